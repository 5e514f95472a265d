// What nodes and operators run: a plain C function that is handed addresses, so that they serve
// the CPU (c/mode_norm.c) and the GPU (c/gpu_launch.c) alike.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace modenorm {

using at::Tensor;
using Tensors = std::vector<Tensor>;

enum { ALIGNMENT = 16, MOST_ARRAYS = 32, NO_CONTEXT = 201 };  // the last: of CUDA's driver

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
    PyThreadState *state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
};

[[noreturn]] inline void throw_python_error()
{
    python_error error;
    error.persist();
    throw std::move(error);
}

inline bool is_aligned(const Tensor &tensor)
{
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % ALIGNMENT == 0;
}

// Places are the order in which the function expects its addresses, as indices into the tensors
// that it is called with, -1 for what there is not.
struct Task {
    int (*run)(const void *what, void *where, const uint64_t *addresses);
    const void *what;
    PyObject *enter_context;  // for threads that have none
    std::string places;

    // (function, its first argument, enter_context, places)
    static Task of(PyObject *tuple)
    {
        unsigned long long run, what;
        PyObject *enter_context;
        const char *places;
        Py_ssize_t count;
        if (!PyArg_ParseTuple(tuple, "KKOy#", &run, &what, &enter_context, &places, &count))
            throw python_error();
        TORCH_CHECK(count <= MOST_ARRAYS);
        return {reinterpret_cast<decltype(Task::run)>(run), reinterpret_cast<const void *>(what),
                Py_NewRef(enter_context), std::string(places, count)};
    }

    void operator()(void *where, const Tensors &given) const
    {
        uint64_t addresses[MOST_ARRAYS];
        for (size_t i = 0; i < places.size(); i++) {
            int place = static_cast<signed char>(places[i]);
            bool absent = place < 0 || !given[place].defined();
            void *at = absent ? nullptr : given[place].mutable_data_ptr();
            addresses[i] = reinterpret_cast<uint64_t>(at);
        }
        int error = run(what, where, addresses);
        if (error == NO_CONTEXT) {  // of the first kernel: nothing was launched
            Gil gil;
            THPObjectPtr done(PyObject_CallNoArgs(enter_context));
            if (!done)
                throw_python_error();
            error = run(what, where, addresses);
        }
        TORCH_CHECK(!error, "the CUDA driver refused to launch a kernel: error ", error);
    }
};

inline Tensor floats(at::IntArrayRef shape, const Tensor &x)
{
    return at::empty(shape, x.options().dtype(at::kFloat));
}

}  // namespace modenorm
