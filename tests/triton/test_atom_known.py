"""Passes on the ATOM surface that are like an earlier one, by Triton's interpreter: their context has the fields that
the general way gives the same pass."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepbind.errors import BlockFaultError, StepError
from stepbind.plan import build_plan
from stepbind.plan.launch import Call
from stepbind.targets.atom import api, known, usual_gpu
from stepbind.targets.atom import context as atom_context
from stepbind.targets.atom.kept import kept_on
from stepbind.targets.atom.native import native
from stepbind.targets.atom.prototypes import is_plain
from tests.targets.atom_double.case import HYBRID, MODELS, PLAIN, every_class
from tests.targets.atom_double.fields import values_in
from tests.targets.atom_double.modules import atom_installed
from tests.targets.atom_double.passes import int32, pass_inputs, positions_of, runtime_for
from tests.targets.test_native import break_one

pytestmark = pytest.mark.skipif(native is None, reason="installed without a C compiler")

BLOCKS, SIZE, COLUMNS = 100, 8, 6


class Host:
    """A runtime whose tables stay in their places. `firsts`: how many passes had to become a step."""

    def __init__(self, cls: Any, seed: int, prefill: bool) -> None:
        self.cls, self.rng, self.prefill = cls, random.Random(seed), prefill
        self.model = MODELS[cls]()
        self.runtime = runtime_for(self.model, SIZE, SIZE, BLOCKS)
        self.rows = self.rng.randint(1, 5)
        groups = self.rng.choice((1, 3)) if cls is HYBRID else 1
        self.layer_to_group = [1, 2, 1, 0] if groups > 1 else None
        self.tables = [torch.empty(self.rows, COLUMNS, dtype=torch.int32) for _ in range(groups)]
        self.store = self.rng.choice((None, torch.empty(self.rows, COLUMNS, dtype=torch.int32)))

    def next_pass(self, prior: list[int] | None = None, query: list[int] | None = None) -> dict[str, Any]:
        """Arguments: other lengths, other blocks in the same tables, everything else new."""
        rng = self.rng
        prior = prior or [rng.randint(0 if self.prefill else 1, 30) for _ in range(self.rows)]
        query = query or [rng.randint(1, 12) if self.prefill else 1 for _ in range(self.rows)]
        for table in (*self.tables, *(() if self.store is None else (self.store,))):
            table.copy_(torch.tensor([rng.randrange(1, BLOCKS) for _ in range(table.numel())]).view_as(table))
        inputs = pass_inputs(
            prefill=self.prefill,
            query=query,
            prior=prior,
            tables=list(self.tables),
            store=self.store,
            layer_to_group=self.layer_to_group,
        )
        return {"inputs": inputs, "positions": positions_of(query, prior), "cg_bufs": object()}

    def build(self, arguments: dict[str, Any], **more: Any) -> Any:
        return self.cls.build(model=self.model, runtime=self.runtime, **arguments, **more)

    def build_anew(self, arguments: dict[str, Any]) -> Any:
        """On a runtime of its own: the general way."""
        runtime = runtime_for(self.model, SIZE, SIZE, BLOCKS)
        return self.cls.build(model=self.model, runtime=runtime, **arguments, strict=False)

    def warm_up(self) -> None:
        """The general way, then the first of the kind, of the most tokens."""
        for _ in range(2):
            self.build(self.next_pass([30] * self.rows, [12 if self.prefill else 1] * self.rows))


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each pass that is computed by a step and a plan."""
    found: list[int] = []
    compute = usual_gpu._compute

    def counted(*arguments: Any) -> Any:
        found.append(1)
        return compute(*arguments)

    monkeypatch.setattr(usual_gpu, "_compute", counted)
    return found


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's way on the CPU, with kernels in the interpreter."""

    def by_triton(step: Any, arena: Any, *, strict: bool) -> Any:
        return build_plan(step, arena, strict=strict, triton=True)

    monkeypatch.setattr(atom_context, "is_on_host", lambda positions, table: False)
    monkeypatch.setattr(usual_gpu, "build_plan", by_triton)
    with atom_installed():
        yield


