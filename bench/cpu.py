"""On the CPU: what a bind costs, and how generation compares with transformers' own on the same checkpoint.

python bench/cpu.py [FILE]    prints the tables, and writes them to FILE
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import heading, median_seconds, table

from stepbind import (
    Arena,
    CacheGroup,
    Caches,
    Context,
    EngineOptions,
    GroupKind,
    LocalEngine,
    Phase,
    SamplingParams,
    build_plan,
    make_arena,
    make_step,
)
from stepbind.context import bound
from stepbind.tiny import VOCAB_SIZE, tiny_model

LAYERS, BLOCK = 48, 64
PROMPTS, PROMPT_LEN, NEW_TOKENS = 16, 128, 64


def four_groups() -> list[CacheGroup]:
    """48 layers as a hybrid's are: one attention layer in four."""
    attention = tuple(range(3, LAYERS, 4))
    groups = [CacheGroup("attention", GroupKind.ATTENTION, attention, BLOCK, 16, 20_000)]
    for part in range(3):
        groups.append(CacheGroup(f"state{part}", GroupKind.STATE, tuple(range(part, LAYERS, 4)), BLOCK, BLOCK, 20_000))
    return groups


def bind_once(arena: Arena, phase: Phase, query: list[int], prior: list[int], tables: dict[str, torch.Tensor]) -> None:
    """All that a host does for one pass before the model's forward: step, plan, bind."""
    step = make_step(arena.cache_groups, phase, query, prior, tables)
    with bound(Context(build_plan(step, arena), Caches())):
        pass


def bind_table() -> str:
    groups = four_groups()
    floor = median_seconds(lambda: torch.zeros(1).add_(1), repeats=2000)
    rows: list[list[object]] = [["one torch.zeros(1).add_(1)", f"{floor * 1e6:.1f}", "1"]]
    cases = [(Phase.DECODE, count, 1, 512) for count in (1, 32, 256)]
    cases += [(Phase.PREFILL, 1, 8192, 0), (Phase.PREFILL, 16, 512, 512)]
    for phase, count, query_len, prior_len in cases:
        context = query_len + prior_len
        arena = make_arena(groups, max_rows=count, max_tokens=count * query_len, max_context=context)
        columns = -(-context // BLOCK)
        ids = torch.randint(1, 20_000, (count, columns), dtype=torch.int32)
        tables = {group.name: ids for group in groups}
        query, prior = [query_len] * count, [prior_len] * count
        seconds = median_seconds(partial(bind_once, arena, phase, query, prior, tables), repeats=200)
        name = f"{phase.value}, {count} x {query_len} tokens, context {context}"
        rows.append([name, f"{seconds * 1e6:.0f}", f"{seconds / floor:.0f}"])
    return table(["48 layers, 4 groups: step + plan + bind", "median us", "ratio to the floor"], rows)


def generation_table() -> str:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(PROMPTS)]
    rows: list[list[object]] = []
    for family in ("qwen3_5", "qwen3"):
        model = tiny_model(family, hidden_size=256, intermediate_size=768)
        theirs = [_seconds(partial(_transformers, model, prompts)) for _ in range(3)]
        with LocalEngine(model, options=EngineOptions(block_size=BLOCK, cache_tokens=4096)) as engine:
            ours = [_seconds(partial(_stepbind, engine, prompts)) for _ in range(3)]
        best_theirs, best_ours, count = sorted(theirs)[1], sorted(ours)[1], PROMPTS * NEW_TOKENS
        rows.append([family, "transformers", f"{count / best_theirs:.0f}", "1"])
        rows.append([family, "stepbind, local host", f"{count / best_ours:.0f}", f"{best_theirs / best_ours:.2f}"])
    return table(["hidden 256, float32", "by", "new tokens a second (median of 3)", "ratio"], rows)


def _transformers(model: Any, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
        )


def _stepbind(engine: LocalEngine, prompts: list[list[int]]) -> None:
    engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    report = "\n\n".join(
        [
            heading("On the CPU: bind, and generation beside transformers"),
            bind_table(),
            f"Greedy generation of {NEW_TOKENS} tokens for {PROMPTS} prompts of {PROMPT_LEN} tokens, all in one batch, "
            "by the same model in the same run:",
            generation_table(),
        ]
    )
    print(report)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(report + "\n")


if __name__ == "__main__":
    main()
