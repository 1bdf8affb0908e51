"""A step is checked once, from host lengths; every error names the field, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stepbind import CacheGroup, Granularity, GroupKind, Lengths, Phase, Step, StepError, make_arena, make_step
from stepbind.plan import build_plan

FULL = CacheGroup("full", GroupKind.ATTENTION, (1, 3), block_size=16, kernel_block_size=4, num_blocks=100)
STATE = CacheGroup("state", GroupKind.STATE, (0, 2), block_size=32, kernel_block_size=32, num_blocks=20)


def table(rows: int, columns: int, **options: object) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.int32, **options)  # type: ignore[call-overload, no-any-return]


def prefill(**changes: object) -> Step:
    arguments: dict[str, object] = {
        "groups": [FULL, STATE],
        "phase": Phase.PREFILL,
        "query_len": [5, 20],
        "prior_len": [0, 16],
        "tables": {"full": table(2, 3), "state": table(2, 2)},
    }
    return make_step(**(arguments | changes))  # type: ignore[arg-type]


def test_scalars_come_from_host_lengths() -> None:
    step = prefill(padded_rows=4, padded_tokens=32)
    assert (step.num_rows, step.num_tokens, step.max_query) == (2, 25, 20)
    assert (step.max_context, step.total_context, step.is_dummy) == (36, 41, False)
    assert (step.padded_rows, step.padded_tokens) == (4, 32)


def test_sizes_default_to_the_step_without_padding() -> None:
    step = prefill()
    assert (step.padded_rows, step.padded_tokens) == (2, 25)


def test_making_a_step_reads_no_device_value() -> None:
    """Tensors on the meta device have no values to read."""
    step = prefill(
        tables={"full": table(2, 3, device="meta"), "state": table(2, 2, device="meta")},
        position=torch.zeros(25, dtype=torch.int64, device="meta"),
    )
    assert step.device.type == "meta"


def test_all_zero_lengths_are_a_dummy_step() -> None:
    step = prefill(query_len=[0, 0], prior_len=[0, 0], padded_tokens=8)
    assert step.is_dummy
    assert step.max_context == 0


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "batch sizes disagree": (
        lambda: prefill(prior_len=[0]),
        r"prior_len: got 1 rows, expected 2 rows as in query_len",
    ),
    "no rows": (lambda: prefill(query_len=[], prior_len=[]), r"query_len: got no rows, expected at least one row"),
    "negative query": (lambda: prefill(query_len=[5, -1]), r"query_len\[1\]: got -1, expected 0 or more tokens"),
    "negative prior": (lambda: prefill(prior_len=[-3, 0]), r"prior_len\[0\]: got -3, expected 0 or more tokens"),
    "one zero query": (lambda: prefill(query_len=[5, 0]), r"query_len\[1\]: got 0, expected at least 1 new token"),
    "dummy with context": (
        lambda: prefill(query_len=[0, 0]),
        r"prior_len\[1\]: got 16, expected 0: a dummy step",
    ),
    "two tokens in decode": (
        lambda: prefill(phase=Phase.DECODE),
        r"query_len\[1\]: got 20, expected 1 new token a row in decode",
    ),
    "length past int32": (lambda: prefill(query_len=[5, 2**31]), r"lengths: got 2147483648, expected at most"),
    "sum past int32": (
        lambda: prefill(query_len=[5, 20], prior_len=[0, 2**31 - 1]),
        r"prior_len \+ query_len: got 2147483667, expected at most 2147483647",
    ),
    "contexts of a prefill": (
        lambda: prefill(contexts_on_device=True),
        r"contexts_on_device: got a prefill pass, expected a decode pass of known lengths",
    ),
    "contexts that are not there": (
        lambda: prefill(phase=Phase.DECODE, query_len=[1, 1], contexts_on_device=True),
        r"prior_len.device: got none, expected context lengths, as contexts_on_device says",
    ),
    "device lengths as host": (
        lambda: Lengths.of(torch.ones(2, dtype=torch.int32, device="meta")),
        r"lengths: got a tensor on meta, expected host values",
    ),
    "empty table": (
        lambda: prefill(tables={"full": table(2, 0), "state": table(2, 2)}),
        r"block table of group 'full': got shape \(2, 0\), expected \[rows, columns\] with at least one column",
    ),
    "one-dimensional table": (
        lambda: prefill(tables={"full": table(2, 3)[0], "state": table(2, 2)}),
        r"block table of group 'full': got shape \(3,\)",
    ),
    "int64 table": (
        lambda: prefill(tables={"full": table(2, 3).long(), "state": table(2, 2)}),
        r"block table of group 'full': got torch.int64, expected torch.int32",
    ),
    "table of another batch": (
        lambda: prefill(tables={"full": table(2, 3), "state": table(3, 2)}),
        r"block table of group 'state': got 3 rows, expected 2 rows as in query_len",
    ),
    "wrong device": (
        lambda: prefill(tables={"full": table(2, 3), "state": table(2, 2, device="meta")}),
        r"block table of group 'state': got device meta, expected cpu",
    ),
    "narrow table": (
        lambda: prefill(tables={"full": table(2, 2), "state": table(2, 2)}),
        r"'full': got 2 columns of 16 tokens \(physical granularity\), expected at least 3 for the longest",
    ),
    "narrow kernel table": (
        lambda: prefill(granularity={"full": Granularity.KERNEL, "state": Granularity.PHYSICAL}),
        r"'full': got 3 columns of 4 tokens \(kernel granularity\), expected at least 9",
    ),
    "unknown group": (
        lambda: prefill(tables={"full": table(2, 3), "state": table(2, 2), "latent": table(2, 2)}),
        r"tables: got group 'latent', expected one of the groups \['full', 'state'\]",
    ),
    "missing group": (
        lambda: prefill(tables={"full": table(2, 3)}),
        r"tables: got no table for group 'state', expected one table for each",
    ),
    "fewer padded rows than rows": (
        lambda: prefill(padded_rows=1),
        r"padded_rows: got 1, expected at least the 2 rows",
    ),
    "fewer padded tokens than tokens": (
        lambda: prefill(padded_tokens=24),
        r"padded_tokens: got 24, expected at least the 25 tokens",
    ),
    "float positions": (
        lambda: prefill(position=torch.zeros(25)),
        r"position: got torch.float32 on cpu, expected torch.int32 or torch.int64",
    ),
    "positions of another step": (
        lambda: prefill(position=torch.zeros(7, dtype=torch.int64)),
        r"position: got shape \(7,\), expected \[25\]",
    ),
    "block size 0": (
        lambda: CacheGroup("g", GroupKind.STATE, (0,), 0, 4, 10),
        r"group 'g' block_size: got 0, expected at least 1 token",
    ),
    "kernel block size 0": (
        lambda: CacheGroup("g", GroupKind.STATE, (0,), 4, 0, 10),
        r"group 'g' kernel_block_size: got 0, expected at least 1 token",
    ),
    "sizes that do not divide": (
        lambda: CacheGroup("g", GroupKind.STATE, (0,), 64, 48, 10),
        r"group 'g' kernel_block_size: got 48, expected a divisor of block_size 64",
    ),
    "a pool of nothing": (
        lambda: CacheGroup("g", GroupKind.STATE, (0,), 64, 64, 1),
        r"group 'g' num_blocks: got 1, expected more than first_block 1",
    ),
    "a group without layers": (
        lambda: CacheGroup("g", GroupKind.STATE, (), 64, 64, 10),
        r"group 'g' layers: got none, expected at least one layer number",
    ),
    "a layer in two groups": (
        lambda: prefill(
            groups=[FULL, CacheGroup("state", GroupKind.STATE, (3,), 32, 32, 20)],
        ),
        r"group 'state' layers: got layer 3, which group 'full' has too, expected each layer in one group",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(StepError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert caught.value.field in str(caught.value)


def test_a_step_larger_than_the_arena_is_refused_before_anything_is_written() -> None:
    arena = make_arena([FULL, STATE], max_rows=1, max_tokens=64, max_context=64)
    with pytest.raises(StepError, match="padded_rows: got 2, expected at most the arena's 1"):
        build_plan(prefill(), arena)
    arena = make_arena([FULL, STATE], max_rows=2, max_tokens=24, max_context=64)
    with pytest.raises(StepError, match="padded_tokens: got 25, expected at most the arena's 24"):
        build_plan(prefill(), arena)
    arena = make_arena([FULL, STATE], max_rows=2, max_tokens=64, max_context=32)
    with pytest.raises(StepError, match="max_context: got 36, expected at most the arena's 32"):
        build_plan(prefill(), arena)


def test_a_step_of_other_groups_than_the_arena_is_refused() -> None:
    arena = make_arena([FULL], max_rows=2, max_tokens=64, max_context=64)
    with pytest.raises(StepError, match=r"tables: got groups \['full', 'state'\], expected the arena's \['full'\]"):
        build_plan(prefill(), arena)
