"""stepbind: run a model's own attention layers on the memory and schedule of somebody else's serving engine."""

from stepbind.bind import bind
from stepbind.caches import Caches
from stepbind.context import Context, current
from stepbind.errors import BlockFaultError, NotBoundError, RequestError, StepError, UnknownModelError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.local import Completion, Delta, EngineOptions, LocalEngine, SamplingParams
from stepbind.layers import Layer, discover_layers
from stepbind.models.adapt import adapted
from stepbind.plan import Arena, Plan, build_plan, check_faults, make_arena
from stepbind.step import BlockTable, Granularity, Lengths, Phase, Step, make_step

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "BlockFaultError",
    "BlockTable",
    "CacheGroup",
    "Caches",
    "Completion",
    "Context",
    "Delta",
    "EngineOptions",
    "Granularity",
    "GroupKind",
    "Layer",
    "Lengths",
    "LocalEngine",
    "NotBoundError",
    "Phase",
    "Plan",
    "RequestError",
    "SamplingParams",
    "Step",
    "StepError",
    "UnknownModelError",
    "adapted",
    "bind",
    "build_plan",
    "check_faults",
    "current",
    "discover_layers",
    "make_arena",
    "make_step",
]
