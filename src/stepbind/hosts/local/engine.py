"""The local host: a small engine with the same contract as a big one, for running a model on a laptop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepbind.bind import bind
from stepbind.caches import Caches, StateSpec
from stepbind.errors import RequestError, StepError
from stepbind.groups import GroupKind
from stepbind.hosts.local.blocks import BlockManager
from stepbind.hosts.local.decode import Flight, GraphDecoder
from stepbind.hosts.local.memory import allocate_buffers, allocate_index_buffers
from stepbind.hosts.local.options import DTYPES, EngineOptions
from stepbind.hosts.local.poison import Poison
from stepbind.hosts.local.request import Completion, Delta, FinishReason, SamplingParams, Sequence
from stepbind.hosts.local.sampling import Sampler
from stepbind.hosts.local.scheduler import Batch, Scheduler, step_of
from stepbind.hosts.local.text import TextStream
from stepbind.layers import Layer, discover_layers, group_layers
from stepbind.models.adapt import adapted
from stepbind.plan import build_plan, make_arena
from stepbind.step import Phase

Prompt = str | List[int]


@dataclass(eq=False)
class _Live:
    """A running request's sequence with what turns its logits into tokens and text."""

    sequence: Sequence
    sampler: Sampler
    text: TextStream

    @property
    def goes_on_blindly(self) -> bool:
        """Whether its next pass needs nothing of the host that its last token decides."""
        return self.sampler.greedy and not self.sequence.params.return_logits


