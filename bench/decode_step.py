"""Decode end to end on one GPU: scheduling, sampling and detokenising included, beside transformers on the same model.

    python bench/decode_step.py [--rows 1,32,256] [--state bfloat16,float32] [--variants] [--no-transformers]
                                [--seconds 150] [--after FILE] [FILE]

The model is Qwen3-Next in its layout, with random bfloat16 weights: 24 layers of which 18 Gated DeltaNet, hidden 2048,
dense MLP 6144, 16 heads of 256 with 2 KV heads, 16/16 linear heads of 128, vocabulary 151,936: 1.76 billion parameters.

Each case has a process of its own. They build, compile and warm up side by side, and are measured one by one when all
are ready and FILE of --after is there, or when only the time for measuring is left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from report import heading, table
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from stepbind import EngineOptions, LocalEngine, SamplingParams
from stepbind.hosts.local import graphs
from stepbind.ops import delta_decode, fla_gated_delta, linear, triton_attention, triton_linear, triton_pdl

CONTEXT, STEPS, SETTLE = 512, 128, 8
BLOCK = 64


def layers_start_late() -> None:
    graphs.EARLY_LAYERS = False


def all_start_late() -> None:
    graphs.EARLY_LAYERS = triton_pdl.ENABLED = False


def library_products() -> None:
    linear.ENABLED = False


def weights_apart() -> None:
    graphs.JOINED_PRODUCTS = False


def nothing_asked_for_early() -> None:
    triton_linear.STEPS_ASKED_FOR = 0


def token_step_in_parts() -> None:
    delta_decode.ENABLED = False


def without_all() -> None:
    all_start_late()
    library_products()
    weights_apart()
    token_step_in_parts()
    triton_attention.STAGES = 3  # one tile under way


VARIANTS: dict[str, Callable[[], None]] = {
    "compiled layers start late": layers_start_late,
    "a launch for each weight": weights_apart,
    "weights of tiles not asked for early": nothing_asked_for_early,
    "the library's products": library_products,
    "DeltaNet token step in parts": token_step_in_parts,
    "without all of these": without_all,
}
"""What can be left out, to see what it gives."""
VARIANTS_OF = {
    1: ("compiled layers start late", "a launch for each weight", "without all of these"),
    32: tuple(VARIANTS),
}
MEASURING = 45
"""Seconds that are kept for measuring, of those given."""


@dataclass(frozen=True)
class Case:
    rows: int
    by: str  # a state's dtype, or "transformers"
    variant: str = ""

    @property
    def name(self) -> str:
        if self.by == "transformers":
            return "transformers generate"
        return f"stepbind, {self.by} state" + (f", {self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Result:
    """Milliseconds: median and worst wall time of a step, GPU time of its graph. Tokens [rows][steps]."""

    wall: float
    worst: float = 0.0
    gpu: float = 0.0
    kernels: str = ""
    tokens: tuple[tuple[int, ...], ...] = ()


def make_model(device: str) -> Any:
    tiny = device == "cpu"
    config = Qwen3NextConfig(
        vocab_size=151_936,
        hidden_size=64 if tiny else 2048,
        intermediate_size=96 if tiny else 6144,
        num_hidden_layers=4 if tiny else 24,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=16 if tiny else 256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=16 if tiny else 128,
        linear_value_head_dim=16 if tiny else 128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (1 if tiny else 6),
        num_experts=0,
        max_position_embeddings=768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_device(device)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.set_default_device("cpu")
    return model


def prompts(rows: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    ids: list[list[int]] = torch.randint(0, 151_936, (rows, CONTEXT), generator=generator).tolist()
    return ids


def ours(case: Case, model: Any, wait: Callable[[], None]) -> Result:
    """Steps of the local host, compiled and captured. `wait` is called when all is warm."""
    on_gpu = model.device.type == "cuda"
    options = EngineOptions(
        block_size=BLOCK,
        token_budget=4096,
        max_rows=case.rows,
        cache_tokens=case.rows * 768,
        graphs=True,
        graph_rows=(case.rows,),
        state_dtype=case.by,
        compile_layers=on_gpu,
    )
    VARIANTS.get(case.variant, lambda: None)()
    # Prompts token by token: they are not measured, and tuning fla-core's kernels would take longer than all else.
    fla_gated_delta.serves = lambda *_: False
    with LocalEngine(model, options=options) as engine:
        for prompt in prompts(case.rows):
            engine.add(prompt, SamplingParams(max_tokens=STEPS + SETTLE + 64, ignore_eos=True))
        while len(engine.step()) < case.rows:  # prompts, the capture, and the first full decode pass
            pass
        for _ in range(SETTLE):
            engine.step()
        wait()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            done = engine.step()
            times.append(time.perf_counter() - start)
            assert len(done) == case.rows
        gpu, kernels = (graph_seconds(engine), kernels_of(engine)) if on_gpu else (0.0, "")  # while all rows are live
        tokens = tuple(tuple(live.sequence.tokens[CONTEXT:]) for live in engine._live.values())
        for request in list(engine._live):
            engine.abort(request)
    return Result(statistics.median(times) * 1e3, max(times) * 1e3, gpu * 1e3, kernels, tokens)


def graph_seconds(engine: LocalEngine) -> float:
    """GPU time of one replay of the engine's largest graph, back to back on the rows' last values."""
    assert engine._decoder is not None
    graph = engine._decoder.largest_graph
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = 20
    start.record()
    for _ in range(count):
        graph.replay()
        engine._decoder.rewind()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def kernels_of(engine: LocalEngine) -> str:
    """Where the GPU time of a step goes: the kernels of one replay, by total time. Kernels that start early count from
    their start, so that the sum can be more than the step."""
    assert engine._decoder is not None
    graph = engine._decoder.largest_graph
    replays = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(replays):
            graph.replay()
            engine._decoder.rewind()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    rows: list[list[object]] = [
        [f"{event.self_device_time_total / replays:.1f}", f"{event.count / replays:.0f}", f"`{event.key[:90]}`"]
        for event in events[:24]
    ]
    total = sum(event.self_device_time_total for event in events) / replays
    count = sum(event.count for event in events) / replays
    rows.append([f"{total:.1f}", f"{count:.0f}", "all"])
    return table(["us a step", "launches", "kernel"], rows)


def theirs(case: Case, model: Any, wait: Callable[[], None]) -> Result:
    """transformers' generate, milliseconds a step: the difference of two lengths, so that the prompt falls out."""
    ids = torch.tensor(prompts(case.rows), device=model.device)

    def run(new_tokens: int) -> float:
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
        out.tolist()  # waits for it
        return time.perf_counter() - start

    run(4)
    wait()
    return Result((run(36) - run(4)) / 32 * 1e3)


