"""The texts and bytes of single tokens, as answers with log-probabilities list them: joined they are the answer's text.

A token that ends inside a character has the text "", and the token that completes the character has it whole; their
bytes are their own. A token that ends the answer, or a special one that is left out of the text, has no text and no
bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...data.tokenizer import Tokenizer
from .generation import Job, Token
from .slots import CONTEXT_TOKENS

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Spelled:
    """A token with what it adds to the text, from this offset on."""

    token: Token
    text: str
    offset: int


class Speller:
    """The tokens of one answer with their texts; a token waits while it ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, job: Job, ends: Collection[int], offset: int) -> None:
        before = job.prompt_ids[-CONTEXT_TOKENS:].tolist()
        self._detokenizer = tokenizer.detokenizer(before, job.skip_special_tokens)
        self._ends, self._offset = ends, offset
        self._waiting: list[Token] = []

    def push(self, token: Token) -> list[Spelled]:
        """Take the next token; return those whose texts are known now."""
        if token.id in self._ends:
            return [*self.finish(), Spelled(token, "", self._offset)]
        self._waiting.append(token)
        return self._spell(self._detokenizer.push(token.id))

    def finish(self) -> list[Spelled]:
        """Return the tokens that waited. No more come."""
        return self._spell(self._detokenizer.finish())

    def _spell(self, texts: list[str]) -> list[Spelled]:
        tokens, self._waiting = self._waiting[: len(texts)], self._waiting[len(texts) :]
        spelled = []
        for token, text in zip(tokens, texts, strict=True):
            spelled.append(Spelled(token, text, self._offset))
            self._offset += len(text)
        return spelled


def spelled_prompt(tokenizer: Tokenizer, tokens: Sequence[Token], text: str) -> list[Spelled]:
    """The tokens of an echoed prompt, whose text may spell special tokens."""
    ids = [token.id for token in tokens]
    pieces, offset = tokenizer.pieces(ids, skip_special_tokens=True), 0
    if "".join(pieces) != text:
        shown = tokenizer.pieces(ids, skip_special_tokens=False)
        if "".join(shown).endswith(text):
            pieces, offset = shown, len(text) - len("".join(shown))  # behind those that were added
    spelled = []
    for token, piece in zip(tokens, pieces, strict=True):
        spelled.append(Spelled(token, piece[max(0, -offset) :], max(offset, 0)))
        offset += len(piece)
    return spelled


def spelled_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int] | None:
    """The bytes of a token: of its text, or its own where it is a part of a character; None for a special one."""
    if token_id in tokenizer.special_ids:
        return None
    own = tokenizer.token_bytes(token_id)
    try:
        own.decode()
    except UnicodeDecodeError:
        return list(own)
    return list(text.encode()) if text and REPLACEMENT not in text else list(own)
