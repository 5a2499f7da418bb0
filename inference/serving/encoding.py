"""Reading texts with an encoder, the server's synchronous half: special tokens, batches by length, embeddings, masks.

Letters: B texts, S tokens with [CLS] and [SEP], N positions asked for, H width.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
import numpy as np

from ...core.backend import EncoderBackend, Limits, batches
from ...core.errors import WrongUse
from ...core.hardware import usable_cores
from ...data.tokenizer import Tokenizer

# Padded tokens in one batch. A CPU gains nothing from more, and padding to the longest costs it as much as tokens.
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
TOKEN_CHARACTERS = 128  # of a token at most: the longest of common vocabularies
Outputs = dict[str, np.ndarray]
PLACE_TOKENS = 4096  # of texts that wait: as many take one place of the queue
_lanes = ThreadPoolExecutor(usable_cores(), "encode")  # starts no thread before it is used


class Encoding(msgspec.Struct, frozen=True, eq=False, tag="read"):
    """One text for an encoder: its ids with special tokens, and what is asked of it."""

    ids: np.ndarray  # (S,)
    ask: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))  # (N,)
    first_tokens: int | None = None  # those of the first of two texts; None = there is one
    want: tuple[str, ...] = ()  # names of outputs; of masks the most probable tokens go
    top_k: int = 0
    n: ClassVar[int] = 1  # answers

    def each(self) -> list["Encoding"]:
        return [self]

    @property
    def cost(self) -> int:
        return len(self.ids)

    @property
    def places(self) -> float:
        """Share of the queue that it takes: by its tokens, so that many short texts fit."""
        return len(self.ids) / PLACE_TOKENS


@dataclass(frozen=True)
class Reader:
    """Texts as an encoder reads them: its tokenizer's special tokens, its context and its vocabulary."""

    tokenizer: Tokenizer
    context: int
    vocab_size: int

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """The ids before a text and behind it: [CLS] and [SEP], or those of a tokenizer without them."""
        cls_id, sep_id = self.tokenizer.cls_id, self.tokenizer.sep_id
        if cls_id is None and sep_id is None:
            return self.tokenizer.framing
        return [] if cls_id is None else [cls_id], [] if sep_id is None else [sep_id]

    def framed(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text of any length, as the model reads it or without its special tokens."""
        ids: list[int] = self.tokenizer.encode(text).tolist()
        before, behind = self.framing if add_special_tokens else ([], [])
        return [*before, *ids, *behind]

    def encode(self, text: str | Sequence[int], where: str, truncate: bool = False) -> Any:
        """The ids of a text, or ids as they are; `truncate`: the beginning is enough. Raises WrongUse for too many."""
        ids: Any = text
        if isinstance(text, str):
            if not truncate:
                self.check_characters(len(text), where)  # tokenising a megabyte takes most of a second
            ids = self.tokenizer.encode(text[: TOKEN_CHARACTERS * self.context])
        if len(ids) > self.context and not truncate:
            raise longer(f"{len(ids)} tokens > {self.context}", where)
        return ids

    def check_characters(self, count: int, where: str) -> None:
        """Refuse a text of so many that no tokenizer could bring it into the context."""
        if count > TOKEN_CHARACTERS * self.context:
            raise longer(f"{count:,} characters for {self.context:,} tokens", where)

    def frame(self, texts: Mapping[str, str | list[int]], truncate: bool = False, **asked: Any) -> Encoding:
        """[CLS] text [SEP], and with a second one text [SEP]; of a tokenizer without them what its file puts around a
        text. Each has the name that errors give it, and may be ids; `truncate` leaves of each what fits behind the
        others. `asked`: fields of `Encoding`. Raises WrongUse for an empty text, unknown ids and more than the context.
        """
        before, behind = self.framing
        ids, ends = before, []
        for where, text in texts.items():
            own = self.encode(text, where, truncate)
            if truncate:
                own = own[: max(0, self.context - len(ids) - len(behind))]
            check_ids(own, self.vocab_size, where)
            ids = [*ids, *own, *behind]
            ends.append(len(ids))
            if len(ends) < len(texts):
                ids += behind * (self.tokenizer.separators - 1)
        if len(ids) > self.context:
            raise longer(f"{len(ids)} tokens with the special ones > {self.context}", where)
        return Encoding(np.array(ids, np.int64), first_tokens=ends[0] if len(ends) > 1 else None, **asked)

    def chunks(self, text: str, prompt: str = "") -> list[str]:
        """The text in pieces that fit behind the prompt, cut between words, an eighth of each in the next one."""
        words = re.findall(r"\S{1,8}\s*", text) or [text]  # of a script without spaces some letters
        room = self.context - 2 - len(self.tokenizer.encode(prompt))
        ends = np.cumsum(self.tokenizer.encode_batch(words)[1])
        pieces, start, stop = [], 0, 0
        while stop < len(words):
            read = ends[start - 1] if start else 0
            stop = max(int(np.searchsorted(ends, read + room, "right")), start + 1)
            pieces.append("".join(words[start:stop]).strip())
            start = max(int(np.searchsorted(ends, ends[stop - 1] - room // 8, "right")), start + 1)
        return pieces

    def masked(self, text: str, top_k: int) -> Encoding:
        """A text whose mask tokens are to be filled with the `top_k` most probable. Raises WrongUse without one."""
        mask_id = self.tokenizer.mask_id
        if mask_id is None:
            raise WrongUse("this model's tokenizer has no mask token", where="input")
        name = self.tokenizer.decode([mask_id])
        self.check_characters(len(text), "input")
        if name not in text:
            raise WrongUse("there is no mask in the text", where="input", fix=f"write {name} for a word")
        ids: list[int] = []
        for part in text.split(name):
            ids += [mask_id, *self.encode(part, "input")]
        framed = self.frame({"input": ids[1:]}).ids
        return Encoding(framed, np.flatnonzero(framed == mask_id), top_k=top_k)


def longer(why: str, where: str) -> WrongUse:
    """The error of a text that the model cannot read whole."""
    fix = 'split the text; embeddings and rankings cut it where a request has "truncate": true'
    return WrongUse(f"{where} is longer than the model's context", where=where, why=why, fix=fix)


def named_texts(field: str, texts: Sequence[Any]) -> dict[str, Any]:
    """The texts of a request's field by the names that errors give them: `field[2]`, or `field` for a single text."""
    if len(texts) == 1:
        return {field: texts[0]}
    return {f"{field}[{index}]": text for index, text in enumerate(texts)}


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, where: str = "input") -> None:
    """Refuse an empty text and ids that the model has no embedding for."""
    if len(ids) == 0:
        raise WrongUse(f"{where} is empty", where=where, fix="give at least one token of text")
    check_known(ids, vocab_size, where)


