/* What a usual pass costs most calls for, each in one: are the layers' buffers still the same (places.c), all values of a
 * decode or prefill pass on the host (values.c, programs.c), and the sizes of one on a GPU (device.c). Python's side:
 * `native.py`, `_native.pyi`.
 *
 * Tensors are read and made through torch's DLPack C exchange API (DLPack 1.2 and later, PyTorch 2.10 and later,
 * `torch.Tensor.__dlpack_c_exchange_api__`), which needs no header of torch's and copies nothing.
 *
 * Whatever is not usual gives None (False), and nothing is raised for it: the general way in Python says what is wrong.
 * All that is written to are new tensors.
 */
#ifndef STEPBIND_TENSORS_H
#define STEPBIND_TENSORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* DLPack's own layout, https://dmlc.github.io/dlpack/latest/c_api.html */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
} DLVersion;

typedef struct DLOwned {
    DLVersion version;
    void *context;
    void (*deleter)(struct DLOwned *self);
    uint64_t flags;
    DLTensor tensor;
} DLOwned;

typedef struct {
    DLVersion version;
    void *previous;
    void *allocate, *owned_from_object;
    int (*object_from_owned)(DLOwned *owned, void **out); /* takes it over */
    int (*view_of_object)(void *object, DLTensor *out); /* borrowed: good while the tensor is and stays as it is */
    void *current_stream;
} DLPackExchange;

enum { DL_MAJOR = 1, DL_MINOR = 1, DL_CPU = 1, DL_INT = 0, DL_BOOL = 6 };

/* [n] int32 or int64 numbers on the host. */
typedef struct {
    int64_t size;
    const int32_t *narrow;
    const int64_t *wide;
} Numbers;

static inline int64_t at(const Numbers *of, int64_t i)
{
    return of->narrow ? of->narrow[i] : of->wide[i];
}

static inline char *data_of(const DLTensor *tensor)
{
    return (char *)tensor->data + tensor->byte_offset;
}

#ifdef __GNUC__
#pragma GCC visibility push(hidden) /* names as plain as these may be somebody else's too */
#endif

/* 0 with an exception where this torch has no such API. */
int tensors_init(void);

/* Of tensors alone: 0 for anything else, with no exception set. */
int view(PyObject *object, DLTensor *out);

/* A contiguous tensor on the host, of so many dimensions and this dtype. */
int host_view(PyObject *object, DLTensor *out, int ndim, int code, int bits);

/* A tensor [n] on the host. */
int numbers(PyObject *object, Numbers *out);

/* A new tensor [size] on the host in *out, which must be NULL or one to let go; its memory, or NULL with an exception. */
void *new_tensor(int64_t size, int code, int bits, PyObject **out);

PyObject *places(PyObject *self, PyObject *buffers);
PyObject *are_at(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *is_content(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *decode(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *decode_lengths(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *prefill(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *prefill_lengths(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *conv_programs(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
