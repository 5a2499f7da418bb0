"""The port: what is read again while it serves, and how many files the process opens."""

import asyncio
import os
import resource
import signal
import ssl
import subprocess
from pathlib import Path

import pytest
import uvicorn
from throughline.core.errors import WrongUse
from throughline.inference.serving import listen
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.keys import read_keys, replace_keys
from throughline.inference.serving.reload import ReloadedFile, read_certificate
from throughline.inference.serving.server import Server, build_app


def write_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of this name and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    words = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
    )
    made = subprocess.run([*words.split(), "-keyout", key, "-out", certificate], capture_output=True)
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    return certificate, key


def shown(server_context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection gets, by a handshake in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_new_connections_get_the_new_certificate_and_a_faulty_one_changes_nothing(tmp_path: Path) -> None:
    """A key that is not the certificate's, and a file that is none: the old pair stays whole."""
    old, new = write_certificate(tmp_path, "old"), write_certificate(tmp_path, "new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*old)
    before = shown(context)
    (tmp_path / "none").write_text("no certificate")
    for wrong in ((new[0], old[1]), (tmp_path / "none", old[1]), (tmp_path / "absent", old[1])):
        with pytest.raises(WrongUse, match="TLS cannot begin"):
            read_certificate(context, *wrong)
        assert shown(context) == before
    read_certificate(context, *new)
    assert shown(context) != before


def test_sighup_reads_keys_again_and_drops_no_connection(tmp_path: Path) -> None:
    """The same connection is let in by a key that the file got after the server began. A file that changes without a
    signal is read by the next look.
    """
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = read_keys(file, None, 64)
    reloaded = ReloadedFile("the API keys", [file], lambda: replace_keys(keys, read_keys(file, None, 64)))
    server = Server(Catalogue([]), ServerLimits(), Telemetry())
    how = {"http": listen.Reading, "lifespan": "on", "ws": "none", "log_config": None, "access_log": False}
    config = uvicorn.Config(build_app(server, keys), **how)
    listener = listen.bind("127.0.0.1", 0)

    async def main() -> None:
        serving = listen.DrainingServer(config, server, listener, [reloaded])
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())

        async def status(key: str) -> bytes:
            head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            return answer.split()[1]

        assert [await status(key) for key in ("old", "new")] == [b"200", b"401"]
        file.write_text("new\n")
        os.kill(os.getpid(), signal.SIGHUP)
        while await status("new") != b"200":
            await asyncio.sleep(0.005)
        assert await status("old") == b"401"
        file.write_text("third key=x\n")  # faulty
        await serving._look()
        assert await status("new") == b"200"
        file.write_text("third\n")
        await serving._look()
        assert await status("third") == b"200"
        writer.close()
        serving.should_exit = True
        await task

    asyncio.run(main())


def test_a_request_that_has_come_when_the_server_shuts_down_is_answered_as_the_last_one() -> None:
    """It lies unread in the kernel when idle connections are closed; one without a request is closed."""
    server = Server(Catalogue([]), ServerLimits(drain_s=0.0), Telemetry())
    config = uvicorn.Config(build_app(server), http=listen.Reading, lifespan="on", ws="none", log_config=None)
    listener = listen.bind("127.0.0.1", 0)

    async def main() -> None:
        serving = listen.DrainingServer(config, server, listener)
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        idle, _ = await asyncio.open_connection(*listener.getsockname())
        head = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(head)
        assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
        server.draining.set()
        writer.write(head)  # sent at once; the loop reads it in its next turn
        for connection in list(serving.server_state.connections):
            connection.shutdown()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        assert await idle.read() == b""
        serving.should_exit = True
        await task

    asyncio.run(main())


@pytest.mark.parametrize(("hard", "connections"), [(resource.RLIM_INFINITY, 4096), (1 << 40, 4096)])
def test_a_system_that_refuses_its_own_hard_limit_gets_a_lower_one(
    hard: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS: the hard limit is unlimited, and more than OPEN_MAX (10,240) open files are refused."""
    calls: list[tuple[int, int]] = []

    def set_limits(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] == resource.RLIM_INFINITY or limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        calls.append(limits)

    monkeypatch.setattr(listen.resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(listen.resource, "setrlimit", set_limits)
    assert listen.connections() == connections and calls == [(10_240, hard)]


def test_where_no_limit_can_be_set_the_present_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(listen.resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(listen.resource, "setrlimit", refuse)
    assert listen.connections() == 256 - listen.OWN_FILES
