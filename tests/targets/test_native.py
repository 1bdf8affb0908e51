"""The compiled part: what it computes of passes that are broken in every way equals the general way, or it declines."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepbind.errors import StepError
from stepbind.targets.atom import shared
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.native import native
from stepbind.targets.atom.read import read
from tests.targets.atom_double.modules import atom_installed
from tests.targets.test_values import Pass, assert_same

pytestmark = pytest.mark.usefixtures("compiled_alone")
NUMBERS = (-(2**31), -7, -1, 0, 1, 2, 7, 8, 9, 40, 1000, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def double() -> Iterator[None]:
    with atom_installed():
        yield


def change(rng: random.Random, tensor: torch.Tensor) -> Any:
    """Something that a tensor of a pass should not be, mostly."""
    if tensor.numel():
        tensor = tensor.clone()
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(NUMBERS)
    return rng.choice(
        (
            tensor,
            tensor,
            tensor.long(),
            tensor.float(),
            tensor[:-1],
            tensor[..., :-1],
            tensor.repeat_interleave(2, dim=-1)[..., ::2],
            tensor[None],
            tensor.new_empty(0),
            None,
        )
    )


def break_one(rng: random.Random, case: Pass) -> None:
    """Change one tensor of the pass, in place of what the host gave."""
    attention = case.inputs.attention_inputs
    of_groups = attention.kv_cache_kernel_block_id_device_by_group
    names = [name for name, value in vars(attention).items() if isinstance(value, torch.Tensor)]
    what = rng.choice([*names, "positions", *range(len(of_groups or ()))])
    if what == "positions":
        changed = change(rng, case.positions)
        case.positions = changed if isinstance(changed, torch.Tensor) else case.positions
    elif isinstance(what, int):
        of_groups[what] = change(rng, of_groups[what])
    else:
        setattr(attention, what, change(rng, getattr(attention, what)))


def general(case: Pass, on_gpu: bool) -> Computed | None:
    """None for a pass that the general way refuses."""
    try:
        case.host = read(case.inputs)
        return case.by_plan() if on_gpu else case.general()
    except (StepError, ValueError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError):
        return None


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(("on_gpu", "count"), [(False, 1500), (True, 400)])
def test_broken_passes_equal_the_general_way_or_are_declined(which: int, on_gpu: bool, count: int) -> None:
    """A GPU's way on the CPU may raise `StepError` too, where the general one refuses."""
    taken = declined = 0
    for seed in range(count):
        rng = random.Random(seed)
        case = Pass(seed, which, 1)
        break_one(rng, case)
        if on_gpu:  # where the host's offsets are all that can be read
            attention = case.inputs.attention_inputs
            attention.cu_seqlens_device = attention.cu_seqlens
        try:
            usual = case.usual_by_plan() if on_gpu else case.usual()
        except StepError:
            assert on_gpu
            assert general(case, on_gpu) is None
            continue
        taken, declined = taken + (usual is not None), declined + (usual is None)
        if usual is not None and not (on_gpu and contexts_disagree(case)):
            want = general(case, on_gpu)
            assert want is not None
            assert_same(usual, want)
    assert min(taken, declined) > count // 8


def contexts_disagree(case: Pass) -> bool:
    """Whether a decode's contexts are not what the host says: a GPU's way does not see that, the CPU's would."""
    attention = case.inputs.attention_inputs
    prior, context = attention.sequence_lengths, attention.sequence_lengths_plus_1_device
    return not attention.is_prefill and context.tolist() != [n + 1 for n in prior.tolist()]


@pytest.mark.parametrize("start", [[0, 100, 2], [0, -5, 2], [0, 2, 2], [1, 1, 2], [0, 1, 3], [0, 2**31 - 1, 2]])
def test_offsets_that_lead_out_of_the_pass_are_declined(start: list[int]) -> None:
    new = prior = torch.ones(2, dtype=torch.int32)
    tables = [torch.ones(2, 2, dtype=torch.int32)]
    given = new, prior, prior, torch.tensor(start, dtype=torch.int32), torch.ones(2, dtype=torch.int32), tables
    assert native.prefill(*given, (8,), (0, 5), (0,), False, True) is None
    good = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert native.prefill(*given[:3], good, *given[4:], (8,), (0, 5), (0,), False, True) is not None


