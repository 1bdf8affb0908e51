/* The lengths of a usual pass that a GPU computes: sizes by the host's, and where on the device the same ones are. */
#include "tensors.h"

static int64_t elements(const DLTensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* Whether this is a tensor of so many elements, whatever it holds. */
static int has_elements(PyObject *object, int64_t count)
{
    DLTensor tensor;
    return view(object, &tensor) && elements(&tensor) == count;
}

/* Whether this is a tensor [rows] int32 where `table` is, and its address. */
static int address(PyObject *object, int64_t rows, PyObject *table, long long *out)
{
    DLTensor tensor, beside;
    if (!view(object, &tensor) || !view(table, &beside) || tensor.device_type != beside.device_type ||
        tensor.device_id != beside.device_id || tensor.ndim != 1 || tensor.shape[0] != rows ||
        tensor.dtype.code != DL_INT || tensor.dtype.bits != 32 || tensor.dtype.lanes != 1 ||
        (rows > 1 && tensor.strides && tensor.strides[0] != 1))
        return 0;
    *out = (long long)(intptr_t)data_of(&tensor);
    return 1;
}

/* Numbers of the host's, 32 bits each; there may be none. */
static int narrow(PyObject *object, Numbers *out)
{
    DLTensor tensor;
    if (!host_view(object, &tensor, 1, DL_INT, 32))
        return 0;
    *out = (Numbers){tensor.shape[0], (const int32_t *)data_of(&tensor), NULL};
    return 1;
}

PyObject *decode_lengths(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "expected 7 arguments, got %zd", count);
    Numbers prior, start;
    long long contexts;
    int64_t rows = PyLong_AsLongLong(arguments[5]), longest = 0, total = 0;
    if (rows < 1)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (!has_elements(arguments[0], rows) || !has_elements(arguments[1], 0) || !narrow(arguments[2], &prior) ||
        prior.size != rows || !address(arguments[3], rows, arguments[6], &contexts) || !narrow(arguments[4], &start) ||
        (start.size && start.narrow[start.size - 1]))
        Py_RETURN_NONE;
    for (int64_t row = 0; row < rows; row++) {
        int64_t context = (int64_t)prior.narrow[row] + 1;
        if (context <= 1 || context > INT32_MAX)
            Py_RETURN_NONE;
        longest = context > longest ? context : longest;
        total += context;
    }
    return Py_BuildValue("LLL", (long long)longest, (long long)total, contexts);
}

/* Block boundaries strictly inside the new tokens `prior` .. `end` - 1 of a row. */
static int64_t boundaries(int64_t prior, int64_t end, int64_t size)
{
    return (end - 1) / size - prior / size;
}

PyObject *prefill_lengths(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    enum { MAX_SIZES = 16, CONV_CHUNK = 8 };
    if (count != 9 || !PyTuple_Check(arguments[8]))
        return PyErr_Format(PyExc_TypeError, "expected 9 arguments, the last one a tuple");
    Numbers new, prior, start;
    long long new_there, prior_there;
    PyObject *table = arguments[7], *sizes = arguments[8];
    int64_t rows = PyLong_AsLongLong(arguments[5]), tokens = PyLong_AsLongLong(arguments[6]);
    int64_t num_sizes = PyTuple_GET_SIZE(sizes), size[MAX_SIZES], snapshots[MAX_SIZES] = {0};
    if (rows < 1 || tokens < 1 || num_sizes > MAX_SIZES)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    for (int64_t i = 0; i < num_sizes; i++)
        if ((size[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i))) < 1)
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (!narrow(arguments[0], &new) || new.size != rows || !address(arguments[1], rows, table, &new_there) ||
        !narrow(arguments[2], &prior) || prior.size != rows || !address(arguments[3], rows, table, &prior_there) ||
        !narrow(arguments[4], &start) || start.size != rows + 1 || start.narrow[0] || start.narrow[rows] != tokens)
        Py_RETURN_NONE;
    int64_t most = 0, longest = 0, total = 0, chunks = 0, deepest = 0, widest = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t query = new.narrow[row], old = prior.narrow[row], end = old + query;
        if (query < 1 || old < 0 || end > INT32_MAX || (int64_t)start.narrow[row + 1] - start.narrow[row] != query)
            Py_RETURN_NONE;
        for (int64_t i = 0; i < num_sizes; i++)
            snapshots[i] += boundaries(old, end, size[i]);
        most = query > most ? query : most;
        longest = end > longest ? end : longest;
        deepest = old > deepest ? old : deepest;
        total += end;
        chunks += (query + CONV_CHUNK - 1) / CONV_CHUNK;
    }
    for (int64_t i = 0; i < num_sizes; i++)
        widest = snapshots[i] > widest ? snapshots[i] : widest;
    return Py_BuildValue("LLLOLLLL", (long long)most, (long long)longest, (long long)total,
                         deepest ? Py_True : Py_False, (long long)chunks, (long long)widest, new_there, prior_there);
}
