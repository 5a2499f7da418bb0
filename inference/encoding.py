"""Reading texts with a BERT: special tokens, batches by length, embeddings, fill-mask. The synchronous half of the server.

Letters: B texts, S tokens with [CLS] and [SEP], N positions asked for, H width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.backend import EncoderBackend
from ..core.errors import Failed, WrongUse
from ..data.tokenizer import Tokenizer
from .sampling import log_softmax

BATCH_TOKENS = 4096  # padded tokens in one batch: 8 rows of 512


@dataclass(frozen=True, eq=False)
class Encoding:
    """One text for an encoder: its ids with special tokens and the positions whose MLM logits are asked for."""

    ids: np.ndarray  # (S,)
    ask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (N,)
    tell: Callable[[dict[str, np.ndarray] | Failed], None] | None = None  # where an engine sends the answer


def frame(
    tokenizer: Tokenizer, text: str | Sequence[int], context: int, vocab_size: int, where: str = "input"
) -> np.ndarray:
    """Ids of a text (or the given ids) with [CLS] before and [SEP] behind, int64 (S,). `where` is named in errors.

    Raises WrongUse for a text that is empty or longer than the context and for ids outside the vocabulary.
    """
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    check_ids(ids, vocab_size, where)
    before = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
    behind = [] if tokenizer.sep_id is None else [tokenizer.sep_id]
    framed = np.array([*before, *ids, *behind], np.int64)
    if len(framed) > context:
        why = f"{len(framed)} tokens with the special ones > {context}"
        raise WrongUse(
            "the text is longer than the model's context", where=where, why=why, fix="split the text"
        )
    return framed


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, where: str = "input") -> None:
    """Refuse an empty text and ids that the model has no embedding for."""
    if len(ids) == 0:
        raise WrongUse("the text is empty", where=where, fix="give at least one token of text")
    if outside := [int(i) for i in ids if not 0 <= i < vocab_size]:
        why = f"{outside[0]} is not in 0 … {vocab_size - 1}"
        raise WrongUse("a token id is outside the vocabulary", where=where, why=why)


def encode_batch(
    backend: EncoderBackend, texts: Sequence[Encoding], pad_id: int
) -> list[dict[str, np.ndarray]]:
    """Run texts of any lengths together; per text `sentence_embedding` (H,) and `mlm_logits` (N, V) of its own positions."""
    lengths = np.array([len(text.ids) for text in texts])
    ids_BS = np.full((len(texts), lengths.max()), pad_id, np.int64)
    ask_BN = np.zeros((len(texts), max(len(text.ask) for text in texts)), np.int64)
    for row, text in enumerate(texts):
        ids_BS[row, : len(text.ids)] = text.ids
        ask_BN[row, : len(text.ask)] = text.ask
    mask_BS = np.arange(ids_BS.shape[1]) < lengths[:, None]
    outputs = backend.forward(ids_BS, np.zeros_like(ids_BS), mask_BS, ask_BN)
    return [
        {
            "sentence_embedding": outputs["sentence_embedding"][row],
            "mlm_logits": outputs["mlm_logits"][row, : len(text.ask)],
        }
        for row, text in enumerate(texts)
    ]


def take_batch(texts: Sequence[Encoding]) -> list[Encoding]:
    """The first text with those of the others that are nearest in length, up to `BATCH_TOKENS` padded tokens."""
    first = texts[0]
    nearest = sorted(texts, key=lambda text: (text is not first, abs(len(text.ids) - len(first.ids))))
    batch: list[Encoding] = []
    longest = 0
    for text in nearest:
        longest = max(longest, len(text.ids))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            break
        batch.append(text)
    return batch


def embed(backend: EncoderBackend, rows: Sequence[np.ndarray], pad_id: int) -> np.ndarray:
    """Embeddings of texts given by their ids, each of length 1, float32 (B, H); batched by length."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    vectors: dict[int, np.ndarray] = {}
    while order:
        batch = [Encoding(rows[i]) for i in order]
        size = len(take_batch(batch))  # sorted by length, so the nearest are the next ones
        answers = encode_batch(backend, batch[:size], pad_id)
        vectors |= {i: unit(answer["sentence_embedding"]) for i, answer in zip(order, answers)}
        order = order[size:]
    return np.stack([vectors[i] for i in range(len(rows))])


def unit(vector_H: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1, float32."""
    return (vector_H / max(float(np.linalg.norm(vector_H)), 1e-12)).astype(np.float32)


def mask_text(tokenizer: Tokenizer, text: str, context: int, vocab_size: int) -> Encoding:
    """A text in which the mask token's name stands for missing words, ready to be encoded.

    Raises WrongUse when the tokenizer has no mask or the text none.
    """
    mask_id = tokenizer.mask_id
    if mask_id is None:
        raise WrongUse("this model's tokenizer has no mask token", where="input")
    name = tokenizer.decode([mask_id])
    first, *others = text.split(name)
    if not others:
        raise WrongUse(
            "there is no mask in the text", where="input", fix=f"write {name} where a word is missing"
        )
    ids = [int(i) for i in tokenizer.encode(first)]
    for part in others:
        ids += [mask_id, *(int(i) for i in tokenizer.encode(part))]
    framed = frame(tokenizer, ids, context, vocab_size)
    return Encoding(framed, np.flatnonzero(framed == mask_id))


def fill(tokenizer: Tokenizer, text: Encoding, logits_NV: np.ndarray, top_k: int) -> dict[str, Any]:
    """For every mask its `top_k` most probable tokens with probabilities, and the text with the best ones in place."""
    probabilities = np.exp(log_softmax(logits_NV.astype(np.float64)[:, : tokenizer.vocab_size]))
    data = []
    for index, row in enumerate(probabilities):
        best = np.argsort(-row, kind="stable")[:top_k]
        candidates = [
            {"id": int(i), "text": tokenizer.decode([i]), "probability": float(row[i])} for i in best
        ]
        data.append(
            {"object": "mask", "index": index, "position": int(text.ask[index]), "candidates": candidates}
        )
    filled = text.ids.copy()
    filled[text.ask] = probabilities.argmax(axis=1)
    framing = (tokenizer.cls_id, tokenizer.sep_id)
    return {"data": data, "text": tokenizer.decode([i for i in filled if i not in framing])}
