"""Asks a server under the watchdog, and holds what was seen against the bounds."""

import http.client
import json
import time
from typing import Any

JSON = {"Content-Type": "application/json"}


def post(server: Any, path: str, body: bytes | dict, timeout: float = 120) -> tuple[int, bytes]:
    """Status and body of an answer; 0 when the connection broke."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        connection.request("POST", path, data, JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def judged(server: Any, name: str, bounds: Any) -> None:
    """Say what was seen, and hold it against the bounds."""
    slowest_ms = 1000 * max(server.health_s, default=0)
    took_s = time.monotonic() - server.began_s
    figures = f"blocked {server.blocked_ms:.0f} ms, peak {server.peak_mb:.0f} MB"
    print(f"\n{name}: {took_s:.1f} s, {figures}, /health at most {slowest_ms:.0f} ms")
    assert server.blocked_ms <= bounds.blocked_ms and server.peak_mb <= bounds.peak_mb
