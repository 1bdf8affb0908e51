"""What transformers' own greedy generation says, for comparison."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import torch

from stepbind.tiny import VOCAB_SIZE, tiny_model

BATCH = 25
NEW_TOKENS = 193  # past three boundaries of 64-token blocks, wherever the prompt ends


@dataclass(frozen=True)
class Expected:
    prompt: tuple[int, ...]
    tokens: list[int]
    logits: torch.Tensor  # [NEW_TOKENS, vocabulary]


def random_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 .. 300 tokens; the shortest and the longest are among them."""
    rng = random.Random(seed)
    lengths = [1, 300] + [rng.randint(1, 300) for _ in range(count - 2)]
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in lengths]


@cache
def model_of(family: str) -> torch.nn.Module:
    return tiny_model(family)


@cache
def expected(family: str, count: int, new_tokens: int = NEW_TOKENS) -> tuple[Expected, ...]:
    """Greedy generation of `count` random prompts by `model.generate`, in left-padded batches of like lengths."""
    prompts = random_prompts(count)
    order = sorted(range(count), key=lambda index: len(prompts[index]))
    found: dict[int, Expected] = {}
    for start in range(0, count, BATCH):
        batch = order[start : start + BATCH]
        for index, result in zip(batch, _generate(family, [prompts[i] for i in batch], new_tokens), strict=True):
            found[index] = result
    return tuple(found[index] for index in range(count))


def _generate(family: str, prompts: list[tuple[int, ...]], new_tokens: int) -> list[Expected]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model_of(family).generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=-1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(out.logits, dim=1)
    return [Expected(prompt, out.sequences[row, longest:].tolist(), logits[row]) for row, prompt in enumerate(prompts)]
