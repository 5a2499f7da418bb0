"""Requests and clients made to hurt: what each costs the HTTP process, in figures (`-s` prints them).

The bounds: no turn of the event loop above 50 ms, no more memory than 300 MB and the budget of bodies, and every client
has an answer. Everything stays on the loopback interface; the whole takes some minutes.
"""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_client import judged, post

pytestmark = pytest.mark.slow
BIG = 3_990_000


def filled(begin: str, one: str, end: str) -> bytes:
    """A body just below what a body may be."""
    return (begin + ",".join([one] * ((BIG - len(begin) - len(end)) // (len(one) + 1))) + end).encode()


WRONG = {
    "floats": ("/v1/completions", filled('{"model":"gpt","prompt":[', "1.5", "]}")),
    "empty lists": ("/v1/completions", filled('{"model":"gpt","prompt":[', "[]", "]}")),
    "nulls": ("/v1/embeddings", filled('{"model":"bert","input":[', "null", "]}")),
    "letters": ("/v1/embeddings", filled('{"model":"bert","input":[', '"a"', "]}")),
    "backslashes": ("/v1/embeddings", filled('{"model":"bert","input":[', r'"\\"', "]}")),
    "ids": ("/v1/completions", filled('{"model":"gpt","prompt":[', "1", "]}")),
    "lists of one": ("/v1/completions", filled('{"model":"gpt","prompt":[', "[1]", "]}")),
    "messages": ("/v1/chat/completions", filled('{"messages":[', '{"role":"user"}', "]}")),
    "roles": ("/v1/chat/completions", filled('{"messages":[', r'{"\u0072ole":"user"}', "]}")),
    "parts": (
        "/v1/responses",
        filled('{"input":[{"role":"user","content":[', '{"type":"input_text","text":""}', "]}]}"),
    ),
    "conversations": (
        "/v1/chat/completions",
        filled('{"messages":[', json.dumps({"role": "user", "content": "word " * 190_000}), "]}"),
    ),
    "masks": ("/v1/fill-mask", json.dumps({"model": "masks", "input": "[MASK]" * 160_000}).encode()),
    "tokens": ("/detokenize", filled('{"model":"gpt","tokens":[', "1.5", "]}")),
    "many tokens": ("/detokenize", filled('{"model":"gpt","tokens":[', "1", "]}")),
    "biases": (
        "/v1/completions",
        json.dumps(
            {"model": "gpt", "prompt": "x", "logit_bias": {str(i): 1 for i in range(270_000)}}
        ).encode(),
    ),
    "metadata": ("/v1/completions", json.dumps({"metadata": {str(i): "" for i in range(270_000)}}).encode()),
    "unknown fields": ("/v1/completions", json.dumps({f"a{i}": 0 for i in range(270_000)}).encode()),
    "a deep schema": ("/v1/completions", b'{"model":"gpt","prompt":"x","guided_json":' + b'{"a":' * 12_000),
    "a schema": (
        "/v1/completions",
        json.dumps(
            {
                "model": "gpt",
                "prompt": "x",
                "n": 128,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"enum": [f"word {i}" for i in range(180_000)]}},
                },
            }
        ).encode(),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_body_that_is_wrong_costs_little(server: Any, bounds: Any, name: str) -> None:
    """S1, S2: bodies just below 4 MB whose parts were once made into objects, or errors, before anybody counted."""
    path, body = WRONG[name]
    server.begin()
    status, told = post(server, path, body)
    assert status == 400 and len(told) < 4000, (status, told[:200])
    judged(server, name, bounds)


def test_a_grammar_whose_client_has_left_holds_up_nobody(server: Any, bounds: Any) -> None:
    """S2: the largest schemas, each of its own, by clients that leave; then one who stays is answered soon."""
    pytest.importorskip("llguidance")
    server.begin()
    for number in range(8):
        schema = {"enum": [f"word {number} {i}" for i in range(3000)]}
        body = {"model": "gpt", "prompt": "x", "n": 64, "guided_json": schema}
        with server.connect() as connection:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            time.sleep(0.05)
    began_s = time.monotonic()
    status, told = post(server, "/v1/completions", {"model": "gpt", "prompt": "x", "guided_regex": "[ab]{3}"})
    assert status == 200, told[:300]
    assert time.monotonic() - began_s < 15  # the one that is being made is finished first
    judged(server, "grammars", bounds)


def test_unread_bodies_hold_no_connection(server: Any, bounds: Any) -> None:
    """S3: answers that come before their body, and drops of it afterwards."""
    heads = {
        "no such path": b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        "a GET with a body": b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        "too large": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\nabc",
    }
    server.begin()
    held = {(name, i): server.connect() for name in heads for i in range(30)}
    for (name, _), connection in held.items():
        connection.sendall(heads[name])
    until_s = time.monotonic() + 8
    while held and time.monotonic() < until_s:
        for key, connection in list(held.items()):
            connection.settimeout(0.001)
            try:
                connection.sendall(b"1\r\na\r\n")
                gone = connection.recv(65536) == b""
            except TimeoutError:
                gone = False
            except OSError:
                gone = True
            if gone:
                held.pop(key).close()
        time.sleep(0.2)
    left = sorted({name for name, _ in held})
    for connection in held.values():
        connection.close()
    judged(server, f"unread bodies, {len(held)} of 90 held", bounds)
    assert not held, left


def test_unfinished_bodies_stay_within_their_budget(server: Any, bounds: Any) -> None:
    """S4: 100 bodies of 4 MB of which one byte is missing; small requests are served meanwhile."""
    server.begin()
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BIG}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    held = [server.connect() for _ in range(100)]

    def send(connection: socket.socket) -> None:
        with suppress(OSError):  # refused
            connection.sendall(head.encode() + b" " * (BIG - 1))

    # Ten at a time: on the loopback interface the receiver's process does the senders' share of TCP too, 2 ms a read.
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(send, held))
    status, _ = post(server, "/tokenize", {"model": "gpt", "prompt": "x"})
    assert status == 200
    for connection in held:
        connection.close()
    judged(server, "unfinished bodies", bounds)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "gpt", "prompt": "word " * 198_000}),
        ("/v1/embeddings", {"model": "bert", "input": "a" * 990_000}),
        ("/tokenize", {"model": "gpt", "prompt": "word " * 198_000}),
    ],
    ids=["prompts", "words", "tokens"],
)
def test_long_texts_hold_up_nobody(server: Any, bounds: Any, path: str, body: dict) -> None:
    """S4, N1, N2: texts of a megabyte, twenty at a time, one word that is one token among them."""
    server.begin()
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: post(server, path, body), range(40)))
    assert {status for status, _ in found} <= {200, 400, 503}
    judged(server, f"40 megabytes to {path}", bounds)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "gpt", "prompt": "x", "n": 128, "max_tokens": 120, "logprobs": 20}),
        ("/v1/completions", {"model": "gpt", "prompt": "x", "n": 64, "max_tokens": 120, "logprobs": 20}),
        (
            "/v1/completions",
            {
                "model": "gpt",
                "prompt": ["a b c d e f g h " * 8] * 40,
                "max_tokens": 1,
                "echo": True,
                "logprobs": 20,
            },
        ),
        ("/v1/embeddings", {"model": "bert", "input": ["A model reads"] * 256}),
        ("/v1/fill-mask", {"model": "masks", "input": "[MASK] " * 500, "top_k": 100}),
    ],
    ids=["128 answers", "64 answers", "echoes", "vectors", "masks"],
)
def test_large_answers_hold_up_nobody(server: Any, bounds: Any, path: str, body: dict) -> None:
    """S5: answers of megabytes are made beside the event loop, or refused when they would be too large."""
    server.begin()
    status, told = post(
        server, path, body | ({"temperature": 0, "logit_bias": {"0": -100}} if "prompt" in body else {})
    )
    assert status == 200 or b"too large" in told, told[:300]
    judged(server, f"{len(told) / 1e6:.1f} MB, status {status}", bounds)


