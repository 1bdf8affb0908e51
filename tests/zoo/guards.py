"""The lines that guard against the zoo's faults, and a program that takes each away in turn.

Run as a program it prints, for each guard, the exit code of its line's tests without it: 1 means that they failed, as
they must. The heavy imports are made once; each guard has a forked process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent.parent / "src" / "stepbind"


@dataclass(frozen=True)
class Guard:
    """`line`: the zoo's. `guard` in `file` is replaced by `without`, which is the fault."""

    line: str
    file: str
    guard: str
    without: str


FILL, LAUNCH, KERNELS = "plan/fill_torch.py", "plan/fill_triton.py", "plan/fill_kernels.py"
CONV, DELTA, LATENT = "ops/causal_conv.py", "ops/gated_delta.py", "ops/latent_attention.py"
GRAPHS, WRITE = "hosts/local/graphs.py", "ops/triton_cache_write.py"
IN_POOL = "(block < num_blocks):\n"
RTP_READER, RTP_STEPS, RTP_BINDING = (f"hosts/rtp_llm/{name}.py" for name in ("reader", "steps", "binding"))
POSITIONS = "shared.prior_len[token.row] + token.offset if"
LOOP = "[n + i for n, q in zip(step.prior_len.host, step.query_len.host) for i in range(q)]"
ON_DEVICE, FROZEN = "_on_device(lengths, rows, step.device)", "torch.from_numpy(lengths.host)"
VERIFIED = "prior.copy_(host.prefix_len.device)"
SOURCES = "key = (tags, numbers, blocks, named, sizes)"
SEARCH = "torch.searchsorted(end, index, right=True)"
REPEAT = "torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)"
ARGMAX = "logits.argmax(dim=-1).int()"
GUARDS = [
    Guard("01", FILL, "state_read[:rows] = read", "state_read[:rows] = write"),
    Guard("02", FILL, "    group, rows = table.group,", "    group, rows = step.tables[0].group,"),
    Guard("03", FILL, "* group.block_size - prior[item.row]", "* group.block_size"),
    Guard("04", CONV, "shared.query_len, plan.state_write)", "shared.query_len, plan.state_read)"),
    Guard("05", FILL, "inside = (column >= 0) & ", "inside = "),
    Guard("06", FILL, "inside = (column >= 0) & ", "inside = "),
    Guard("06", FILL, "missing = ((prior > 0) & (read < 0)) | ", "missing = "),
    Guard("07", "hosts/local/pool.py", "self._free.pop()", "self._free[-1]"),
    Guard("08", FILL, "    group_plan.state_write[rows:] = -1\n", ""),
    Guard("08", RTP_STEPS, "torch.mul(new, live, out=query)", "query.copy_(new)"),
    Guard("08", RTP_STEPS, "    prior.mul_(live)\n", ""),
    Guard("09", "ops/cache_write.py", "nonzero(slot >= 0)", "nonzero(slot >= -1)"),
    Guard("09", CONV, "nonzero(slot >= 0)", "nonzero(slot >= -1)"),
    Guard("09", DELTA, "recurrent[slot[row].long()] = state[row]", "recurrent[slot.long()] = state"),
    Guard("09", CONV, "nonzero(plan.state_read >= 0)", "nonzero(plan.state_read >= -1)"),
    Guard("09", DELTA, "state[row] = recurrent[slot[row].long()].float()", "state[:] = recurrent[slot.long()].float()"),
    Guard("09", WRITE, f"(target >= 0) & {IN_POOL}        head", f"(target >= -1) & {IN_POOL}        head"),
    Guard("09", WRITE, f"(target >= 0) & {IN_POOL}        at", f"(target >= -1) & {IN_POOL}        at"),
    Guard("09", "ops/triton_causal_conv.py", "(write >= 0) & (write < num_slots) & (W", "(write < num_slots) & (W"),
    Guard("09", "ops/triton_gated_delta.py", "if (write >= 0) & (write < num_slots)", "if (write < num_slots)"),
    Guard("10_11", FILL, "    group_plan.state_write[rows:] = -1\n", ""),
    Guard("10_11", FILL, "inside = (physical >= group.first_block) & ", "inside = (physical >= 0) & "),
    Guard("12", "ops/attention.py", "context.masked_fill_(~readable[:, None, :, None], 0)", "context"),
    Guard("12", LATENT, "context.masked_fill_(~readable[..., None], 0)", "context"),
    Guard("13", "ops/ragged.py", "new_zeros(tokens, *padded.shape[2:])", "new_full([tokens, *padded.shape[2:]], 1e9)"),
    Guard("13", CONV, "out = torch.zeros_like(x)", "out = torch.full_like(x, 1e9)"),
    Guard("13", "ops/triton_causal_conv.py", "_activate(total, SILU), 0.0)", "_activate(total, SILU), 1.0)"),
    Guard("14", FILL, "        out[rows:] = 0\n", ""),
    Guard("14", FILL, "    group_plan.slot[tokens:] = -1\n", ""),
    Guard("14", FILL, "    group_plan.state_write[rows:] = -1\n", ""),
    Guard("14", "plan/arena.py", "tokens = step.padded_rows, step.padded_", "tokens = step.num_rows, step.num_"),
    Guard("15", FILL, "    group_plan.slot[tokens:] = -1\n", ""),
    Guard("15", FILL, "    group_plan.state_read[rows:] = -1\n", ""),
    Guard("15", FILL, "    return _none_outside_pool(block, table.group), beyond", "    return block, beyond"),
    Guard("15", "targets/atom/values.py", "blocks, group_plan.slot)", "blocks, group_plan.slot.clone())"),
    Guard("16", FILL, "        out[tokens:] = padding\n", ""),
    Guard("16_tables", FILL, "        out[tokens:] = padding\n", ""),
    Guard("16_tables", LATENT, "(row >= 0)[:, None] & ", ""),
    Guard("17", FILL, "_store_table(group_plan.physical_table,", "_store_table(physical.clone(),"),
    Guard("17", FILL, "    group_plan.state_read[:rows] = read\n", ""),
    Guard("17", FILL, "    group_plan.state_write[:rows] = write\n", ""),
    Guard(
        "17",
        RTP_READER,
        '(inputs, "kv_cache_kernel_block_id_device", None)',
        '(inputs, "kv_cache_block_id_device", None)',
    ),
    Guard("18", FILL, POSITIONS, f"torch.tensor({LOOP}) if"),
    Guard("18", FILL, ON_DEVICE, FROZEN),
    Guard("18", RTP_STEPS, VERIFIED, "prior.copy_(host.prefix_len.host)"),
    Guard("19", FILL, "zip(step.tables, plan.groups, strict", "zip(step.tables, plan.groups[:2] * 2, strict"),
    Guard("19", LAUNCH, "_group_words(group_plan, ", "_group_words(arena.groups[index % 2], "),
    Guard("19", "context.py", "self.plan.groups[index], ", "self.plan.groups[index % 2], "),
    Guard("20", LATENT, " & (position < shared.context_len[:, None])", ""),
    Guard("20", "plan/arena.py", '        ("max_context", step.max_context, arena.max_context),\n', ""),
    Guard("20", "ops/attention.py", " & (position < shared.context_len[:, None])", ""),
    Guard("20", "ops/triton_attention_splits.py", "tl.minimum(prior + token - start + 1, table_", "(table_"),
    Guard("20", RTP_BINDING, "longest is not None and longest > self.max_context", "False"),
    Guard("21", "caches.py", "            buffer.data_ptr(),", "            0,"),
    Guard("21", "caches.py", "            buffer.stride(),", "            (),"),
    Guard("21", "caches.py", "            buffer.dtype,", "            torch.float32,"),
    Guard("21", "caches.py", "            buffer.device,", '            torch.device("cpu"),'),
    Guard("21", "caches.py", "BufferKey.of(index_buffer), spec, group)", "BufferKey.of(index_buffer), None, group)"),
    Guard("22", RTP_BINDING, SOURCES, "key = (tags, numbers)"),
    Guard("22", "targets/atom/kept.py", "return numbers, sizes, ", "return numbers, "),
    Guard("23", FILL, POSITIONS, f"torch.tensor({LOOP}) if"),
    Guard("23", GRAPHS, "position_ids=plan.shared.position[None]", "position_ids=None"),
    Guard("23", RTP_STEPS, "if host.is_graph or lengths.are_bounds or is_dummy:", "if is_dummy:"),
    Guard("24", FILL, "torch.where(real, column, 0)].long()", "torch.where(real, column, 0)]"),
    Guard(
        "25",
        FILL,
        "    _fill_shared(step, plan.shared)\n",
        "    [_fill_shared(step, plan.shared) for _ in step.tables]\n",
    ),
    Guard("25", LAUNCH, "        call.launch(pointer_to(", "        for _ in step.tables: call.launch(pointer_to("),
    Guard("25", KERNELS, "is_first = tl.program_id(1) == 0", "is_first = tl.program_id(1) >= 0"),
    Guard("25", RTP_BINDING, "if key == self._sources_key:", "if False:"),
    Guard("25", "hosts/local/rows.py", "if self._add_new_blocks():", "if self._add_new_blocks() or True:"),
    Guard("26", FILL, SEARCH, REPEAT),
    Guard("26", "plan/__init__.py", 'strict or (strict is None and arena.device.type == "cpu")', "strict is not False"),
    Guard("26", RTP_STEPS, VERIFIED, "prior.copy_(torch.tensor(host.prefix_len.device.tolist()))"),
    Guard("26", GRAPHS, ARGMAX, f"torch.tensor({ARGMAX}.tolist())"),
    Guard("26", "ops/triton_causal_conv.py", "shared.query_len.shape[0]", "int((shared.query_len > 0).sum())"),
]


