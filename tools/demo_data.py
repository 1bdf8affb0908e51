"""What the demonstration checkpoints learn from: their tokenizer, and story after story as token ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from stepbind.demo.stories import Piece, story_pieces

VOCAB_SIZE = 1280
END_OF_TEXT = "<|end|>"
CHARACTERS_A_TOKEN, SPARE_CHARACTERS = 4.8, 400
"""A little over what the tokenizer reaches on stories, so that one of that many characters fills its row of tokens."""

Batch = tuple[torch.Tensor, torch.Tensor]


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE from stories of this seed: nearly every word of a story is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(END_OF_TEXT, special=True)],
        show_progress=False,
    )
    texts = ("".join(piece.text for piece in story(seed, number, 0.5, 4000)) for number in range(500))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def story(seed: int, number: int, named: float, characters: int) -> list[Piece]:
    """Story `number` of a seed."""
    return story_pieces(random.Random(f"{seed}-{number}"), named, characters=characters)


WORDS = re.compile(r" ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s")
"""What the tokenizer takes a story apart into before anything else. A space belongs to the word behind it."""


class Encoder:
    """A story's tokens, word by word: a few hundred words make all stories, and each is looked up once.

    `tests/demo` holds it against the tokenizer, which takes several times as long on text in so many small parts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._known = tokenizer, dict[str, list[int]]()

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in WORDS.findall(text):
            if word not in self._known:
                self._known[word] = self._tokenizer(word)["input_ids"]
            ids += self._known[word]
        return ids


class Stories(Dataset[Batch]):
    """Rows of `length` + 1 token ids, and the Part of the story that each belongs to. Row `n` is always the same."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, first: int, rows: int, length: int, named: float
    ) -> None:
        self._encode, self._named = Encoder(tokenizer), named
        self._seed, self._first, self._rows, self._length = seed, first, rows, length

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Batch:
        wanted = self._length + 1
        characters = int(wanted * CHARACTERS_A_TOKEN) + SPARE_CHARACTERS
        ids: list[int] = []
        parts: list[int] = []
        for piece in story(self._seed, self._first + index, self._named, characters):
            tokens = self._encode(piece.text)
            ids += tokens
            parts += [piece.part] * len(tokens)
        if len(ids) < wanted:
            raise ValueError(f"story {index} has {len(ids)} tokens, {wanted} wanted: raise CHARACTERS_A_TOKEN")
        return torch.tensor(ids[:wanted]), torch.tensor(parts[:wanted])


def batches(dataset: Stories, batch_rows: int, workers: int) -> Iterator[Batch]:
    """The rows in order, `batch_rows` at a time, made by so many processes."""
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        batch_size=batch_rows,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )
    return iter(loader)