def test_a_long_query_is_read_once_or_not_at_all(server: Any, bounds: Any) -> None:
    """S6: one word of a megabyte beside 256 documents."""
    server.begin()
    body = {"model": "judge", "query": "a" * 990_000, "documents": ["a fox"] * 256}
    began_s = time.monotonic()
    status, told = post(server, "/v1/rerank", body)
    assert status == 400 and b"longer than the model's context" in told
    assert time.monotonic() - began_s < 2
    judged(server, "rerank", bounds)


def test_idle_and_slow_connections_leave_room(server: Any, bounds: Any) -> None:
    """500 that say nothing and 500 that send a head by drops: others are served as before."""
    server.begin()
    held = [server.connect() for _ in range(1000)]
    for connection in held[::2]:
        connection.sendall(b"POST /v1/comp")
    server.health_s.clear()
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s:
        for connection in held[::2]:
            connection.sendall(b"l")
        time.sleep(0.3)
    share = sorted(server.health_s)[int(len(server.health_s) * 0.99)]
    for connection in held:
        connection.close()
    print(f"\n/health beside 1,000 connections: p99 {1000 * share:.0f} ms of {len(server.health_s)}")
    judged(server, "1,000 connections", bounds)
    assert 1000 * share < bounds.health_ms


@pytest.mark.parametrize("sent", ["requests", "lines", "pieces"])
def test_parts_of_requests_hold_up_nobody(server: Any, bounds: Any, sent: str) -> None:
    """Clients that send thousands of requests without an answer, of lines of a head, or of pieces of a body."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    data = {
        "requests": (head + b"\r\n") * 10_000,
        "lines": head + b"aa:bb\r\n" * 9000,
        "pieces": head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 60_000,
    }[sent]
    server.begin()
    held = [server.connect() for _ in range(100)]
    for connection in held:
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(data)
    time.sleep(2)
    status, _ = post(server, "/tokenize", {"model": "gpt", "prompt": "x"})
    for connection in held:
        connection.close()
    judged(server, f"{len(held)} times {len(data) / 1e6:.2f} MB of {sent}", bounds)
    assert status == 200


def test_more_connections_than_files_leave_room(start: Callable, gpt_onnx: Path, bounds: Any) -> None:
    """Where a process may have 1,024 files open, and 256 unless it asks: those that owe a request longest go."""
    with start(f"gpt={gpt_onnx}", files=(256, 1024)) as server:
        held = [server.connect() for _ in range(2000)]
        for connection in held:
            connection.sendall(b"POST /v1/comp")
        assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        judged(server, "2,000 connections", bounds)
