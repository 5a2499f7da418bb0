"""The server under load, in the test's own process: full queues, clients that leave, batches that break."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

ENDLESS = {"temperature": 0, "logit_bias": {"0": -100}}  # never the end-of-text token


def test_a_full_queue_is_429_and_every_accepted_request_is_answered(ask) -> None:
    async def body(found) -> None:
        fields = {"model": "gpt", "prompt": "x", "max_tokens": 100, "temperature": 0} | ENDLESS
        answers = await asyncio.gather(
            *(found.client.post("/v1/completions", json=fields) for _ in range(40))
        )
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in refused:
            assert (
                int(answer.headers["Retry-After"]) >= 1
                and answer.json()["error"]["type"] == "rate_limit_error"
            )
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 100, answer.json()
        assert (await found.complete(prompt="x"))["usage"]["completion_tokens"] == 24  # normal again

    ask(body, slots=2, queue=4)


def slowed(found, monkeypatch: pytest.MonkeyPatch, name: str = "gpt") -> list[float]:
    """Makes each step of a model take 20 ms more; the list grows with every step."""
    loaded, calls = found.workers[name].loaded, []
    backend, method = (loaded.causal, "step") if loaded.causal else (loaded.encoder, "forward")
    usual = getattr(backend, method)

    def slow(*arguments):
        calls.append(time.monotonic())
        time.sleep(0.02)
        return usual(*arguments)

    monkeypatch.setattr(backend, method, slow)
    return calls


async def call_and_leave(found, path: str, body: dict, until: Callable[[], bool]) -> None:
    """A request whose client leaves when `until` says so."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict:
        if messages:
            return messages.pop()
        while not until():
            await asyncio.sleep(0.002)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        pass

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "method": "POST"}
    scope |= {"headers": [(b"content-type", b"application/json")], "path": path, "query_string": b""}
    await found.app(scope, receive, send)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [1, 4], ids=["before the first token", "after some"])
def test_a_client_that_leaves_gives_its_slot_back(
    ask, streamed: bool, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 150 steps few are computed: before the first token (a prompt of several chunks) and after it."""

    async def body(found) -> None:
        calls = slowed(found, monkeypatch)
        request = {"model": "gpt", "prompt": "x", "max_tokens": 150, "stream": streamed} | ENDLESS
        await call_and_leave(found, "/v1/completions", request, lambda: len(calls) >= after)
        while found.workers["gpt"].engine.busy:
            await asyncio.sleep(0.01)
        assert len(calls) < 50 and found.remote().waiting == 0

    ask(body, slots=1)


def test_cancelled_requests_leave_the_queue_at_once(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that time out and come again must not fill the queue with work that nobody reads."""

    async def body(found) -> None:
        slowed(found, monkeypatch)
        request = {"model": "gpt", "prompt": "x", "max_tokens": 100} | ENDLESS
        first = asyncio.create_task(found.complete(**request))
        while found.remote().active == 0 and found.remote().waiting == 0:
            await asyncio.sleep(0.002)
        for _ in range(3):  # each round fills the queue and leaves it
            left = asyncio.Event()
            gone = [
                asyncio.create_task(call_and_leave(found, "/v1/completions", request, left.is_set))
                for _ in range(4)
            ]
            while found.remote().waiting < 5:
                await asyncio.sleep(0.002)
            left.set()
            await asyncio.gather(*gone)
            assert found.remote().waiting == 1
        engine = found.workers["gpt"].engine
        while engine.waiting:
            await asyncio.sleep(0.002)
        assert (await found.complete(prompt="y", max_tokens=2))["usage"]["completion_tokens"] == 2
        await first

    ask(body, slots=1, queue=4)


def test_a_grammar_in_preparation_holds_up_nobody(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile; its own answer follows; one whose client left is never begun."""
    pytest.importorskip("llguidance", reason="needs llguidance")

    async def body(found) -> None:
        model, gate, begun = found.workers["gpt"], threading.Event(), list[str]()
        usual = model._guide

        def slow(constraint: str) -> Any:
            begun.append(json.loads(constraint)["regex"])
            assert gate.wait(30)
            return usual(constraint)

        monkeypatch.setattr(model, "_guide", slow)
        answer = asyncio.create_task(found.complete(prompt="x", guided_regex="[ab]{3}"))
        request = {"model": "gpt", "prompt": "x", "guided_regex": "left"}
        left = asyncio.Event()
        gone = asyncio.create_task(call_and_leave(found, "/v1/completions", request, left.is_set))
        while len(model.engine.waiting) < 2:
            await asyncio.sleep(0.002)
        assert (await found.complete(prompt="y", max_tokens=2))["usage"]["completion_tokens"] == 2
        left.set()
        await gone
        while len(model.engine.waiting) > 1:
            await asyncio.sleep(0.002)
        gate.set()
        assert re.fullmatch("[ab]{3}", (await answer)["choices"][0]["text"])
        assert (await found.complete(prompt="z", max_tokens=1))["usage"]["completion_tokens"] == 1
        assert begun == ["[ab]{3}"] and not model.engine.waiting

    ask(body, slots=1)


def test_an_embedding_whose_client_left_is_not_computed(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(found) -> None:
        calls = slowed(found, monkeypatch, "bert")
        texts = {"model": "bert", "input": ["A model " * 20] * 200}  # several batches of 4,096 tokens
        await call_and_leave(found, "/v1/embeddings", texts, lambda: len(calls) >= 1)
        engine, remote = found.workers["bert"].engine, found.remote("bert")
        while engine.busy or remote.waiting:  # which hears a moment later
            await asyncio.sleep(0.005)
        assert len(calls) <= 2

    ask(body)


def test_a_batch_that_breaks_is_answered_and_the_server_lives_on(
    ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found) -> None:
        def broken(*_args, **_kwargs):
            raise RuntimeError("no memory")

        for name, path, fields in (
            ("gpt", "completions", {"prompt": "x", "model": "gpt"}),
            ("gpt", "completions", {"prompt": "x", "model": "gpt", "stream": True}),
            ("bert", "embeddings", {"input": "x"}),
        ):
            loaded = found.workers[name].loaded
            with monkeypatch.context() as patch:
                patch.setattr(loaded.causal or loaded.encoder, "step" if loaded.causal else "forward", broken)
                answer = await found.client.post(f"/v1/{path}", json=fields)
            said = answer.json()["error"]["message"]
            assert answer.status_code == 500 and "failed on this answer" in said and "no memory" not in said
            async with asyncio.timeout(60):  # it failed on a trial too: another process may have to begin
                while (await found.client.post(f"/v1/{path}", json=fields)).status_code != 200:
                    await asyncio.sleep(0.02)
        with monkeypatch.context() as patch:  # between the queue and the batch
            patch.setattr(found.workers["gpt"].engine, "_reuse", broken)
            answer = await found.client.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
            assert answer.status_code == 500

    ask(body)


def test_a_fault_of_ours_is_json_with_the_request_id(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(found) -> None:
        monkeypatch.setattr(found.server.catalogue.find("gpt"), "completion", lambda body: {}["absent"])
        answer = await found.client.post(
            "/v1/completions", json={"prompt": "x", "model": "gpt"}, headers={"X-Request-ID": "mine-7"}
        )
        assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine-7"
        assert "mine-7" in answer.json()["error"]["message"] and "absent" not in answer.text

    ask(body)
