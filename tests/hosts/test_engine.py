"""The local host's behaviour beside plain generation. Every engine here runs poisoned."""

from __future__ import annotations

import pytest

from stepbind import Completion, EngineOptions, LocalEngine, RequestError, SamplingParams, StepError
from stepbind.tiny import VOCAB_SIZE, byte_tokenizer
from tests.hosts.reference import model_of, random_prompts

PROMPTS = [prompt[:40] for prompt in random_prompts(12)]


def engine(family: str = "qwen3_5", **options: object) -> LocalEngine:
    defaults: dict[str, object] = {"cache_tokens": 1024, "max_rows": 4, "token_budget": 16, "poison": True}
    return LocalEngine(model_of(family), byte_tokenizer(), EngineOptions(**(defaults | options)))  # type: ignore[arg-type]


def greedy(max_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | changes))  # type: ignore[arg-type]


def alone(prompt: tuple[int, ...], sampling: SamplingParams) -> Completion:
    with engine() as host:
        return host.generate([prompt], sampling)[0]


def test_out_of_blocks_makes_a_request_wait_and_never_fail() -> None:
    """Five blocks of 16 hold one request of 60 tokens at a time."""
    with engine(cache_tokens=80) as host:
        completions = host.generate(PROMPTS[:6], greedy())
        assert [each.tokens for each in completions] == [alone(prompt, greedy()).tokens for prompt in PROMPTS[:6]]


def test_all_blocks_come_back() -> None:
    with engine(keep_state_every=2) as host:
        pools = host._scheduler.blocks.pools
        host.generate(PROMPTS, greedy())
        for _ in host.stream(PROMPTS, greedy()):
            break  # leaving early aborts
        assert not host.busy
        assert [pool.available for pool in pools] == [pool.capacity for pool in pools]


def test_a_request_that_can_never_fit_fails_alone() -> None:
    with engine(cache_tokens=64) as host:
        good, long, empty, bad_token = host.generate(
            [PROMPTS[0], [1] * 60, [], [VOCAB_SIZE]], [greedy(5), greedy(20), greedy(5), greedy(5)]
        )
    assert good.tokens == alone(PROMPTS[0], greedy(5)).tokens
    assert long.finish_reason == "error"
    assert "prompt + max_tokens: got 60 + 20 tokens, expected at most 65" in str(long.error)
    assert "prompt: got no tokens" in str(empty.error)
    assert f"prompt: got token {VOCAB_SIZE}, expected 0 .. {VOCAB_SIZE - 1}" in str(bad_token.error)


def test_a_request_may_use_the_whole_context() -> None:
    with engine(cache_tokens=64) as host:
        assert len(host.generate([[1] * 60], greedy(5))[0].tokens) == 5


def test_tokens_stream_as_they_come() -> None:
    with engine() as host:
        deltas = list(host.stream(PROMPTS[:3], greedy(6)))
    for request, prompt in enumerate(PROMPTS[:3]):
        own = [delta for delta in deltas if delta.request == request]
        want = alone(prompt, greedy(6))
        assert [delta.token for delta in own] == want.tokens
        assert "".join(delta.text for delta in own) == want.text
        assert [delta.finish_reason for delta in own] == [None] * 5 + ["length"]


def test_a_stream_raises_for_a_request_it_cannot_serve() -> None:
    with engine() as host, pytest.raises(RequestError, match="got no tokens"):
        list(host.stream([PROMPTS[0], []], greedy(3)))


def test_an_aborted_request_keeps_its_tokens_and_frees_its_blocks() -> None:
    with engine() as host:
        request, other = host.add(PROMPTS[0], greedy(50)), host.add(PROMPTS[1], greedy(5))
        finished: list[Completion] = []
        for _ in range(9):
            finished += [completion for _, completion in host.step() if completion]
        aborted = host.abort(request)
        assert aborted.finish_reason == "abort"
        assert aborted.tokens == alone(PROMPTS[0], greedy(50)).tokens[: len(aborted.tokens)]
        while host.busy:
            finished += [completion for _, completion in host.step() if completion]
        assert [each.tokens for each in finished] == [alone(PROMPTS[1], greedy(5)).tokens]
        for gone in (request, other):
            with pytest.raises(RequestError, match="expected a live one"):
                host.abort(gone)


def test_a_waiting_request_can_be_aborted() -> None:
    with engine(max_rows=1) as host:
        first, second = host.add(PROMPTS[0], greedy(3)), host.add(PROMPTS[1], greedy(3))
        host.step()
        assert host.abort(second).tokens == []
        while host.busy:
            host.step()
        with pytest.raises(RequestError):
            host.abort(first)


def test_stop_tokens_end_a_request() -> None:
    tokens = alone(PROMPTS[0], greedy()).tokens
    stop = tokens[4]
    got = alone(PROMPTS[0], greedy(stop_token_ids=(stop,)))
    assert got.finish_reason == "stop"
    assert got.tokens == tokens[: tokens.index(stop) + 1]


