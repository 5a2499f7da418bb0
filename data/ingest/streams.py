"""Files as blocks of bytes: opened at an offset, decompressed, damage named, cut at separators."""

import bz2
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from ...core.errors import Failed

BLOCK_BYTES = 1 << 20
BLANK = b" \t\r\n"
LINE_END = re.compile(rb"\n")
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")  # greedy: one match takes the whole run of blank lines


@contextmanager
def open_blocks(
    path: str, compression: str, offset: int, on_bytes: Callable[[int], None]
) -> Iterator[Iterator[bytes]]:
    """The (decompressed) content of a file from `offset` on, in blocks of about BLOCK_BYTES.

    `on_bytes` is told how many bytes of the file each block took. Raises Failed when the file cannot be
    opened or its compressed data are cut short or damaged.
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the with below
    except OSError as error:
        fix = "put the file back, or start again without it and with another --out"
        why = error.strerror or str(error)
        raise Failed("cannot open an input", where=path, why=why, fix=fix) from error
    with file:
        file.seek(offset)
        yield _guarded(file, path, compression, on_bytes)


def _guarded(
    file: IO[bytes], path: str, compression: str, on_bytes: Callable[[int], None]
) -> Iterator[bytes]:
    told = file.tell()
    fix = "copy or download the file again"
    try:
        for block in _decompressed(file, compression):
            place = file.tell()
            on_bytes(place - told)
            told = place
            yield block
    except EOFError as error:
        why = "it ends in the middle of its compressed data"
        raise Failed("a compressed file is cut short", where=path, why=why, fix=fix) from error
    except (zlib.error, ValueError) as error:
        raise Failed("a compressed file is damaged", where=path, why=str(error), fix=fix) from error
    except OSError as error:  # gzip and bz2 report damage as an OSError without a number
        what = "a compressed file is damaged" if error.errno is None else "cannot read a file"
        raise Failed(what, where=path, why=str(error), fix=fix) from error


def _decompressed(file: IO[bytes], compression: str) -> Iterator[bytes]:
    if compression == "zst":
        yield from _unzstd(file)
        return
    opened: Any = file
    if compression and os.fstat(file.fileno()).st_size:  # an empty file is no damaged one
        opened = gzip.GzipFile(fileobj=file) if compression == "gz" else bz2.BZ2File(file)
    while block := opened.read(BLOCK_BYTES):
        yield block


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    """Zstandard frames. Unlike zstandard's stream reader this notices a frame that is cut short.

    Input goes in 4 KiB at a time: data compressed 32,000 : 1 then expand to 128 MiB at once and not more.
    """
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    decoder, pending, out, size = None, b"", [], 0
    try:
        while chunk := (pending or file.read(4096)):
            decoder = decoder or context.decompressobj()
            out.append(decoder.decompress(chunk))
            size += len(out[-1])
            pending = decoder.unused_data
            decoder = None if decoder.eof else decoder
            if size >= BLOCK_BYTES:
                yield b"".join(out)
                out, size = [], 0
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if size:
        yield b"".join(out)
    if decoder is not None:
        raise EOFError


def between(
    blocks: Iterable[bytes], start: int, stop: int | None, separator: re.Pattern[bytes]
) -> Iterator[bytes]:
    """The part of a file from the end of the first separator at or after `start - 1` to that for `stop - 1`.

    `blocks` begin at max(start - 1, 0); start 0 is the beginning of the file, stop None its end. Where one
    range stops the next one starts by the same rule, so ranges that touch share nothing and lose nothing.
    """
    position, seeking = max(start - 1, 0), start > 0
    held: list[bytes] = []  # a run of white space is judged when its end is known
    for block in blocks:
        if not block.strip(BLANK):
            held.append(block)
            continue
        block = b"".join([*held, block])
        solid = len(block.rstrip(BLANK))
        block, held = block[:solid], [block[solid:]]
        while True:  # twice at most: the separator at the start, then the one at the stop
            base = 0 if seeking or stop is None else max(stop - 1 - position, 0)
            found = separator.search(block, base) if seeking or stop is not None else None
            if found is None:
                break
            if not seeking:
                yield block[: found.end()]
                return
            if stop is not None:
                again = separator.search(block, max(stop - 1 - position, 0))
                if again is not None and again.end() == found.end():
                    return
            position += found.end()
            block, seeking = block[found.end() :], False
        position += len(block)
        if block and not seeking:
            yield block
    if not seeking and (rest := b"".join(held)):
        yield rest
