"""The server in-process: OpenAI's shapes, streams that add up, batches that change nothing, limits and errors."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from throughline.core.errors import Failed, WrongUse
from throughline.inference import served
from throughline.inference.served import Limits, ServedModel, load_served
from throughline.inference.server import bind, build_app, run


@asynccontextmanager
async def serving(*specs: str, **limits: int) -> AsyncIterator[tuple[httpx.AsyncClient, list[ServedModel]]]:
    bounds = Limits(**limits)
    models = load_served(specs, bounds, threads=1)
    app = build_app(models, bounds)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)
    async with app.router.lifespan_context(app), client:
        yield client, models


@pytest.fixture
def ask(gpt_onnx: Path, bert_onnx: Path, gpt_dir: Path):
    """Runs an async test body against a server with a GPT in ONNX and in torch, and a BERT."""

    def run(body: Callable[[httpx.AsyncClient, list[ServedModel]], Awaitable[None]], **limits: int) -> None:
        async def main() -> None:
            async with serving(f"gpt={gpt_onnx}", f"torch={gpt_dir}", f"bert={bert_onnx}", **limits) as (
                client,
                models,
            ):
                await body(client, models)

        asyncio.run(main())

    return run


async def complete(client: httpx.AsyncClient, **fields) -> dict:
    answer = await client.post(
        "/v1/completions", json={"model": "gpt", "max_tokens": 24, "temperature": 0} | fields
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, **fields) -> list[dict]:
    fields = {"model": "gpt", "max_tokens": 24, "temperature": 0, "stream": True} | fields
    async with client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_completions_have_openais_shape(ask) -> None:
    async def body(client, models) -> None:
        answer = await complete(client, prompt="The quick brown", logprobs=3)
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
        torch_choice = (await complete(client, model="torch", prompt="The quick brown"))["choices"][0]
        assert torch_choice["token_ids"] == choice["token_ids"] and torch_choice["logprobs"] is None
        echoed = await complete(client, prompt="The quick brown", echo=True)
        assert echoed["choices"][0]["text"] == "The quick brown" + choice["text"]

    ask(body)


def test_streams_add_up_to_the_whole_answer(ask) -> None:
    async def body(client, models) -> None:
        drawn = {"temperature": 1.0, "seed": 7}
        for fields in ({}, drawn, {"stop": ["e", "zq"]}, drawn | {"n": 3, "echo": True, "logprobs": 2}):
            fields |= {"prompt": ["A model reads", "東京"], "max_tokens": 40}
            whole = await complete(client, **fields)
            events = await stream(client, **fields, stream_options={"include_usage": True})
            assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
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

    ask(body)


def test_concurrent_answers_equal_single_ones(ask) -> None:
    prompts = ["The quick", "A model", "dog", "Wörter mit", "next. " * 20, "x"]

    async def body(client, models) -> None:
        single = [await complete(client, prompt=prompt, max_tokens=50) for prompt in prompts]
        together = await asyncio.gather(
            *(complete(client, prompt=prompt, max_tokens=50) for prompt in prompts * 3)
        )
        for i, answer in enumerate(together):
            assert answer["choices"][0]["token_ids"] == single[i % len(prompts)]["choices"][0]["token_ids"]

    ask(body, slots=4)


def test_seeds_reproduce_and_differ(ask) -> None:
    async def body(client, models) -> None:
        async def text(**fields) -> list[str]:
            answer = await complete(client, prompt="The", temperature=1.5, **fields)
            return [choice["text"] for choice in answer["choices"]]

        assert await text(seed=3) == await text(seed=3) != await text(seed=4)
        assert await text(seed=3, n=2) == await text(seed=3) + await text(seed=4)
        assert await text() != await text()

    ask(body)


def test_embeddings_batched_equal_single_and_have_length_one(ask) -> None:
    texts = ["A model", "the lazy dog jumps again and again over the model", "next", "text " * 25]

    async def body(client, models) -> None:
        async def embed(given, **fields) -> np.ndarray:
            answer = await client.post("/v1/embeddings", json={"input": given, "model": "bert"} | fields)
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
            # padding changes the order of fp32 sums only: 1e-4, the bound of parity.py on numbers of at most 1
            np.testing.assert_allclose(together[i::4], np.repeat(alone, 10, axis=0), atol=1e-4)
            np.testing.assert_array_equal(
                await embed(text, encoding_format="base64"), alone.astype(np.float32)
            )
        assert abs(together[0] @ together[1]) < 0.9999  # different texts, different vectors

    ask(body)


def test_fill_mask_gives_probabilities(ask) -> None:
    async def body(client, models) -> None:
        request = {"input": "The [MASK] brown [MASK] jumps", "top_k": 100}
        answer = (await client.post("/v1/fill-mask", json=request)).json()
        assert [mask["position"] for mask in answer["data"]] == [2, 4]
        for mask in answer["data"]:
            probabilities = [candidate["probability"] for candidate in mask["candidates"]]
            assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1 + 1e-9
        assert "[MASK]" not in answer["text"] and answer["text"].startswith("The")

    ask(body)


def test_status_endpoints(ask) -> None:
    async def body(client, models) -> None:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json()["ready"]
        found = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
        assert found["gpt"]["endpoints"] == ["/v1/completions"] and found["gpt"]["backend"] == "onnxruntime"
        assert found["torch"]["backend"] == "torch" and found["bert"]["mask_token"] == "[MASK]"
        assert set((await client.get("/openapi.json")).json()["paths"]) >= {
            "/v1/completions",
            "/v1/embeddings",
            "/v1/fill-mask",
        }
        page = await client.get("/")
        assert (
            page.status_code == 200 and "http://" not in page.text and "https://" not in page.text
        )  # no CDN
        models[0].ready = False
        assert (await client.get("/ready")).status_code == 503

    ask(body)


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("completions", {"prompt": "x"}, 400, "2 models answer"),
        ("completions", {"prompt": "x", "model": "absent"}, 404, "no model 'absent'"),
        ("completions", {"prompt": "x", "model": "bert"}, 400, "is a BERT"),
        ("completions", {"model": "gpt"}, 400, "prompt: Field required"),
        ("completions", {"prompt": "x", "model": "gpt", "temprature": 1}, 400, "temprature: Extra inputs"),
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
    async def body(client, models) -> None:
        answer = await client.post(f"/v1/{path}", json=fields)
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
        (b"", 400), (b"not json", 400), (b'{"prompt": NaN, "model": "gpt"}', 400), (b'{"prompt": "\xff", "model": "gpt"}', 400),
        (b"[" * 100_000, 400), (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
    ],
    ids=["empty", "no json", "nan", "no utf-8", "deep", "huge"],
)  # fmt: skip
def test_broken_bodies_are_no_server_errors(ask, content: bytes, status: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:  # without a Content-Length
        for start in range(0, len(content), 100_000):
            yield content[start : start + 100_000]

    async def body(client, models) -> None:
        headers = {"content-type": "application/json"}
        for given in (content, pieces()):
            answer = await client.post("/v1/completions", content=given, headers=headers)
            assert answer.status_code == status and "error" in answer.json(), answer.text
            assert answer.json()["error"]["param"] in (None, "body", "prompt")

    ask(body)


def test_long_texts_are_tokenised_beside_the_event_loop(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of text take a second, in which health checks and other answers must go on; too many are refused before it."""
    threads = []

    def watched(name: str) -> None:
        original = getattr(served, name)
        monkeypatch.setattr(
            served, name, lambda *a: threads.append(threading.current_thread()) or original(*a)
        )

    async def body(client, models) -> None:
        watched("frame"), watched("mask_text")
        assert (await client.post("/v1/embeddings", json={"input": "A model"})).status_code == 200
        assert (await client.post("/v1/fill-mask", json={"input": "A [MASK]"})).status_code == 200
        assert len(threads) == 2 and threading.current_thread() not in threads
        many = await client.post("/v1/embeddings", json={"input": ["x"] * 10})
        assert many.status_code == 400 and "too many texts" in many.json()["error"]["message"]
        assert len(threads) == 2

    ask(body, queue=9)


