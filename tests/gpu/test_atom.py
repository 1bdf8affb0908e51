"""The ATOM surface on a GPU: eager passes and captured ones have the fields of the CPU, and binds wait for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepbind.errors import BlockFaultError
from stepbind.targets import atom
from tests.hosts.rtp_double.cuda_graph import CudaGraph
from tests.targets.atom_double.fields import values_in
from tests.targets.atom_double.modules import Ambient, atom_installed
from tests.targets.atom_double.passes import (
    hybrid_model,
    int32,
    latent_model,
    on_device,
    pass_inputs,
    plain_model,
    positions_of,
    random_pass,
    runtime_for,
)

MODELS: dict[Any, Callable[..., Any]] = {
    atom.RTPForwardContext: plain_model,
    atom.RTPForwardMLAContext: latent_model,
    atom.RTPForwardQwen35HybridContext: hybrid_model,
}
every_class = pytest.mark.parametrize("cls", MODELS, ids=["plain", "mla", "hybrid"])
MAX_CONTEXT = 64
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


@every_class
@pytest.mark.parametrize("ratio", [1, 4])
def test_eager_passes_have_the_fields_of_the_cpu(cls: Any, ratio: int) -> None:
    model = MODELS[cls]()
    is_hybrid = MODELS[cls] is hybrid_model
    for seed in range(40):
        rng = random.Random(seed)
        groups = rng.choice((1, 3)) if is_hybrid else 1
        inputs, positions = random_pass(rng, groups=groups, ratio=ratio, compact=is_hybrid)
        arguments = {"model": model, "cg_max_seq_len": MAX_CONTEXT, "strict": False}
        here = runtime_for(model, 8, 8 // ratio, 100)
        want = cls.build(runtime=here, inputs=inputs, positions=positions, **arguments)
        there = runtime_for(model, 8, 8 // ratio, 100, DEVICE)
        moved = on_device(inputs, DEVICE)
        for way in ("general", "usual"):  # the first pass of a runtime has its groups to find
            got = cls.build(runtime=there, inputs=moved, positions=positions.to(DEVICE), **arguments)
            assert dict(values_in(got)) == dict(values_in(want)), f"seed {seed}, {way}"


@every_class
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_a_bind_waits_for_nothing(cls: Any, prefill: bool) -> None:
    model = MODELS[cls]()
    runtime = runtime_for(model, 8, 8, 100, "cuda")
    query, prior = ([5, 9], [3, 16]) if prefill else ([1, 1], [3, 16])
    tables = [int32([[1, 2, 3, 4], [5, 6, 7, 8]])] * (3 if MODELS[cls] is hybrid_model else 1)
    numbers = [1, 2, 1, 0] if len(tables) > 1 else None
    inputs = pass_inputs(prefill=prefill, query=query, prior=prior, tables=tables, layer_to_group=numbers)
    arguments = {"model": model, "runtime": runtime, "inputs": on_device(inputs, "cuda")}
    arguments["positions"] = positions_of(query, prior).cuda()
    for _ in range(3):
        with cls.bind(**arguments):
            pass
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with cls.bind(**arguments):
            pass
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def decode_on(runtime: Any, model: Any, cls: Any, table: list[list[int]]) -> dict[str, Any]:
    """Arguments of a decode of two rows."""
    tables = [int32(table)] * (3 if MODELS[cls] is hybrid_model else 1)
    numbers = [1, 2, 1, 0] if len(tables) > 1 else None
    query, prior = [1, 1], [3, 16]
    inputs = pass_inputs(prefill=False, query=query, prior=prior, tables=tables, layer_to_group=numbers)
    positions = positions_of(query, prior).cuda()
    return {"model": model, "runtime": runtime, "inputs": on_device(inputs, DEVICE), "positions": positions}


GOOD, OTHER, HOLE = [[1, 2, 3], [5, 6, 7]], [[8, 9, 10], [11, 12, 13]], [[1, 2, 3], [5, 6, -1]]


@every_class
def test_a_nested_pass_leaves_the_outer_ones_values_alone(cls: Any) -> None:
    model = MODELS[cls]()
    runtime = runtime_for(model, 8, 8, 100, DEVICE)
    outer, inner = (decode_on(runtime, model, cls, table) for table in (GOOD, OTHER))
    for _ in range(2):
        with cls.bind(**outer):
            metadata = ambient_metadata()
            before = dict(values_in(metadata))
            with cls.bind(**inner):
                assert dict(values_in(ambient_metadata())) != before
            cls.build(**inner)
            assert dict(values_in(metadata)) == before


@every_class
def test_faults_are_raised_by_a_later_pass_without_waiting_for_good_ones(cls: Any) -> None:
    model = MODELS[cls]()
    runtime = runtime_for(model, 8, 8, 100, DEVICE)
    good, hole = (decode_on(runtime, model, cls, table) for table in (GOOD, HOLE))
    cls.build(**hole)
    torch.cuda.synchronize()  # as a host that reads its tokens
    with pytest.raises(BlockFaultError, match=r"of earlier steps: .* 1 in group .* \(first in row 1\)"):
        cls.build(**good)
    cls.build(**good)
    with pytest.raises(BlockFaultError, match=r"block tables: .* \(first in row 1\)"):
        cls.build(**hole, strict=True)
    cls.build(**hole, strict=False)
    torch.cuda.synchronize()
    cls.build(**good)
    with pytest.raises(BlockFaultError, match="not strict"):
        cls.check_faults(runtime)


class Host:
    """RTP's buffers for decode graphs, of which a replay refreshes what RTP refreshes; all else is poison."""

    ROWS, COLUMNS, POISON = 8, 9, 1_000_003  # 9 columns: no multiple of the ratio, so a compact table is known as one

    def __init__(self, cls: Any, device: str, ratio: int) -> None:
        self.cls, self.device, self.ratio = cls, device, ratio
        self.is_hybrid = MODELS[cls] is hybrid_model
        self.model = MODELS[cls]()
        self.runtime = runtime_for(self.model, 8, 8 // ratio, 100, device)
        # A hybrid's first table is in physical blocks, as the bridge takes it.
        self.expand = 1 if self.is_hybrid else ratio
        columns = [self.COLUMNS * self.expand] + [self.COLUMNS] * (2 if self.is_hybrid else 0)
        self.tables = [self._buffer(self.ROWS, each) for each in columns]
        self.context_len = self._buffer(self.ROWS)
        self.positions = self._buffer(self.ROWS)

    def _buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def inputs(self, rows: int) -> SimpleNamespace:
        """Those of a capture, on the buffers; host values and the store's table are poison."""
        poison = [self.POISON] * rows
        tables = [table[:rows] for table in self.tables]
        numbers = [1, 2, 1, 0] if self.is_hybrid else None
        inputs = pass_inputs(prefill=False, query=[1] * rows, prior=poison, tables=tables, layer_to_group=numbers)
        attention = inputs.attention_inputs
        attention.is_cuda_graph = True
        attention.sequence_lengths_plus_1_device = self.context_len[:rows]
        attention.cu_seqlens_device = self._buffer(rows + 1)
        attention.kv_cache_block_id_device = self._buffer(rows, self.COLUMNS + 1).fill_(self.POISON)
        return inputs

    def refresh(self, prior: list[int], physical: list[torch.Tensor]) -> None:
        live = len(prior)
        self.context_len[:live].copy_(int32(prior) + 1)
        self.positions[:live].copy_(int32(prior))
        for index, (table, blocks) in enumerate(zip(self.tables, physical, strict=True)):
            expand = self.expand if index == 0 else 1
            table.zero_()
            table[:live].copy_((blocks[..., None] * expand + torch.arange(expand)).flatten(1))

    def capture(self, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], object]]:
        """A forward that copies out each tensor that its layers could read: the copies, by name, and the replay."""
        inputs, copies = self.inputs(rows), dict[str, torch.Tensor]()

        def forward() -> tuple[torch.Tensor, ...]:
            arguments = {"model": self.model, "runtime": self.runtime, "inputs": inputs, "cg_max_seq_len": MAX_CONTEXT}
            with self.cls.bind(positions=self.positions[:rows], **arguments):
                metadata = ambient_metadata()
                found = {
                    "context_lens": metadata.context_lens,
                    "slot_mapping": metadata.slot_mapping,
                    "block_tables": metadata.block_tables,
                    "block_table": metadata.plugin_metadata.block_table,
                    "query_start": metadata.plugin_metadata.query_start_loc,
                }
                for group in metadata.rtp_groups:
                    for field in ("slot_mapping", "state_read", "state_write"):
                        if getattr(group, field) is not None:
                            found[f"{group.number} {field}"] = getattr(group, field)
                if metadata.gdn_metadata is not None:
                    found["read"] = metadata.gdn_metadata.non_spec_state_indices_in_tensor
                    found["write"] = metadata.gdn_metadata.non_spec_state_indices_tensor
            for name, value in found.items():
                if name not in copies:  # in the first warm-up: a capture allocates nothing here
                    copies[name] = torch.empty_like(value)
                copies[name].copy_(value)
            return tuple(copies.values())

        if self.device == "cpu":  # as the emulated graphs do: the same operations again
            forward()
            return copies, forward
        return copies, CudaGraph(forward).replay


