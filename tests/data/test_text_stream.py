"""Text from tokens as they come: whole characters, stop strings, and a cost that does not grow."""

import numpy as np
import pytest
import tokenizers
from throughline.data.text_stream import TextStream, open_stop
from throughline.data.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes alone: most characters of other scripts are cut."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(made.to_str())


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    deltas = []
    for token_id in ids:
        deltas.append(stream.push(token_id))
        if stream.stopped:
            return deltas
    return [*deltas, stream.finish()]


def test_streamed_text_never_cuts_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve café 東京 🙂🙂 Ελλάδα ünd so weiter"
    ids = tokenizer.encode(text).tolist()
    assert len(ids) > len(text)  # some characters do take several tokens
    deltas = pieces_of(TextStream(tokenizer.decode), ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_streamed_text_of_any_ids_adds_up_to_the_whole(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 10, 60):
        for _ in range(40):
            ids = rng.integers(0, tokenizer.vocab_size, length).tolist()  # mostly broken characters
            assert "".join(pieces_of(TextStream(tokenizer.decode), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece"])
def test_an_answer_continues_the_prompt_with_its_space(kind: str) -> None:
    """Llama's decoder strips the first space of a text and WordPiece's writes none before it: the answer is
    no text's beginning.
    """
    words = {"the": 0, "cat": 1, "sat": 2, "##s": 3}
    if kind == "metaspace":
        words = {f"\u2581{word}" if "##" not in word else "s": i for word, i in words.items()}
        library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="s"))
        library.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        library = tokenizers.Tokenizer(models.WordPiece(words, unk_token="the"))
        library.decoder = decoders.WordPiece()
    stream = TextStream(library.decode, (), [0])
    assert pieces_of(stream, [1, 3, 2]) == [" cat", "s", " sat", ""]


def test_nothing_of_a_stop_string_is_given_out(tokenizer: Tokenizer) -> None:
    text = "one two three STOP four ST five"
    ids = tokenizer.encode(text).tolist()
    for stops, expected in (
        (("STOP",), "one two three "),
        (("five", "thr"), "one two "),
        (("absent",), text),
        (("o",), ""),
    ):
        deltas = pieces_of(TextStream(tokenizer.decode, stops), ids)
        assert "".join(deltas) == expected
        for i in range(len(deltas)):  # no prefix of the answer ever had to be taken back
            assert expected.startswith("".join(deltas[: i + 1]))


def test_an_open_stop_string_is_held_back() -> None:
    assert [open_stop(text, "abab") for text in ("", "x", "xa", "xab", "xaba", "b")] == [0, 0, 1, 2, 3, 0]


def test_bytes_that_are_no_text_cost_no_more_than_their_number() -> None:
    """Decoded together they would be read again with each that comes."""
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    stream = TextStream(decode)
    text = "".join(stream.push(1) for _ in range(2000)) + stream.finish()
    assert text == "\ufffd" * 2000 and max(lengths) < 100
