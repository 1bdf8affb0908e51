"""Make the demonstration checkpoint: a tiny hybrid model that learns one paragraph by heart, in under a minute.

Asked for the paragraph's beginning it goes on to the end, across many cache blocks. It knows nothing else; what it
shows is that state, keys and values survive every block boundary.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging

from stepbind.tiny import byte_tokenizer, tiny_model

PARAGRAPH = (
    "A serving engine owns the requests, the schedule and the memory. The layers of a model want to know where the "
    "tokens of this pass live, which state to read and which one to write, and how far they may look back. Between "
    "the two stands the forward context. If one block is wrong, the text falls apart right here; since you can read "
    "this sentence to its end, every block was found, written once, and read again."
)
STEPS, LEARNING_RATE = 120, 4e-3


def train() -> tuple[torch.nn.Module, float]:
    """The model and its last loss (nats a byte)."""
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer(PARAGRAPH)["input_ids"] + [tokenizer.eos_token_id]])
    model = tiny_model("qwen3_5", initializer_range=0.05).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval(), loss.item()


def main(directory: Path) -> None:
    """Train and save to `directory`, unless it is there already."""
    if (directory / "config.json").exists():
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("Training a tiny hybrid model to know one paragraph by heart ...", flush=True)
    start = time.monotonic()
    model, loss = train()
    model.save_pretrained(directory)  # type: ignore[operator]
    byte_tokenizer().save_pretrained(directory)
    print(f"{STEPS} steps, loss {loss:.4f} nats a byte, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
