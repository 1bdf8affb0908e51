"""What the layers of a running forward read, and how a layer finds it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepbind.caches import Caches, KVPages, LatentPages, StateSlots
from stepbind.errors import NotBoundError, StepError
from stepbind.plan.plan import PagedPlan, Plan, StatePlan


@dataclass(frozen=True, eq=False)
class Context:
    """What a layer reads during one forward: the step's plan and the model's cache views."""

    plan: Plan
    caches: Caches

    def attention(self, layer: int) -> tuple[PagedPlan, KVPages]:
        """Plan and pages of a full-attention layer. Raises `StepError` for a layer of another kind."""
        plan, cache = self._of(layer)
        if not (isinstance(plan, PagedPlan) and isinstance(cache, KVPages)):
            raise StepError(f"layer {layer}", f"{type(cache).__name__} in its group", "key and value pages")
        return plan, cache

    def state(self, layer: int) -> tuple[StatePlan, StateSlots]:
        """Plan and slots of a recurrent layer. Raises `StepError` for a layer of another kind."""
        plan, cache = self._of(layer)
        if not (isinstance(plan, StatePlan) and isinstance(cache, StateSlots)):
            raise StepError(f"layer {layer}", f"{type(cache).__name__} in its group", "recurrent state")
        return plan, cache

    def latent(self, layer: int) -> tuple[PagedPlan, LatentPages]:
        """Plan and pages of a latent-attention layer. Raises `StepError` for a layer of another kind."""
        plan, cache = self._of(layer)
        if not (isinstance(plan, PagedPlan) and isinstance(cache, LatentPages)):
            raise StepError(f"layer {layer}", f"{type(cache).__name__} in its group", "latent pages")
        return plan, cache

    def _of(self, layer: int) -> tuple[PagedPlan | StatePlan, KVPages | StateSlots | LatentPages]:
        index = self.plan.group_of_layer.get(layer)
        if index is None:
            known = sorted(self.plan.group_of_layer)
            raise StepError("layer", layer, f"one of the plan's layers {known}")
        return self.plan.groups[index], self.caches[layer]


class _Bound(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.context: Context | None = None


_bound = _Bound()


def current() -> Context:
    """The context bound around the running forward, in this thread. Raises `NotBoundError` outside of `bind`."""
    context = _bound.context
    if context is None:
        raise NotBoundError(
            "forward context", "none in this thread", "the forward inside `with bind(plan, caches, model):`"
        )
    return context


@contextmanager
def bound(context: Context) -> Iterator[Context]:
    """Make `context` the current one of this thread inside the block, and restore the one before on every exit."""
    before = swap(context)
    try:
        yield context
    finally:
        swap(before)


def swap(context: Context | None) -> Context | None:
    """Make `context` the current one of this thread; returns the one before, which the caller puts back."""
    before = _bound.context
    _bound.context = context
    return before
