/* Which row and which chunk each program of a varlen convolution has. */
#include "tensors.h"

/* Offsets [n] in an array, int32 or int64 by their size; good while the caller holds it. */
static int offsets(PyObject *object, Numbers *out)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_C_CONTIGUOUS) < 0)
        return 0;
    int64_t bytes = buffer.itemsize;
    *out = (Numbers){buffer.len / bytes, bytes == 4 ? buffer.buf : NULL, bytes == 8 ? buffer.buf : NULL};
    PyBuffer_Release(&buffer);
    return (out->narrow || out->wide) && out->size > 1;
}

enum { COUNTS, ROWS, CHUNKS, ROW_LIST, CHUNK_LIST, LISTS };

PyObject *conv_programs(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    Numbers start;
    int64_t chunk = count == 3 ? PyLong_AsLongLong(arguments[1]) : 0, width, total = 0;
    if (chunk < 1 || !offsets(arguments[0], &start))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "expected (offsets, chunk, least width)");
    PyObject *result = NULL, *tensors[LISTS] = {NULL};
    void *counts = new_tensor(start.size - 1, DL_INT, start.narrow ? 32 : 64, &tensors[COUNTS]);
    for (int64_t row = 0; counts && row + 1 < start.size; row++) {
        int64_t tokens = at(&start, row + 1) - at(&start, row), programs = (tokens + chunk - 1) / chunk;
        if (tokens < 0) {
            PyErr_Format(PyExc_ValueError, "offsets that fall behind row %lld", (long long)row);
            goto done;
        }
        if (start.narrow)
            ((int32_t *)counts)[row] = (int32_t)programs;
        else
            ((int64_t *)counts)[row] = programs;
        total += programs;
    }
    width = PyLong_AsLongLong(arguments[2]);
    width = 2 * (total > width ? total : width);
    int64_t *rows;
    int32_t *chunks, *row_list, *chunk_list;
    if (!counts || !(rows = new_tensor(total, DL_INT, 64, &tensors[ROWS])) ||
        !(chunks = new_tensor(total, DL_INT, 32, &tensors[CHUNKS])) ||
        !(row_list = new_tensor(width, DL_INT, 32, &tensors[ROW_LIST])) ||
        !(chunk_list = new_tensor(width, DL_INT, 32, &tensors[CHUNK_LIST])))
        goto done;
    for (int64_t row = 0, next = 0; row + 1 < start.size; row++)
        for (int64_t first = next, tokens = at(&start, row + 1) - at(&start, row); (next - first) * chunk < tokens; next++) {
            rows[next] = row;
            row_list[next] = (int32_t)row;
            chunks[next] = chunk_list[next] = (int32_t)(next - first);
        }
    memset(row_list + total, 0xff, (size_t)(width - total) * sizeof(int32_t)); /* -1 */
    memset(chunk_list + total, 0xff, (size_t)(width - total) * sizeof(int32_t));
    result = Py_BuildValue("LOOOOO", (long long)total, tensors[COUNTS], tensors[ROWS], tensors[CHUNKS],
                           tensors[ROW_LIST], tensors[CHUNK_LIST]);
done:
    for (int i = 0; i < LISTS; i++)
        Py_CLEAR(tensors[i]);
    return result;
}