def test_a_full_queue_is_429_and_every_accepted_request_is_answered(ask) -> None:
    async def body(client, models) -> None:
        fields = {"model": "gpt", "prompt": "x", "max_tokens": 100, "temperature": 0}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(40)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in refused:
            assert (
                int(answer.headers["Retry-After"]) >= 1
                and answer.json()["error"]["type"] == "rate_limit_error"
            )
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 100
        assert (await complete(client, prompt="x"))["usage"]["completion_tokens"] == 24  # normal again

    ask(body, slots=2, queue=4)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_gives_its_slot_back(
    ask, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client, models) -> None:
        engine, backend = models[0].causal, models[0].loaded.causal
        forward, calls = backend.forward, []

        def slow(*arguments):
            calls.append(1)
            time.sleep(0.02)
            return forward(*arguments)

        monkeypatch.setattr(backend, "forward", slow)
        body = json.dumps(
            {"model": "gpt", "prompt": "x", "max_tokens": 150, "temperature": 0, "stream": streamed}
        ).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> (
            dict
        ):  # the body, and after three steps of the answer the news that the client left
            if messages:
                return messages.pop()
            while len(calls) < 3:
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "headers": headers,
        }
        await client._transport.app(scope | {"path": "/v1/completions", "query_string": b""}, receive, send)
        while engine.active:
            await asyncio.sleep(0.01)
        assert len(calls) < 50  # of the 150 that the answer would have taken

    ask(body, slots=1)