both_phases = pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])


@every_class
@both_phases
def test_a_known_pass_has_the_fields_of_the_general_way(cls: Any, prefill: bool, firsts: list[int]) -> None:
    for seed in range(4):
        host = Host(cls, seed, prefill)
        host.warm_up()
        del firsts[:]
        for _ in range(3):
            host.tables = [table.view_as(table) for table in host.tables]  # other objects in the same places
            arguments = host.next_pass()
            context, want = host.build(arguments), host.build_anew(arguments)
            assert dict(values_in(context)) == dict(values_in(want)), f"seed {seed}"
            first = host.tables[0] if cls is HYBRID or host.store is None else host.store
            assert_is_of(context, arguments, [first, *host.tables[1:]])
        assert not firsts


def assert_is_of(context: Any, arguments: dict[str, Any], tables: list[torch.Tensor]) -> None:
    """The host's own objects are those of this pass, not of an earlier one with the same values."""
    attention, metadata = arguments["inputs"].attention_inputs, context.attn_metadata
    plugin = metadata.plugin_metadata
    assert context.rtp_attn_inputs is metadata.rtp_attn_inputs is attention
    assert context.context.positions is arguments["positions"]
    assert metadata.block_tables is plugin.block_table is tables[0]
    assert all(group.block_table is tables[group.number] for group in metadata.rtp_groups)
    assert getattr(plugin, "cg_bufs", None) in (None, arguments["cg_bufs"])
    if not attention.is_prefill:
        assert metadata.context_lens is plugin.seq_lens is attention.sequence_lengths_plus_1_device
    assert metadata.gdn_metadata is context.gdn_metadata
    if context.gdn_metadata is not None:
        assert context.gdn_metadata.rtp_attn_inputs is attention
        assert context.gdn_metadata.rtp_state_indices_cache is context.state_indices_cache


