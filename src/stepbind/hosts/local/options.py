"""Sizes and choices of the local host."""

from __future__ import annotations

from dataclasses import dataclass

from stepbind.errors import StepError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the local host.

    block_size, kernel_block_size: tokens a block; the kernel block size defaults to the block size and must divide
    it. token_budget: prompt tokens that one prefill pass may take. max_rows: requests in flight. cache_tokens: tokens
    that the attention pools hold together. keep_state_every: keep each k-th block's recurrent state, as hosts do that
    reuse prefixes (0: none). reuse_prefixes: do not compute again what the cache still holds of a prompt's beginning,
    up to a block's end (with recurrent layers: one whose state was kept). Off by default: with it, the passes that a
    request is cut into, and so the rounding of its logits, depend on what ran before. poison: fill what nobody owns
    with NaN, and check after every pass that it is untouched, and remembered prefixes too.
    graphs: replay decode passes captured at `graph_rows` padded rows. None is yes on a GPU; yes on the CPU runs the
    captured pass again, for tests. compile_layers: let torch.compile fuse what stands between the ops in them.
    state_dtype: of recurrent states in the cache; arithmetic on them is float32 in any case.
    """

    block_size: int = 16
    kernel_block_size: int | None = None
    token_budget: int = 256
    max_rows: int = 16
    cache_tokens: int = 32768
    keep_state_every: int = 0
    reuse_prefixes: bool = False
    poison: bool = False
    graphs: bool | None = None
    graph_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    compile_layers: bool = False
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("block_size", "token_budget", "max_rows", "cache_tokens"):
            if getattr(self, name) < 1:
                raise StepError(name, getattr(self, name), "at least 1")
        if self.kernel_block_size is not None and self.kernel_block_size < 1:
            raise StepError("kernel_block_size", self.kernel_block_size, "at least 1")
        if self.state_dtype not in DTYPES[1:]:
            raise StepError("state_dtype", repr(self.state_dtype), f"one of {', '.join(DTYPES[1:])}")
        if self.keep_state_every < 0:
            raise StepError("keep_state_every", self.keep_state_every, "0 (none) or more blocks")
