"""Binding nests, restores on every exit, is separate per thread, and says how to bind where nothing is bound."""

from __future__ import annotations

import threading

import pytest
import torch

from stepbind import (
    CacheGroup,
    Caches,
    GroupKind,
    NotBoundError,
    Phase,
    Plan,
    StepError,
    adapted,
    bind,
    build_plan,
    current,
    discover_layers,
    make_arena,
    make_step,
)
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.tiny import tiny_model

MODEL = tiny_model("llama", num_hidden_layers=2)
LAYERS = discover_layers(MODEL)
GROUP = CacheGroup("full", GroupKind.ATTENTION, (0, 1), block_size=16, kernel_block_size=16, num_blocks=4)
CACHES = Caches.of(
    [GROUP], {layer.index: layer.spec for layer in LAYERS}, allocate_buffers(LAYERS, [GROUP], torch.device("cpu"))
)


def plan(tokens: int = 3, group: CacheGroup = GROUP) -> Plan:
    step = make_step([group], Phase.PREFILL, [tokens], [0], {group.name: torch.tensor([[1]], dtype=torch.int32)})
    return build_plan(step, make_arena([group], max_rows=1, max_tokens=16, max_context=16))


def test_outside_of_bind_the_error_says_how_to_bind() -> None:
    with pytest.raises(NotBoundError, match=r"expected the forward inside `with bind\(plan, caches, model\):`"):
        current()
    with adapted(MODEL), pytest.raises(NotBoundError):
        MODEL(torch.zeros(1, 3, dtype=torch.long))


def test_binding_nests_and_restores() -> None:
    with bind(plan(), CACHES, MODEL) as outer:
        assert current() is outer
        with bind(plan(2), CACHES, MODEL) as inner:
            assert current() is inner
        assert current() is outer
    with pytest.raises(NotBoundError):
        current()


def test_an_exception_restores_too() -> None:
    with bind(plan(), CACHES, MODEL) as outer:
        with pytest.raises(RuntimeError), bind(plan(), CACHES, MODEL):
            raise RuntimeError
        assert current() is outer
    assert MODEL.config._attn_implementation != "stepbind"


def test_a_bind_that_is_entered_already_is_refused() -> None:
    binding = bind(plan(), CACHES, MODEL)
    with binding as context:
        with pytest.raises(StepError, match="bind: got a block that is entered already"), binding:
            pass
        assert current() is context
    with pytest.raises(NotBoundError):
        current()
    with binding as context:  # again, after its end
        assert current() is context


def test_each_thread_has_its_own_context() -> None:
    """Two threads forward one model at the same time, each over its own plan; a third is not bound at all."""
    ready, errors = threading.Barrier(3, timeout=30), []
    outputs: dict[int, torch.Tensor] = {}

    def bound(tokens: int) -> None:
        try:
            own_plan = plan(tokens)
            own_caches = Caches.of(
                [GROUP],
                {layer.index: layer.spec for layer in LAYERS},
                allocate_buffers(LAYERS, [GROUP], torch.device("cpu")),
            )
            with bind(own_plan, own_caches, MODEL) as context, torch.no_grad():
                ready.wait()
                assert current() is context
                ids = torch.arange(tokens)[None]
                outputs[tokens] = MODEL(ids, position_ids=own_plan.shared.position[None], use_cache=False).logits
                ready.wait()
        except BaseException as error:
            errors.append(error)

    def unbound() -> None:
        ready.wait()
        try:
            current()
            errors.append(AssertionError("a context of another thread was seen"))
        except NotBoundError:
            pass
        ready.wait()

    threads = [threading.Thread(target=bound, args=(3,)), threading.Thread(target=bound, args=(7,))]
    threads.append(threading.Thread(target=unbound))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with torch.no_grad():
        for tokens, logits in outputs.items():
            torch.testing.assert_close(logits, MODEL(torch.arange(tokens)[None]).logits, atol=1e-4, rtol=0)


def test_a_plan_without_a_group_for_a_layer_is_refused() -> None:
    other = CacheGroup("full", GroupKind.ATTENTION, (0,), block_size=16, kernel_block_size=16, num_blocks=4)
    with (
        pytest.raises(StepError, match=r"layer 1 \(model.layers.1.self_attn\): got no cache group in the plan"),
        bind(plan(group=other), CACHES, MODEL),
    ):
        pass
    with pytest.raises(NotBoundError):
        current()


def test_a_forward_of_other_tokens_than_the_plan_is_refused() -> None:
    with (
        bind(plan(3), CACHES, MODEL),
        pytest.raises(StepError, match="layer 0 query: got 4 tokens, expected the step's 3 padded tokens"),
    ):
        MODEL(torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    with (
        bind(plan(3), CACHES, MODEL),
        pytest.raises(StepError, match=r"layer 0 query: got shape \(2, 4, 3, 16\), expected \[1, heads, tokens"),
    ):
        MODEL(torch.zeros(2, 3, dtype=torch.long), use_cache=False)


def test_a_layer_of_another_kind_is_refused() -> None:
    with bind(plan(), CACHES, MODEL) as context:
        with pytest.raises(StepError, match="layer 0: got KVPages in its group, expected recurrent state"):
            context.state(0)
        with pytest.raises(StepError, match=r"layer: got 5, expected one of the plan's layers \[0, 1\]"):
            context.attention(5)
