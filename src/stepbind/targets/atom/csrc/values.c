/* The values of a pass: slots of tokens, slots of states, lengths. */
#include "tensors.h"

/* Whether `size` of them, from the one at `begin` on, count from `first`. */
static int count_from(const Numbers *of, int64_t begin, int64_t size, int64_t first)
{
    int64_t wrong = 0;
    if (of->narrow)
        for (int64_t i = 0; i < size; i++)
            wrong |= of->narrow[begin + i] ^ (int32_t)(first + i);
    else
        for (int64_t i = 0; i < size; i++)
            wrong |= of->wide[begin + i] ^ (first + i);
    return !wrong;
}

/* The groups' tables [B, C] int32, each with the tokens of an entry; entries are good from `lowest` on, below `end`.
 * What is computed of each: slots [T] where it has them, and states where there are any, to read and to write, [B]. */
enum { MAX_GROUPS = 64 };
typedef struct {
    const int32_t *entries;
    int64_t columns, size;
    int64_t *slot;
    int32_t *read, *write;
} Group;

enum { SLOTS, READ, WRITE, KINDS };
typedef struct {
    Group groups[MAX_GROUPS];
    int64_t count, lowest, end;
    PyObject *tensors[KINDS][MAX_GROUPS];
} Groups;

static void forget(Groups *of)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int64_t i = 0; i < of->count; i++)
            Py_CLEAR(of->tensors[kind][i]);
}

/* tables: list of [rows, C] int32. sizes: tuple of their tokens an entry. limits: (lowest, end). paged: tuple of the
 * numbers of those with slots. Makes the outputs; 0 for what is not usual, or with an exception. */
static int groups_of(PyObject *const *arguments, int64_t rows, int64_t tokens, Groups *out)
{
    PyObject *tables = arguments[0], *sizes = arguments[1], *limits = arguments[2], *paged = arguments[3];
    int has_states = arguments[4] == Py_True;
    if (!PyList_Check(tables) || !PyTuple_Check(sizes) || !PyTuple_Check(limits) || PyTuple_GET_SIZE(limits) != 2 ||
        !PyTuple_Check(paged) || PyList_GET_SIZE(tables) > MAX_GROUPS ||
        PyTuple_GET_SIZE(sizes) != PyList_GET_SIZE(tables))
        return 0;
    int64_t count = PyList_GET_SIZE(tables);
    out->lowest = PyLong_AsLongLong(PyTuple_GET_ITEM(limits, 0));
    out->end = PyLong_AsLongLong(PyTuple_GET_ITEM(limits, 1));
    for (int64_t i = 0; i < count; i++) {
        DLTensor table;
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
        if (size < 1 || size > INT32_MAX || !host_view(PyList_GET_ITEM(tables, i), &table, 2, DL_INT, 32) ||
            table.shape[0] != rows)
            return 0;
        out->groups[i] = (Group){(const int32_t *)data_of(&table), table.shape[1], size, NULL, NULL, NULL};
        for (int kind = 0; kind < KINDS; kind++)
            out->tensors[kind][i] = NULL;
        out->count = i + 1;
        if (has_states && (!(out->groups[i].read = new_tensor(rows, DL_INT, 32, &out->tensors[READ][i])) ||
                           !(out->groups[i].write = new_tensor(rows, DL_INT, 32, &out->tensors[WRITE][i]))))
            return 0;
    }
    for (int64_t i = 0; i < PyTuple_GET_SIZE(paged); i++) {
        int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(paged, i));
        if (number < 0 || number >= count ||
            !(out->groups[number].slot = new_tensor(tokens, DL_INT, 64, &out->tensors[SLOTS][number])))
            return 0;
    }
    return 1;
}

/* A tuple of the tensors of one kind, None where a group has none. */
static PyObject *tensors_of(Groups *of, int kind)
{
    PyObject *tuple = PyTuple_New(of->count);
    for (int64_t i = 0; tuple && i < of->count; i++) {
        PyObject *tensor = of->tensors[kind][i];
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(tensor ? tensor : Py_None));
    }
    return tuple;
}

/* The block of a row's token, -1 where there is none. Tokens and sizes have 31 bits, whose division is the faster one. */
static int32_t block_of(const Groups *of, const Group *group, int64_t row, int64_t token)
{
    int64_t column = (uint32_t)token / (uint32_t)group->size;
    if (column >= group->columns)
        return -1;
    int32_t block = group->entries[row * group->columns + column];
    return block >= of->lowest && block < of->end ? block : -1;
}

/* Slots and states of one row: tokens `prior` .. `end` - 1, the first of them at `begin` in the pass. False where a
 * block is missing. A state is read from the block of the last token in the cache and written to that of the last new
 * one (engine contract, "Recurrent state"). */
static int fill_row(const Groups *of, int64_t row, int64_t begin, int64_t prior, int64_t end)
{
    for (int64_t i = 0; i < of->count; i++) {
        const Group *group = of->groups + i;
        if (group->read) {
            group->read[row] = prior > 0 ? block_of(of, group, row, prior - 1) : -1;
            group->write[row] = block_of(of, group, row, end - 1);
            if (group->write[row] < 0 || (prior > 0 && group->read[row] < 0))
                return 0;
        }
        for (int64_t token = prior; group->slot && token < end;) {
            int64_t offset = (uint32_t)token % (uint32_t)group->size, left = group->size - offset;
            int64_t block = block_of(of, group, row, token), count = left < end - token ? left : end - token;
            if (block < 0)
                return 0;
            int64_t *out = group->slot + begin + (token - prior), first = block * group->size + offset;
            for (int64_t i = 0; i < count; i++)
                out[i] = first + i;
            token += count;
        }
    }
    return 1;
}

