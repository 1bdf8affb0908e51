"""The command line: `stepbind generate`, `stepbind demo`, `stepbind models`, `stepbind doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from stepbind import doctor as doctor_report
from stepbind.demo import show
from stepbind.demo.faults import FAULTS
from stepbind.demo.recall import draw_questions
from stepbind.demo.shipped import SHIPPED, shipped_checkpoint
from stepbind.demo.stories import NAMED
from stepbind.demo.ways import columns, load, ways
from stepbind.errors import StepError
from stepbind.hosts.local import Completion, EngineOptions, LocalEngine, SamplingParams
from stepbind.hosts.local.compare import Agreement, compare
from stepbind.models.family import families

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)

FAILED, UNUSABLE = 1, 2
"""Exit codes: something disagreed or could not be served; the call itself makes no sense."""


def main() -> None:
    """Run the command line; a `StepError` or a checkpoint that cannot be read is one line, not a trace."""
    try:
        app()
    except (StepError, OSError) as error:
        stderr.print(f"stepbind: {error}", markup=False)
        raise SystemExit(UNUSABLE) from None


@app.command()
def generate(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] [PROMPT]...",
            help="A transformers checkpoint (its directory, its hub name, or one that comes with stepbind: "
            f"{', '.join(SHIPPED)}), and texts to continue. CHECKPOINT can be left out before a PROMPT of more than "
            f"one word, and with prompts from a file: it is {SHIPPED[0]} then.",
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="One prompt a line, after those given.", exists=True, dir_okay=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens a prompt, at the most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling, the same for each prompt.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-text token.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens a cache block.")] = 16,
    kernel_block_size: Annotated[int | None, typer.Option(help="Tokens a kernel block; divides the former.")] = None,
    chunk: Annotated[int, typer.Option(help="Prompt tokens one prefill pass may take.")] = 256,
    max_rows: Annotated[int, typer.Option(help="Requests in flight.")] = 16,
    cache_tokens: Annotated[int, typer.Option(help="Tokens the cache holds.")] = EngineOptions.cache_tokens,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    against: Annotated[
        bool, typer.Option("--compare", help="Hold it against transformers' own generation; exit 1 if they differ.")
    ] = False,
    poison: Annotated[bool, typer.Option(help="Prove that no pass touches what no request owns.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, a line each.")] = False,
) -> None:
    """Continue prompts on engine-owned cache blocks."""
    if against and temperature != 0:
        raise StepError("--temperature", temperature, "0 with --compare: sampled tokens have nothing to equal")
    checkpoint, prompts = checkpoint_and_prompts(given or [])
    prompts += prompts_file.read_text().splitlines() if prompts_file else []
    if not prompts:
        what = f"none behind the CHECKPOINT {checkpoint!r}" if given else "none"
        raise StepError("prompts", what, "at least one PROMPT or a --prompts-file")
    sampling = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        return_logits=against,
    )
    options = EngineOptions(
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        token_budget=chunk,
        max_rows=max_rows,
        cache_tokens=cache_tokens,
        poison=poison,
    )
    with _loading(checkpoint):
        engine = LocalEngine.from_pretrained(located(checkpoint), options=options, dtype=dtype, device=device)
    with engine:
        completions = _generate(engine, prompts, sampling)
    agreements: list[Agreement | None] = [None] * len(prompts)
    if against:
        with _status("Generating again with transformers"):
            agreements = list(compare(engine.model, completions))
    for text, completion, agreement in zip(prompts, completions, agreements, strict=True):
        if as_json:
            print(json.dumps(_as_json(text, completion, agreement)))
        else:
            _print(text, completion, agreement)
    failed = any(completion.error for completion in completions)
    if failed or any(agreement is not None and not agreement.equal for agreement in agreements):
        raise typer.Exit(FAILED)


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help=f"Whose stories: {' or '.join(NAMED)}.")] = SHIPPED[0],
    fault: Annotated[
        str | None, typer.Option("--break", help=f"Switch a known fault on, in a shim for tests: {', '.join(FAULTS)}.")
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions in the table, at each distance.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of the story and the questions.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint that learned them; left out, the shipped one.", file_okay=False)
    ] = None,
) -> None:
    """Tell a story, ask about it, and count right answers by how long ago the telling was."""
    if name not in NAMED:
        raise StepError("stories", repr(name), f"one of {', '.join(NAMED)}")
    if device == "cpu":
        torch.set_num_threads(1)  # these layers are too small to share: with a second core busy, two take longer
    with _loading(name):
        subject = load(checkpoint or shipped_checkpoint(name), fault=fault, device=device)
    if fault is not None:
        stdout.print(show.fault_line(fault))
    show.converse(stdout, subject, NAMED[name], seed)
    drawn = draw_questions(subject.tokenizer, questions, NAMED[name], seed)
    with _bar("Asking", "questions", len(drawn) * ways(subject)) as came:
        found = list(columns(subject, drawn, came))
    stdout.print(show.recall_table(found, fault))


@app.command()
def models() -> None:
    """List the model families that stepbind can feed."""
    table = Table("family", "model_type", "layers")
    for family in families():
        table.add_row(family.name, ", ".join(family.model_types), family.layers)
    stdout.print(table)


@app.command()
def doctor() -> None:
    """Print versions, devices, and which kernel each op would use and why."""
    found = Table("package", "version")
    for package, number in doctor_report.versions().items():
        found.add_row(package, number)
    stdout.print(found)
    for device in doctor_report.devices():
        stdout.print(f"device: {device}")
    kernels = Table("op", "on", "kernel", "why")
    for choice in doctor_report.choices():
        kernels.add_row(choice.op, choice.device, choice.kernel, choice.why)
    stdout.print(kernels)


def checkpoint_and_prompts(given: list[str]) -> tuple[str, list[str]]:
    """The first argument is the checkpoint, unless it cannot be one: no directory, no path, and with a space in it,
    which no hub name has. Then it is the first prompt, and the checkpoint one that comes with stepbind."""
    if not given:
        return SHIPPED[0], []
    first = given[0]
    is_place = os.path.isdir(first) or first.startswith((".", "/", "~"))
    if not is_place and any(character.isspace() for character in first):
        return SHIPPED[0], given
    return first, given[1:]


def located(checkpoint: str) -> str | Path:
    """A shipped checkpoint's directory for its name, unless a directory here has that name."""
    return shipped_checkpoint(checkpoint) if checkpoint in SHIPPED and not Path(checkpoint).is_dir() else checkpoint