def test_the_models_end_token_ends_a_request_unless_ignored() -> None:
    model = model_of("qwen3_5")
    tokens = alone(PROMPTS[0], greedy()).tokens
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [tokens[3]]  # type: ignore[union-attr]
    try:
        got = alone(PROMPTS[0], SamplingParams(max_tokens=20))
        assert got.finish_reason == "stop"
        assert got.tokens == tokens[: tokens.index(tokens[3]) + 1]
        assert alone(PROMPTS[0], greedy()).tokens == tokens
    finally:
        model.generation_config.eos_token_id = before  # type: ignore[union-attr]


def test_stop_strings_end_the_text_before_them() -> None:
    text = alone(PROMPTS[0], greedy()).text
    stop = text[5:8]
    got = alone(PROMPTS[0], greedy(stop=(stop,)))
    assert got.finish_reason == "stop"
    assert got.text == text[: text.index(stop)]


def test_sampling_depends_on_the_requests_seed_and_not_on_its_company() -> None:
    sampling = [
        SamplingParams(max_tokens=12, temperature=0.8, top_k=50, top_p=0.95, seed=seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    with engine() as host:
        together = host.generate(PROMPTS, sampling)
    with engine(max_rows=1, block_size=4, token_budget=5) as host:
        one_by_one = [host.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, sampling, strict=True)]
    assert [each.tokens for each in together] == [each.tokens for each in one_by_one]


def test_sampling_draws_from_the_filtered_distribution() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=3, return_logits=True, ignore_eos=True)
    with engine() as host:
        completions = host.generate([PROMPTS[0]] * 40, sampling)
    assert completions[0].logits is not None
    allowed = set(completions[0].logits[0].topk(3).indices.tolist())
    drawn = {completion.tokens[0] for completion in completions}
    assert drawn <= allowed
    assert len(drawn) > 1


def test_prefill_and_decode_take_turns() -> None:
    """A long prompt does not keep a decoding request waiting for more than one pass."""
    with engine(token_budget=4) as host:
        short = host.add(PROMPTS[0][:2], greedy(20))
        host.step()
        host.add([1] * 100, greedy(2))
        served = [any(delta.request == short for delta, _ in host.step()) for _ in range(20)]
    assert served.count(True) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0, expected at least 1"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"stop": "text"}, "stop: got 'text', expected a tuple"),
        ({"stop": ("",)}, "expected a tuple of strings that are not empty"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(StepError, match="token_budget: got 0, expected at least 1"):
        EngineOptions(token_budget=0)
    with pytest.raises(StepError, match="kernel_block_size: got 5, expected a divisor of block_size 16"):
        engine(kernel_block_size=5)
    with engine() as host, pytest.raises(RequestError, match="sampling: got 1 settings, expected one, or 2 as there"):
        host.generate(PROMPTS[:2], [greedy()])


def test_a_model_is_plain_again_even_where_the_engine_could_not_be_made() -> None:
    model = model_of("qwen3_5")
    with pytest.raises(StepError):
        engine(kernel_block_size=5)
    assert model.config._attn_implementation != "stepbind"  # type: ignore[union-attr]


def test_text_needs_a_tokenizer() -> None:
    with LocalEngine(model_of("llama"), options=EngineOptions(cache_tokens=64, poison=True)) as host:
        assert "this checkpoint has no tokenizer" in str(host.generate(["text"])[0].error)
        assert "no stop strings without a tokenizer" in str(host.generate([[1]], greedy(stop=("a",)))[0].error)
        assert host.generate([[1, 2]], greedy(3))[0].text == ""


@pytest.mark.parametrize("graphs", [False, True])
def test_a_pass_that_fails_ends_what_ran_and_nothing_that_waits(graphs: bool) -> None:
    """The layers ran before it failed, and moved states on: running it again would move them twice."""
    model = model_of("qwen3_5")
    options = EngineOptions(max_rows=2, token_budget=16, graphs=graphs)
    sampling, prompt = SamplingParams(max_tokens=20, ignore_eos=True), list(range(16))
    with LocalEngine(model, options=options) as engine:
        [right] = engine.generate([prompt], sampling)
        first, second, waiting = (engine.add(prompt, sampling) for _ in range(3))
        for _ in range(4):
            engine.step()

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory, say")

        hook = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="say"):
            [engine.step() for _ in range(3)]  # a pass in flight may have to land first
        hook.remove()
        for gone in (first, second):
            with pytest.raises(RequestError, match="a live one"):
                engine.abort(gone)
        done = {}
        while engine.busy:
            done |= {delta.request: completion for delta, completion in engine.step() if completion is not None}
    assert [completion.tokens for completion in done.values()] == [right.tokens]
    assert list(done) == [waiting]
