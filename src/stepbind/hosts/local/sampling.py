"""Choosing a row's next token from its logits."""

from __future__ import annotations

import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stepbind.hosts.local.request import SamplingParams


class Sampler:
    """Greedy or sampled choice for one request. Its random numbers depend on its own seed alone, so that the same
    request gives the same tokens in any batch."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._greedy = params.temperature == 0
        if self._greedy:
            return
        self._generator = torch.Generator(device=device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._warpers = [TemperatureLogitsWarper(params.temperature)]
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(params.top_p))

    @property
    def greedy(self) -> bool:
        return self._greedy

    def draw(self, logits: torch.Tensor) -> int:
        """logits [vocabulary] float32 -> a token, at random by this request's settings."""
        scores = logits[None]
        for warper in self._warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))
