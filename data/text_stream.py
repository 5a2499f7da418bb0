"""Text of an answer as it becomes certain, cut at the first stop string."""

from collections.abc import Callable, Sequence

from .detokenizer import Detokenizer, WindowDetokenizer
from .tokenizer import Tokenizer

Decode = Callable[[list[int]], str]


class TextStream:
    """Text from token ids as it becomes certain: never half a character or a part of a stop string. The join
    of its parts is the tokenizer's own decoding of all ids, up to the first stop string.

    `decode`: a `Tokenizer`, its `decode`, or any function from ids to text. `before`: the ids that the text
    continues; many decoders write a word's blank only behind another word. `skip_special_tokens` leaves
    special tokens out of the text; it is for tokenizers alone.
    """

    def __init__(
        self,
        decode: Tokenizer | Decode,
        stop: Sequence[str] = (),
        before: Sequence[int] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        owner = decode if isinstance(decode, Tokenizer) else getattr(decode, "__self__", None)
        self._detokenizer: Detokenizer
        if isinstance(owner, Tokenizer):
            self._detokenizer = owner.detokenizer(before or (), skip_special_tokens)
        else:
            assert callable(decode)
            self._detokenizer = WindowDetokenizer(decode, before or ())
        self._stop = tuple(stop)
        self._held = ""  # decoded, but it may become a stop string
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text that is certain now; "" while a character or a stop string may still be open. A stop string that is
        complete while it may not stop the text is a part of it.
        """
        self._held += "".join(self._detokenizer.push(token_id))
        return self._release(may_stop)

    def finish(self) -> str:
        """The rest of the text when no more tokens come."""
        self._held += "".join(self._detokenizer.finish())
        text = self._release()
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, may_stop: bool = True) -> str:
        if not self._stop:
            text, self._held = self._held, ""
            return text
        starts = [self._held.find(stop) for stop in self._stop] if may_stop else []
        found = [start for start in starts if start >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            self.stopped = True
            return text
        keep = max((open_stop(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def open_stop(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