CONFIGURATIONS = (
    "DeepseekV3Config",
    "DeepseekV32Config",
    "GlmMoeDsaConfig",
    "LlamaConfig",
    "OlmoHybridConfig",
    "Qwen3Config",
    "Qwen3NextConfig",
    "Qwen3_5MoeTextConfig",
    "Qwen3_5TextConfig",
)


def exit_code_without(guard: Guard) -> int:
    """Exit code of the line's tests against a copy of the package in which the guard is gone."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "stepbind"
        shutil.copytree(PACKAGE, copy)  # compiled files too: all but one are still good
        source = copy / guard.file
        text = source.read_text()
        if text.count(guard.guard) != 1:
            raise SystemExit(f"line {guard.line}: {guard.guard!r} is {text.count(guard.guard)} times in {guard.file}")
        source.write_text(text.replace(guard.guard, guard.without))
        child = os.fork()
        if child == 0:
            sys.path.insert(0, directory)
            os._exit(_run_tests(guard, directory))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_tests(guard: Guard, directory: str) -> int:
    import pytest

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS / f"test_line_{guard.line}.py")])
    used = sys.modules.get("stepbind")
    # Any other code than pytest's own 0 or 1 is no answer.
    return int(code) if used is not None and str(used.__file__).startswith(directory) else 99


def main() -> None:
    import_heavy_modules()
    print(json.dumps([exit_code_without(guard) for guard in GUARDS]))


def import_heavy_modules() -> None:
    """Everything that tests import but the package and themselves."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import hypothesis  # noqa: F401
    import torch
    import torch._dynamo
    import transformers
    import triton  # noqa: F401

    torch.set_num_threads(1)  # a forked process has no thread pool
    torch.zeros(2, device="meta").cumsum(0)  # shapes of operations are imported when one is asked for
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "Qwen3_5ForCausalLM", *CONFIGURATIONS):
        getattr(transformers, name)  # transformers imports a class's module when it is asked for


if __name__ == "__main__":
    main()
