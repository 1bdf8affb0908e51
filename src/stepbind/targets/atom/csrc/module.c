#include "tensors.h"

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL, "see _native.pyi"

static PyMethodDef functions[] = {
    {"places", places, METH_O, "see _native.pyi"},
    {"are_at", FAST(are_at)},
    {"is_content", FAST(is_content)},
    {"decode", FAST(decode)},
    {"decode_lengths", FAST(decode_lengths)},
    {"prefill", FAST(prefill)},
    {"prefill_lengths", FAST(prefill_lengths)},
    {"conv_programs", FAST(conv_programs)},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "stepbind.targets.atom._native", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return tensors_init() ? PyModule_Create(&definition) : NULL;
}
