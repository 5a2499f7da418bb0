"""A server in the test's own process: the models' processes are threads, so that a test can look into them."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from throughline.core.backend import BackendOptions
from throughline.inference.serving import listen, remote, worker
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.channel import Open
from throughline.inference.serving.keys import Key
from throughline.inference.serving.server import Server, build_app


class ThreadProcess:
    """A model's process that is a thread."""

    pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket:
            worker.serve(self._socket)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@dataclass
class Running:
    """A server with a client of it, and the models as their processes hold them, by name."""

    client: httpx.AsyncClient
    server: Server
    app: Any
    workers: dict[str, worker.WorkerModel]

    def remote(self, name: str = "gpt") -> remote.Remote:
        return self.server.catalogue.find(name).remotes[0]

    async def complete(self, **fields: Any) -> dict:
        body = {"model": "gpt", "max_tokens": 24, "temperature": 0} | fields
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def running(
    patch: pytest.MonkeyPatch,
    specs: Sequence[str],
    keys: Sequence[str] = (),
    catalogue: dict[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[Running]:
    workers: dict[str, worker.WorkerModel] = {}

    class Noted(worker.WorkerModel):
        def __init__(self, opening: Open, *rest: Any) -> None:
            super().__init__(opening, *rest)
            workers[opening.name] = self

    patch.setattr(remote, "spawn", ThreadProcess)
    patch.setattr(worker, "WorkerModel", Noted)
    bounds, telemetry = ServerLimits(**limits), Telemetry()
    options = BackendOptions(device="cpu", threads=1)
    server = Server(Catalogue(specs, bounds, options, **(catalogue or {})), bounds, telemetry)
    app = build_app(server, [Key.of(key) for key in keys])
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)
    async with app.router.lifespan_context(app), client:
        while not all(model.ready or model.failure for model in server.models) and not server.failure:
            await asyncio.sleep(0.005)
        yield Running(client, server, app, workers)


@contextlib.contextmanager
def on_a_port(app: Any) -> Iterator[tuple[str, int]]:
    """The application under uvicorn with our protocol, in a thread; gives its address."""
    config = uvicorn.Config(app, http=listen.DeadlineProtocol, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    listener = listen.bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)


@contextlib.contextmanager
def on_a_port_with(
    patch: pytest.MonkeyPatch, specs: Sequence[str], **limits: Any
) -> Iterator[tuple[str, Server]]:
    """A server with these models on a port; gives its address as a URL that ends with /, and the server."""
    patch.setattr(remote, "spawn", ThreadProcess)
    bounds, telemetry = ServerLimits(**limits), Telemetry()
    server = Server(Catalogue(specs, bounds, BackendOptions("cpu", threads=1)), bounds, telemetry)
    with on_a_port(build_app(server)) as (host, port):
        while not all(model.ready for model in server.models):
            time.sleep(0.005)
        yield f"http://{host}:{port}/", server


async def until(true: Callable[[], Any]) -> None:
    """Wait until this is true, a minute at most."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.002)


Body = Callable[[Running], Awaitable[None]]


def run_with(patch: pytest.MonkeyPatch, specs: Sequence[str], body: Body, **limits: Any) -> None:
    """Run an async test body against a server with these models."""

    async def main() -> None:
        async with running(patch, specs, **limits) as found:
            await body(found)

    asyncio.run(main())
