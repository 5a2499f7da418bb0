"""Text from token ids as they come, for answers that are shown or stopped while a model makes them."""

from collections.abc import Callable

REPLACEMENT = "\ufffd"
OPEN_TOKENS = 64  # beyond which a character that is still cut is none


class TextStream:
    """Text from token ids as it becomes certain: never half a character or a part of a stop string; the whole is the
    sum of its parts. `decode` turns a list of ids into text (the tokenizer's). `before`: the last token of what is
    continued, because many decoders write a word's space only after another word.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = (), before: list[int] | None = None
    ) -> None:
        self._decode, self._stop = decode, stop
        self._ids = before or []  # the last certain token as context, and those after it
        self._given = len(decode(self._ids)) if before else 0  # characters of decode(_ids) already taken
        self._held = ""  # decoded, but it may become a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character or a stop string may still be open."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # A cut character decodes to one replacement at the very end; the next token may complete it.
        certain = len(text) - (text.endswith(REPLACEMENT) and len(self._ids) < OPEN_TOKENS)
        self._held += text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text):
            self._ids = self._ids[-1:]
            self._given = len(self._decode(self._ids))
        return self._release()

    def finish(self) -> str:
        """The rest of the text when no more tokens come."""
        self._held += self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        text = self._release()
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self) -> str:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        self.stopped = self.stopped or bool(found)
        keep = max((open_stop(self._held, stop) for stop in self._stop), default=0)
        cut = min(found, default=len(self._held) - keep)
        text, self._held = self._held[:cut], "" if found else self._held[cut:]
        return text


def open_stop(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
