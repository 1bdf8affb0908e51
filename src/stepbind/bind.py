"""Binding a plan and its cache views around one forward of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from stepbind.caches import Caches
from stepbind.context import Context, swap
from stepbind.errors import StepError
from stepbind.models.adapt import enter, leave
from stepbind.plan.plan import Plan


@contextmanager
def bind(plan: Plan, caches: Caches, model: nn.Module) -> Iterator[Context]:
    """Let the context-reading layers of `model` work on `plan` and `caches` inside the block.

    Nests, is separate per thread, and restores what was bound before on every exit. The model itself is adapted for
    the outermost `bind` or `adapted` around it, and is plain transformers again afterwards; whoever binds every step
    holds `adapted(model)` around all of them, and a bind then costs no work per layer but a look-up.

    Raises `StepError` for a model that stepbind does not know, and for layers that the plan has no group for.
    """
    adaptation = enter(model)
    try:
        # An arena's plans share one mapping, so that its layers are looked up in it once.
        if adaptation.bound_groups is not plan.group_of_layer:
            for layer in adaptation.layers:
                if layer.index not in plan.group_of_layer:
                    raise StepError(f"layer {layer.index} ({layer.name})", "no cache group in the plan", "a group")
            adaptation.bound_groups = plan.group_of_layer
        context = Context(plan, caches)
        before = swap(context)
        try:
            yield context
        finally:
            swap(before)
    finally:
        leave(model, adaptation)