def lengths_of(rng: random.Random, prefill: bool) -> dict[str, Any]:
    """Arguments of `decode_lengths` or `prefill_lengths`, of a good pass."""
    rows = rng.randint(1, 20)
    prior = [rng.choice((0, 1, 7, 8, 9, 63, 64, 5000)) + (not prefill) for _ in range(rows)]
    table, tokens = torch.ones(rows, 2, dtype=torch.int32), int32(prior)
    if not prefill:
        given = {"new": int32([1] * rows), "prefix": int32([]), "prior": tokens, "context": tokens + 1}
        return {**given, "start": int32([0] * rng.randint(0, 3)), "rows": rows, "table": table}
    new = int32([rng.choice((1, 7, 8, 9, 64, 300)) for _ in range(rows)])
    start = torch.cat((int32([0]), new.cumsum(0, dtype=torch.int32)))
    given = {"new": new, "new_there": new.clone(), "prior": tokens, "prior_there": tokens.clone(), "start": start}
    return {**given, "rows": rows, "tokens": int(start[-1]), "table": table, "sizes": (8, 64)}


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_sizes_of_passes_on_a_gpu_are_those_of_the_hosts_lengths() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        of = lengths_of(rng, False)
        context = of["context"]
        want = int(context.max()), int(context.sum()), context.data_ptr()
        assert native.decode_lengths(*of.values()) == want
        of = lengths_of(rng, True)
        new, prior = of["new"].tolist(), of["prior"].tolist()
        ends = [n + q for n, q in zip(prior, new, strict=True)]
        chunks = sum(-(-q // 8) for q in new)
        inside = [sum((e - 1) // size - n // size for n, e in zip(prior, ends, strict=True)) for size in (8, 64)]
        there = of["new_there"].data_ptr(), of["prior_there"].data_ptr()
        want = max(new), max(ends), sum(ends), any(prior), chunks, max(inside), *there
        assert native.prefill_lengths(*of.values()) == want


@pytest.mark.parametrize("prefill", [False, True])
def test_lengths_that_are_not_usual_are_declined(prefill: bool) -> None:
    function = native.prefill_lengths if prefill else native.decode_lengths
    for seed in range(400):
        rng = random.Random(seed)
        of = lengths_of(rng, prefill)
        name = rng.choice(list(of))
        was = of[name]
        if name == "table":
            of[name] = torch.ones(2, 2, device="meta")  # lengths that are elsewhere
        elif name == "sizes":
            of[name] = rng.choice(((0,), (-1, 8), tuple(range(1, 18))))
        elif isinstance(was, int):
            of[name] = rng.choice((was + 1, was - 1, 0, -1))
        elif name == "prefix":
            of[name] = rng.choice((None, int32([1])))
        elif name == "start" and not prefill:
            of[name] = rng.choice((None, int32([0, 1]), was.long()))
        elif name == "new" and not prefill:
            of[name] = rng.choice((None, int32([1] * (of["rows"] + 1))))
        else:
            bad = [was[:-1], was.long(), was.float(), was[None], was.repeat_interleave(2)[::2], None]
            bad = [*bad[:-2], None] if was.numel() < 2 else bad  # one number is next to itself
            if not name.endswith("_there") and name != "context":  # those are not read here
                index = rng.randrange(was.numel())
                bad += [was.index_fill(0, torch.tensor(index), value) for value in (-1, -(2**31), 2**31 - 1)]
            of[name] = rng.choice(bad)
        assert function(*of.values()) is None, (seed, name, of[name])


def test_what_is_made_is_let_go() -> None:
    """Of passes taken and of those declined in the last row: neither objects nor memory pile up."""
    context = torch.full((512,), 9, dtype=torch.int32)
    tables = [torch.ones(512, 64, dtype=torch.int32)]
    for last in (1, 0):
        tables[0][-1] = last
        token = context - 1
        given = token, context, torch.zeros(1, dtype=torch.int32), token, tables, (8,), (1, 5), (0,), True
        before = resident_bytes()
        counts = sys.getrefcount(None), sys.getrefcount(tables[0])
        for _ in range(20_000):  # 8 kB each
            found = native.decode(*given)
        assert (found is None) is (last == 0)
        assert resident_bytes() - before < 40e6
        # None is immortal since Python 3.12; torch itself may hold a tensor's object once.
        assert abs(sys.getrefcount(None) - counts[0]) < 1000
        assert sys.getrefcount(tables[0]) - counts[1] < 10


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_convolution_programs_are_those_of_the_general_way(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for rows in (1, 2, 3, 40):
        for longest in (1, 8, 9, 700):
            start = np.cumsum([0, *(rng.randint(0, longest) for _ in range(rows))]).astype(dtype)
            if not start[-1]:
                continue
            given = shared.SharedValues(torch.from_numpy(start), None, None, None)
            found = shared.conv_programs(start, given)
            with monkeypatch.context() as patch:
                patch.setattr(shared, "native", None)
                want = shared.conv_programs(start, given)
            assert_same(found[1:], want[1:])
            assert found[0][8].keys() == want[0][8].keys()
            assert_same(tuple(found[0][8].values()), tuple(want[0][8].values()))


def test_convolution_programs_are_without_lists_where_a_plan_has_them() -> None:
    start = np.array([0, 9, 9, 17], dtype=np.int32)
    total, counts, row, chunk, *lists = native.conv_programs(start, 8, 3, False)
    assert (total, counts.tolist(), row.tolist(), chunk.tolist()) == (3, [2, 0, 1], [0, 0, 2], [0, 1, 0])
    assert lists == [None, None]
    *_, batch, offset = native.conv_programs(start, 8, 3, True)
    assert (batch.tolist(), offset.tolist()) == ([0, 0, 2, -1, -1, -1], [0, 1, 0, -1, -1, -1])


def test_offsets_that_fall_are_an_error() -> None:
    with pytest.raises(ValueError, match="offsets that fall behind row 1"):
        native.conv_programs(np.array([0, 4, 3]), 8, 1024, True)


def test_buffers_are_the_same_only_in_the_same_place() -> None:
    own = [torch.zeros(4, 6), torch.zeros(4, 6)]
    caches = {i: SimpleNamespace(kv_cache_base=each, kv_scale_base=None) for i, each in enumerate(own)}
    kept = native.places(own)

    def same() -> bool:
        return native.are_at(caches.__getitem__, [0, 1], own, kept)

    assert same()
    was = own[1].data
    for other in (torch.zeros(4, 6), was[:3], was.t(), was[1:], was.view(6, 4)):
        own[1].data = other
        assert not same()
        own[1].data = was
        assert same()
    caches[1].kv_cache_base = own[1].view(4, 6)  # another object
    assert not same()
    caches[1] = SimpleNamespace(kv_cache_base=own[1], kv_scale_base=torch.zeros(4))  # a scale that was not there
    assert not same()
    caches[1] = SimpleNamespace(kv_cache_base=own[1])
    assert same()
    caches[1] = SimpleNamespace()
    with pytest.raises(AttributeError, match="kv_cache_base"):
        same()
    del caches[1]
    with pytest.raises(KeyError):
        same()
