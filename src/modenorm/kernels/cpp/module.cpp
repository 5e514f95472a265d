// What node.py and operator.py call.

#include "node.h"
#include "operator.h"

namespace {

PyMethodDef METHODS[] = {
    {"plan", modenorm::make_plan, METH_VARARGS, nullptr},
    {"norm", reinterpret_cast<PyCFunction>(modenorm::norm), METH_FASTCALL, nullptr},
    {"repeat", reinterpret_cast<PyCFunction>(modenorm::repeat), METH_FASTCALL, nullptr},
    {"remember", reinterpret_cast<PyCFunction>(modenorm::remember), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "modenorm_cpp", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_modenorm_cpp() { return PyModule_Create(&MODULE); }
