"""Holding the local host's completions against transformers' own greedy generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepbind.hosts.local.request import Completion


@dataclass(frozen=True)
class Agreement:
    """One prompt: how many leading tokens agree, of how many, and the largest logit difference over those."""

    agreed: int
    tokens: int
    max_logit_difference: float

    @property
    def equal(self) -> bool:
        return self.agreed == self.tokens


@torch.inference_mode()
def compare(model: Any, completions: Sequence[Completion]) -> list[Agreement]:
    """Generate each completion's prompt again with `model.generate`, one at a time, as many tokens.

    The completions must be greedy ones with their logits; the model must not be adapted any more.
    """
    return [_compare(model, completion) for completion in completions]


def _compare(model: Any, completion: Completion) -> Agreement:
    count = len(completion.tokens)
    if completion.logits is None or count == 0:
        return Agreement(0, count, 0.0)
    prompt = torch.tensor([completion.prompt], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=-1,  # the completion's length says where to stop
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(completion.prompt) :].tolist()
    pairs = zip(tokens, completion.tokens, strict=True)
    agreed = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), count)
    # The logits that a first differing token was chosen from still have the same tokens before them.
    same_input = min(agreed + 1, count)
    logits = torch.cat(out.logits[:same_input]).float().cpu()
    return Agreement(agreed, count, float((logits - completion.logits[:same_input]).abs().max()))
