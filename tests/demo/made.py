"""A tiny random checkpoint that reads stories, for everything that needs no right answers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from stepbind.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import demo_data


@functools.cache
def tokenizer() -> Any:
    return demo_data.make_tokenizer(0)


def model(family: str = "qwen3_5") -> Any:
    return tiny_model(family, vocab_size=demo_data.VOCAB_SIZE, eos_token_id=0, pad_token_id=0)


def save(directory: Path, family: str = "qwen3_5") -> Path:
    model(family).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