class LocalEngine:
    """Generates with a transformers model whose layers work on block pools that the engine owns.

    The model stays adapted until `close()`; the engine is a context manager. One thread uses it at a time.
    Raises `UnknownModelError` for a model of no known family, `StepError` for options that do not fit together.
    """

    def __init__(self, model: Any, tokenizer: Any | None = None, options: EngineOptions | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = options = options or EngineOptions()
        self.device: torch.device = model.device
        layers = [_with_state_dtype(layer, options.state_dtype) for layer in discover_layers(model)]
        self.groups = group_layers(
            layers,
            block_size=options.block_size,
            kernel_block_size=options.kernel_block_size or options.block_size,
            num_blocks=_pool_sizes(options),
        )
        blocks = BlockManager(self.groups, options.keep_state_every, reuse_prefixes=options.reuse_prefixes)
        self.buffers = allocate_buffers(layers, self.groups, self.device)
        self.index_buffers = allocate_index_buffers(layers, self.groups, self.device)
        self._specs = {layer.index: layer.spec for layer in layers}
        self._caches = Caches.of(self.groups, self._specs, self.buffers, self.index_buffers)
        self.max_context = min(model.config.max_position_embeddings, options.cache_tokens)
        self._arena = make_arena(
            self.groups,
            max_rows=options.max_rows,
            max_tokens=max(options.token_budget, options.max_rows),
            max_context=self.max_context,
            device=self.device,
        )
        self._scheduler = Scheduler(
            blocks,
            max_rows=options.max_rows,
            token_budget=options.token_budget,
            max_context=self.max_context,
        )
        self._poison = Poison(self.groups, self.buffers, self.index_buffers) if options.poison else None
        self._decoder: GraphDecoder | None = None
        if self.device.type == "cuda" if options.graphs is None else options.graphs:
            self._decoder = GraphDecoder(
                model, self._arena, self._caches, options.graph_rows, compile_layers=options.compile_layers
            )
        self._flight: Flight | None = None
        self._live: dict[int, _Live] = {}
        self._next_request = 0
        self._end_tokens = _end_tokens(model)
        self._scopes = ExitStack()
        self._scopes.enter_context(adapted(model))

    @staticmethod
    def from_pretrained(
        checkpoint: str | Path,
        *,
        options: EngineOptions | None = None,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
    ) -> LocalEngine:
        """Load a checkpoint (directory or hub name) with its tokenizer, where it has one.

        dtype: "auto" for the checkpoint's own, or a torch dtype's name. Raises `StepError` for a dtype that is none
        and a path where nothing is, `OSError` as transformers does for what it cannot read.
        """
        if dtype not in DTYPES:
            raise StepError("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
        if str(checkpoint).startswith((".", "/", "~")) and not Path(checkpoint).is_dir():
            raise StepError("checkpoint", f"{str(checkpoint)!r}, where nothing is", "a directory with a checkpoint")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
        return LocalEngine(model, load_tokenizer(checkpoint), options)

    def close(self) -> None:
        """Give the model back as plain transformers."""
        self._scopes.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: List[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
        *,
        on_token: Callable[[Delta], object] | None = None,
    ) -> list[Completion]:
        """Continue prompts (text or token ids), all with one `sampling` or each with its own; in their order.
        `on_token` is called with every token as it comes; the text comes with the completions.

        A prompt that cannot be served gets a completion with `finish_reason="error"` and the reason in `error`; the
        others are not affected.
        """
        prompts = list(prompts)
        completions: dict[int, Completion] = {}
        for request, outcome in self._run(prompts, sampling, stream_text=False):
            if isinstance(outcome, Completion):
                completions[request] = outcome
            elif on_token is not None:
                on_token(outcome)
        return [completions[index] for index in range(len(prompts))]

    def stream(
        self, prompts: List[Prompt], sampling: SamplingParams | List[SamplingParams] | None = None
    ) -> Iterator[Delta]:
        """As `generate`, token by token as they come; `Delta.request` is the prompt's index. Leaving the loop early
        aborts what still runs. Raises `RequestError` at once for a prompt that cannot be served."""
        for _, outcome in self._run(list(prompts), sampling, stream_text=True):
            if isinstance(outcome, Delta):
                yield outcome
            elif outcome.finish_reason == "error":
                raise RequestError("request", outcome.error, "one that the engine can serve")

    def _run(
        self, prompts: list[Prompt], sampling: SamplingParams | List[SamplingParams] | None, *, stream_text: bool
    ) -> Iterator[tuple[int, Delta | Completion]]:
        """Deltas and, at each request's end, its completion, with the prompt's index."""
        params = _one_each(prompts, sampling)
        index_of: dict[int, int] = {}
        try:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                try:
                    index_of[self.add(prompt, param, stream_text=stream_text)] = index
                except RequestError as error:
                    tokens = prompt if not isinstance(prompt, str) else []
                    yield index, Completion(list(tokens), [], "", "error", error=str(error))
            while any(request in self._live for request in index_of):
                for delta, completion in self.step():
                    index = index_of[delta.request]
                    yield index, Delta(index, delta.token, delta.text, delta.finish_reason)
                    if completion is not None:
                        yield index, completion
        finally:
            for request in index_of:
                if request in self._live:
                    self.abort(request)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, stream_text: bool = True) -> int:
        """Queue a prompt; returns the request's number. Without `stream_text` the text comes with the completion alone,
        unless stop strings have to be looked for. Raises `RequestError` for one that cannot be served."""
        params = params or SamplingParams()
        tokens = self._encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", repr(params.stop), "no stop strings without a tokenizer")
        request = self._next_request
        sequence = Sequence(request, len(tokens), tokens, params)
        self._scheduler.add(sequence)
        text = TextStream(self.tokenizer, params.stop, lazy=not stream_text and not params.stop)
        self._live[request] = _Live(sequence, Sampler(params, self.device), text)
        self._next_request += 1
        return request

    def abort(self, request: int) -> Completion:
        """End a request now; what it generated so far is its completion. Raises `RequestError` for one not alive."""
        if request not in self._live:
            raise RequestError("request", request, f"a live one: {sorted(self._live)}")
        live = self._live[request]
        live.text.finish()
        return self._end(live, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[tuple[Delta, Completion | None]]:
        """Run one pass; a delta for each request that got a token, with its completion if that was the last one. With
        graphs, the tokens of a decode pass come with the call after the one that launched it.

        A pass that raises ends every request that was running: it may have moved their states on, and a second try
        would move them again. Those that wait are not affected.
        """
        try:
            return self._step()
        except BaseException:
            self._flight = None
            for sequence in list(self._scheduler.running):
                self._end(self._live[sequence.request], "error")
            self.forget_prefixes()
            raise

    def forget_prefixes(self) -> None:
        """Reuse nothing that was computed so far, also by requests that still run: what to do when the model's weights
        have changed. Blocks that no live request uses are free at once."""
        self._scheduler.forget_prefixes()

    def _step(self) -> list[tuple[Delta, Completion | None]]:
        if self._flight is not None:
            return self._land(self._flight)
        generation = self._caches.generation
        self._caches.update(self.groups, self._specs, self.buffers, self.index_buffers)
        if self._caches.generation != generation:
            self.forget_prefixes()  # they were in buffers that have been replaced
        batch = self._scheduler.schedule()
        if batch is None:
            return []
        if self._poison is not None:
            self._poison.before(self._scheduler.running, self._scheduler.blocks.prefixes)
        if self._decoder is not None and batch.phase is Phase.DECODE:
            self._flight = self._decoder.launch(batch)
            logits = None
        else:
            logits = self._forward(batch)
        if self._poison is not None:
            self._poison.after()
        rows = batch.finishing()
        self._scheduler.done(batch)
        if logits is None:
            return []
        live = [self._live[batch.sequences[row].request] for row in rows]
        return self._take(live, logits.argmax(dim=-1).tolist(), logits)

    def _land(self, flight: Flight) -> list[tuple[Delta, Completion | None]]:
        """The tokens of a launched pass. Where all rows are greedy, the next one is launched first, so that the GPU
        does not wait for what the host does with them; a row that then turns out to have ended ran once for nothing."""
        assert self._decoder is not None
        self._flight = None
        live = [self._live.get(sequence.request) for sequence in flight.batch.sequences]
        if self._poison is None and all(each is not None and each.goes_on_blindly for each in live):
            following = self._scheduler.go_on(list(flight.batch.sequences))
            if following is not None:
                self._flight = self._decoder.go_on(following)
                self._scheduler.done(following)
        return self._take(live, *self._decoder.land(flight))

    def _take(
        self, live: List[_Live | None], best: list[int], logits: torch.Tensor
    ) -> list[tuple[Delta, Completion | None]]:
        """Give each row its best token, or one drawn from its logits [rows, vocabulary]."""
        deltas = []
        for row, each in enumerate(live):
            if each is None:  # ended or aborted while the pass ran
                continue
            if each.sequence.params.return_logits:
                # A copy on the CPU too: the next replay overwrites a graph's logits.
                each.sequence.logits.append(logits[row].to("cpu", torch.float32, copy=True))
            token = best[row] if each.sampler.greedy else each.sampler.draw(logits[row].float())
            deltas.append(self._advance(each, token))
        return deltas

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits [rows that get a token, vocabulary] of one pass, in the model's dtype."""
        plan = build_plan(step_of(batch, self.groups, self.device), self._arena)
        input_ids = torch.tensor([batch.input_ids()], device=self.device)
        last = plan.shared.query_start[1:][batch.finishing()].long() - 1
        with bind(plan, self._caches, self.model):
            out = self.model(
                input_ids=input_ids, position_ids=plan.shared.position[None], use_cache=False, logits_to_keep=last
            )
        return out.logits[0]  # type: ignore[no-any-return]

    def _advance(self, live: _Live, token: int) -> tuple[Delta, Completion | None]:
        """Append a chosen token to its request, and end it where that was the last one."""
        sequence, params = live.sequence, live.sequence.params
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        if token in params.stop_token_ids or (token in self._end_tokens and not params.ignore_eos):
            reason = "stop"
        text = live.text.push(token)
        if live.text.stopped:
            reason = "stop"
        elif reason is None and len(sequence.tokens) - sequence.prompt_len == params.max_tokens:
            reason = "length"
        if reason is None:
            return Delta(sequence.request, token, text), None
        text += live.text.finish()
        if live.text.stopped:
            reason = "stop"
        return Delta(sequence.request, token, text, reason), self._end(live, reason)

    def _end(self, live: _Live, reason: FinishReason) -> Completion:
        sequence = live.sequence
        self._scheduler.remove(sequence)
        del self._live[sequence.request]
        return Completion(
            prompt=sequence.tokens[: sequence.prompt_len],
            tokens=sequence.tokens[sequence.prompt_len :],
            text=live.text.text,
            finish_reason=reason,
            logits=torch.stack(sequence.logits) if sequence.logits else None,
            reused=sequence.reused,
            chunks=tuple(sequence.chunks),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            vocabulary = self.model.config.vocab_size
            for token in prompt:
                if not 0 <= token < vocabulary:
                    raise RequestError("prompt", f"token {token}", f"0 .. {vocabulary - 1}")
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("prompt", "text", "token ids: this checkpoint has no tokenizer")
        tokens: list[int] = self.tokenizer(prompt)["input_ids"]
        return tokens


def load_tokenizer(checkpoint: str | Path) -> Any | None:
    """The checkpoint's tokenizer; None for a directory that has none."""
    directory = Path(checkpoint)
    if directory.is_dir() and not any(directory.glob("*token*")):
        return None
    return AutoTokenizer.from_pretrained(checkpoint)


def _with_state_dtype(layer: Layer, state_dtype: str) -> Layer:
    if not isinstance(layer.spec, StateSpec):
        return layer
    return replace(layer, spec=replace(layer.spec, state_dtype=getattr(torch, state_dtype)))


def _pool_sizes(options: EngineOptions) -> dict[GroupKind, int]:
    """Physical blocks of each kind of pool, the reserved block 0 included."""
    columns = -(-options.cache_tokens // options.block_size)
    kept = columns // options.keep_state_every if options.keep_state_every else 0
    return {
        GroupKind.ATTENTION: 1 + columns,
        GroupKind.LATENT: 1 + columns,
        GroupKind.STATE: 1 + 2 * options.max_rows + kept,
    }


def _end_tokens(model: Any) -> frozenset[int]:
    """The model's end-of-text tokens: its generation config's, which a checkpoint's own replaces."""
    end = model.generation_config.eos_token_id
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)


def _one_each(prompts: list[Prompt], sampling: SamplingParams | List[SamplingParams] | None) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * len(prompts)
    if len(sampling) != len(prompts):
        raise RequestError("sampling", f"{len(sampling)} settings", f"one, or {len(prompts)} as there are prompts")
    return list(sampling)