def _generate(engine: LocalEngine, prompts: list[str], sampling: SamplingParams) -> list[Completion]:
    """Generate, with a bar where somebody watches."""
    with _bar("Generating", "tokens", len(prompts) * sampling.max_tokens) as came:
        return engine.generate(prompts, sampling, on_token=lambda delta: came(1))


@contextmanager
def _bar(doing: str, unit: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar where somebody watches; what is given is called with how many more are done."""
    if not stderr.is_terminal:
        yield lambda count: None
        return
    columns = (SpinnerColumn(), TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(unit, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    """transformers draws its own bar while it loads; it is silent where nobody watches."""
    if not stderr.is_terminal:
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
    with _status(f"Loading {checkpoint}"):
        yield


@contextmanager
def _status(text: str) -> Iterator[None]:
    if not stderr.is_terminal:
        yield
        return
    with stderr.status(text):
        yield


def _as_json(prompt: str, completion: Completion, agreement: Agreement | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": prompt,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }
    if completion.error is not None:
        found["error"] = completion.error
    if agreement is not None:
        found["compare"] = dataclasses.asdict(agreement) | {"equal": agreement.equal}
    return found


def _print(prompt: str, completion: Completion, agreement: Agreement | None) -> None:
    stdout.print(f"[bold]{_escaped(prompt)}[/bold]{_escaped(completion.text)}")
    if completion.error is not None:
        stderr.print(f"stepbind: {completion.error}", markup=False)
    if agreement is not None:
        verdict = "equal to transformers" if agreement.equal else "DIFFERS from transformers"
        stdout.print(
            f"  {verdict}: {agreement.agreed} of {agreement.tokens} tokens agree, "
            f"largest logit difference {agreement.max_logit_difference:.1e}"
        )


def _escaped(text: str) -> str:
    """Text as it is, without what would be markup or move the cursor."""
    return show.printable(text).replace("[", "\\[")
