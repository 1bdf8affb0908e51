"""What a user asks of the local host, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from stepbind.errors import RequestError
from stepbind.hosts.local.prefix import Node

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: new tokens at the most. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. seed: of this
    request alone; the same seed gives the same tokens whatever else runs (None draws one). stop: strings that end
    the text, themselves left out. stop_token_ids: tokens that end it, besides the model's end-of-text tokens unless
    `ignore_eos`. return_logits: keep the logits that each token was chosen from.

    Raises `RequestError` for values out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_logits: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError("max_tokens", self.max_tokens, "at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise RequestError("temperature", self.temperature, "0 (greedy) or a positive number")
        if self.top_k < 0:
            raise RequestError("top_k", self.top_k, "0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", self.top_p, "more than 0, at most 1")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise RequestError("stop", repr(self.stop), "a tuple of strings that are not empty")


@dataclass(frozen=True, eq=False)
class Completion:
    """A finished request. `logits` [tokens, vocabulary] float32 where asked for.

    reused: prompt tokens that were found in the cache, a multiple of the block size. chunks: prompt tokens that each
    prefill pass computed, behind those.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logits: torch.Tensor | None = None
    reused: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Delta:
    """One token of one request, as it comes. `text` is what became certain with it, maybe nothing."""

    request: int
    token: int | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class Sequence:
    """A request while it lives: its tokens, how many of them the cache holds, and its blocks."""

    request: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    computed: int = 0  # tokens whose keys, values and states are in the cache
    tables: list[list[int]] = field(default_factory=list)  # per group: a block id or -1 for each column
    reserved: list[int] = field(default_factory=list)  # per group: blocks it may still take
    logits: list[torch.Tensor] = field(default_factory=list)
    prefix: list[Node] = field(default_factory=list)  # remembered nodes of its first columns, shared ones first
    remembered: bool = True  # whether more of it may be remembered
    reused: int = 0  # prompt tokens that it did not have to compute
    chunks: list[int] = field(default_factory=list)  # prompt tokens of each of its prefill passes

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def max_len(self) -> int:
        """Tokens that the cache may have to hold; the last generated one never enters it."""
        return self.prompt_len + self.params.max_tokens - 1
