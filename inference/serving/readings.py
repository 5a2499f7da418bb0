"""The endpoints that read: embeddings, fill-mask, classify and rerank with a BERT, tokenize with any model."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ...core.backend import log_softmax
from ...core.errors import WrongUse
from ...models.config import MULTI_LABEL, REGRESSION
from . import api_types as api
from .accounts import check_texts
from .calls import Call, size_of
from .encoding import Encoding, Outputs, check_known, named_texts, unit


async def embeddings(call: Call, body: api.EmbeddingBody) -> dict[str, Any]:
    """Embed texts with a BERT."""
    vectors = enumerate(await _embed(call, body, "input"))
    return _list(call, [{"object": "embedding", "index": i, "embedding": vector} for i, vector in vectors])


async def embed(call: Call, body: api.EmbedBody) -> list[msgspec.Raw]:
    """Embed texts with a BERT, as Text Embeddings Inference answers."""
    return await _embed(call, body, "inputs")


async def _embed(call: Call, body: api.EmbedBody, field: str) -> list[msgspec.Raw]:
    """The vectors of the texts of this field, as JSON."""
    want = call.model.sentence.output(body.pooling)
    texts = named_texts(field, body.input)
    answers = await _read_all(call, texts, want, body.truncate, body.prompt_name)
    vectors = [answer[want][: body.dimensions] for answer in answers]
    if body.dimensions is not None and body.dimensions > len(answers[0][want]):
        why = f"{body.dimensions} > {len(answers[0][want])}"
        raise WrongUse("a vector has fewer dimensions", where="dimensions", why=why)

    def told(vector_H: np.ndarray) -> msgspec.Raw:
        vector_H = unit(vector_H) if body.normalize else vector_H
        # bytes become base64, little end first
        value = vector_H.tolist() if body.encoding_format == "float" else vector_H.astype("<f4").tobytes()
        return msgspec.Raw(msgspec.json.encode(value))

    return await call.beside(sum(map(len, vectors)), lambda: [*map(told, vectors)])


async def fill_mask(call: Call, body: api.FillMaskBody) -> dict[str, Any]:
    """The most probable tokens for every mask in a text, with a BERT."""
    reader, decode = call.model.reader, call.model.tokenizer.decode
    masked = await call.beside(len(body.input), lambda: reader.masked(body.input, body.top_k))
    (answer,) = await _read(call, [masked])
    positions, best_NK = masked.ask, answer["ids"]

    def told(index: int) -> msgspec.Raw:
        best = zip(best_NK[index].tolist(), answer["probabilities"][index].tolist())
        found = [{"id": i, "text": decode([i]), "probability": share} for i, share in best]
        mask = {"object": "mask", "index": index, "position": int(positions[index]), "candidates": found}
        return msgspec.Raw(msgspec.json.encode(mask))

    data = await call.beside(best_NK.size, lambda: [*map(told, range(len(positions)))])
    filled = masked.ids.copy()
    filled[positions] = best_NK[:, 0]
    framing = (reader.tokenizer.cls_id, reader.tokenizer.sep_id)
    return _list(call, data) | {"text": reader.tokenizer.decode([i for i in filled if i not in framing])}


async def classify(call: Call, body: api.ClassifyBody) -> dict[str, Any]:
    """The class of each text, with a BERT that has been fine-tuned to classify: of several classes also `labels`, those
    above one half; of a regression the number, as `score`.
    """
    answers = await _read_all(call, named_texts("input", body.input), "class_logits")
    names, problem = call.model.facts["classes"], call.model.facts["problem_type"]
    data = []
    for index, answer in enumerate(answers):
        values = label_scores(answer["class_logits"], problem)
        one = {"index": index, "label": names[int(values.argmax())], "probs": values.tolist()}
        one["num_classes"] = len(names)
        if problem == MULTI_LABEL:
            one["labels"] = [name for name, value in zip(names, values) if value > 0.5]
        if problem == REGRESSION:
            one["score"] = float(values[0])
        data.append(one)
    return _list(call, data)


async def rerank(call: Call, body: api.RerankBody) -> dict[str, Any]:
    """Documents by their score beside a query: of a regression its number, else the sigmoid of a single class, or the
    probability of the last.
    """
    results = await _ranked(call, body, "documents")
    return {"model": call.model.name, "results": results, "usage": _usage(call)}


async def _ranked(call: Call, body: api.RerankBody, field: str) -> list[dict[str, Any]]:
    """The documents of this field in the order of their scores."""
    documents = named_texts(field, body.documents)
    scores = await _scored(call, {"query": body.query}, documents, body.truncate)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    text = [{"document": {"text": one}} if body.return_documents else {} for one in body.documents]
    return [{"index": i, "relevance_score": scores[i]} | text[i] for i in order]


async def rank(call: Call, body: api.RankBody) -> list[dict[str, Any]]:
    """Texts by their score beside a query, as Text Embeddings Inference answers."""
    ranked = await _ranked(call, body, "texts")
    for one in ranked:
        one.update({"score": one.pop("relevance_score")} | one.pop("document", {}))
    return ranked


async def score(call: Call, body: api.ScoreBody) -> dict[str, Any]:
    """The score of each text beside another: as `rerank` has it or, without classes, the cosine of embeddings."""
    ones, others = body.text_1, body.text_2
    if len(ones) not in (1, len(others)):
        raise WrongUse("texts do not pair", where="text_1", why=f"{len(ones)} beside {len(others)}")
    if call.model.facts.get("classes"):
        scores = await _scored(call, named_texts("text_1", ones), named_texts("text_2", others), False)
    else:
        want = call.model.sentence.output(None)
        check_texts(len(ones) + len(others), "text_2", call.model.limits.texts)
        texts = named_texts("text_1", ones) | named_texts("text_2", others)
        vectors = [unit(answer[want]) for answer in await _read_all(call, texts, want)]
        first = vectors[: len(ones)] * (len(others) // len(ones))
        scores = [float(one @ other) for one, other in zip(first, vectors[len(ones) :])]
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    return _list(call, data)


async def _scored(
    call: Call, queries: Mapping[str, Any], documents: Mapping[str, Any], truncate: bool
) -> list[float]:
    """The score of each document beside the query if there is one, else beside its own."""
    reader = call.model.reader

    def frames() -> list[Encoding]:
        encoded = [(where, reader.encode(query, where)) for where, query in queries.items()]  # once each
        if len(encoded) == 1:
            encoded *= len(documents)
        framed = []
        for (query_name, query), (name, document) in zip(encoded, documents.items()):
            pair = {query_name: query, name: document}
            framed.append(reader.frame(pair, truncate, want=("class_logits",)))
        return framed

    size = size_of([*queries.values(), *documents.values()])
    answers = await _read(call, await call.beside(size, frames))
    problem = call.model.facts["problem_type"]
    return [float(label_scores(answer["class_logits"], problem)[-1]) for answer in answers]


async def tokenize(call: Call, body: api.TokenizeBody) -> dict[str, Any]:
    """The ids of a text."""
    model = call.model

    def ids() -> tuple[msgspec.Raw, int]:
        model.reader.check_characters(len(body.prompt), "prompt")
        if model.causal:
            token_ids = model.tokenizer.encode_prompt(body.prompt, body.add_special_tokens).tolist()
        else:
            token_ids = model.reader.framed(body.prompt, body.add_special_tokens)
        return msgspec.Raw(msgspec.json.encode(token_ids)), len(token_ids)

    tokens, count = await call.beside(len(body.prompt), ids)
    return {"tokens": tokens, "count": count, "max_model_len": model.facts["context"]}


async def detokenize(call: Call, body: api.DetokenizeBody) -> dict[str, Any]:
    """The text of ids."""
    check_known(body.tokens, call.model.facts["vocab_size"], "tokens")
    decode, skip = call.model.tokenizer.decode, body.skip_special_tokens
    return {"prompt": await call.beside(len(body.tokens), lambda: decode(body.tokens, skip))}


async def _read_all(call: Call, texts: Mapping[str, Any], want: str, *how: Any) -> list[Outputs]:
    """This output of the model for each text of a body, which `frames` lays out so."""
    framed = await call.beside(size_of(texts.values()), lambda: call.model.frames(texts, want, *how))
    return await _read(call, framed)


async def _read(call: Call, texts: list[Encoding]) -> list[Outputs]:
    return await call.unless_gone(call.model.read(texts, call.watch))


def label_scores(logits_C: np.ndarray, problem: str) -> np.ndarray:
    """What the outputs of a head for labels mean, float64 (C,): numbers of a regression, or probabilities, of several
    classes each its own; a single class has that of being it.
    """
    logits_C = logits_C.astype(np.float64)
    if problem == REGRESSION:
        return logits_C
    if problem == MULTI_LABEL or len(logits_C) == 1:
        return np.exp(-np.logaddexp(0, -logits_C))
    return np.exp(log_softmax(logits_C))


def _list(call: Call, data: Sequence[Any]) -> dict[str, Any]:
    return {"object": "list", "data": data, "model": call.model.name, "usage": _usage(call)}


def _usage(call: Call) -> dict[str, int | None]:
    return {"prompt_tokens": call.watch.prompt_tokens, "total_tokens": call.watch.prompt_tokens}