def run_case(case: Case, device: str, parent: Connection) -> None:
    """The life of a case's process: get ready, say so, wait for the word, measure, send the result."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        parent.send("ready")
        parent.recv()

    try:
        torch.set_num_threads(1)
        model = make_model(device)
        parent.send((theirs if case.by == "transformers" else ours)(case, model, wait))
    except Exception as error:
        traceback.print_exc()
        parent.send(error if isinstance(error, MemoryError) else RuntimeError(f"{type(error).__name__}: {error}"))


def run_cases(cases: list[Case], device: str, seconds: float, after: Path | None) -> dict[Case, Result]:
    """Results of the cases that were ready in time and did not fail; the others are printed."""
    began = time.monotonic()
    start_measuring = began + seconds - MEASURING
    context = multiprocessing.get_context("spawn")
    pipes: dict[Case, Connection] = {}
    processes = []
    for case in cases:
        pipes[case], theirs_end = context.Pipe()
        processes.append(context.Process(target=run_case, args=(case, device, theirs_end), daemon=True))
        processes[-1].start()
        theirs_end.close()

    def received(case: Case, until: float) -> Any:
        """What a case sends until then; None if nothing."""
        try:
            return pipes[case].recv() if pipes[case].poll(max(0.0, until - time.monotonic())) else None
        except EOFError:
            return RuntimeError("its process has ended")

    ready = []
    for case in cases:
        word = received(case, start_measuring)
        print(f"[{time.monotonic() - began:5.1f} s] {case.rows} rows, {case.name}: {word or 'not ready'}", flush=True)
        if word == "ready":
            ready.append(case)
    for process, case in zip(processes, cases, strict=True):
        if case not in ready:
            process.kill()
    while after is not None and not after.exists():
        if time.monotonic() > start_measuring:
            print(f"measuring though {after} is not there: other work may disturb the figures", flush=True)
            break
        time.sleep(0.2)
    results: dict[Case, Result] = {}
    for case in ready:
        pipes[case].send("go")
        result = received(case, began + seconds)
        if isinstance(result, Result):
            results[case] = result
            print(f"[{time.monotonic() - began:5.1f} s] {cells(case, result)}", flush=True)
        else:
            print(f"{case.rows} rows, {case.name}: {result or 'no result in time'}", flush=True)
    for process in processes:
        process.kill()
    return results


def cells(case: Case, result: Result) -> list[object]:
    """A line of the table."""
    if not result.gpu:
        return [case.rows, case.name, f"{result.wall:.2f}", "", "", ""]
    times = [f"{each:.2f}" for each in (result.wall, result.worst, result.gpu)]
    return [case.rows, case.name, *times, f"{result.gpu / result.wall:.0%}"]


def agreement(results: dict[Case, Result]) -> str:
    """Leading tokens of each row that a variant shares with the case it varies, as a share of all."""
    lines = []
    for case, result in results.items():
        base = results.get(Case(case.rows, case.by))
        if case.variant and base is not None:
            equal = total = 0
            for mine, wanted in zip(result.tokens, base.tokens, strict=True):
                parted = next((i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b), len(mine))
                equal, total = equal + parted, total + len(mine)
            lines.append(f"- {case.rows} rows, {case.variant}: {equal / total:.0%} of the tokens before rows part")
    return "\n".join(lines)


def weight_read_ms(parameters: int) -> tuple[float, float]:
    """The floor: 16-bit parameters that a step reads, at the bandwidth of a large copy on this card."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    bandwidth = 2 * source.numel() * 10 / (start.elapsed_time(end) / 1e3)
    return 2 * parameters / bandwidth * 1e3, bandwidth / 1e12


