"""What becomes of a hybrid's recurrent state when one slot is both read and written: tokens beside the right ones.

    python tools/boundary_fault.py [PAGE]    prints the tables, and puts them between the marks in PAGE

A tiny random hybrid (Gated DeltaNet and full attention) continues a prompt greedily on block tables of 16 tokens,
three times: as transformers does, by the engine contract's rule (read the block of the last token in the cache, write
that of the last new one), and by the rule of ATOM's own bridge (the second block for both).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from stepbind import Caches, GroupKind, Phase, adapted, bind, build_plan, discover_layers, make_arena, make_step
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.layers import group_layers
from stepbind.plan import StatePlan
from stepbind.tiny import tiny_model

BLOCK_SIZE = 16
NUM_BLOCKS = 16
MARKS = ("<!-- boundary_fault.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Case:
    title: str
    prompt: int  # tokens
    chunk: int  # most new tokens of a pass
    new_tokens: int
    note: str


CASES = (
    Case(
        "The first boundary after the prompt",
        prompt=11,
        chunk=64,
        new_tokens=12,
        note="The prompt's 11 tokens and the first 5 generated ones fill block 1. Token 17 is the first of block 2:\n"
        "its state is read from block 1 and written to block 2. The one-slot rule reads block 2, which nobody wrote.",
    ),
    Case(
        "A resumed chunk",
        prompt=36,
        chunk=31,
        new_tokens=12,
        note="The prompt comes in passes of 31 and 5 tokens. The second one's state is read from block 2, which has\n"
        "token 31, and written to block 3, which has token 36. The one-slot rule starts it from nothing.",
    ),
)


@torch.no_grad()
def generate(model: Any, prompt: list[int], case: Case, *, one_slot: bool) -> list[int]:
    """Greedy tokens on our own block tables: block c+1 holds tokens 16c .. 16c+15."""
    layers = discover_layers(model)
    sizes = dict.fromkeys(GroupKind, NUM_BLOCKS)
    groups = group_layers(layers, block_size=BLOCK_SIZE, kernel_block_size=BLOCK_SIZE, num_blocks=sizes)
    buffers = allocate_buffers(layers, groups, torch.device("cpu"))
    caches = Caches.of(groups, {layer.index: layer.spec for layer in layers}, buffers)
    arena = make_arena(groups, max_rows=1, max_tokens=64, max_context=BLOCK_SIZE * (NUM_BLOCKS - 1))
    blocks = torch.arange(1, NUM_BLOCKS, dtype=torch.int32)[None]
    tokens, prior = list(prompt), 0
    with adapted(model):
        while len(tokens) < case.prompt + case.new_tokens:
            new = tokens[prior : prior + case.chunk]
            phase = Phase.PREFILL if prior < case.prompt else Phase.DECODE
            step = make_step(groups, phase, [len(new)], [prior], {group.name: blocks for group in groups})
            plan = build_plan(step, arena)
            for group in plan.groups:
                if one_slot and isinstance(group, StatePlan) and prior > 0:
                    group.state_read.copy_(group.state_write)
            with bind(plan, caches, model):
                position = plan.shared.position[None]
                logits = model(torch.tensor([new]), position_ids=position, use_cache=False).logits[0, -1]
            prior += len(new)
            if prior == len(tokens):
                tokens.append(int(logits.argmax()))
    return tokens[case.prompt :]


def table(case: Case, model: Any, prompt: list[int]) -> str:
    ids = torch.tensor([prompt])
    length = {"max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens, "eos_token_id": -1}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
    right = out[0, case.prompt :].tolist()
    rows = [
        ("transformers", right),
        ("read and write slot", generate(model, prompt, case, one_slot=False)),
        ("one slot (ATOM's bridge)", generate(model, prompt, case, one_slot=True)),
    ]
    places = range(case.prompt + 1, case.prompt + case.new_tokens + 1)
    lines = [
        f"### {case.title}",
        "",
        f"{case.note}\nTokens that differ from transformers' are bold.",
        "",
        "| token number | " + " | ".join(map(str, places)) + " |",
        "|---|" + "---|" * case.new_tokens,
    ]
    for name, tokens in rows:
        cells = [str(token) if token == want else f"**{token}**" for token, want in zip(tokens, right, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    logging.set_verbosity_error()
    model = tiny_model("qwen3_5")
    generator = torch.Generator().manual_seed(1)
    parts = []
    for case in CASES:
        prompt = torch.randint(0, 256, (case.prompt,), generator=generator).tolist()
        parts.append(table(case, model, prompt))
    text = "\n\n".join(parts)
    print(text)
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        before, _, rest = page.read_text().partition(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    main()
