"""Requests without sense, and a model's process that stops: no fault of the server, and everybody is answered."""

import http.client
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hostile_client import JSON, judged, post

pytestmark = pytest.mark.slow
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "gpt", "prompt": "The quick", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/embeddings": {"model": "bert", "input": ["A fox", "a dog"]},
    "/v1/fill-mask": {"model": "masks", "input": "a [MASK]"},
    "/v1/classify": {"model": "judge", "input": "a fox"},
    "/v1/rerank": {"model": "judge", "query": "a", "documents": ["b", "c"]},
    "/v1/score": {"model": "judge", "text_1": "a", "text_2": ["b"]},
    "/embed": {"model": "bert", "inputs": "a fox"},
    "/rerank": {"model": "judge", "query": "a", "texts": ["b"]},
    "/tokenize": {"model": "gpt", "prompt": "a"},
    "/detokenize": {"model": "gpt", "tokens": [5]},
    "/health": {},
}
FIELDS = [
    "model",
    "prompt",
    "input",
    "inputs",
    "messages",
    "query",
    "documents",
    "tokens",
    "n",
    "max_tokens",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "logprobs",
    "echo",
    "stream",
    "seed",
    "logit_bias",
    "response_format",
    "guided_regex",
    "guided_json",
    "structured_outputs",
    "min_tokens",
    "dimensions",
    "truncate",
    "text_1",
    "text_2",
]


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """Some JSON value."""
    simple = [
        None,
        True,
        0,
        -1,
        1,
        5,
        2**63,
        2**70,
        1e300,
        0.5,
        "",
        "x",
        "[MASK] a",
        "gpt",
        "bert",
        "judge",
        "\u0000",
        "é\ud7ff",
    ]
    kind = draw.random()
    if depth > 2 or kind < 0.7:
        return draw.choice(simple)
    if kind < 0.85:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    names = ("type", "schema", "json", "role", "content", "json_object", "user", "1", "text")
    return {draw.choice(names): drawn(draw, depth + 1) for _ in range(draw.randrange(4))}


def test_ten_thousand_requests_without_sense_meet_no_fault(server: Any, bounds: Any) -> None:
    """Fields of ours with values of any kind, bodies cut and changed: 200 or a 4xx that says why, never a 5xx."""
    server.begin()
    lock, statuses, faults = threading.Lock(), dict[int, int](), list[Any]()

    def client(seed: int) -> None:
        draw = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        for _ in range(2500):
            path = draw.choice([*VALID])
            ours = FIELDS if draw.random() < 0.5 else ["n", "stop", "stream", "seed", *VALID[path]]
            body = VALID[path] | {draw.choice(ours): drawn(draw) for _ in range(draw.randrange(3))}
            data = bytearray(json.dumps(body).encode())
            if draw.random() < 0.2:
                data[draw.randrange(len(data))] = draw.randrange(256)
            connection.request("POST", path, bytes(data), JSON)
            answer = connection.getresponse()
            told = answer.read()
            with lock:
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
                if answer.status >= 500:
                    faults.append((path, bytes(data), told))
        connection.close()

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judged(server, f"10,000 requests, {statuses}", bounds)
    assert sum(statuses.values()) == 10_000 and not faults, faults[:3]


def test_a_worker_that_stops_is_replaced_and_everybody_is_answered(
    start: Callable, gpt_onnx: Path, bounds: Any
) -> None:
    """S7: the model's process is stopped, as a deadlock stops it. Its clients hear of it within the limit and what a
    new process takes to load; what they send meanwhile stays bounded.
    """
    limit_s = 3
    with start(f"gpt={gpt_onnx}", "--hang-timeout", str(limit_s)) as server:
        (worker,) = server.workers()
        worker.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        body = {"model": "gpt", "prompt": "x", "max_tokens": 50, "logit_bias": {"0": -100}, "temperature": 0}
        large = body | {"prompt": "word " * 2000}
        with ThreadPoolExecutor(32) as pool:
            leaving = [pool.submit(post, server, "/v1/completions", large, 0.2) for _ in range(200)]
            found = list(pool.map(lambda _: post(server, "/v1/completions", body), range(20)))
        took_s = time.monotonic() - began_s
        assert [status for status, _ in found] == [500] * 20 or {status for status, _ in found} <= {
            500,
            503,
            200,
        }
        assert took_s < limit_s + 10 and all(one.done() for one in leaving)
        while post(server, "/v1/completions", body)[0] != 200:
            assert time.monotonic() - began_s < 60
            time.sleep(0.2)
        assert worker.pid not in [one.pid for one in server.workers()]
        judged(server, f"a stopped worker, its clients told after {took_s:.1f} s", bounds)