def check_known(ids: Sequence[int] | np.ndarray, vocab_size: int, where: str) -> None:
    """Refuse ids that the model has no embedding for."""
    outside = [int(i) for i in ids if not 0 <= i < vocab_size]
    if outside:
        why = f"{outside[0]} is not in 0 … {vocab_size - 1}"
        raise WrongUse(f"{where} has a token id outside the vocabulary", where=where, why=why)


def encode_batch(backend: EncoderBackend, texts: Sequence[Encoding], pad_id: int) -> list[Outputs]:
    """Run texts of any lengths together; per text `sentence_embedding` and `cls_embedding` (H,), `mlm_logits` (N, V) of
    its own positions, and of a model that classifies `class_logits` (C,). A backend with several `lanes` gets as many
    parts, by length: calls of one thread wait for each other once, the threads of one call after every operation.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    parts = in_lanes([len(texts[index].ids) for index in order], backend.lanes)
    chosen = [order[part] for part in parts]
    run = partial(_encode_part, backend if len(parts) == 1 else backend.lane(), pad_id=pad_id)
    given = [[texts[index] for index in part] for part in chosen]
    found = map(run, given) if len(given) == 1 else _lanes.map(run, given)
    answers = {index: answer for part, answers in zip(chosen, found) for index, answer in zip(part, answers)}
    return [answers[index] for index in range(len(texts))]


def in_lanes(lengths: Sequence[int], lanes: int) -> list[slice]:
    """Lengths, ascending, cut into at most so many parts of about as many tokens each, none of them empty."""
    bounds = np.cumsum([0, *lengths])
    cuts = {int(np.abs(bounds - bounds[-1] * lane / lanes).argmin()) for lane in range(1, lanes)}
    return [slice(start, end) for start, end in pairwise(sorted({0, len(lengths), *cuts}))]


def _encode_part(backend: EncoderBackend, texts: Sequence[Encoding], pad_id: int) -> list[Outputs]:
    lengths = np.array([len(text.ids) for text in texts])
    ids_BS = np.full((len(texts), lengths.max()), pad_id, np.int64)
    ask_BN = np.zeros((len(texts), max(len(text.ask) for text in texts)), np.int64)
    for row, text in enumerate(texts):
        ids_BS[row, : len(text.ids)] = text.ids
        ask_BN[row, : len(text.ask)] = text.ask
    mask_BS = np.arange(ids_BS.shape[1]) < lengths[:, None]
    firsts_B1 = np.array([[text.first_tokens or len(text.ids)] for text in texts])
    types_BS = (mask_BS & (np.arange(ids_BS.shape[1]) >= firsts_B1)).astype(np.int64)
    want = {"logits" if name == "class_logits" else name for text in texts for name in text.want}
    if ask_BN.size:
        want.add("mlm_logits")
    found = dict(backend.forward(ids_BS, types_BS, mask_BS, ask_BN, want or None))
    if "last_hidden_state" in found:
        found.setdefault("cls_embedding", found.pop("last_hidden_state")[:, 0])
    if "logits" in found:
        found["class_logits"] = found.pop("logits")
    answers = [{name: values[row] for name, values in found.items()} for row in range(len(texts))]
    for answer, text in zip(answers, texts) if "mlm_logits" in found else ():
        answer["mlm_logits"] = answer["mlm_logits"][: len(text.ask)]
    return answers


def batch_limits(backend: EncoderBackend) -> Limits:
    """What the runtime takes, and on its device the tokens beyond which a batch gains nothing."""
    return backend.limits.within(Limits(tokens=BATCH_TOKENS["cpu" if backend.device == "cpu" else "cuda"]))


def take_batch(texts: Mapping[int, Encoding], limits: Limits) -> list[int]:
    """The first text with those of the others that are nearest in length, by their keys."""
    lengths = {number: len(text.ids) for number, text in texts.items()}
    first = next(iter(lengths.values()))
    nearest = sorted(lengths, key=lambda number: abs(lengths[number] - first))
    return next(batches(nearest, lengths.__getitem__, limits))


def embed(
    backend: EncoderBackend, texts: Sequence[Encoding], pad_id: int, output: str = "sentence_embedding"
) -> np.ndarray:
    """This output for each text, scaled to length 1, float32 (B, H); batched by length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    vectors: dict[int, np.ndarray] = {}
    for batch in batches(order, lambda i: len(texts[i].ids), batch_limits(backend)):
        asked = [msgspec.structs.replace(texts[i], want=(output,)) for i in batch]
        answers = encode_batch(backend, asked, pad_id)
        vectors |= {i: unit(answer[output]) for i, answer in zip(batch, answers)}
    return np.stack([vectors[i] for i in range(len(texts))])


def unit(vector_H: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1, float32."""
    return (vector_H / max(float(vector_H @ vector_H) ** 0.5, 1e-12)).astype(np.float32, copy=False)
