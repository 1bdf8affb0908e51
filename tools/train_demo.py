"""Train the demonstration checkpoints on one GPU, from nothing, on stories that this package tells itself.

    python tools/train_demo.py hybrid src/stepbind/demo/checkpoints/hybrid
    python tools/train_demo.py sparse-mla src/stepbind/demo/checkpoints/sparse-mla

Needs fla-core on a GPU, for its triangular inverse. The same seed draws the same weights and the same stories in the
same order.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from demo_data import Batch, Encoder, Stories, batches, make_tokenizer
from demo_models import CONTEXT, new_model, parameters, quick_layers
from demo_sparse import DENSE, INDEXED, SPARSE, attending, indexer_loss, indexer_weights
from demo_step import Step, half_precision
from torch.nn import functional as F

from stepbind.demo.questions import AHEAD, DISTANCES, draw_question
from stepbind.demo.stories import NAMED, Part

WEIGHTS = {Part.STORY: 0.1, Part.WORDS: 0.5, Part.VALUE: 1.0}
"""What each part's mean counts. Most words of a story cannot be known; an answer's words the question says."""

CAUSAL = "causal"
"""Attention as the model has it."""


@dataclass(frozen=True)
class Phase:
    """steps: optimizer steps. rows, length: a batch's shape. rate: of learning, at its highest."""

    steps: int
    rows: int
    length: int
    rate: float
    attention: str = CAUSAL
    indexers_only: bool = False


