"""Token ids to text, token by token, with exactly the text that the tokenizer's own decoder makes of all of
them.

The library's `DecodeStream` releases the characters of a run of byte tokens as they are complete. Its whole
`decode` replaces every byte of a run that turns out not to be UTF-8. The two differ then, so a run is held
back here until it ends.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from .framing import steps_of

REPLACEMENT = "\ufffd"
OPEN_TOKENS = 64  # undecodable tokens held back at most where only a decoding function is known
ANCHOR = "a"  # a token that stands before another one, which then does not begin the text
# Decoders that make one text of each token, whatever the tokens beside it are; the first token is an exception.
SEPARATE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}


class Detokenizer(Protocol):
    """The texts of tokens that come one by one. There is one text for each token; their join is the text of
    all.
    """

    def push(self, token_id: int) -> list[str]:
        """Take a token; return the texts of the tokens that are settled now, in order. It may be none."""
        ...

    def finish(self) -> list[str]:
        """Return the texts of the tokens that were held back. No more tokens come."""
        ...


class TokenTexts:
    """What each token of one tokenizer contributes to a text. `library`: a `tokenizers.Tokenizer`."""

    def __init__(self, library: Any, decoder: dict[str, Any] | None) -> None:
        self._library = library
        steps = steps_of(decoder, "decoders")
        kinds = [step["type"] for step in steps]
        self._byte_level = _byte_level_table() if kinds == ["ByteLevel"] else None
        self.byte_fallback = "ByteFallback" in kinds
        self.is_separate = self._byte_level is None and _is_separate(steps)
        self.bytes_of = lru_cache(None)(self._bytes_of)
        self.text_of = lru_cache(None)(self._text_of)
        self.byte_of = lru_cache(None)(self._byte_of)
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes of UTF-8 that the decoder only joins."""
        return self._byte_level is not None

    def decode(self, tokens: Sequence[str]) -> str:
        """The decoder's text of token strings."""
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def name_of(self, token_id: int) -> str:
        """The token as the vocabulary has it; "" for an id outside the vocabulary."""
        return self._library.id_to_token(token_id) or ""

    def _byte_of(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token such as `<0xE4>` stands for, None for any other token."""
        name = self.name_of(token_id)
        if not (self.byte_fallback and len(name) == 6 and name.startswith("<0x") and name.endswith(">")):
            return None
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None

    def _text_of(self, token_id: int) -> str:
        """The text that the token adds behind another one; U+FFFD where it is no whole character."""
        if self._byte_level is not None:
            return self._bytes_of(token_id).decode("utf-8", "replace")
        name = self.name_of(token_id)
        if not name:
            return ""
        anchor, both = self.decode([ANCHOR]), self.decode([ANCHOR, name])
        return both.removeprefix(anchor)

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of UTF-8 that the token adds behind another one."""
        if (byte := self._byte_of(token_id)) is not None:
            return bytes([byte])
        if self._byte_level is None:
            return self._text_of(token_id).encode()
        name = self.name_of(token_id)
        table = self._byte_level
        if any(character not in table for character in name):
            return name.encode()
        return bytes(table[character] for character in name)


class JoinedBytes:
    """Joins bytes. A token that ends inside a character is held back until the character is complete."""

    def __init__(self, texts: TokenTexts, before: Sequence[int], skip_special: bool) -> None:
        self._texts = texts
        self._skipped = texts.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[str] = []  # texts of the tokens that are held back
        self._told = False
        visible = [i for i in before[-OPEN_TOKENS:] if i not in self._skipped]
        for token_id in visible[-4:]:  # a character has at most four bytes, and so its open beginning
            self.push(token_id)
        self._pending = []
        self._told = bool(
            self._decoder.getstate()[0]
        )  # the prompt's text ended in U+FFFD for an open character

    def push(self, token_id: int) -> list[str]:
        skipped = token_id in self._skipped
        text = "" if skipped else self._decoder.decode(self._texts.bytes_of(token_id))
        if self._told and text:
            self._told, text = False, text.removeprefix(REPLACEMENT)
        self._pending.append(text)
        if self._decoder.getstate()[0]:
            return []
        settled, self._pending = self._pending, []
        return settled

    def finish(self) -> list[str]:
        rest = self._decoder.decode(b"", final=True)
        rest = "" if self._told else rest
        settled, self._pending = self._pending, []
        if settled:
            settled[-1] += rest
        return settled


class JoinedTokens:
    """Joins the texts of tokens that are decoded one by one, and of runs of byte tokens, which are decoded
    together.
    """

    def __init__(self, texts: TokenTexts, before: Sequence[int], skip_special: bool) -> None:
        self._texts = texts
        self._skipped = texts.special_ids if skip_special else frozenset[int]()
        self._first: list[str] | None = []  # the tokens so far while they have no text, None behind them
        self._run: list[int] = []  # the byte tokens of the open run
        self._held: list[
            int | None
        ] = []  # of the tokens held back their place in the run, None for a skipped one
        self._told = 0  # tokens at the beginning of `_held` that belong to the prompt
        self._begin(before)

    def _begin(self, before: Sequence[int]) -> None:
        """Read the end of the prompt: from the last token with a text of its own on."""
        start = len(before)
        while start > 0:
            start -= 1
            if before[start] not in self._skipped and self._texts.byte_of(before[start]) is None:
                break
        if any(i not in self._skipped for i in before[max(0, start - OPEN_TOKENS) : start]):
            self._first = None  # something stands before the tokens that are read
        for token_id in before[start:]:
            self.push(token_id)
        self._told = len(self._held)

    def push(self, token_id: int) -> list[str]:
        if token_id in self._skipped:
            if not self._held:
                return [""]
            self._held.append(None)
            return []
        if self._texts.byte_of(token_id) is not None:
            self._held.append(len(self._run))
            self._run.append(token_id)
            return []
        settled = self._settle()
        settled.append(self._one(token_id))
        return settled

    def finish(self) -> list[str]:
        return self._settle()

    def _one(self, token_id: int) -> str:
        if self._first is None:
            return self._texts.text_of(token_id)
        return self._beginning([self._texts.name_of(token_id)])

    def _beginning(self, names: list[str]) -> str:
        """The text of tokens that begin the text: decoders strip or add a blank there."""
        assert self._first is not None
        self._first += [name for name in names if name]
        text = self._texts.decode(self._first) if self._first else ""
        if text:
            self._first = None
        return text

    def _settle(self) -> list[str]:
        """End the run of byte tokens and return the texts of all tokens that are held back."""
        if not self._held:
            return []
        texts = self._run_texts()
        settled = ["" if place is None else texts[place] for place in self._held][self._told :]
        self._run, self._held, self._told = [], [], 0
        return settled

    def _run_texts(self) -> list[str]:
        """The text of each byte token of the run: a character belongs to the token that completes it."""
        names = [self._texts.name_of(i) for i in self._run]
        if self._first is None:
            whole = self._texts.decode([ANCHOR, *names]).removeprefix(self._texts.decode([ANCHOR]))
        else:
            whole = self._beginning(names)
        if whole == REPLACEMENT * len(names):
            return [REPLACEMENT] * len(names)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._texts.bytes_of(i)) for i in self._run]
        if "".join(texts) == whole:
            return texts
        return [""] * (len(names) - 1) + [whole]  # its first blank was stripped


