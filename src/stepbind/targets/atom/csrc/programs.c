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

static int64_t programs_of(const Numbers *start, int64_t row, int64_t chunk)
{
    return (at(start, row + 1) - at(start, row) + chunk - 1) / chunk;
}

enum { COUNTS, ROWS, CHUNKS, ROW_LIST, CHUNK_LIST, LISTS };

PyObject *conv_programs(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    Numbers start;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "expected (offsets, chunk, least, with_lists)");
    int64_t chunk = PyLong_AsLongLong(arguments[1]), least = PyLong_AsLongLong(arguments[2]), total = 0;
    if (chunk < 1 || least < 0 || !offsets(arguments[0], &start))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "expected offsets of rows, a chunk of tokens");
    for (int64_t row = 0; row + 1 < start.size; row++) {
        if (at(&start, row + 1) < at(&start, row))
            return PyErr_Format(PyExc_ValueError, "offsets that fall behind row %lld", (long long)row);
        total += programs_of(&start, row, chunk);
    }
    PyObject *result = NULL, *tensors[LISTS] = {NULL};
    int64_t width = 2 * (total > least ? total : least), *rows;
    int32_t *chunks, *row_list = NULL, *chunk_list = NULL;
    void *counts = new_tensor(start.size - 1, DL_INT, start.narrow ? 32 : 64, &tensors[COUNTS]);
    if (!counts || !(rows = new_tensor(total, DL_INT, 64, &tensors[ROWS])) ||
        !(chunks = new_tensor(total, DL_INT, 32, &tensors[CHUNKS])))
        goto done;
    if (arguments[3] == Py_True && (!(row_list = new_tensor(width, DL_INT, 32, &tensors[ROW_LIST])) ||
                                    !(chunk_list = new_tensor(width, DL_INT, 32, &tensors[CHUNK_LIST]))))
        goto done;
    for (int64_t row = 0, next = 0; row + 1 < start.size; row++) {
        int64_t programs = programs_of(&start, row, chunk);
        if (start.narrow)
            ((int32_t *)counts)[row] = (int32_t)programs;
        else
            ((int64_t *)counts)[row] = programs;
        for (int64_t i = 0; i < programs; i++, next++) {
            rows[next] = row;
            chunks[next] = (int32_t)i;
            if (chunk_list) {
                row_list[next] = (int32_t)row;
                chunk_list[next] = (int32_t)i;
            }
        }
    }
    if (chunk_list) {
        memset(row_list + total, 0xff, (size_t)(width - total) * sizeof(int32_t)); /* -1 */
        memset(chunk_list + total, 0xff, (size_t)(width - total) * sizeof(int32_t));
    }
    for (int i = ROW_LIST; i < LISTS; i++)
        if (!tensors[i])
            tensors[i] = Py_NewRef(Py_None);
    result = Py_BuildValue("LOOOOO", (long long)total, tensors[COUNTS], tensors[ROWS], tensors[CHUNKS],
                           tensors[ROW_LIST], tensors[CHUNK_LIST]);
done:
    for (int i = 0; i < LISTS; i++)
        Py_CLEAR(tensors[i]);
    return result;
}