PHASES = {
    "hybrid": (Phase(2500, 32, 256, 1.2e-3), Phase(600, 16, 768, 8e-4), Phase(1200, 8, CONTEXT, 8e-4)),
    "sparse-mla": (
        Phase(2000, 32, 256, 1.2e-3, DENSE),
        Phase(500, 16, 768, 8e-4, DENSE),
        Phase(800, 8, CONTEXT, 8e-4, DENSE),
        Phase(300, 8, CONTEXT, 2e-3, INDEXED, indexers_only=True),
        Phase(150, 8, CONTEXT, 3e-4, SPARSE),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(PHASES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--scale", type=float, default=1.0, help="Of the number of steps, to try it out.")
    parser.add_argument("--rows", type=float, default=1.0, help="Of the rows in a batch, to try it out.")
    parser.add_argument("--rate", type=float, default=1.0, help="Of the learning rates, to try it out.")
    given = parser.parse_args()
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    quick_layers()
    tokenizer = make_tokenizer(given.seed)
    model = new_model(given.model, given.seed, given.device)
    print(f"{given.model}: {parameters(model):,} parameters, seed {given.seed}", flush=True)
    first = 0
    for phase in PHASES[given.model]:
        steps, rows = max(2, int(phase.steps * given.scale)), max(1, int(phase.rows * given.rows))
        phase = Phase(**asdict(phase) | {"steps": steps, "rows": rows, "rate": phase.rate * given.rate})
        stories = Stories(tokenizer, given.seed, first, steps * rows, phase.length, NAMED[given.model])
        train(model, phase, batches(stories, rows, given.workers))
        first += steps * rows
        report(model, tokenizer, phase, given.seed, NAMED[given.model])
        seconds = round(time.perf_counter() - started)
        save(model, tokenizer, given.directory, {"seed": given.seed, "stories": first, "seconds": seconds})


def train(model: Any, phase: Phase, rows: Iterator[Batch]) -> None:
    """One phase, its own optimizers and schedule."""
    started = time.perf_counter()
    model.train()
    weights = trained_weights(model, phase)
    trained = {id(weight) for weight in weights}
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in trained)
    step = Step(partial(loss_of, model, phase), weights, model.get_input_embeddings().weight, phase.rows, phase.length)
    said = 0.0
    for number, (ids, parts) in enumerate(rows):
        figures = step(ids, parts, phase.rate * rate_at(number, max(1, phase.steps // 20), phase.steps))
        now = time.perf_counter() - started
        if now - said > 10 or number in (0, phase.steps - 1):
            said = now
            story, words, value, right, index = figures.tolist()
            print(
                f"{phase.attention} {phase.rows}x{phase.length} step {number} {now:.0f} s: values {value:.4f} "
                f"({right:.4f} right), words {words:.4f}, story {story:.4f}, indexers {index:.4f}",
                flush=True,
            )
    for weight in model.parameters():
        weight.requires_grad_(True)
        weight.grad = None


def trained_weights(model: Any, phase: Phase) -> list[torch.Tensor]:
    if phase.attention == CAUSAL:
        return list(model.parameters())
    indexers = indexer_weights(model)
    if phase.indexers_only:
        return indexers
    idle = {id(weight) for weight in indexers} if phase.attention == DENSE else set()
    return [weight for weight in model.parameters() if id(weight) not in idle]


def loss_of(model: Any, phase: Phase, ids: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a phase minimises, and of this batch: nats a token of each Part, the share of values that come first, and
    the indexers' divergence."""
    logits = predict(model, phase.attention, ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    of = {part: (parts[:, 1:] == part).flatten().float() for part in Part}
    nats = {part: (each * of[part]).sum() / of[part].sum() for part in Part}
    right = ((logits.argmax(-1) == ids[:, 1:]).flatten() * of[Part.VALUE]).sum() / of[Part.VALUE].sum()
    index = indexer_loss(model) if phase.attention in (INDEXED, SPARSE) else torch.zeros_like(right)
    loss = index if phase.indexers_only else index + sum(WEIGHTS[part] * nats[part] for part in Part)
    return loss, torch.stack([*(nats[part] for part in Part), right, index]).detach()


def predict(model: Any, attention: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of full rows. A mask for each sort of layer is given, so that none is built, nor looked at from the host.

    `demo_sparse`'s ways to attend know that rows are full; GLM's layers only take their mask apart.
    """
    if attention == CAUSAL:
        masks = dict.fromkeys(model.config.layer_types)
        return model(ids, attention_mask=masks, use_cache=False).logits  # type: ignore[no-any-return]
    masks = dict.fromkeys(model.config.layer_types, ids.new_zeros(1, 1, 1, 1))
    with attending(model, attention):
        return model(ids, attention_mask=masks, use_cache=False).logits  # type: ignore[no-any-return]


def rate_at(step: int, warm: int, steps: int) -> float:
    """Share of the highest rate: a straight rise, then half a cosine down to a twentieth."""
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@torch.no_grad()
def report(model: Any, tokenizer: Any, phase: Phase, seed: int, named: float, each: int = 64) -> None:
    """Print the share of fresh questions whose whole answer comes first, token by token, by distance and by kind."""
    started, encode = time.perf_counter(), Encoder(tokenizer)
    model.eval()
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for distance in DISTANCES:
        if distance + AHEAD > phase.length * 1.1:
            continue
        asked = [
            draw_question(10_000_019 * (seed + 1) + number, distance, named, lambda text: len(encode(text)))
            for number in range(each)
        ]
        right = answered(model, tokenizer, phase, [(question.prompt, question.asked.answer) for question in asked])
        for question, well in zip(asked, right, strict=True):
            found["distance", str(distance)].append(well)
            found["kind", question.asked.kind].append(well)
    shares = ", ".join(f"{name} {sum(well) / len(well):.3f}" for (_, name), well in found.items())
    print(f"recall, {phase.attention}: {shares} ({time.perf_counter() - started:.0f} s)", flush=True)


def answered(model: Any, tokenizer: Any, phase: Phase, texts: list[tuple[str, str]]) -> list[bool]:
    """For each prompt and answer, whether every token of the answer has the largest logit."""
    prompts = [tokenizer(prompt).input_ids for prompt, _ in texts]
    answers = [tokenizer(answer).input_ids for _, answer in texts]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(texts), -(-longest // 64) * 64 + 1, dtype=torch.long)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        asked[row, len(prompt) : len(prompt) + len(answer)] = True
    ids, asked = ids.to(model.device), asked.to(model.device)
    with half_precision(model.device):
        best = predict(model, phase.attention, ids[:, :-1]).argmax(-1)
    wrong = (best != ids[:, 1:]) & asked[:, 1:]
    return [not row for row in wrong.any(-1).tolist()]


def save(model: Any, tokenizer: Any, directory: Path, facts: dict[str, int]) -> None:
    """bfloat16 weights in transformers' format, the tokenizer, and how they were made."""
    copy.deepcopy(model).eval().to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made = facts | {"device": name, "torch": torch.__version__, "parameters": parameters(model)}
    (directory / "made.json").write_text(json.dumps(made, indent=1) + "\n")
    print(f"saved to {directory}: {made}", flush=True)


if __name__ == "__main__":
    main()
