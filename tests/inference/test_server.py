"""The server in-process: OpenAI's shapes, streams that add up, batches that change nothing, limits and
errors.
"""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from throughline.core.backend import BackendOptions
from throughline.core.errors import WrongUse
from throughline.inference.serving.accounts import ServerLimits
from throughline.inference.serving.catalogue import Catalogue


async def stream(client: httpx.AsyncClient, **fields) -> list[dict]:
    fields = {"model": "gpt", "max_tokens": 24, "temperature": 0, "stream": True} | fields
    async with client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_completions_have_openais_shape(ask_texts) -> None:
    async def body(found) -> None:
        answer = await found.complete(prompt="The quick brown", logprobs=3)
        assert (
            answer["object"] == "text_completion"
            and answer["model"] == "gpt"
            and answer["id"].startswith("cmpl-")
        )
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 24
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 24
        logprobs = choice["logprobs"]
        assert [len(logprobs[key]) for key in logprobs] == [24] * 4
        # greedy: the chosen token is the most probable one
        assert all(
            lp == max(top.values()) for lp, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"])
        )
        torch_choice = (await found.complete(model="torch", prompt="The quick brown"))["choices"][0]
        assert torch_choice["token_ids"] == choice["token_ids"] and torch_choice["logprobs"] is None
        echoed = await found.complete(prompt="The quick brown", echo=True)
        assert echoed["choices"][0]["text"] == "The quick brown" + choice["text"]

    ask_texts(body)


def test_streams_add_up_to_the_whole_answer(ask_texts) -> None:
    async def body(found) -> None:
        drawn = {"temperature": 1.0, "seed": 7}
        for fields in ({}, drawn, {"stop": ["e", "zq"]}, drawn | {"n": 3, "echo": True, "logprobs": 2}):
            fields |= {"prompt": ["A model reads", "東京"], "max_tokens": 40}
            whole = await found.complete(**fields)
            events = await stream(found.client, **fields, stream_options={"include_usage": True})
            assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
            assert not any("usage" in event for event in events[:-1])
            for expected in whole["choices"]:
                parts = [
                    event["choices"][0]
                    for event in events[:-1]
                    if event["choices"][0]["index"] == expected["index"]
                ]
                assert "".join(part["text"] for part in parts) == expected["text"]
                assert [i for part in parts for i in part["token_ids"]] == expected["token_ids"]
                assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
                    expected["finish_reason"]
                ]

    ask_texts(body)


def test_usage_is_told_with_every_event_where_that_is_asked(ask_texts) -> None:
    """vLLM's option, by which load generators count."""

    async def body(found) -> None:
        events = await stream(found.client, prompt="x", stream_options={"continuous_usage_stats": True})
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == list(range(1, len(events) + 1))

    ask_texts(body)


def test_concurrent_answers_equal_single_ones(ask_texts) -> None:
    prompts = ["The quick", "A model", "dog", "Wörter mit", "next. " * 20, "x"]

    async def body(found) -> None:
        single = [await found.complete(prompt=prompt, max_tokens=50) for prompt in prompts]
        together = await asyncio.gather(
            *(found.complete(prompt=prompt, max_tokens=50) for prompt in prompts * 3)
        )
        for i, answer in enumerate(together):
            assert answer["choices"][0]["token_ids"] == single[i % len(prompts)]["choices"][0]["token_ids"]

    ask_texts(body, slots=4)


def test_seeds_reproduce_and_differ(ask_texts) -> None:
    async def body(found) -> None:
        async def text(**fields) -> list[str]:
            answer = await found.complete(prompt="The", temperature=1.5, **fields)
            return [choice["text"] for choice in answer["choices"]]

        assert await text(seed=3) == await text(seed=3) != await text(seed=4)
        assert await text(seed=3, n=2) == await text(seed=3) + await text(seed=4)
        assert await text() != await text()

    ask_texts(body)


def test_embeddings_batched_equal_single_and_have_length_one(ask) -> None:
    texts = ["A model", "the lazy dog jumps again and again over the model", "next", "text " * 25]

    async def body(found) -> None:
        async def embed(given, **fields) -> np.ndarray:
            answer = await found.client.post(
                "/v1/embeddings", json={"input": given, "model": "bert"} | fields
            )
            assert answer.status_code == 200, answer.text
            data = answer.json()["data"]
            assert [item["index"] for item in data] == list(range(len(data)))
            if fields.get("encoding_format") == "base64":
                return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
            return np.array([item["embedding"] for item in data])

        together = await embed(texts * 10)
        np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
        for i, text in enumerate(texts):
            alone = await embed(text)
            # padding changes the order of fp32 sums only: 1e-4, the bound of parity.py on numbers of at most
            # 1
            np.testing.assert_allclose(together[i::4], np.repeat(alone, 10, axis=0), atol=1e-4)
            np.testing.assert_array_equal(
                await embed(text, encoding_format="base64"), alone.astype(np.float32)
            )
        assert abs(together[0] @ together[1]) < 0.9999  # different texts, different vectors

    ask(body)


def test_fill_mask_gives_probabilities(ask) -> None:
    async def body(found) -> None:
        request = {"input": "The [MASK] brown [MASK] jumps", "top_k": 100}
        answer = (await found.client.post("/v1/fill-mask", json=request)).json()
        assert [mask["position"] for mask in answer["data"]] == [2, 4]
        for mask in answer["data"]:
            probabilities = [candidate["probability"] for candidate in mask["candidates"]]
            assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1 + 1e-9
        assert "[MASK]" not in answer["text"] and answer["text"].startswith("The")

    ask(body)


