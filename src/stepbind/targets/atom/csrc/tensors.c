/* Tensors of torch, read and made. */
#include "tensors.h"

static PyTypeObject *tensor_type;
static DLPackExchange *exchange;

int tensors_init(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    PyObject *capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : NULL;
    Py_XDECREF(torch);
    if (!capsule) {
        Py_XDECREF(type);
        PyErr_SetString(PyExc_ImportError, "no torch, or one without DLPack's C exchange API");
        return 0;
    }
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    tensor_type = (PyTypeObject *)type; /* held for good, as the table of functions is */
    if (exchange && exchange->version.major != DL_MAJOR) {
        PyErr_Format(PyExc_ImportError, "DLPack %u, expected %d", exchange->version.major, DL_MAJOR);
        return 0;
    }
    return exchange != NULL;
}

int view(PyObject *object, DLTensor *out)
{
    if (!PyObject_TypeCheck(object, tensor_type))
        return 0;
    if (exchange->view_of_object(object, out) < 0) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

int host_view(PyObject *object, DLTensor *out, int ndim, int code, int bits)
{
    if (!view(object, out) || out->device_type != DL_CPU || out->ndim != ndim || out->dtype.code != code ||
        out->dtype.bits != bits || out->dtype.lanes != 1)
        return 0;
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        if (out->shape[i] != 1 && out->strides && out->strides[i] != expected)
            return 0;
        expected *= out->shape[i];
    }
    return 1;
}

int numbers(PyObject *object, Numbers *out)
{
    DLTensor tensor;
    if (host_view(object, &tensor, 1, DL_INT, 32)) {
        *out = (Numbers){tensor.shape[0], (const int32_t *)data_of(&tensor), NULL};
        return 1;
    }
    if (host_view(object, &tensor, 1, DL_INT, 64)) {
        *out = (Numbers){tensor.shape[0], NULL, (const int64_t *)data_of(&tensor)};
        return 1;
    }
    return 0;
}

static void free_owned(DLOwned *self)
{
    free(self);
}

void *new_tensor(int64_t size, int code, int bits, PyObject **out)
{
    enum { ALIGNMENT = 64, HEAD = (sizeof(DLOwned) + 2 * sizeof(int64_t) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT };
    size_t bytes = HEAD + ((size_t)size * bits / 8 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    DLOwned *owned = aligned_alloc(ALIGNMENT, bytes);
    Py_CLEAR(*out);
    if (!owned)
        return PyErr_NoMemory();
    int64_t *shape = (int64_t *)(owned + 1);
    shape[0] = size;
    shape[1] = 1; /* the stride */
    *owned = (DLOwned){.version = {DL_MAJOR, DL_MINOR}, .deleter = free_owned};
    owned->tensor = (DLTensor){.data = (char *)owned + HEAD, .device_type = DL_CPU, .ndim = 1,
                               .dtype = {(uint8_t)code, (uint8_t)bits, 1}, .shape = shape, .strides = shape + 1};
    void *object = NULL;
    if (exchange->object_from_owned(owned, &object) < 0)
        return NULL;
    *out = object;
    return (char *)owned + HEAD;
}
