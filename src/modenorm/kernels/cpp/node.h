// A norm as an autograd node of C++, which costs the host a fraction of one of Python.
//
// It knows nothing of norms but that a forward makes y of x and parameters, keeping one array, and
// that a backward makes as many gradients. Whatever is unusual about a backward (to be
// differentiated again, vectorised, tensor subclasses) goes to a function of Python.

#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "task.h"

namespace modenorm {
namespace {

using torch::autograd::AutogradContext;

// The calls of tensors that look the same. Given to the tasks are, forward: inputs, what is changed
// in place, kept, scratch, y; backward: dy, inputs, kept, scratch, the inputs' gradients. Plans live
// for ever: graphs point to them, and so may what compiled autograd makes of graphs;
// kernels/cpp/node.py makes only so many.
struct Plan {
    std::string name;
    Task forward, backward;
    int64_t num_inputs, kept_size, scratch_size, backward_scratch_size;
    bool can_omit_dx;
    PyObject *plainly;  // (inputs, needed, dy) to gradients
    PyObject *owner;    // of what the tasks point to
};

// What a call has beside the tensors that gradients flow to.
struct Call {
    const Plan *plan;
    void *where;  // a stream, or a number of threads
    Tensors changed;
};

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
    if (tensor.strides() == strides && is_aligned(tensor) && !tensor.is_neg())
        return tensor;
    return at::empty_strided(like.sizes(), strides, like.options()).copy_(tensor);
}

Tensors differentiate_plainly(const Plan &plan, const Tensors &inputs,
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
        throw_python_error();
    return THPVariable_UnpackList(found.get());
}

}  // namespace

struct Norm : torch::autograd::Function<Norm> {
    static Tensor forward(AutogradContext *context, at::TensorList inputs, const Call &call)
    {
        at::AutoDispatchBelowADInplaceOrView below;
        const Plan &plan = *call.plan;
        const Tensor &x = inputs[0];
        Tensor kept = floats({plan.kept_size}, x), y = at::empty_like(x);
        Tensors given(inputs.begin(), inputs.end());
        given.reserve(inputs.size() + call.changed.size() + 3);
        given.insert(given.end(), call.changed.begin(), call.changed.end());
        given.insert(given.end(), {kept, floats({plan.scratch_size}, x), y});
        plan.forward(call.where, given);
        given.resize(inputs.size());
        given.push_back(kept);
        context->save_for_backward(std::move(given));
        context->saved_data["plan"] = reinterpret_cast<int64_t>(call.plan);
        context->saved_data["where"] = reinterpret_cast<int64_t>(call.where);
        context->saved_data["strides"] = x.strides();
        context->set_materialize_grads(false);
        return y;
    }

    static Tensors backward(AutogradContext *context, Tensors upstream)
    {
        auto &plan = *reinterpret_cast<const Plan *>(context->saved_data["plan"].toInt());
        Tensors inputs = context->get_saved_variables(), gradients;
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
            Tensors given{dy};
            given.reserve(2 * inputs.size() + 3);
            given.insert(given.end(), inputs.begin(), inputs.end());
            given.insert(given.end(), {kept, floats({plan.backward_scratch_size}, dy)});
            given.insert(given.end(), gradients.begin(), gradients.end());
            auto where = reinterpret_cast<void *>(context->saved_data["where"].toInt());
            plan.backward(where, given);
        }
        gradients.emplace_back();  // of the call itself
        return gradients;
    }
};

namespace {

// plan(name, forward, backward, num_inputs, sizes of three arrays, can_omit_dx, plainly, owner)
PyObject *make_plan(PyObject *, PyObject *arguments)
{
    HANDLE_TH_ERRORS
    const char *name;
    PyObject *forward, *backward, *plainly, *owner;
    long long num_inputs, kept, scratch, backward_scratch;
    int can_omit_dx;
    if (!PyArg_ParseTuple(arguments, "sOOLLLLpOO", &name, &forward, &backward, &num_inputs, &kept,
                          &scratch, &backward_scratch, &can_omit_dx, &plainly, &owner))
        return nullptr;
    auto *plan = new Plan{name, Task::of(forward), Task::of(backward), num_inputs, kept, scratch,
                          backward_scratch, can_omit_dx != 0, Py_NewRef(plainly),
                          Py_NewRef(owner)};
    return PyLong_FromVoidPtr(plan);
    END_HANDLE_TH_ERRORS
}

// norm(plan, where, *tensors) to y; None among them is what the plan knows to be missing
PyObject *norm(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    auto *plan = static_cast<const Plan *>(PyLong_AsVoidPtr(arguments[0]));
    Call call{plan, PyLong_AsVoidPtr(arguments[1]), {}};
    Tensors inputs;
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

}  // namespace
}  // namespace modenorm