def test_status_endpoints(ask) -> None:
    async def body(found) -> None:
        assert (await found.client.get("/health")).json() == {"status": "ok"}
        assert (await found.client.get("/ready")).json()["ready"]
        listed = {model["id"]: model for model in (await found.client.get("/v1/models")).json()["data"]}
        assert listed["gpt"]["endpoints"] == ["/v1/completions", "/tokenize", "/detokenize"]
        assert listed["gpt"]["backend"] == "onnxruntime"
        assert listed["torch"]["backend"] == "torch" and listed["bert"]["mask_token"] == "[MASK]"
        assert (await found.client.get("/v1/models/bert")).json() == listed["bert"]
        assert (await found.client.get("/v1/models/absent")).status_code == 404
        assert set((await found.client.get("/openapi.json")).json()["paths"]) >= {
            "/v1/completions",
            "/v1/embeddings",
            "/v1/fill-mask",
        }
        page = await found.client.get("/")
        # no CDN
        assert page.status_code == 200 and "http://" not in page.text and "https://" not in page.text
        found.remote("gpt").ready = False
        assert (await found.client.get("/ready")).status_code == 503
        found.remote("gpt").ready = True
        found.server.draining.set()
        assert (await found.client.get("/ready")).status_code == 503
        assert (await found.client.get("/health")).headers["connection"] == "close"

    ask(body)


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("completions", {"prompt": "x"}, 400, "2 models answer"),
        ("completions", {"prompt": "x", "model": "absent"}, 404, "no model 'absent'"),
        ("completions", {"prompt": "x", "model": "bert"}, 400, "is a BERT"),
        ("completions", {"model": "gpt"}, 400, "prompt: Field required"),
        ("completions", {"prompt": "x", "model": "gpt", "temprature": 1}, 400, "did you mean temperature"),
        ("completions", {"prompt": "x", "model": "gpt", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "model": "gpt", "max_tokens": "5"}, 400, "max_tokens"),
        (
            "completions",
            {"prompt": "x", "model": "gpt", "max_tokens": 1000},
            400,
            "longer than the model's context",
        ),
        ("completions", {"prompt": [[5, 99999]], "model": "gpt"}, 400, "outside the vocabulary"),
        ("completions", {"prompt": [], "model": "gpt"}, 400, "prompt"),
        ("completions", {"prompt": ["x"] * 30, "n": 10, "model": "gpt"}, 400, "too many texts"),
        ("completions", {"prompt": "x", "stop": [""], "model": "gpt"}, 400, "stop"),
        ("embeddings", {"input": ""}, 400, "empty"),
        ("embeddings", {"input": "long " * 100}, 400, "longer than the model's context"),
        ("fill-mask", {"input": "no gap here"}, 400, "no mask"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    ask, path: str, fields: dict, status: int, message: str
) -> None:
    async def body(found) -> None:
        answer = await found.client.post(f"/v1/{path}", json=fields)
        error = answer.json()["error"]
        assert (
            answer.status_code == status
            and message in error["message"]
            and error["type"] == "invalid_request_error"
        )
        assert error["param"] in (None, "model", "prompt", "input", *fields), "no field of the request"
        assert path != "completions" or error["param"] != "input"

    ask(body)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"not json", 400),
        (b'{"prompt": NaN, "model": "gpt"}', 400),
        (b'{"prompt": "\xff", "model": "gpt"}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
    ],
    ids=["empty", "no json", "nan", "no utf-8", "deep", "huge"],
)
def test_broken_bodies_are_no_server_errors(ask, content: bytes, status: int) -> None:
    async def deltas() -> AsyncIterator[bytes]:  # without a Content-Length
        for start in range(0, len(content), 100_000):
            yield content[start : start + 100_000]

    async def body(found) -> None:
        headers = {"content-type": "application/json"}
        for given in (content, deltas()):
            answer = await found.client.post("/v1/completions", content=given, headers=headers)
            assert answer.status_code == status and "error" in answer.json(), answer.text
            assert answer.json()["error"]["param"] in (None, "body", "prompt")

    ask(body)


def test_long_texts_are_tokenised_beside_the_event_loop(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of text take a second, in which health checks and other answers must go on; too many are
    refused before it.
    """
    threads = []

    async def body(found) -> None:
        tokenizer = found.server.catalogue.find("gpt").tokenizer
        encode = tokenizer.encode_prompt

        def noted(*given):
            threads.append(threading.current_thread())
            return encode(*given)

        monkeypatch.setattr(tokenizer, "encode_prompt", noted)
        here = threading.current_thread()
        await found.complete(prompt="short", max_tokens=1)
        assert threads == [here]
        long = {"prompt": "x" * 5000, "model": "gpt"}
        answer = await found.client.post("/v1/completions", json=long)
        assert answer.status_code == 400 and len(threads) == 2 and threads[1] is not here
        many = await found.client.post("/v1/completions", json={"prompt": ["x"] * 10, "model": "gpt"})
        assert many.status_code == 400 and "too many texts" in many.json()["error"]["message"]
        assert len(threads) == 2

    ask(body, queue=9)


def test_two_models_of_one_name_are_refused(gpt_onnx: Path) -> None:
    with pytest.raises(WrongUse, match="two models are called"):
        Catalogue([str(gpt_onnx), str(gpt_onnx)], ServerLimits(), BackendOptions())
    for spec in ("=" + str(gpt_onnx), "gpt="):
        with pytest.raises(WrongUse, match="a name and a path"):
            Catalogue([spec], ServerLimits(), BackendOptions())


def test_ids_beyond_the_tokenizer_are_a_prompt_like_any_other(ask) -> None:
    """The model's vocabulary (304) is padded beyond the tokenizer's (300): such ids may be read, never
    chosen.
    """

    async def body(found) -> None:
        answer = await found.complete(prompt=[5, 302], repetition_penalty=1.2, temperature=1.0)
        assert max(answer["choices"][0]["token_ids"]) < 300

    ask(body)
