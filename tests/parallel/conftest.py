"""What the tests of runs in layouts share."""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A foreign store of 20,000 tokens in a pattern that can be learnt."""
    import numpy as np
    from common import index_file

    directory = tmp_path_factory.mktemp("store")
    tokens = (np.arange(20_000) * 7 % 31 + np.arange(20_000) // 50 % 3).astype(np.uint16)
    tokens.tofile(directory / "00000.bin")
    index_file(directory / "00000.idx", np.array([len(tokens)]), np.array([0, 1]), np.uint16)
    return directory


@pytest.fixture
def socket_bytes() -> Callable[[], int]:
    """What this process's connections have sent, as the kernel counts it."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs Linux's /proc to see the sockets")
    return acknowledged


def acknowledged() -> int:
    """Bytes that the kernel says this process's TCP connections have sent and the peer acknowledged
    (tcpi_bytes_acked).
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    total += struct.unpack_from(
                        "Q", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 120
                    )[0]
        except (OSError, struct.error):
            continue
    return total
