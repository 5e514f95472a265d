// A norm as an autograd node of C++, which costs the host a fraction of one of Python.
//
// What it runs is a plain C function that is handed addresses; so one node serves the CPU
// (cpu_layer.c) and the GPU (gpu_launch.c). It knows nothing of norms but that a forward makes y of
// x and parameters, keeping one array, and that a backward makes as many gradients. Whatever is
// unusual about a backward (to be differentiated again, vectorised, tensors with a mind of their
// own) goes to a function of Python.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace modenorm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A function of C, and its first argument.
struct Task {
    int (*run)(const void *what, void *where, const uint64_t *addresses);
    const void *what;
};

enum { ALIGNMENT = 16, MOST_ARRAYS = 32, NO_CONTEXT = 201 };  // the last: of CUDA's driver

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
    PyThreadState *state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
};

// The calls of tensors that look the same. Places are the order in which a function expects its
// addresses, as indices into what it is given here, -1 for what there is not. Given are, forward:
// inputs, what is changed in place, kept, scratch, y; backward: dy, inputs, kept, scratch, the
// inputs' gradients. Plans live for ever: graphs point to them, and so may what compiled autograd
// makes of graphs; kernels/cpp_node.py makes only so many.
struct Plan {
    std::string name;
    Task forward, backward;
    int64_t num_inputs, kept_size, scratch_size, backward_scratch_size;
    bool can_omit_dx;
    std::string forward_places, backward_places;
    PyObject *plainly;        // (inputs, needed, dy) to gradients
    PyObject *enter_context;  // for threads that have none
    PyObject *owner;          // of what the tasks point to

    void call(const Task &task, void *where, const std::string &places,
              const variable_list &given) const
    {
        uint64_t addresses[MOST_ARRAYS];
        TORCH_CHECK(places.size() <= MOST_ARRAYS);
        for (size_t i = 0; i < places.size(); i++) {
            int place = static_cast<signed char>(places[i]);
            bool absent = place < 0 || !given[place].defined();
            void *at = absent ? nullptr : given[place].mutable_data_ptr();
            addresses[i] = reinterpret_cast<uint64_t>(at);
        }
        int error = task.run(task.what, where, addresses);
        if (error == NO_CONTEXT) {  // of the first kernel: nothing was launched
            Gil gil;
            PyObject *done = PyObject_CallNoArgs(enter_context);
            if (!done)
                throw_python_error();
            Py_DECREF(done);
            error = task.run(task.what, where, addresses);
        }
        TORCH_CHECK(!error, "the CUDA driver refused to launch a kernel: error ", error);
    }

    [[noreturn]] static void throw_python_error()
    {
        python_error error;
        error.persist();
        throw std::move(error);
    }
};

// What a call has beside the tensors that gradients flow to.
struct Call {
    const Plan *plan;
    void *where;  // a stream, or a number of threads
    variable_list changed;
};

Tensor floats(int64_t size, const Tensor &x)
{
    return at::empty({size}, x.options().dtype(at::kFloat));
}

// Autograd sees to sizes and types, unless a node is called by hand or hooks unpack another x.
bool is_plain_beside(const Tensor &dy, const Tensor &x)
{
    auto ignored = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                   c10::DispatchKeySet(c10::DispatchKey::Negative);  // which as_laid_out resolves
    bool alike = dy.sizes() == x.sizes() && dy.dtype() == x.dtype() && dy.device() == x.device();
    return alike && dy.key_set() - ignored == x.key_set() - ignored;
}

Tensor as_laid_out(const Tensor &tensor, const Tensor &like, at::IntArrayRef strides)
{
    auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    if (tensor.strides() == strides && address % ALIGNMENT == 0 && !tensor.is_neg())
        return tensor;
    return at::empty_strided(like.sizes(), strides, like.options()).copy_(tensor);
}

variable_list differentiate_plainly(const Plan &plan, const variable_list &inputs,
                                    const AutogradContext &context, const Tensor &dy)
{
    Gil gil;
    THPObjectPtr given(THPVariable_WrapList(inputs));
    THPObjectPtr needed(PyList_New(inputs.size()));
    for (size_t i = 0; i < inputs.size(); i++)
        PyList_SET_ITEM(needed.get(), i, PyBool_FromLong(context.needs_input_grad(i)));
    THPObjectPtr upstream(THPVariable_Wrap(dy));
    THPObjectPtr found(PyObject_CallFunctionObjArgs(plan.plainly, given.get(), needed.get(),
                                                    upstream.get(), nullptr));
    if (!found)
        Plan::throw_python_error();
    return THPVariable_UnpackList(found.get());
}

}  // namespace

struct Norm : torch::autograd::Function<Norm> {
    static Tensor forward(AutogradContext *context, at::TensorList inputs, const Call &call)
    {
        at::AutoDispatchBelowADInplaceOrView below;
        const Plan &plan = *call.plan;
        const Tensor &x = inputs[0];
        Tensor kept = floats(plan.kept_size, x), y = at::empty_like(x);
        variable_list given(inputs.begin(), inputs.end());
        given.reserve(inputs.size() + call.changed.size() + 3);
        given.insert(given.end(), call.changed.begin(), call.changed.end());
        given.insert(given.end(), {kept, floats(plan.scratch_size, x), y});
        plan.call(plan.forward, call.where, plan.forward_places, given);
        given.resize(inputs.size());
        given.push_back(kept);
        context->save_for_backward(std::move(given));
        context->saved_data["plan"] = reinterpret_cast<int64_t>(call.plan);
        context->saved_data["where"] = reinterpret_cast<int64_t>(call.where);
        context->saved_data["strides"] = x.strides();
        context->set_materialize_grads(false);
        return y;
    }

