"""Decode end to end on one GPU: scheduling, sampling and detokenising included, beside transformers on the same model.

    python bench/decode_step.py [--rows 1,32,256] [--layers compiled] [--state bfloat16] [--no-transformers] [FILE]

The model is Qwen3-Next in its layout, with random bfloat16 weights: 24 layers of which 18 Gated DeltaNet, hidden 2048,
dense MLP 6144, 16 heads of 256 with 2 KV heads, 16/16 linear heads of 128, vocabulary 151,936: 1.76 billion parameters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import heading, table
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from stepbind import EngineOptions, LocalEngine, SamplingParams

CONTEXT, STEPS, SETTLE = 512, 128, 8
BLOCK = 64


def make_model() -> Any:
    config = Qwen3NextConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        num_experts=0,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.set_default_device("cpu")
    return model


def prompts(rows: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    ids: list[list[int]] = torch.randint(0, 151_936, (rows, CONTEXT), generator=generator).tolist()
    return ids


def ours(model: Any, rows: int, state_dtype: str, compile_layers: bool) -> tuple[float, float, float, str]:
    """Median and worst wall time of a step, and the GPU time of its graph, in milliseconds; and its kernels."""
    options = EngineOptions(
        block_size=BLOCK,
        token_budget=8192,
        max_rows=rows,
        cache_tokens=rows * 1024,
        graph_rows=(rows,),
        state_dtype=state_dtype,
        compile_layers=compile_layers,
    )
    with LocalEngine(model, options=options) as engine:
        for prompt in prompts(rows):
            engine.add(prompt, SamplingParams(max_tokens=STEPS + SETTLE + 64, ignore_eos=True))
        while len(engine.step()) < rows:  # prompts, the capture, and the first full decode pass
            pass
        for _ in range(SETTLE):
            engine.step()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            done = engine.step()
            times.append(time.perf_counter() - start)
            assert len(done) == rows
        torch.cuda.synchronize()
        gpu, kernels = graph_seconds(engine), kernels_of(engine)  # while every row is still live
        for request in list(engine._live):
            engine.abort(request)
    return statistics.median(times) * 1e3, max(times) * 1e3, gpu * 1e3, kernels


def graph_seconds(engine: LocalEngine) -> float:
    """GPU time of one replay of the engine's largest graph, back to back on the rows' last values."""
    assert engine._decoder is not None
    graph = engine._decoder.largest_graph
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
    """Where the GPU time of a step goes: the kernels of one replay, by total time."""
    assert engine._decoder is not None
    graph = engine._decoder.largest_graph
    replays = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
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


def theirs(model: Any, rows: int) -> float:
    """transformers' generate, milliseconds a step: the difference of two lengths, so that the prompt falls out."""
    ids = torch.tensor(prompts(rows), device="cuda")

    def run(new_tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(4)
    return (run(36) - run(4)) / 32 * 1e3


def weight_read_ms(model: Any) -> tuple[float, float]:
    """The floor: bytes of weights that a step reads, at the bandwidth of a large copy on this card."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    bandwidth = 2 * source.numel() * 10 / (start.elapsed_time(end) / 1e3)
    read = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    read -= model.get_input_embeddings().weight.numel() * 2
    return read / bandwidth * 1e3, bandwidth / 1e12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--layers", default="plain,compiled", help="what stands between the ops")
    parser.add_argument("--state", default="float32,bfloat16", help="dtypes of the recurrent state")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/decode_step.py needs a GPU: torch sees none here")
    model = make_model()
    floor, bandwidth = weight_read_ms(model)
    rows_list = [int(rows) for rows in arguments.rows.split(",")]
    found: list[list[object]] = []
    pieces: list[str] = []
    for rows in rows_list:
        base = None if arguments.no_transformers or rows > 32 else theirs(model, rows)
        if base is not None:
            found.append([rows, "transformers generate", f"{base:.2f}", "", "", "", "1"])
        for compile_layers in [layers == "compiled" for layers in arguments.layers.split(",")]:
            for state_dtype in arguments.state.split(","):
                wall, worst, gpu, kernels = ours(model, rows, state_dtype, compile_layers)
                name = f"stepbind, {state_dtype} state" + (", compiled layers" if compile_layers else "")
                ratio = f"{base / wall:.1f}" if base else ""
                found.append([rows, name, f"{wall:.2f}", f"{worst:.2f}", f"{gpu:.2f}", f"{gpu / wall:.0%}", ratio])
                print(found[-1], flush=True)
                pieces.append(f"## {rows} rows, {name}\n\n{kernels}")
                torch._dynamo.reset()
    columns = ["rows", "by", "ms a step, median", "worst", "GPU time of the graph, ms", "GPU busy", "times faster"]
    report = "\n\n".join(
        [
            heading("Decode end to end, 1.76B hybrid, context 512"),
            f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth:.2f} TB/s; reading the weights once at that "
            f"rate takes {floor:.2f} ms. Wall time of `LocalEngine.step` over {STEPS} steps, greedy.",
            table(columns, found),
            *pieces,
        ]
    )
    print(report)
    if arguments.file is not None:
        arguments.file.write_text(report + "\n")


if __name__ == "__main__":
    main()
