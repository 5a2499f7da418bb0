"""The endpoints that read: embeddings, fill-mask, classify and rerank with a BERT, tokenize with any model."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.errors import WrongUse
from ...core.logits import log_softmax
from .api_types import ClassifyBody, DetokenizeBody, EmbeddingBody, FillMaskBody, RerankBody, TokenizeBody
from .calls import Call
from .encoding import Encoding, unit
from .served import as_list

Read = tuple[list[Encoding], list[dict[str, np.ndarray]]]


async def embeddings(call: Call, body: EmbeddingBody) -> dict[str, Any]:
    """Embed texts with a BERT."""
    want = call.model.sentence.output(body.pooling)
    texts, answers = await _read_all(call, body.input, want)
    vectors = [unit(answer[want]) if body.normalize else answer[want] for answer in answers]
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": call.model.name, "usage": _usage(texts)}


async def fill_mask(call: Call, body: FillMaskBody) -> dict[str, Any]:
    """The most probable tokens for every mask in a text, with a BERT."""
    reader = call.model.reader
    texts, answers = await _read(call, len(body.input), lambda: [reader.masked(body.input, body.top_k)])
    decode, positions, best_NK = reader.tokenizer.decode, texts[0].ask, answers[0]["ids"]
    data = []
    for index, (ids, shares) in enumerate(zip(best_NK.tolist(), answers[0]["probabilities"].tolist())):
        found = [{"id": i, "text": decode([i]), "probability": share} for i, share in zip(ids, shares)]
        position = int(positions[index])
        data.append({"object": "mask", "index": index, "position": position, "candidates": found})
    filled = texts[0].ids.copy()
    filled[positions] = best_NK[:, 0]
    framing = (reader.tokenizer.cls_id, reader.tokenizer.sep_id)
    text = decode([i for i in filled if i not in framing])  # with the best in place
    return {"object": "list", "data": data, "text": text, "model": call.model.name, "usage": _usage(texts)}


async def classify(call: Call, body: ClassifyBody) -> dict[str, Any]:
    """The class of each text, with a BERT that has been fine-tuned to classify."""
    texts, answers = await _read_all(call, body.input, "class_logits")
    names = call.model.facts["classes"]
    data = []
    for index, answer in enumerate(answers):
        shares = _shares(answer["class_logits"])
        label = names[int(shares.argmax())]
        data.append({"index": index, "label": label, "probs": shares.tolist(), "num_classes": len(names)})
    return {"object": "list", "data": data, "model": call.model.name, "usage": _usage(texts)}


async def rerank(call: Call, body: RerankBody) -> dict[str, Any]:
    """Documents by their score beside a query: the sigmoid of a single class, or the share of the last."""
    model = call.model
    model.check_count(len(body.documents), "documents")

    pairs = [{"query": body.query, "documents": text} for text in body.documents]
    size = sum(len(text) for pair in pairs for text in pair.values())
    want = ("class_logits",)
    texts, answers = await _read(call, size, lambda: [model.reader.frame(pair, want=want) for pair in pairs])
    scores = [_score(answer["class_logits"]) for answer in answers]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    for result in results if body.return_documents else ():
        result["document"] = {"text": body.documents[result["index"]]}
    return {"model": model.name, "results": results, "usage": _usage(texts)}


async def tokenize(call: Call, body: TokenizeBody) -> dict[str, Any]:
    """The ids of a text."""
    model = call.model

    def ids() -> list[int]:
        if body.add_special_tokens and not model.causal:
            return model.reader.frame({"prompt": body.prompt}).ids.tolist()
        return model.tokenizer.encode(body.prompt).tolist()

    tokens = await call.beside(len(body.prompt), ids)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": model.facts["context"]}


async def detokenize(call: Call, body: DetokenizeBody) -> dict[str, Any]:
    """The text of ids."""
    if any(not 0 <= i < call.model.facts["vocab_size"] for i in body.tokens):
        raise WrongUse("a token id is outside the vocabulary", where="tokens")
    return {"prompt": await call.beside(len(body.tokens), lambda: call.model.tokenizer.decode(body.tokens))}


async def _read_all(call: Call, given: Any, want: str) -> Read:
    """The texts of a body, and this output of the model for each."""
    texts = as_list(given)
    return await _read(call, sum(map(len, texts)), lambda: call.model.frames(texts, want))


async def _read(call: Call, characters: int, make: Callable[[], list[Encoding]]) -> Read:
    texts = await call.beside(characters, make)
    return texts, await call.unless_gone(call.model.read(texts, call.watch))


def _vector(vector_H: np.ndarray, encoding: str) -> list[float] | str:
    """A vector as numbers, or as base64 of float32, little end first."""
    if encoding == "base64":
        return base64.b64encode(vector_H.astype("<f4").tobytes()).decode()
    return vector_H.tolist()


def _shares(logits_C: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits_C.astype(np.float64)))


def _score(logits_C: np.ndarray) -> float:
    alone = len(logits_C) == 1
    return float(1 / (1 + np.exp(-float(logits_C[0]))) if alone else _shares(logits_C)[-1])


def _usage(texts: Sequence[Encoding]) -> dict[str, int]:
    tokens = sum(len(text.ids) for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
