/* Whether tensors that the host may replace or lay out anew are the same as before. */
#include "tensors.h"

/* The place of one buffer, as `places` writes it and `are_at` compares it. */
enum { MAX_DIMS = 8 };
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t code, bits;
    int64_t ndim, shape[MAX_DIMS], strides[MAX_DIMS];
} Place;

static int place_of(PyObject *object, Place *out)
{
    DLTensor tensor;
    if (!view(object, &tensor) || tensor.ndim > MAX_DIMS)
        return 0;
    memset(out, 0, sizeof(Place));
    out->data = data_of(&tensor);
    out->device_type = tensor.device_type;
    out->device_id = tensor.device_id;
    out->code = tensor.dtype.code;
    out->bits = tensor.dtype.bits;
    out->ndim = tensor.ndim;
    for (int i = 0; i < tensor.ndim; i++) {
        out->shape[i] = tensor.shape[i];
        out->strides[i] = tensor.strides ? tensor.strides[i] : 0;
    }
    return 1;
}

PyObject *places(PyObject *self, PyObject *buffers)
{
    if (!PyList_Check(buffers))
        return PyErr_Format(PyExc_TypeError, "expected a list of tensors");
    Py_ssize_t count = PyList_GET_SIZE(buffers);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(Place));
    if (!bytes)
        return NULL;
    Place *out = (Place *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!place_of(PyList_GET_ITEM(buffers, i), out + i)) {
            Py_DECREF(bytes);
            Py_RETURN_NONE;
        }
    }
    return bytes;
}

/* Whether `buffer` is the i-th of `own`, and still in its place. */
static int is_at(PyObject *buffer, PyObject *own, const Place *places, Py_ssize_t i)
{
    DLTensor now;
    const Place *kept = places + i;
    if (i >= PyList_GET_SIZE(own) || buffer != PyList_GET_ITEM(own, i) || !view(buffer, &now) ||
        data_of(&now) != kept->data || now.ndim != kept->ndim || now.device_type != kept->device_type ||
        now.device_id != kept->device_id || now.dtype.code != kept->code || now.dtype.bits != kept->bits)
        return 0;
    for (int d = 0; d < now.ndim; d++)
        if (now.shape[d] != kept->shape[d] || (now.strides ? now.strides[d] : 0) != kept->strides[d])
            return 0;
    return 1;
}

PyObject *are_at(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4 || !PyList_Check(arguments[1]) || !PyList_Check(arguments[2]) || !PyBytes_Check(arguments[3]))
        return PyErr_Format(PyExc_TypeError, "expected (get_layer_cache, layer numbers, own buffers, places)");
    static PyObject *name_base, *name_scale;
    if (!name_base)
        name_base = PyUnicode_InternFromString("kv_cache_base");
    if (!name_scale)
        name_scale = PyUnicode_InternFromString("kv_scale_base");
    if (!name_base || !name_scale)
        return NULL;
    PyObject *get = arguments[0], *layers = arguments[1], *own = arguments[2];
    const Place *kept = (const Place *)PyBytes_AS_STRING(arguments[3]);
    if (PyBytes_GET_SIZE(arguments[3]) != PyList_GET_SIZE(own) * (Py_ssize_t)sizeof(Place))
        return PyErr_Format(PyExc_ValueError, "expected a place for each of %zd buffers", PyList_GET_SIZE(own));
    Py_ssize_t scales = PyList_GET_SIZE(layers);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layers); i++) {
        PyObject *cache = PyObject_CallOneArg(get, PyList_GET_ITEM(layers, i));
        if (!cache)
            return NULL;
        PyObject *base = PyObject_GetAttr(cache, name_base);
        PyObject *scale = base ? PyObject_GetAttr(cache, name_scale) : NULL;
        if (base && !scale && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            scale = Py_NewRef(Py_None);
        }
        Py_DECREF(cache);
        int is_same = base && scale && is_at(base, own, kept, i) && (scale == Py_None || is_at(scale, own, kept, scales));
        scales += scale && scale != Py_None;
        Py_XDECREF(base);
        Py_XDECREF(scale);
        if (PyErr_Occurred())
            return NULL;
        if (!is_same)
            Py_RETURN_FALSE;
    }
    return PyBool_FromLong(scales == PyList_GET_SIZE(own));
}

PyObject *is_content(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    DLTensor tensor;
    if (count != 2 || !PyBytes_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "expected (tensor, bytes)");
    if (!host_view(arguments[0], &tensor, 1, DL_INT, 32) ||
        PyBytes_GET_SIZE(arguments[1]) != tensor.shape[0] * (Py_ssize_t)sizeof(int32_t))
        Py_RETURN_FALSE;
    return PyBool_FromLong(!memcmp(data_of(&tensor), PyBytes_AS_STRING(arguments[1]), PyBytes_GET_SIZE(arguments[1])));
}
