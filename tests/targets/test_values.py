"""The ways to compute a pass agree: the general one and the usual one, on the CPU and by the plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from stepbind.errors import StepError
from stepbind.targets import atom
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.kept import kept_on, update_groups
from stepbind.targets.atom.metadata import HYBRID, PLAIN, SPARSE_MLA, Profile
from stepbind.targets.atom.passes import PlanBuffers, compute_by_plan, compute_captured, compute_on_host
from stepbind.targets.atom.read import read
from stepbind.targets.atom.shared import conv_programs
from stepbind.targets.atom.usual import usual_inputs, usual_pass
from stepbind.targets.atom.usual_gpu import usual_on_gpu
from tests.targets.atom_double.modules import atom_installed
from tests.targets.atom_double.passes import (
    hybrid_model,
    latent_model,
    pass_inputs,
    plain_model,
    random_pass,
    runtime_for,
)

MODELS: list[tuple[Any, Any, Profile]] = [
    (atom.RTPForwardContext, plain_model, PLAIN),
    (atom.RTPForwardMLAContext, latent_model, SPARSE_MLA),
    (atom.RTPForwardQwen35HybridContext, hybrid_model, HYBRID),
]


@pytest.fixture(autouse=True, scope="module")
def double() -> Iterator[None]:
    with atom_installed():
        yield


FIRST = ("slot_mapping", "state_read", "state_write", "has_prior")


class Pass:
    def __init__(self, seed: int, which: int, ratio: int, *, holes: bool = False) -> None:
        rng = random.Random(seed)
        self.cls, model, self.profile = MODELS[which]
        groups = rng.choice((1, 3)) if which == 2 else 1
        self.inputs, self.positions = random_pass(rng, groups=groups, ratio=ratio, compact=which == 2)
        if holes:
            attention = self.inputs.attention_inputs
            others = (attention.kv_cache_kernel_block_id_device_by_group or [])[1:]
            for table in others or rng.choice(([], [attention.kv_cache_kernel_block_id_device])):
                table[rng.randrange(table.shape[0]), rng.randrange(table.shape[1])] = rng.choice((-1, 0, 1000))
        self.model = model()
        runtime = runtime_for(self.model, 8, 8 // ratio, 100)
        self.host = read(self.inputs)
        maps = self.cls.collect_layer_maps(self.model)
        self.groups = update_groups(kept_on(runtime), runtime, maps, self.host)

    def general(self) -> Computed:
        return compute_on_host(self.host, self.positions, self.profile, self.groups, False, 64)

    def usual(self) -> Computed | None:
        given = usual_inputs(self.inputs, physical=self.profile.physical_table)
        return None if given is None else usual_pass(given, self.inputs, self.positions, self.profile, self.groups)

    def fast(self) -> Computed:
        return self.usual() or self.general()

    def by_plan(self) -> Computed:
        tokens = self.positions.numel()
        return compute_by_plan(self.inputs, self.host, tokens, self.profile, self.groups, PlanBuffers(), 64, False)

    def usual_by_plan(self) -> Computed | None:
        given = usual_inputs(self.inputs, physical=self.profile.physical_table)
        if given is None:
            return None
        return usual_on_gpu(given, self.positions, self.profile, self.groups, PlanBuffers(), False, 0)

    def captured(self) -> Computed:
        return compute_captured(self.inputs, self.host, self.profile, self.groups, PlanBuffers(), 64)


def assert_same(got: Any, want: Any, name: str = "") -> None:
    if isinstance(want, torch.Tensor):
        assert got is not None, name
        assert (got.dtype, got.tolist()) == (want.dtype, want.tolist()), name
    elif hasattr(want, "_asdict"):
        for field, value in want._asdict().items():
            if field == "states":  # the groups' own, again
                continue
            assert_same(getattr(got, field), value, f"{name}.{field}")
    elif isinstance(want, Sequence) and not isinstance(want, str):
        assert len(got) == len(want)
        for index, value in enumerate(want):
            assert_same(got[index], value, f"{name}[{index}]")
    elif hasattr(want, "tolist"):
        assert (got.dtype, got.tolist()) == (want.dtype, want.tolist()), name
    else:
        assert got == want, name


@pytest.mark.usefixtures("compiled_alone")
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("holes", [False, True])
def test_the_usual_pass_equals_the_general_way(which: int, ratio: int, holes: bool) -> None:
    taken = {False: 0, True: 0}
    for seed in range(300):
        case = Pass(seed, which, ratio, holes=holes)
        usual = case.usual()
        taken[case.host.is_prefill] += usual is not None
        if usual is not None:
            assert_same(usual, case.general())
    assert min(taken.values()) > 20


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("holes", [False, True])
def test_the_usual_pass_on_a_gpu_equals_the_general_way_there(which: int, holes: bool) -> None:
    taken = {False: 0, True: 0}
    for seed in range(100):
        case = Pass(seed, which, 1, holes=holes)
        usual = case.usual_by_plan()
        taken[case.host.is_prefill] += usual is not None
        if usual is not None:
            assert_same(usual, case.by_plan())
    assert min(taken.values()) > 10


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("ratio", [1, 4])
def test_the_plans_values_equal_those_of_the_cpu(which: int, ratio: int) -> None:
    for seed in range(40):
        case = Pass(seed, which, ratio, holes=True)
        planned, direct = case.by_plan(), case.fast()
        assert_same(planned.groups, direct.groups, "groups")
        for field in (
            "seq_lens",
            "max_query",
            "max_context",
            "total_context",
            "num_tokens",
            "query_start_host",
            *FIRST,
        ):
            assert_same(getattr(planned, field), getattr(direct, field), field)
        for field, value in direct.shared._asdict().items():
            if value is not None:
                assert_same(getattr(planned.shared, field), value, field)
        assert (planned.shared.conv_row is not None) == bool(case.host.is_prefill and case.groups.state_groups)
        if planned.shared.conv_row is not None:
            lists, want = (conv_programs(of.query_start_host, of.shared)[1:] for of in (planned, direct))
            assert_same(lists, want, "lists of convolution programs")


@pytest.mark.parametrize("which", range(3))
def test_captured_values_equal_the_eager_ones(which: int) -> None:
    for seed in range(60):
        case = Pass(seed, which, 1)
        if case.host.is_prefill or case.host.plus_one is None:
            continue
        captured, eager = case.captured(), case.fast()
        assert_same(captured.groups, eager.groups, "groups")
        for field in ("seq_lens", *FIRST):
            assert_same(getattr(captured, field), getattr(eager, field), field)


@pytest.mark.parametrize("which", range(3))
def test_eager_passes_leave_the_buffers_of_graphs_alone(which: int) -> None:
    """More rows and tokens than the captured pass had make other buffers grow."""
    case = next(case for case in (Pass(seed, which, 1) for seed in range(50)) if not case.host.is_prefill)
    buffers = PlanBuffers()
    captured = compute_captured(case.inputs, case.host, case.profile, case.groups, buffers, 64)
    held = buffers.captured, buffers.captured_scratch, captured.seq_lens.data_ptr()
    rows, tables = 300, len(case.host.tables)
    inputs = pass_inputs(prefill=False, query=[1] * rows, prior=[5] * rows, tables=[[[1]] * rows] * tables)
    compute_by_plan(inputs, read(inputs), rows, case.profile, case.groups, buffers, 64, False)
    again = compute_captured(case.inputs, case.host, case.profile, case.groups, buffers, 64)
    assert (buffers.captured, buffers.captured_scratch, again.seq_lens.data_ptr()) == held
    with pytest.raises(StepError, match="got 300 rows, expected at most 256 in a capture"):
        compute_captured(inputs, read(inputs), case.profile, case.groups, buffers, 64)
