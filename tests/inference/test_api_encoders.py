"""Encoders over HTTP: pooling and scale of embeddings, classes and ranks equal to a plain forward's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.source import open_model


def test_pooling_and_scale_of_embeddings(ask, bert_dir: Path) -> None:
    """`cls` is the last hidden state of the first token; without `normalize` the numbers are the model's."""

    async def body(found) -> None:
        async def embed(**fields) -> np.ndarray:
            request = {"model": "bert", "input": "A model reads"} | fields
            answer = await found.client.post("/v1/embeddings", json=request)
            return np.array(answer.json()["data"][0]["embedding"])

        tokenizer, model = Tokenizer.load(bert_dir), open_model(bert_dir).model
        ids = [tokenizer.cls_id, *tokenizer.encode("A model reads").tolist(), tokenizer.sep_id]
        with torch.inference_mode():
            hidden = model.hidden(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.long))[0].numpy()
        np.testing.assert_allclose(await embed(pooling="cls", normalize=False), hidden[0], atol=1e-4)
        np.testing.assert_allclose(await embed(normalize=False), hidden.mean(0), atol=1e-4)
        unit = hidden[0] / np.linalg.norm(hidden[0])
        np.testing.assert_allclose(await embed(pooling="cls"), unit, atol=1e-4)

    ask(body)


def test_classify_and_rerank_with_a_fine_tuned_head(
    judge_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Probabilities equal transformers' on the same directory: fp32 sums in another order."""
    transformers = pytest.importorskip("transformers")
    from throughline.inference.exports.export import export_onnx

    export_onnx(judge_dir, tmp_path / "onnx")
    theirs = transformers.BertForSequenceClassification.from_pretrained(str(judge_dir)).eval()
    tokenizer = Tokenizer.load(judge_dir)
    query, texts = "A model", ["reads text", "The quick brown fox jumps", "dog"]

    def shares(ids: list[int], types: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        return torch.softmax(logits[0].double(), -1).tolist()

    async def body(found) -> None:
        framed = [[tokenizer.cls_id, *tokenizer.encode(text).tolist(), tokenizer.sep_id] for text in texts]
        first = [tokenizer.cls_id, *tokenizer.encode(query).tolist(), tokenizer.sep_id]
        for name in ("judge", "onnx"):
            listed = (await found.client.get(f"/v1/models/{name}")).json()
            reads = {"/v1/embeddings", "/embed", "/v1/score", "/tokenize", "/detokenize"}
            assert {*listed["endpoints"]} == reads | {"/v1/classify", "/v1/rerank", "/rerank"}
            answer = (await found.client.post("/v1/classify", json={"input": texts, "model": name})).json()
            for one, ids in zip(answer["data"], framed, strict=True):
                np.testing.assert_allclose(one["probs"], shares(ids, [0] * len(ids)), atol=1e-3)
                assert one["label"] == ("bad", "good")[int(np.argmax(one["probs"]))]
            request = {"query": query, "documents": texts, "model": name, "return_documents": True}
            ranked = (await found.client.post("/v1/rerank", json=request)).json()["results"]
            scores = [one["relevance_score"] for one in ranked]
            assert scores == sorted(scores, reverse=True) and len(scores) == 3
            for one in ranked:
                rest = framed[one["index"]][1:]
                expected = shares(first + rest, [0] * len(first) + [1] * len(rest))[1]
                assert one["relevance_score"] == pytest.approx(expected, abs=1e-3)
                assert one["document"]["text"] == texts[one["index"]]
            # as Text Embeddings Inference is asked and answers
            request = {"query": query, "texts": texts, "model": name, "return_text": True}
            theirs_too = (await found.client.post("/rerank", json=request)).json()
            for one, same in zip(theirs_too, ranked, strict=True):
                score, text = pytest.approx(same["relevance_score"], abs=1e-6), same["document"]["text"]
                assert one == {"index": same["index"], "score": score, "text": text}
            bare = (await found.client.post("/embed", json={"inputs": texts, "model": name})).json()
            listed = await found.client.post("/v1/embeddings", json={"input": texts, "model": name})
            whole = [one["embedding"] for one in listed.json()["data"]]
            np.testing.assert_allclose(bare, whole, atol=1e-6)
        wrong = await found.client.post("/v1/fill-mask", json={"input": "a [MASK]", "model": "judge"})
        assert (
            wrong.status_code == 400 and "does not answer /v1/fill-mask" in wrong.json()["error"]["message"]
        )

    in_thread.run_with(monkeypatch, [f"judge={judge_dir}", f"onnx={tmp_path / 'onnx'}"], body)