class Operations(TorchDispatchMode):
    """Notes torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


@every_class
@both_phases
def test_a_known_pass_is_a_launch_and_no_operation_of_torchs(cls: Any, prefill: bool) -> None:
    """So it allocates nothing on the device, copies nothing and waits for nothing. A prefill's slices were made with
    the first one of its sizes; its offsets are on the host, and `numpy` detaches them."""
    host = Host(cls, 5, prefill)
    host.warm_up()
    arguments = host.next_pass()
    host.build(arguments)
    launches: list[Any] = []
    nothing = Call(lambda *given: launches.append(given), ())  # Triton's interpreter works on tensors
    for kind in kept_on(host.runtime).buffers.known.values():
        kind.decode = None if kind.decode is None else nothing
        kind.launcher.calls = dict.fromkeys(kind.launcher.calls, nothing)
    with Operations() as seen:
        host.build(arguments)
    assert (len(launches), seen.names) == (1, ["aten.detach.default"] if prefill else [])


@both_phases
def test_what_layers_add_to_a_pass_is_not_in_the_next_one(prefill: bool) -> None:
    host = Host(HYBRID, 0, prefill)
    host.warm_up()
    for _ in range(2):
        context = host.build(host.next_pass())
        caches = context.state_indices_cache, context.gdn_metadata.rtp_state_indices_in_cache
        assert all((9, prefill) not in cache for cache in caches)
        for cache in caches:
            cache[9, prefill] = torch.zeros(1)


@every_class
@both_phases
def test_a_broken_pass_of_a_known_kind_equals_the_general_way_or_is_refused(cls: Any, prefill: bool) -> None:
    """Not where the device's lengths are others than the host's: nobody looks at those."""
    refused = taken = 0
    for seed in range(12 if prefill and cls is HYBRID else 30):
        host = Host(cls, seed, prefill)
        host.warm_up()
        arguments = host.next_pass()
        case: Any = SimpleNamespace(**arguments)
        attention = case.inputs.attention_inputs
        break_one(host.rng, case)
        attention.cu_seqlens_device = attention.cu_seqlens
        arguments["positions"] = case.positions
        try:
            got = host.build(arguments, strict=False)
        except (StepError, ValueError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
            refused += 1
            with pytest.raises(type(error)):
                host.build_anew(arguments)
            continue
        if not lengths_disagree(attention):
            taken += 1
            assert dict(values_in(got)) == dict(values_in(host.build_anew(arguments))), f"seed {seed}"
    assert min(refused, taken) > 1


def lengths_disagree(attention: Any) -> bool:
    """Whether the device's are there, and others than the host's."""
    if not attention.is_prefill:
        return are_others(attention.sequence_lengths, attention.sequence_lengths_plus_1_device, 1)
    names = "input_lengths", "prefix_lengths"
    return any(are_others(getattr(attention, name), getattr(attention, f"{name}_device")) for name in names)


def are_others(host: Any, device: Any, more: int = 0) -> bool:
    if host is None or device is None or not (host.numel() and device.numel()):
        return False
    return bool([n + more for n in host.tolist()] != device.tolist())


@every_class
def test_tables_in_other_places_are_a_kind_of_their_own(cls: Any, firsts: list[int]) -> None:
    host = Host(cls, 1, False)
    host.warm_up()
    del firsts[:]
    was = host.tables, host.store
    wide = torch.empty(host.rows, COLUMNS + 1, dtype=torch.int32)
    host.tables = [wide[:, :COLUMNS].contiguous() for _ in host.tables]
    arguments = host.next_pass()
    assert dict(values_in(host.build(arguments))) == dict(values_in(host.build_anew(arguments)))
    assert len(firsts) == 1
    host.tables, host.store = was
    host.build(host.next_pass())
    assert len(firsts) == 1
    host.tables[-1].set_(host.tables[-1].clone())  # the same object in another place
    arguments = host.next_pass()
    assert dict(values_in(host.build(arguments))) == dict(values_in(host.build_anew(arguments)))
    assert len(firsts) == 2


@both_phases
def test_tables_with_too_few_columns_are_an_error_as_in_a_first_pass(prefill: bool) -> None:
    host = Host(PLAIN, 1, prefill)
    host.build(host.next_pass([47] * host.rows, [1] * host.rows))
    host.warm_up()
    with pytest.raises(StepError, match=r"got 6 columns of 8 tokens .* expected at least"):
        host.build(host.next_pass([500] * host.rows, [1] * host.rows))
    host.build(host.next_pass())


@pytest.mark.parametrize(
    ("prefill", "prior", "query"),
    [(False, 47, 1), (True, 47, 1), (True, 0, 40)],
    ids=["context of a decode", "context of a prefill", "tokens"],
)
def test_a_pass_that_needs_more_room_is_a_first_one_again(
    prefill: bool, prior: int, query: int, firsts: list[int]
) -> None:
    host = Host(PLAIN, 2, prefill)
    host.warm_up()
    earlier = host.next_pass()
    arena = next(iter(kept_on(host.runtime).buffers.eager._arenas.values()))
    del firsts[:]
    arguments = host.next_pass([prior] * host.rows, [query] * host.rows)
    assert (prior + query > arena.max_context) != (query * host.rows > arena.max_tokens)
    for _ in range(2):
        assert dict(values_in(host.build(arguments))) == dict(values_in(host.build_anew(arguments)))
    assert len(firsts) == 1
    assert dict(values_in(host.build(earlier))) == dict(values_in(host.build_anew(earlier)))
    assert len(firsts) == 1


@every_class
def test_faults_of_a_known_pass_are_raised_by_the_next_one(cls: Any, firsts: list[int]) -> None:
    host = Host(cls, 3, False)
    host.warm_up()
    del firsts[:]
    arguments = host.next_pass()
    for table in (*host.tables, *(() if host.store is None else (host.store,))):
        table.fill_(-1)
    context = host.build(arguments)
    assert set(context.attn_metadata.slot_mapping.tolist()) == {-1}
    with pytest.raises(BlockFaultError, match="block tables of earlier steps"):
        host.build(host.next_pass())
    host.build(host.next_pass())
    assert not firsts


def test_an_id_beyond_the_pool_at_a_boundary_is_a_fault_in_a_known_prefill_too(firsts: list[int]) -> None:
    """ATOM keeps no state there, but such an id is wrong wherever it stands, as in a first pass."""
    host = next(host for host in (Host(HYBRID, seed, True) for seed in range(9)) if len(host.tables) > 1)
    host.warm_up()
    long = [0] * host.rows, [SIZE * COLUMNS] * host.rows
    host.build(host.next_pass(*long))
    del firsts[:]
    arguments = host.next_pass(*long)
    host.tables[1][:, 1] = BLOCKS
    host.build(arguments)
    assert not firsts
    with pytest.raises(BlockFaultError, match="block tables of earlier steps"):
        host.build(host.next_pass())


def test_passes_that_are_not_to_raise_are_a_kind_of_their_own() -> None:
    host = Host(PLAIN, 3, False)
    host.warm_up()
    for _ in range(3):
        arguments = host.next_pass()
        for table in (*host.tables, *(() if host.store is None else (host.store,))):
            table.fill_(-1)
        host.build(arguments, strict=False)
    host.build(host.next_pass())
    with pytest.raises(BlockFaultError, match="eager passes that are not strict"):
        PLAIN.check_faults(host.runtime)


@pytest.mark.parametrize("how", ["post_init", "own init", "default factory", "slots", "a class of its own"])
def test_classes_that_are_more_than_their_fields_are_made_by_calling_them(how: str, firsts: list[int]) -> None:
    """Derived attributes follow the fields of each pass, where ATOM's class has any."""
    from tests.targets.atom_double import modules

    class Derived(modules.Context):
        pass

    assert is_plain(modules.Context)
    assert is_plain(Derived)
    if how == "post_init":

        @dataclass
        class Post(modules.AttentionMetaData):
            def __post_init__(self) -> None:
                self.doubled = 2 * self.max_seqlen_k

        other: Any = Post
    elif how == "own init":

        class Init(modules.AttentionMetaData):
            def __init__(self, **fields: Any) -> None:
                super().__init__(**fields)
                self.doubled = 2 * self.max_seqlen_k

        other = Init
    elif how == "default factory":

        @dataclass
        class Factory(modules.AttentionMetaData):
            own: list[int] = field(default_factory=list)

        other = Factory
    elif how == "slots":
        other = dataclass(slots=True)(type("Slots", (), {"__annotations__": {"a": int}}))
    else:
        other = SimpleNamespace
    assert not is_plain(other)
    if how in ("slots", "a class of its own"):
        return
    sys.modules["atom.utils.forward_context"].AttentionMetaData = other
    api._api_of.cache_clear()
    host = Host(PLAIN, 4, False)
    host.warm_up()
    del firsts[:]
    made = [host.build(host.next_pass()).attn_metadata for _ in range(3)]
    assert not firsts
    assert {type(each) for each in made} == {other}
    if how == "default factory":
        assert made[1].own is not made[2].own
    else:
        assert [each.doubled for each in made] == [2 * each.max_seqlen_k for each in made]


def test_kinds_that_were_kept_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch, firsts: list[int]) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 2)
    host = Host(PLAIN, 4, False)
    host.store = None
    host.warm_up()
    kinds = [[int32([[1] * COLUMNS] * host.rows)] for _ in range(3)]
    for expected in ([3, 3], [6, 6]):  # before and behind a third kind that takes the place of the first
        del firsts[:]
        for host.tables in kinds[: 2 if expected[0] == 3 else 3]:
            for _ in range(2):
                host.build(host.next_pass())
    assert len(kept_on(host.runtime).buffers.known) == 2
