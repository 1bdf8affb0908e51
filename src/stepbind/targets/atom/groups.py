"""The host's cache groups as ATOM's layers see them: which layers, which table, which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm.groups import GroupSource, granularity_of
from stepbind.hosts.rtp_llm.reader import HostTable
from stepbind.step import Granularity
from stepbind.targets.atom.memory import LayerMaps, layer_numbers
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import AtomPass


@dataclass(frozen=True)
class AtomGroups:
    """sources: a cache group for each of the host's groups and each kind of layer in it. block_size and
    kernel_block_size: of the first group, in tokens. layer_to_group: the host's number of each layer's group, as
    the pass says it (empty where there is one). state_groups: numbers of the groups that have Gated DeltaNet
    layers. first_slots, first_states: the first of the host's groups taken for one of attention, and for a
    recurrent one, in blocks of `block_size`: what the reference's fields of the first group are read with. planned:
    `sources`, and behind them those two where no layer of theirs is in the first group but the fields are there.
    paged: which of `sources` have slots; first_paged: which of `paged` is of the first of the host's groups, -1 for
    none. state_index: which of `sources` has the table that the states of one of the host's groups are in; also of
    the first one, where it is paged. planned_states: which of `planned` has the states of one of the host's groups.
    sizes: tokens of a physical block of each of `sources`. has_kernel_blocks: whether any group has kernel blocks
    smaller than its physical ones. fewest_blocks: of all pools."""

    sources: tuple[GroupSource, ...]
    block_size: int
    kernel_block_size: int
    layer_to_group: dict[int, int]
    state_groups: tuple[int, ...]
    first_slots: CacheGroup
    first_states: CacheGroup
    planned: tuple[GroupSource, ...]
    paged: tuple[int, ...]
    first_paged: int
    state_index: dict[int, int]
    planned_states: dict[int, int]
    sizes: tuple[int, ...]
    has_kernel_blocks: bool
    fewest_blocks: int


def block_sizes(kv_cache: Any, tag: str | None) -> tuple[int, int]:
    """Tokens of a physical and a kernel block, of one tag in the newer interface. Raises `StepError` for none."""
    tags = list(getattr(kv_cache, "group_tags", None) or ())
    if tags:
        tag = tag if tag in tags else tags[0]
        block_size, kernel = kv_cache.get_seq_size_per_block(tag), kv_cache.get_kernel_seq_size_per_block(tag)
    else:
        block_size = int(getattr(kv_cache, "seq_size_per_block", 0))
        kernel = int(getattr(kv_cache, "kernel_seq_size_per_block", 0))
    if block_size <= 0:
        raise StepError("kv_cache.seq_size_per_block", block_size, "at least 1 token")
    kernel = kernel if kernel > 0 else block_size
    if block_size % kernel:
        raise StepError("kv_cache.kernel_seq_size_per_block", kernel, f"a divisor of the block size {block_size}")
    return block_size, kernel


def atom_groups(kv_cache: Any, maps: LayerMaps, host: AtomPass, layer_to_group: Sequence[int]) -> AtomGroups:
    """Raises `StepError` for a layer in a group that the pass has no table of."""
    number_of = _number_of_layers(kv_cache, maps, host, layer_to_group)
    members: dict[tuple[int, GroupKind], list[int]] = {}
    for layer, number in number_of.items():
        members.setdefault((number, _kind(layer, maps)), []).append(layer)
    numbers = [number for number, _ in members]
    sources = []
    for (number, kind), layers in members.items():
        block_size, kernel = block_sizes(kv_cache, host.tags[number] if host.tags else None)
        is_shared = numbers.count(number) > 1
        name = f"group {number}" + (f" ({kind.value})" if is_shared else "")
        blocks = min(_physical_blocks(kv_cache, layer, kind, block_size // kernel) for layer in layers)
        group = CacheGroup(name, kind, tuple(layers), block_size, kernel, max(blocks, 2))
        sources.append(GroupSource(group, number, is_shared))
    block_size, kernel = block_sizes(kv_cache, host.tags[0] if host.tags else None)
    state_groups = tuple(dict.fromkeys(number for number, kind in members if kind is GroupKind.STATE))
    blocks = max((source.group.num_blocks for source in sources if source.table == 0), default=2)
    first_slots, first_states = (
        CacheGroup(f"first as {kind.value}", kind, (layer,), block_size, block_size, blocks)
        for kind, layer in ((GroupKind.ATTENTION, -1), (GroupKind.STATE, -2))  # layers that no model has
    )
    paged = tuple([i for i, each in enumerate(sources) if each.group.kind is not GroupKind.STATE])
    first_paged = next((place for place, i in enumerate(paged) if sources[i].table == 0), -1)
    state_index = {} if first_paged < 0 else {0: paged[first_paged]}
    state_index |= {each.table: i for i, each in enumerate(sources) if each.group.kind is GroupKind.STATE}
    planned = list(sources)
    if first_paged < 0:
        planned.append(GroupSource(first_slots, 0, True))
    if state_groups and 0 not in state_groups:
        planned.append(GroupSource(first_states, 0, True))
    layers_of = dict(enumerate(layer_to_group))
    return AtomGroups(
        tuple(sources),
        block_size,
        kernel,
        layers_of,
        state_groups,
        first_slots,
        first_states,
        tuple(planned),
        paged,
        first_paged,
        state_index,
        {each.table: i for i, each in enumerate(planned) if each.group.kind is GroupKind.STATE},
        tuple([each.group.block_size for each in sources]),
        has_kernel_blocks=any(source.group.ratio > 1 for source in sources),
        fewest_blocks=min((source.group.num_blocks for source in sources), default=0),
    )


def granularity(source: GroupSource, host: AtomPass, profile: Profile, max_context: int | None) -> Granularity:
    """What the ids of a group's kernel table count. Where nothing tells, a hybrid's are physical blocks: its profile
    takes them so. Raises `StepError` for other profiles."""
    if source.group.ratio == 1:
        return Granularity.PHYSICAL
    store = host.store.shape[1] if host.store is not None and source.table == 0 else None
    table = HostTable(source.group.name, host.tables[source.table], store)
    return granularity_of(source, table, max_context, None if profile.physical_table else Granularity.PHYSICAL)


def _number_of_layers(kv_cache: Any, maps: LayerMaps, host: AtomPass, layer_to_group: Sequence[int]) -> dict[int, int]:
    layers, groups = layer_numbers(maps), len(host.tables)
    if groups == 1:
        return dict.fromkeys(layers, 0)
    if host.tags:
        tag_of = {layer: getattr(kv_cache.get_layer_cache(layer), "tag", None) for layer in layers}
        if all(tag in host.tags for tag in tag_of.values()):
            return {layer: host.tags.index(str(tag)) for layer, tag in tag_of.items()}
    for layer, number in enumerate(layer_to_group):
        if not 0 <= number < groups:
            raise StepError(
                f"attention_inputs.kv_cache_layer_to_group[{layer}]", number, f"a group number, 0 .. {groups - 1}"
            )
    return {layer: layer_to_group[layer] if layer < len(layer_to_group) else 0 for layer in layers}


def _kind(layer: int, maps: LayerMaps) -> GroupKind:
    if layer in maps[0]:
        return GroupKind.STATE
    return GroupKind.LATENT if layer in maps[2] else GroupKind.ATTENTION


def _physical_blocks(kv_cache: Any, layer: int, kind: GroupKind, ratio: int) -> int:
    """Attention buffers count kernel blocks, those of recurrent groups physical ones."""
    count = int(kv_cache.get_layer_cache(layer).kv_cache_base.shape[0])
    return count if kind is GroupKind.STATE or count % ratio else count // ratio
