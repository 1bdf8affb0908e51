"""Prefix hits of the local host: fewer tokens are computed, and the tokens stay transformers' own.

Engines run poisoned: what nobody owns holds NaN, and a remembered block that changes is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepbind import Completion, EngineOptions, LocalEngine, SamplingParams, StepError
from stepbind.hosts.local.compare import compare
from stepbind.tiny import VOCAB_SIZE
from tests.hosts.reference import model_of

RNG = random.Random(4)
STEM = [RNG.randrange(VOCAB_SIZE - 1) for _ in range(200)]
FAMILIES = ["llama", "qwen3_5", "glm_moe_dsa"]  # keys and values alone; with recurrent states; latents and index keys
OPTIONS = EngineOptions(
    block_size=16, cache_tokens=2048, max_rows=4, keep_state_every=1, reuse_prefixes=True, poison=True
)


def prompt(common: int, own: int) -> list[int]:
    """`common` tokens that all prompts begin with, and `own` ones that no other has."""
    return STEM[:common] + [RNG.randrange(VOCAB_SIZE - 1) for _ in range(own)]


def greedy(max_tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | changes))


def engine(family: str = "qwen3_5", **changes: Any) -> LocalEngine:
    return LocalEngine(model_of(family), options=replace(OPTIONS, **changes))


def without_reuse(family: str, prompts: list[list[int]], sampling: SamplingParams, **changes: Any) -> list[list[int]]:
    with engine(family, reuse_prefixes=False, **changes) as host:
        completions = host.generate(prompts, sampling)
    assert [each.reused for each in completions] == [0] * len(prompts)
    return [each.tokens for each in completions]


@contextmanager
def counted_tokens(model: torch.nn.Module) -> Iterator[list[int]]:
    """The tokens of every pass that the model runs."""
    counts: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        counts.append(kwargs["input_ids"].numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


PROMPTS = [prompt(170, 9), prompt(170, 30), prompt(64, 1), prompt(100, 3), prompt(0, 40), prompt(128, 0)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({"block_size": 16, "kernel_block_size": 16}, [0, 160, 64, 96, 0, 112]),
        ({"block_size": 64, "kernel_block_size": 16, "token_budget": 23}, [0, 128, 64, 64, 0, 64]),
        ({"block_size": 16, "graphs": True, "keep_state_every": 3}, None),
    ],
    ids=["block16", "block64-kernel16-budget23", "graphs-keep3"],
)
def test_a_hit_computes_less_and_generates_as_transformers(
    family: str, changes: dict[str, Any], reused: list[int] | None
) -> None:
    if reused is None:  # with recurrent layers, each third block's end
        reused = [0, 144, 48, 96, 0, 96] if family == "qwen3_5" else [0, 160, 64, 96, 0, 112]
    sampling = greedy(return_logits=True)
    with engine(family, **changes) as host, counted_tokens(host.model) as counts:
        completions = host.generate(PROMPTS[:1], sampling) + host.generate(PROMPTS[1:], sampling)
    assert [each.reused for each in completions] == reused
    assert [each.reused + sum(each.chunks) for each in completions] == [len(each) for each in PROMPTS]
    if "graphs" not in changes:
        assert sum(counts) == sum(sum(each.chunks) + len(each.tokens) - 1 for each in completions)
    assert [each.tokens for each in completions] == without_reuse(family, PROMPTS, sampling, **changes)
    for agreement in compare(model_of(family), completions):
        assert agreement.equal
        assert agreement.max_logit_difference < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_launched_ahead_reuse_and_remember_too(family: str) -> None:
    """Greedy rows without logits go on before their tokens are known; a conversation goes on from what they wrote."""
    changes = {"graphs": True, "poison": False}
    with engine(family, **changes) as host:
        first = host.generate(PROMPTS[:3], greedy(40))
        turns = [[*each.prompt, *each.tokens, *STEM[:5]] for each in first]
        second = host.generate(turns, greedy(10))
    # All of a turn is remembered but its last token, which never entered the cache.
    assert [each.reused for each in second] == [(len(turn) - 6) // 16 * 16 for turn in turns]
    assert [each.tokens for each in first] == without_reuse(family, PROMPTS[:3], greedy(40), **changes)
    assert [each.tokens for each in second] == without_reuse(family, turns, greedy(10), **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_given_up_under_pressure(family: str) -> None:
    """A cache of 320 tokens holds one or two of these requests, and never fails one for what it remembers."""
    prompts = [prompt(common, own) for common in (120, 40) for own in (50, 120, 7, 90)]
    with engine(family, cache_tokens=320, token_budget=64) as host:
        completions = host.generate(prompts, greedy())
        again = host.generate(prompts[::-1], greedy())[::-1]
    assert [each.finish_reason for each in completions] == ["length"] * len(prompts)
    assert any(each.reused for each in completions)
    assert any(each.reused < len(each.prompt) // 16 * 16 for each in again)
    wanted = without_reuse(family, prompts, greedy())
    assert [each.tokens for each in completions] == wanted
    assert [each.tokens for each in again] == wanted


def run_to_the_end(host: LocalEngine) -> list[Completion]:
    finished = []
    while host.busy:
        finished += [completion for _, completion in host.step() if completion]
    return finished


@pytest.mark.parametrize("family", FAMILIES)
def test_aborting_one_of_those_who_share_leaves_the_others(family: str) -> None:
    prompts = [prompt(100, own) for own in (1, 60, 20)]
    with engine(family, token_budget=48) as host:
        requests = [host.add(each, greedy()) for each in prompts]
        for _ in range(5):
            host.step()
        assert host.abort(requests[0]).tokens  # the one that computed what the others resumed from
        for _ in range(2):
            host.step()
        aborted = host.abort(requests[1])
        assert aborted.reused == 96
        host.add(prompts[1], greedy())
        third, second = run_to_the_end(host)
        assert [second.reused, third.reused] == [144, 96]  # the aborted one is remembered as far as it came
        assert [second.tokens, third.tokens] == without_reuse(family, prompts[1:], greedy())
        pools = host._scheduler.blocks.pools
        assert any(pool.unused for pool in pools)
        host.forget_prefixes()
        assert [pool.available for pool in pools] == [pool.capacity for pool in pools]
        assert not any(pool.unused for pool in pools)


def test_forgotten_prefixes_are_computed_again() -> None:
    with engine() as host:
        host.generate([PROMPTS[0]], greedy(3))
        running = host.add(PROMPTS[1], greedy(3))
        host.step()
        host.forget_prefixes()
        [finished] = run_to_the_end(host)
        assert (running, finished.reused) == (1, 160)
        assert host.generate([PROMPTS[0]], greedy(3))[0].reused == 0
        assert host.generate([PROMPTS[0]], greedy(3))[0].reused == 176


def test_a_failed_pass_is_not_remembered() -> None:
    with engine() as host:
        host.generate([PROMPTS[0]], greedy(3))
        host.model.lm_head.register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="no memory"):
                host.generate([PROMPTS[1]], greedy(3))
        finally:
            host.model.lm_head._forward_pre_hooks.clear()
        assert host.generate([PROMPTS[0]], greedy(3))[0].reused == 0


def fail(*_: object) -> None:
    raise RuntimeError("no memory")


def test_a_replaced_buffer_takes_its_prefixes_with_it() -> None:
    with engine(poison=False) as host:
        wanted = host.generate([PROMPTS[0]], greedy())[0].tokens
        for layer, buffer in host.buffers.items():
            host.buffers[layer] = torch.zeros_like(buffer)
        got = host.generate([PROMPTS[0]], greedy())[0]
    assert got.reused == 0
    assert got.tokens == wanted


def test_poison_notices_a_write_to_a_remembered_block() -> None:
    with engine() as host:
        host.generate([PROMPTS[0]], greedy(3))
        assert host._poison is not None
        prefixes = host._scheduler.blocks.prefixes
        for index, group in enumerate(host.groups):
            host._poison.before([], prefixes)
            host._poison.after()
            block = max(node.blocks[index] for node in prefixes)
            host.buffers[group.layers[0]].view(torch.int8).reshape(group.num_blocks, -1)[block, 3] ^= 1
            message = f"group '{group.name}' layer {group.layers[0]}: got a write to block {block}, which is remembered"
            with pytest.raises(StepError, match=message):
                host._poison.after()


def test_reuse_is_off_unless_asked_for_and_needs_kept_states() -> None:
    with LocalEngine(model_of("llama"), options=EngineOptions(cache_tokens=512)) as host:
        host.generate([PROMPTS[0]], greedy(3))
        assert host.generate([PROMPTS[0]], greedy(3))[0].reused == 0
        assert not list(host._scheduler.blocks.prefixes)
    with engine("llama", keep_state_every=0) as host:
        host.generate([PROMPTS[0]], greedy(3))
        assert host.generate([PROMPTS[0]], greedy(3))[0].reused == 176
    with pytest.raises(StepError, match="keep_state_every: got 0, expected at least 1 with reuse_prefixes"):
        engine("qwen3_5", keep_state_every=0)