def test_a_batch_that_breaks_is_answered_and_the_server_lives_on(
    ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client, models) -> None:
        def broken(*_args, **_kwargs):
            raise RuntimeError("no memory")

        for name, path, fields in (
            ("gpt", "completions", {"prompt": "x", "model": "gpt"}),
            ("gpt", "completions", {"prompt": "x", "model": "gpt", "stream": True}),
            ("bert", "embeddings", {"input": "x"}),
        ):
            backend = next(m.loaded.causal or m.loaded.encoder for m in models if m.name == name)
            with monkeypatch.context() as patch:
                patch.setattr(backend, "forward", broken)
                answer = await client.post(f"/v1/{path}", json=fields)
            assert answer.status_code == 500 and "no memory" in answer.json()["error"]["message"]
            assert (await client.post(f"/v1/{path}", json=fields)).status_code == 200
        with monkeypatch.context() as patch:  # between the queue and the batch
            patch.setattr(models[0].causal._batch, "add", broken)
            assert (
                await client.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
            ).status_code == 500

    ask(body)


def test_draining_answers_what_was_accepted_and_refuses_the_rest(gpt_onnx: Path) -> None:
    async def main() -> None:
        async with serving(f"gpt={gpt_onnx}", slots=2) as (client, models):
            accepted = [asyncio.create_task(complete(client, prompt="x", max_tokens=150)) for _ in range(6)]
            while models[0].engine.queued + models[0].causal.active < 6:
                await asyncio.sleep(0.001)
            drained = asyncio.create_task(asyncio.to_thread(models[0].engine.drain))
            await asyncio.sleep(0.01)
            late = await client.post("/v1/completions", json={"prompt": "x"})
            assert late.status_code == 503 and "Retry-After" in late.headers
            for answer in await asyncio.gather(*accepted):
                assert answer["usage"]["completion_tokens"] == 150
            assert await drained

    asyncio.run(main())


def test_a_server_whose_model_does_not_answer_ends_with_an_error(
    gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with 0, as after a drain."""
    limits = Limits()
    (model,) = load_served([str(gpt_onnx)], limits)

    def broken(*_args, **_kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(model.loaded.causal, "forward", broken)
    with bind("127.0.0.1", 0) as listener, pytest.raises(Failed, match="did not start"):
        run([model], limits, listener)


def test_two_models_of_one_name_are_refused(gpt_onnx: Path) -> None:
    with pytest.raises(WrongUse, match="two models are called"):
        load_served([str(gpt_onnx), str(gpt_onnx)], Limits())
    for spec in ("=" + str(gpt_onnx), "gpt="):
        with pytest.raises(WrongUse, match="a name and a path"):
            load_served([spec], Limits())


def test_ids_beyond_the_tokenizer_are_a_prompt_like_any_other(ask) -> None:
    """The model's vocabulary (304) is padded beyond the tokenizer's (300): such ids may be read, never chosen."""

    async def body(client, models) -> None:
        answer = await complete(client, prompt=[5, 302], repetition_penalty=1.2, temperature=1.0)
        assert max(answer["choices"][0]["token_ids"]) < 300

    ask(body)
