"""Requests of many texts to an encoder: how many fit, what waits, and which text of a batch an error is of."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from throughline.inference.serving.encoding import PLACE_TOKENS


def run(in_thread: Any, patch: pytest.MonkeyPatch, spec: str, body: Any, **limits: Any) -> None:
    in_thread.run_with(patch, [spec], body, **limits)


def test_eight_clients_with_256_texts_each_are_all_answered(
    bert_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 texts at once and as one request, as OpenAI allows; one more is refused. Places are counted by tokens.
    Many short texts are tokenised beside the event loop, as a long one is.
    """
    texts = ["dog"] * 256
    threads = set[str]()

    async def body(found: Any) -> None:
        model = found.server.catalogue.find("bert")
        frames = model.frames

        def noted(*given: Any) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return frames(*given)

        monkeypatch.setattr(model, "frames", noted)

        async def embed(count: int) -> Any:
            request = {"input": (texts * 9)[:count], "dimensions": 1}
            return await found.client.post("/v1/embeddings", json=request)

        answers = await asyncio.gather(*(embed(256) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(len(answer.json()["data"]) == 256 for answer in answers)
        whole = await embed(2048)
        assert whole.status_code == 200 and len(whole.json()["data"]) == 2048
        more = await embed(2049)
        assert more.status_code == 400 and "2049 > 2048" in more.json()["error"]["message"]
        remote = found.remote("bert")
        assert (remote.waiting, remote.cost, remote._taken) == (0, 0, 0.0)
        assert threads == {"beside"}

    run(in_thread, monkeypatch, f"bert={bert_dir}", body)


def test_texts_that_wait_are_bounded_by_their_tokens(
    bert_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of two places takes a request of any size while it is idle, and then nothing until there is room."""
    long = ["dog " * 62] * (3 * PLACE_TOKENS // 64)  # of 64 tokens with the special ones

    async def body(found: Any) -> None:
        first = asyncio.create_task(found.client.post("/embed", json={"inputs": long}))
        while not found.remote("bert").waiting:
            await asyncio.sleep(0.001)
        refused = await found.client.post("/embed", json={"inputs": "dog"})
        assert refused.status_code == 429 and "of 2 places are taken" in refused.text
        assert (await first).status_code == 200
        assert (await found.client.post("/embed", json={"inputs": "dog"})).status_code == 200

    run(in_thread, monkeypatch, f"bert={bert_dir}", body, slots=1, queue=1)


def test_an_error_names_the_text_of_a_batch(
    judge_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its index in the field that the request has; a text alone by the field."""
    long = "dog " * 100

    async def body(found: Any) -> None:
        for path, fields, named, said in (
            ("/v1/embeddings", {"input": ["a", "cat", "", "dog"]}, "input[2]", "is empty"),
            ("/v1/embeddings", {"input": ["a", long]}, "input[1]", "is longer than"),
            ("/v1/embeddings", {"input": [[5], [5, 99999]]}, "input[1]", "has a token id outside"),
            ("/v1/embeddings", {"input": ""}, "input", "is empty"),
            ("/embed", {"inputs": ["a", ""]}, "inputs[1]", "is empty"),
            ("/v1/classify", {"input": ["", "a"]}, "input[0]", "is empty"),
            ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "is empty"),
            ("/v1/rerank", {"query": "", "documents": ["b", "c"]}, "query", "is empty"),
            ("/v1/rerank", {"query": long, "documents": ["b"]}, "query", "is longer than"),
            ("/rerank", {"query": "a", "texts": ["b", "c", long]}, "texts[2]", "is longer than"),
            ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "is empty"),
            ("/v1/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1[1]", "is empty"),
        ):
            answer = await found.client.post(path, json=fields)
            error = answer.json()["error"]
            assert answer.status_code == 400, (path, fields)
            assert error["message"].startswith(f"{named} {said}") and error["param"] == named, error

    run(in_thread, monkeypatch, f"judge={judge_dir}", body)


def test_bytes_of_bodies_come_back_to_the_budget(
    bert_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the budget, one body after the other, answered and refused ones alike."""
    text = "dog " * 10_000  # 40 kB, of which 16 kB are free

    async def body(found: Any) -> None:
        for fields, status in [({"truncate": True}, 200), ({}, 400), ({"colour": "red"}, 400)] * 7:
            answer = await found.client.post("/embed", json={"inputs": text} | fields)
            assert answer.status_code == status, answer.text
            assert found.server.held == 0

    run(in_thread, monkeypatch, f"bert={bert_dir}", body, bodies_bytes=50_000)
