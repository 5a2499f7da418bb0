"""Connections: deadlines, sizes, what a body must be, and how answers are sent."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from starlette.responses import StreamingResponse
from throughline.inference.serving import listen
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.server import Server, build_app


@pytest.fixture
def address(in_thread, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server without models whose deadlines are short."""
    from throughline.inference.serving.accounts import ServerLimits, Telemetry

    monkeypatch.setattr(listen, "HEADER_S", 0.3)
    limits = ServerLimits(body_s=0.3)
    with in_thread.on_a_port(build_app(Server(Catalogue([]), limits, Telemetry()))) as found:
        yield found


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    connection.settimeout(5)
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost:", b""),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"408"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he", b"200"),  # slow on a kept connection
    ],
    ids=["silent", "half a head", "half a body", "no http", "half a second head"],
)
def test_slow_and_broken_clients_are_let_go(address: tuple[str, int], sent: bytes, answer: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        told = all_of(connection)
        assert time.monotonic() - began < 4
    assert told.startswith(b"HTTP/1.1 " + answer) if answer else told == b""
    if answer in (b"400", b"408"):
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_an_idle_connection_is_kept_between_requests(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address)
    for _ in range(2):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        time.sleep(0.5)  # longer than a head may take
    connection.close()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("application/json", "0 models answer"),
        ("application/vnd.x+json; charset=utf-8", "0 models answer"),
        ("text/plain", "Content-Type: application/json"),  # what a web page may send to any server
        ("application/jsonl", "Content-Type: application/json"),
        (None, "Content-Type: application/json"),
    ],
)
def test_a_body_must_be_said_to_be_json(address: tuple[str, int], kind: str | None, problem: str) -> None:
    connection = http.client.HTTPConnection(*address)
    connection.request("POST", "/tokenize", b'{"prompt": "x"}', {"Content-Type": kind} if kind else {})
    answer = connection.getresponse()
    error = json.load(answer)["error"]
    assert answer.status == 400 and problem in error["message"] and error["type"] == "invalid_request_error"
    connection.close()


