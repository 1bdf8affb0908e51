"""ATOM's objects of a decode of a known kind: those of an earlier one, but for what differs from pass to pass.

Making them by their classes' own `__init__`, from some twenty keywords each, costs several times as much.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepbind.targets.atom.api import AtomApi
from stepbind.targets.atom.assemble import Made
from stepbind.targets.atom.known import DecodeAgain
from stepbind.targets.atom.metadata import Profile

_OF_GDN = "rtp_attn_inputs", "rtp_state_indices_cache", "rtp_state_indices_in_cache"
_OF_PHASE = ("max_seq_len",)
_OF_PLUGIN = (
    "num_actual_kv_tokens",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "decode_metadata",
    "rtp_groups",
    "cg_bufs",
)
_OF_METADATA = (
    *("max_seqlen_k", "context_lens", "block_tables", "plugin_metadata", "rtp_groups", "total_kv"),
    *("gdn_metadata", "rtp_attn_inputs"),
)


class Prototype(NamedTuple):
    """A class, and the attributes of an object of one kind of pass: None for those that are a pass's own."""

    cls: type
    attributes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Prototypes:
    """gdn: None for a model without Gated DeltaNet."""

    api: AtomApi
    profile: Profile
    gdn: Prototype | None
    metadata: Prototype
    plugin: Prototype
    phase: Prototype


def prototypes_of(made: Made, profile: Profile, api: AtomApi) -> Prototypes | None:
    """None where one of ATOM's classes is more than its attributes (`is_plain`)."""
    plugin = made.metadata.plugin_metadata
    objects = [made.metadata, plugin, plugin.decode_metadata, *([] if made.gdn is None else [made.gdn])]
    if not all(is_plain(type(each)) for each in objects):
        return None
    return Prototypes(
        api=api,
        profile=profile,
        gdn=None if made.gdn is None else _of(made.gdn, _OF_GDN),
        metadata=_of(made.metadata, _OF_METADATA),
        plugin=_of(plugin, _OF_PLUGIN),
        phase=_of(plugin.decode_metadata, _OF_PHASE),
    )


def is_plain(cls: type) -> bool:
    """Whether an object of a class is what the `__init__` that `dataclass` writes makes of its fields, and nothing
    else: one with other values is a copy of its attributes then."""
    return (
        dataclasses.is_dataclass(cls)
        and getattr(getattr(cls.__init__, "__code__", None), "co_filename", None) == "<string>"
        and not hasattr(cls, "__post_init__")
        and not hasattr(cls, "__slots__")
        and cls.__new__ is object.__new__
        and cls.__setattr__ is object.__setattr__
        and all(field.default_factory is dataclasses.MISSING for field in dataclasses.fields(cls))
    )


def _of(made: Any, own: tuple[str, ...]) -> Prototype:
    return Prototype(type(made), {name: None if name in own else value for name, value in vars(made).items()})


def _new(prototype: Prototype, attributes: dict[str, Any]) -> Any:
    made: Any = object.__new__(prototype.cls)
    made.__dict__ = attributes
    return made


def make_again(found: DecodeAgain, of: Prototypes, cg_bufs: Any) -> Made:
    """As `assemble.make` would of `found.computed()`."""
    known, given, longest, total = found
    profile, table, context, groups = of.profile, given.tables[0], given.lengths[3], found.groups()
    phase = _new(of.phase, {**of.phase.attributes, "max_seq_len": longest})
    of_plugin = {
        **of.plugin.attributes,
        "num_actual_kv_tokens": total,
        "max_seq_len": longest,
        "seq_lens": context,
        "block_table": table,
        "decode_metadata": phase,
        "rtp_groups": groups,
    }
    if profile.sparse_fields:
        of_plugin["cg_bufs"] = cg_bufs
    read: dict[Any, Any] = {}
    write: dict[Any, Any] = {}
    if known.states is not None:
        read, write = known.states.read.copy(), known.states.write.copy()
    gdn = None
    if of.gdn is not None:
        of_gdn = {
            **of.gdn.attributes,
            "rtp_attn_inputs": given.attn_inputs,
            "rtp_state_indices_cache": write,
            "rtp_state_indices_in_cache": read,
        }
        gdn = _new(of.gdn, of_gdn)
    of_metadata = {
        **of.metadata.attributes,
        "max_seqlen_k": longest,
        "context_lens": context,
        "block_tables": table,
        "plugin_metadata": _new(of.plugin, of_plugin),
        "rtp_groups": groups,
        "total_kv": total if profile.sparse_fields else None,
        "gdn_metadata": gdn,
        "rtp_attn_inputs": given.attn_inputs,
    }
    return Made(gdn, _new(of.metadata, of_metadata), write, known.rows)
