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
from pathlib import Path
from typing import Any

import torch
from demo_data import Batch, Stories, batches, make_tokenizer
from demo_models import CONTEXT, new_model, parameters, quick_layers
from demo_sparse import DENSE, INDEXED, SPARSE, attending, indexer_loss, indexer_weights
from torch.nn import functional as F

from stepbind.demo.questions import AHEAD, DISTANCES, draw_question

STORY_WEIGHT = 0.1
"""What a token outside the answers counts: most of them cannot be known."""


@dataclass(frozen=True)
class Phase:
    """steps: optimizer steps. rows, length: a batch's shape. rate: of learning, at its highest."""

    steps: int
    rows: int
    length: int
    rate: float
    attention: str = DENSE
    indexers_only: bool = False


PHASES = {
    "hybrid": (Phase(1200, 128, 256, 3e-3), Phase(500, 48, 768, 2e-3), Phase(2000, 20, CONTEXT, 2e-3)),
    "sparse-mla": (
        Phase(2500, 128, 256, 3e-3),
        Phase(800, 48, 768, 2e-3),
        Phase(1500, 20, CONTEXT, 2e-3),
        Phase(250, 8, CONTEXT, 2e-3, INDEXED, indexers_only=True),
        Phase(250, 8, CONTEXT, 5e-4, SPARSE),
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
        stories = Stories(tokenizer, given.seed, first, steps * rows, phase.length)
        train(model, phase, batches(stories, rows, given.workers), given.device)
        first += steps * rows
        report(model, tokenizer, phase, given.seed)
        seconds = round(time.perf_counter() - started)
        save(model, tokenizer, given.directory, {"seed": given.seed, "stories": first, "seconds": seconds})


def train(model: Any, phase: Phase, rows: Iterator[Batch], device: str) -> None:
    """One phase, its own optimizer and schedule."""
    started = time.perf_counter()
    model.train()
    weights = indexer_weights(model) if phase.indexers_only else list(model.parameters())
    optimizers = make_optimizers(model, weights, phase.rate)
    warm = max(1, phase.steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, warm, phase.steps))
        for optimizer in optimizers
    ]
    sparse = hasattr(model.config, "index_topk")
    said = 0.0
    for step, batch in enumerate(rows):
        ids, answers = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device, dtype=torch.bfloat16):
            if sparse:
                with attending(model, phase.attention):
                    answer, story, right, loss = sparse_loss(model, phase, ids, answers)
            else:
                answer, story, right = losses(model, ids, answers)
                loss = answer + STORY_WEIGHT * story
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter() - started
        if now - said > 10 or step in (0, phase.steps - 1):
            said = now
            extra = f", with indexers {loss.item():.4f}" if phase.attention != DENSE else ""
            print(
                f"{phase.attention} {phase.rows}x{phase.length} step {step} {now:.0f} s: "
                f"answers {answer.item():.4f} ({right.item():.4f} right), story {story.item():.4f}{extra}",
                flush=True,
            )


def losses(model: Any, ids: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nats a token of the answers, and of everything else; and the share of answer tokens that come first."""
    logits = model(ids[:, :-1], use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    asked = answers[:, 1:].flatten()
    right = (logits.argmax(-1) == ids[:, 1:]).flatten()[asked].float().mean()
    return (each * asked).sum() / asked.sum(), (each * ~asked).sum() / (~asked).sum(), right


def sparse_loss(model: Any, phase: Phase, ids: Any, answers: Any) -> tuple[Any, Any, Any, Any]:
    if not phase.indexers_only:
        answer, story, right = losses(model, ids, answers)
        loss = answer + STORY_WEIGHT * story
        return answer, story, right, loss if phase.attention == DENSE else loss + indexer_loss(model)
    others = list(model.parameters())
    trained = {id(weight) for weight in indexer_weights(model)}
    for weight in others:
        weight.requires_grad_(id(weight) in trained)
    answer, story, right = losses(model, ids, answers)
    loss = indexer_loss(model)
    for weight in others:
        weight.requires_grad_(True)
    return answer, story, right, loss


def make_optimizers(model: Any, weights: list[Any], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and everything that is no matrix.

    After 240 steps of the hybrid's first phase, answers cost 0.08 nats a token this way and 0.78 with AdamW alone.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in weights if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in weights if weight.ndim != 2 or weight is embedding]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=embedding.is_cuda),
    ]


def rate_at(step: int, warm: int, steps: int) -> float:
    """Share of the highest rate: a straight rise, then half a cosine down to a twentieth."""
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@torch.no_grad()
def report(model: Any, tokenizer: Any, phase: Phase, seed: int, each: int = 64) -> None:
    """Print the share of fresh questions whose whole answer comes first, token by token, by distance and by kind."""
    started = time.perf_counter()
    model.eval()
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for distance in DISTANCES:
        if distance + AHEAD > phase.length * 1.1:
            continue
        asked = [
            draw_question(10_000_019 * (seed + 1) + number, distance, lambda text: len(tokenizer(text).input_ids))
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
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        if hasattr(model.config, "index_topk"):
            with attending(model, phase.attention):
                best = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
        else:
            best = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
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