    static variable_list backward(AutogradContext *context, variable_list upstream)
    {
        auto &plan = *reinterpret_cast<const Plan *>(context->saved_data["plan"].toInt());
        variable_list inputs = context->get_saved_variables(), gradients;
        Tensor kept = inputs.back(), dy = upstream[0];
        inputs.pop_back();
        gradients.resize(inputs.size());
        if (dy.defined() && (at::GradMode::is_enabled() || !is_plain_beside(dy, inputs[0]))) {
            gradients = differentiate_plainly(plan, inputs, *context, dy);
        } else if (dy.defined()) {
            at::AutoDispatchBelowADInplaceOrView below;
            auto strides = context->saved_data["strides"].toIntVector();
            inputs[0] = as_laid_out(inputs[0], inputs[0], strides);
            dy = as_laid_out(dy, inputs[0], strides);
            bool omits_dx = plan.can_omit_dx && !context->needs_input_grad(0);
            for (size_t i = omits_dx; i < inputs.size(); i++)
                gradients[i] = at::empty_like(inputs[i]);
            variable_list given{dy};
            given.reserve(2 * inputs.size() + 3);
            given.insert(given.end(), inputs.begin(), inputs.end());
            given.insert(given.end(), {kept, floats(plan.backward_scratch_size, dy)});
            given.insert(given.end(), gradients.begin(), gradients.end());
            auto where = reinterpret_cast<void *>(context->saved_data["where"].toInt());
            plan.call(plan.backward, where, plan.backward_places, given);
        }
        gradients.emplace_back();  // of the call itself
        return gradients;
    }
};

namespace {

// plan(name, forward and backward, each a function and its argument, num_inputs, sizes of three
// arrays, can_omit_dx, places forward and backward, plainly, enter_context, owner)
PyObject *make_plan(PyObject *, PyObject *arguments)
{
    HANDLE_TH_ERRORS
    auto plan = std::make_unique<Plan>();
    unsigned long long run[2], what[2];
    long long num_inputs, kept, scratch, backward_scratch;
    int can_omit_dx;
    const char *name, *places[2];
    Py_ssize_t counts[2];
    PyObject *plainly, *enter_context, *owner;
    if (!PyArg_ParseTuple(arguments, "sKKKKLLLLpy#y#OOO", &name, &run[0], &what[0], &run[1],
                          &what[1], &num_inputs, &kept, &scratch, &backward_scratch, &can_omit_dx,
                          &places[0], &counts[0], &places[1], &counts[1], &plainly,
                          &enter_context, &owner))
        return nullptr;
    for (int i = 0; i < 2; i++) {
        Task &task = i ? plan->backward : plan->forward;
        task.run = reinterpret_cast<decltype(task.run)>(run[i]);
        task.what = reinterpret_cast<const void *>(what[i]);
    }
    plan->name = name;
    plan->num_inputs = num_inputs;
    plan->kept_size = kept;
    plan->scratch_size = scratch;
    plan->backward_scratch_size = backward_scratch;
    plan->can_omit_dx = can_omit_dx;
    plan->forward_places.assign(places[0], counts[0]);
    plan->backward_places.assign(places[1], counts[1]);
    plan->plainly = Py_NewRef(plainly);
    plan->enter_context = Py_NewRef(enter_context);
    plan->owner = Py_NewRef(owner);
    return PyLong_FromVoidPtr(plan.release());
    END_HANDLE_TH_ERRORS
}

// norm(plan, where, *tensors) to y; None among them is what the plan knows to be missing
PyObject *norm(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    auto *plan = static_cast<const Plan *>(PyLong_AsVoidPtr(arguments[0]));
    Call call{plan, PyLong_AsVoidPtr(arguments[1]), {}};
    variable_list inputs;
    inputs.reserve(plan->num_inputs);
    for (Py_ssize_t i = 2; i < count; i++) {
        if (arguments[i] == Py_None)
            continue;
        bool is_input = inputs.size() < static_cast<size_t>(plan->num_inputs);
        (is_input ? inputs : call.changed).push_back(THPVariable_Unpack(arguments[i]));
    }
    Tensor y;
    {
        WithoutGil free;
        RECORD_FUNCTION(plan->name, c10::ArrayRef<const c10::IValue>{});
        y = Norm::apply(at::TensorList(inputs), call);
    }
    return THPVariable_Wrap(std::move(y));
    END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"plan", make_plan, METH_VARARGS, nullptr},
    {"norm", reinterpret_cast<PyCFunction>(norm), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "modenorm_node", nullptr, -1, METHODS};

}  // namespace
}  // namespace modenorm

PyMODINIT_FUNC PyInit_modenorm_node() { return PyModule_Create(&modenorm::MODULE); }