PyObject *decode(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 9)
        return PyErr_Format(PyExc_TypeError, "expected 9 arguments, got %zd", count);
    Numbers prior, context, start, position;
    PyObject *result = NULL;
    Groups groups;
    groups.count = 0;
    if (!numbers(arguments[0], &prior) || !prior.narrow || !numbers(arguments[1], &context) ||
        !numbers(arguments[2], &start) || !numbers(arguments[3], &position))
        Py_RETURN_NONE;
    int64_t rows = prior.size, longest = 0, total = 0;
    if (!rows || context.size != rows || position.size != rows || !start.size || at(&start, start.size - 1) ||
        !groups_of(arguments + 4, rows, rows, &groups))
        goto done;
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = prior.narrow[row];
        if (token <= 0 || at(&context, row) != token + 1 || at(&position, row) != token ||
            !fill_row(&groups, row, row, token, token + 1))
            goto done;
        longest = token + 1 > longest ? token + 1 : longest;
        total += token + 1;
    }
    result = Py_BuildValue("LLNNN", (long long)longest, (long long)total, tensors_of(&groups, SLOTS),
                           tensors_of(&groups, READ), tensors_of(&groups, WRITE));
done:
    forget(&groups);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

/* What a prefill has besides slots and states: contexts and has_prior [B], and where asked for row and span [T]. */
enum { CONTEXT, HAS_PRIOR, ROW, SPAN_START, SPAN_END, BESIDE };

PyObject *prefill(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 11)
        return PyErr_Format(PyExc_TypeError, "expected 11 arguments, got %zd", count);
    Numbers new, prior, prior_device, start, position;
    PyObject *result = NULL, *beside[BESIDE] = {NULL};
    Groups groups;
    groups.count = 0;
    if (!numbers(arguments[0], &new) || !new.narrow || !numbers(arguments[1], &prior) || !prior.narrow ||
        !numbers(arguments[2], &prior_device) || !numbers(arguments[3], &start) || !start.narrow ||
        !numbers(arguments[4], &position))
        Py_RETURN_NONE;
    int64_t rows = new.size, tokens = position.size, longest = 0, total = 0, most = 0, deepest = 0;
    int32_t *context, *row_of_token = NULL, *span_start = NULL, *span_end = NULL;
    uint8_t *has_prior;
    if (!rows || prior.size != rows || prior_device.size != rows || start.size != rows + 1 || start.narrow[0] ||
        start.narrow[rows] != tokens || !groups_of(arguments + 5, rows, tokens, &groups) ||
        !(context = new_tensor(rows, DL_INT, 32, &beside[CONTEXT])) ||
        !(has_prior = new_tensor(rows, DL_BOOL, 8, &beside[HAS_PRIOR])))
        goto done;
    int by_token = arguments[10] == Py_True;
    if (by_token && (!(row_of_token = new_tensor(tokens, DL_INT, 32, &beside[ROW])) ||
                     !(span_start = new_tensor(tokens, DL_INT, 32, &beside[SPAN_START])) ||
                     !(span_end = new_tensor(tokens, DL_INT, 32, &beside[SPAN_END]))))
        goto done;
    for (int64_t row = 0; row < rows; row++) {
        int64_t old = prior.narrow[row], begin = start.narrow[row], query = start.narrow[row + 1] - begin;
        int64_t length = old + new.narrow[row];
        /* The second: nothing is written outside of the pass, whatever the offsets between are. */
        if (query <= 0 || begin + query > tokens || old < 0 || old + tokens > INT32_MAX || length > INT32_MAX ||
            at(&prior_device, row) != old || !count_from(&position, begin, query, old) ||
            !fill_row(&groups, row, begin, old, old + query))
            goto done;
        for (int64_t i = begin; by_token && i < begin + query; i++) {
            row_of_token[i] = (int32_t)row;
            span_start[i] = (int32_t)begin;
            span_end[i] = (int32_t)i + 1;
        }
        context[row] = (int32_t)length;
        has_prior[row] = old > 0;
        total += length;
        longest = length > longest ? length : longest;
        most = query > most ? query : most;
        deepest = old > deepest ? old : deepest;
    }
    if (longest <= 0) /* a dummy pass */
        goto done;
    for (int i = 0; i < BESIDE; i++)
        if (!beside[i])
            beside[i] = Py_NewRef(Py_None);
    result = Py_BuildValue("LLLONNN(OOOOO)", (long long)longest, (long long)total, (long long)most,
                           deepest ? Py_True : Py_False, tensors_of(&groups, SLOTS), tensors_of(&groups, READ),
                           tensors_of(&groups, WRITE), beside[CONTEXT], beside[HAS_PRIOR], beside[ROW],
                           beside[SPAN_START], beside[SPAN_END]);
done:
    forget(&groups);
    for (int i = 0; i < BESIDE; i++)
        Py_CLEAR(beside[i]);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}
