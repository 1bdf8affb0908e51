"""Text comes out whole: no half characters, nothing past a stop string, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepbind.hosts.local.text import TextStream
from stepbind.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
texts = st.text(st.sampled_from("ab<|\u00e9\u4e16\U0001f600"), max_size=30)
stops = st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3).map(tuple)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]  # type: ignore[no-any-return]


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    """Up to the stop string that is complete first; of several that end together, the longest."""
    for end in range(len(text) + 1):
        complete = [each for each in stop if text[:end].endswith(each)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(texts, stops)
def test_the_pieces_are_the_text_up_to_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream, pieces = TextStream(TOKENIZER, stop), []
    for token in tokens_of(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == until_stop(text, stop)
    assert stream.stopped == any(each in text for each in stop)


@given(texts)
def test_no_piece_ends_in_half_a_character(text: str) -> None:
    stream = TextStream(TOKENIZER, ())
    for token in tokens_of(text):
        assert "\ufffd" not in stream.push(token)


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ("<|x",))
    assert [stream.push(token) for token in tokens_of("a<|b")] == ["a", "", "", "<|b"]


def test_bytes_that_make_no_character_are_shown_and_do_not_hold_up_the_rest() -> None:
    stream = TextStream(TOKENIZER, ())
    e_acute = tokens_of("\u00e9")[0]  # a lead byte without its continuation
    pieces = [stream.push(e_acute) for _ in range(8)] + [stream.push(tokens_of("a")[0])]
    assert "".join(pieces) == "\ufffd" * 8 + "a"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, ())
    assert (stream.push(1), stream.finish(), stream.text) == ("", "", "")
