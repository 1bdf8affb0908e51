"""What this machine offers: versions, devices, and which kernel each op would use there, and why."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature

import torch
from torch.nn.attention.varlen import varlen_attn

from stepbind.ops import varlen_attention
from stepbind.targets.atom.native import native

PACKAGES = ("stepbind", "torch", "transformers", "tokenizers", "safetensors", "triton", "fla-core")
OPS = (
    "plan fill",
    "cache write",
    "paged attention, decode",
    "paged attention, prefill",
    "causal convolution",
    "gated delta rule, decode",
    "gated delta rule, prefill",
    "products of few rows",
    "latent attention",
    "latent attention, indexer",
)


@dataclass(frozen=True)
class Choice:
    """The kernel that an op would use on a device."""

    op: str
    device: str
    kernel: str
    why: str


def versions() -> dict[str, str]:
    """Python's and each package's version, "not installed" where it is not."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> list[str]:
    """The CPU with its threads, and every GPU that torch sees."""
    found = [f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
    return found


def choices() -> list[Choice]:
    """For each device kind here and each op: the kernel that would run."""
    found = [Choice(op, "cpu", "torch", "vectorised over rows; the CPU's only kernel") for op in OPS]
    found.append(_bind_on_host("bind for ATOM"))
    if torch.cuda.is_available():
        found += [_on_gpu(op) for op in OPS]
    return found


def _bind_on_host(op: str) -> Choice:
    if native is None:
        return Choice(op, "cpu", "numpy", "slower: the package was installed without a C compiler")
    return Choice(op, "cpu", "C, numpy", "compiled where the package was installed, for usual passes; else numpy")


def _on_gpu(op: str) -> Choice:
    if op == "paged attention, decode":
        return Choice(op, "cuda", "Triton", f"stepbind's own, over pages; {_libraries_over_pages()}")
    if op == "paged attention, prefill":
        return _prefill_attention(op)
    if op == "latent attention":
        return Choice(op, "cuda", "Triton", "stepbind's own, absorbed; dense, or over the tokens that an indexer chose")
    if op == "latent attention, indexer":
        return Choice(
            op, "cuda", "Triton", "stepbind's own: scores, and a radix selection that falls on ties as the CPU's"
        )
    if op == "products of few rows":
        if torch.version.hip is not None:
            return Choice(op, "cuda", "torch", "the library's; stepbind's own were not measured on AMD")
        return Choice(op, "cuda", "Triton", "in decode graphs of up to 32 rows, for 16-bit weights; else the library's")
    if op != "gated delta rule, prefill":
        return Choice(op, "cuda", "Triton", "stepbind's own, the same source on NVIDIA and AMD")
    if find_spec("fla") is not None:
        return Choice(op, "cuda", "fla-core, Triton", "chunked, for 64 new tokens a row and more in 16-bit types")
    return Choice(op, "cuda", "Triton", "token by token: fla-core, which has a chunked one, is not installed")


def _libraries_over_pages() -> str:
    has_one = "has one" if "block_table" in signature(varlen_attn).parameters else "has none"
    installed = "is" if find_spec("flashinfer") is not None else "is not"
    return (
        f"never a library's (torch {torch.__version__} {has_one}, FlashInfer {installed} installed), which follows a "
        "table's entries unchecked"
    )


def _prefill_attention(op: str) -> Choice:
    without = "torch's varlen attention, for passes without prior context,"
    reason = varlen_attention.unsupported(torch.device("cuda"))
    if reason is not None:
        return Choice(op, "cuda", "Triton", f"stepbind's own; {without} is not used: {reason}")
    if not varlen_attention.FASTER_FROM:
        return Choice(op, "cuda", "Triton", f"stepbind's own; {without} is installed and was not measured faster")
    where = ", ".join(f"{dim} (from {tokens} tokens)" for dim, tokens in varlen_attention.FASTER_FROM.items())
    return Choice(
        op,
        "cuda",
        "torch varlen, Triton",
        f"{without} in 16-bit types at head dims of {where}, where it was measured faster; else stepbind's own",
    )