def ambient_metadata() -> Any:
    from atom.utils.forward_context import get_forward_context  # type: ignore[import-not-found]  # the double

    return get_forward_context().attn_metadata


@every_class
@pytest.mark.parametrize("ratio", [1, 4])
def test_captured_decodes_follow_what_replay_refreshes(cls: Any, ratio: int) -> None:
    """Graphs of 8, 4 and 2 rows, replayed in turns with fewer live rows: the values of an eager pass of the live rows
    on the CPU, and nothing for the padding."""
    host = Host(cls, DEVICE, ratio)
    graphs = {rows: host.capture(rows) for rows in (8, 4, 2)}
    rng = random.Random(ratio)
    for _ in range(30):
        rows = rng.choice((2, 4, 8))
        live = rng.randint(1, rows)
        prior = [rng.randint(1, MAX_CONTEXT - 1) for _ in range(live)]
        shape = (len(host.tables), live, host.COLUMNS)
        physical = list(int32([rng.randint(1, 99) for _ in range(shape[0] * shape[1] * shape[2])]).view(shape))
        host.refresh(prior, physical)
        copies, replay = graphs[rows]
        replay()
        found = {name: value.cpu() for name, value in copies.items()}
        want = eager_on_the_cpu(host, prior, physical)
        assert found["query_start"].tolist() == list(range(rows + 1))
        for name, value in want.items():
            assert found[name][:live].tolist() == value.tolist(), name
            if not name.startswith("block_table"):
                padding = 0 if name == "context_lens" else -1
                assert found[name][live:].tolist() == [padding] * (rows - live), name


def eager_on_the_cpu(host: Host, prior: list[int], physical: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    first = (physical[0][..., None] * host.expand + torch.arange(host.expand)).flatten(1).int()
    numbers = [1, 2, 1, 0] if host.is_hybrid else None
    query = [1] * len(prior)
    tables = [first, *physical[1:]]
    inputs = pass_inputs(prefill=False, query=query, prior=prior, tables=tables, layer_to_group=numbers)
    runtime = runtime_for(host.model, 8, 8 // host.ratio, 100)
    context = host.cls.build(model=host.model, runtime=runtime, inputs=inputs, positions=int32(prior), strict=False)
    metadata = context.attn_metadata
    values = {
        "context_lens": metadata.context_lens,
        "slot_mapping": metadata.slot_mapping,
        "block_table": metadata.plugin_metadata.block_table,
        "block_tables": metadata.block_tables,
    }
    for group in metadata.rtp_groups:
        for field in ("slot_mapping", "state_read", "state_write"):
            if getattr(group, field) is not None:
                values[f"{group.number} {field}"] = getattr(group, field)
    return values