class WindowDetokenizer:
    """Any decoding function: the text of a token is what it adds to the text of the token before it."""

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = [int(i) for i in before[-1:]]  # the last settled token, and those held back
        self._known = len(decode(self._ids)) if self._ids else 0  # characters of the settled token
        self._held = 0

    def push(self, token_id: int) -> list[str]:
        self._ids.append(token_id)
        self._held += 1
        text = self._decode(self._ids)
        if (
            text.endswith(REPLACEMENT) and self._held < OPEN_TOKENS
        ):  # the next token may complete the character
            return []
        return self._settle(text)

    def finish(self) -> list[str]:
        return self._settle(self._decode(self._ids)) if self._held else []

    def _settle(self, text: str) -> list[str]:
        settled = [""] * (self._held - 1) + [text[self._known :]]
        self._ids, self._held = self._ids[-1:], 0
        self._known = len(self._decode(self._ids))
        return settled


def pieces_of(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    """The text of each token; their join is the text of all."""
    settled: list[str] = []
    for token_id in ids:
        settled += detokenizer.push(int(token_id))
    return settled + detokenizer.finish()


def _is_separate(steps: list[dict[str, Any]]) -> bool:
    """Whether the decoder makes one text of each token, but at the beginning of the text."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind not in SEPARATE:
            return False
        if fused and kind == "Strip" and step.get("stop"):
            return False
        if fused and kind not in ("Strip", "Fuse"):
            return False
        fused = fused or kind == "Fuse"
    return True


@lru_cache(1)
def _byte_level_table() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
