"""Recall counts the questions whose value comes back, at the distance that they were drawn for."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from stepbind import Completion, EngineOptions, LocalEngine
from stepbind.demo.questions import DISTANCES
from stepbind.demo.recall import ANSWER_TOKENS, answer, draw_questions, recall_of
from stepbind.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import demo_data


def test_recall_counts_right_answers_by_distance() -> None:
    tokenizer = demo_data.make_tokenizer(0)
    questions = draw_questions(tokenizer, 3, 0.4)
    assert questions == draw_questions(tokenizer, 3, 0.4)
    assert questions != draw_questions(tokenizer, 3, 0.4, seed=1)
    assert [question.wanted for question in questions] == list(DISTANCES) * 3
    assert all(len(tokenizer(question.asked.answer)["input_ids"]) <= ANSWER_TOKENS for question in questions)
    texts = [question.asked.answer if question.wanted < 500 else " nobody." for question in questions]
    recall = recall_of(questions, [Completion([], [], text, "stop") for text in texts])
    assert recall.asked == dict.fromkeys(DISTANCES, 3)
    assert recall.right == {distance: 3 * (distance < 500) for distance in DISTANCES}
    assert recall.share == 5 / 8


def test_an_answer_is_one_line_of_the_engines_own() -> None:
    tokenizer = demo_data.make_tokenizer(0)
    model = tiny_model("qwen3", vocab_size=demo_data.VOCAB_SIZE, eos_token_id=0, pad_token_id=0)
    question = draw_questions(tokenizer, 1, 1.0)[0]
    with LocalEngine(model, tokenizer, EngineOptions(max_rows=2)) as engine:
        [completion] = answer(engine, [question.prompt], return_logits=True)
    assert "\n" not in completion.text
    assert 1 <= len(completion.tokens) <= ANSWER_TOKENS
    assert completion.logits is not None
    assert completion.tokens == torch.argmax(completion.logits, dim=-1).tolist()