def parameters_read() -> int:
    """All but the embedding, of which a step reads a line a row."""
    model = make_model("meta")
    read: int = sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel()
    return read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--state", default="bfloat16,float32", help="dtypes of the recurrent state")
    parser.add_argument("--variants", action="store_true", help="what each of the fast paths gives, bfloat16 state")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--seconds", type=float, default=150, help="for all of it")
    parser.add_argument("--after", type=Path, help="measure only when this file exists: other work is done")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, to see that all runs")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("bench/decode_step.py needs a GPU: torch sees none here")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the cases themselves run side by side
    rows_list, states = [int(rows) for rows in arguments.rows.split(",")], arguments.state.split(",")
    cases = [Case(rows, state) for state in states for rows in rows_list]
    if not arguments.no_transformers:
        cases += [Case(rows, "transformers") for rows in rows_list if rows <= 32]
    if arguments.variants:
        cases += [Case(rows, states[0], variant) for rows in rows_list for variant in VARIANTS_OF.get(rows, ())]
    results = run_cases(cases, "cpu" if arguments.dry else "cuda", arguments.seconds, arguments.after)
    found = [cells(case, result) for case, result in results.items()]
    pieces = [f"## {c.rows} rows, {c.name}\n\n{r.kernels}" for c, r in results.items() if r.kernels and not c.variant]
    card = ""
    if not arguments.dry:
        floor, bandwidth = weight_read_ms(parameters_read())
        card = f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth:.2f} TB/s; reading the weights once at that "
        card += f"rate takes {floor:.2f} ms. "
    report = "\n\n".join(
        [
            heading("Decode end to end, 1.76B hybrid, context 512"),
            f"{card}Wall time of `LocalEngine.step` over {STEPS} steps, greedy, decoder layers by torch.compile.",
            table(["rows", "by", "ms a step, median", "worst", "GPU time of the graph, ms", "GPU busy"], found),
            agreement(results),
            *pieces,
        ]
    )
    print(report)
    if arguments.file is not None:
        arguments.file.write_text(report + "\n")


if __name__ == "__main__":
    main()
