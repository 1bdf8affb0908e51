"""Binding a plan and its cache views around one forward of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from stepbind.caches import Caches
from stepbind.context import Context, swap
from stepbind.errors import StepError
from stepbind.models.adapt import Adaptation, enter, leave
from stepbind.plan.plan import Plan


def bind(plan: Plan, caches: Caches, model: nn.Module) -> AbstractContextManager[Context]:
    """Let the context-reading layers of `model` work on `plan` and `caches` inside the block.

    Nests, is separate per thread, and restores what was bound before on every exit. The model itself is adapted for
    the outermost `bind` or `adapted` around it, and is plain transformers again afterwards; whoever binds every step
    holds `adapted(model)` around all of them, and a bind then costs no work per layer but a look-up.

    Raises `StepError` for a model that stepbind does not know, and for layers that the plan has no group for.
    """
    return _Bind(Context(plan, caches), model)


class _Bind(AbstractContextManager[Context]):
    """One `bind` block. A class and no generator, which would take twice as long to enter and leave."""

    __slots__ = ("adaptation", "before", "bound", "context", "model")

    def __init__(self, context: Context, model: nn.Module) -> None:
        self.context = context
        self.model = model
        self.bound = False

    def __enter__(self) -> Context:
        if self.bound:
            raise StepError("bind", "a block that is entered already", "a bind of its own for each block")
        plan = self.context.plan
        self.adaptation = enter(self.model)
        # An arena's plans share one mapping, so that its layers are looked up in it once.
        if self.adaptation.bound_groups is not plan.group_of_layer:
            try:
                _look_up_layers(self.adaptation, plan)
            except BaseException:
                leave(self.model, self.adaptation)
                raise
        self.before = swap(self.context)
        self.bound = True
        return self.context

    def __exit__(self, *error: object) -> None:
        self.bound = False
        swap(self.before)
        leave(self.model, self.adaptation)


def _look_up_layers(adaptation: Adaptation, plan: Plan) -> None:
    for layer in adaptation.layers:
        if layer.index not in plan.group_of_layer:
            raise StepError(f"layer {layer.index} ({layer.name})", "no cache group in the plan", "a group")
    adaptation.bound_groups = plan.group_of_layer