def test_a_client_that_reads_nothing_is_let_go(in_thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made for it is bounded by the buffers of its connection, and the answer is given up."""
    monkeypatch.setattr(listen, "UNREAD_S", 0.3)
    made, ended = list[int](), threading.Event()

    async def parts() -> AsyncIterator[bytes]:
        try:
            while True:
                made.append(1)
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def app(scope, receive, send) -> None:
        if scope["type"] == "http":
            await StreamingResponse(parts())(scope, receive, send)

    with in_thread.on_a_port(app) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ended.wait(10)
        assert len(made) * 65536 < 32e6  # Linux gives a loopback connection some 6 MB
        with suppress(ConnectionResetError):  # what the kernel still held may come first
            assert not all_of(connection).endswith(b"0\r\n\r\n"), "the answer has no end"


@pytest.mark.parametrize(
    "sent",
    [
        b"X-Long: " + b"x" * (listen.HEAD_BYTES + 1),
        b"X-Long: " + b"x" * (listen.HEAD_BYTES + 1) + b"\r\n\r\n",
        b"a:b\r\n" * 1000 + b"\r\n",
        b"\r\nGET /health HTTP/1.1\r\n" * 100 + b"\r\n",
    ],
    ids=["no end", "one line", "lines", "requests"],
)
def test_the_head_of_a_request_and_their_number_are_bounded(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + sent)
        with suppress(ConnectionResetError):  # for what was not read
            assert b"HTTP/1.1 400" in all_of(connection)


def test_a_body_comes_in_pieces_worth_their_while(address: tuple[str, int]) -> None:
    """Each piece costs a call of the parser: who sends single bytes is let go, who sends a kilobyte each is read."""
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(head + (b"400\r\n" + b" " * 1024 + b"\r\n") * 300 + b"0\r\n\r\n")
        assert b"cannot be read" in all_of(connection)
    with socket.create_connection(address) as connection, suppress(ConnectionError):  # reset: much is unread
        connection.sendall(head + b"1\r\n \r\n" * 50_000)
        assert b"Invalid HTTP" in all_of(connection)


def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(in_thread) -> None:
    from throughline.inference.serving.accounts import ServerLimits, Telemetry

    telemetry = Telemetry()
    with in_thread.on_a_port(build_app(Server(Catalogue([]), ServerLimits(), telemetry))) as address:
        with socket.create_connection(address) as connection:
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        while b"throughline_requests_total{" not in (page := telemetry.page()):
            time.sleep(0.01)
    assert b'endpoint="/v1/completions",status="499"' in page


@pytest.mark.parametrize("ending", ["answered", "refused", "cut"])
def test_the_bytes_of_a_body_are_given_back_to_the_budget(ending: str) -> None:
    """However a request ends: of three bodies of 60,000 bytes, counted as 43,616 each, the budget holds one."""
    from throughline.inference.serving.accounts import ServerLimits, Telemetry

    server = Server(Catalogue([]), ServerLimits(bodies_bytes=50_000), Telemetry())
    app = build_app(server)
    kind = b"text/plain" if ending == "refused" else b"application/json"
    body = b'{"prompt": "' + b"x" * 59_985 + b'"}'
    head = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "http_version": "1.1",
    }
    fields = [(b"content-type", kind), (b"content-length", b"60000")]

    async def status() -> int | None:
        parts = [{"type": "http.request", "body": body[:50_000], "more_body": True}]
        whole = {"type": "http.request", "body": body[50_000:], "more_body": False}
        parts.append({"type": "http.disconnect"} if ending == "cut" else whole)
        sent: list[dict] = []

        async def receive() -> dict:
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        await app(head | {"headers": fields, "state": {}}, receive, send)
        return sent[0]["status"] if sent else None

    async def main() -> None:
        statuses = [await status() for _ in range(3)]
        assert 503 not in statuses and len(set(statuses)) == 1
        assert server.held == 0

    asyncio.run(main())


def test_few_requests_at_once_are_answered_in_turn(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        connection.sendall((head + b"\r\n") * listen.PIPELINED + head + b"Connection: close\r\n\r\n")
        assert all_of(connection).count(b"HTTP/1.1 200") == listen.PIPELINED + 1


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 40, "more than 16 requests"),
        (b"nonsense\r\n\r\n", "Invalid HTTP"),
        (b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * (listen.HEAD_BYTES + 1), "head of the request"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 2000, "Invalid HTTP"),
    ],
    ids=["too many", "nonsense", "long head", "pieces"],
)
def test_a_broken_request_is_refused_behind_the_answers_to_those_before_it(
    in_thread, sent: bytes, said: str
) -> None:
    """The first answer streams meanwhile: no byte of the refusal gets into it, none is lost."""
    go_on = threading.Event()

    async def app(scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await receive()
            return
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        while not go_on.is_set():
            await asyncio.sleep(0.005)
        await send({"type": "http.response.body", "body": b"two"})

    with in_thread.on_a_port(app) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        told = connection.recv(65536)
        while b"one" not in told:
            told += connection.recv(65536)
        connection.sendall(sent)
        time.sleep(0.05)  # what would be written now came into the answer
        go_on.set()
        with suppress(ConnectionResetError):  # for what was not read
            told += all_of(connection)
    *answers, refusal = told.split(b"HTTP/1.1 ")[1:]
    assert all(answer.startswith(b"200") and answer.endswith(b"\r\n\r\nonetwo") for answer in answers)
    assert len(answers) == (listen.PIPELINED + 1 if said.startswith("more") else 1)
    assert (
        refusal.startswith(b"400")
        and said in json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["message"]
    )


@pytest.mark.parametrize(("most", "connections"), [(1024, 960), (10_000, 4096), (-1, 4096)])
def test_connections_leave_files_for_all_else(
    most: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(listen.resource, "getrlimit", lambda kind: (256, most))
    monkeypatch.setattr(listen.resource, "setrlimit", lambda kind, limits: calls.append(limits))
    assert listen.connections() == connections and calls == [(most, most)]
