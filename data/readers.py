"""Readers: any byte range of any supported file as batches of documents, in bounded memory.

A range [start, stop) owns the documents that begin in it, so ranges that cover a file yield each document once and in
order wherever the cuts fall. Plain .txt (per line, per block) and .jsonl files are read in any range, .parquet by row
groups; a compressed file, a document per file and a dataset are read whole.
"""

import bz2
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from ..core.errors import Failed, MissingExtra, WrongUse
from .text import PIECE_BYTES, check_is_text, clean, clean_string, pieces, strip_bom

BLOCK_BYTES = 1 << 20
ROWS_AT_ONCE = 256

Documents = Literal["file", "line", "block"]


@dataclass(frozen=True)
class Source:
    """One input: a file, or a dataset (`format` "dataset", `bytes` its size or 0 when unknown)."""

    path: str
    bytes: int
    modified_ns: int
    format: Literal["txt", "jsonl", "parquet", "dataset"]
    compression: Literal["", "gz", "bz2", "zst"] = ""


@dataclass(frozen=True)
class ReadOptions:
    """How text becomes documents: `documents` for .txt, `field` for .jsonl, .parquet and datasets, `split` for datasets."""

    documents: Documents = "block"
    field: str = "text"
    split: str = "train"
    unwrap: bool = False
    piece_bytes: int | None = PIECE_BYTES


class Batch(NamedTuple):
    """Documents in order. With `continues` the last one goes on in the first text of the next batch."""

    texts: list[str]
    continues: bool = False


def splittable(source: Source, options: ReadOptions) -> bool:
    """Whether any byte range of the source can be read apart."""
    if source.format == "txt":
        return not source.compression and options.documents != "file"
    return source.format in ("jsonl", "parquet") and not source.compression


def read(
    source: Source,
    start: int,
    stop: int,
    options: ReadOptions,
    counts: Counter[str],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Iterator[Batch]:
    """The documents of `source` that begin in bytes [start, stop), cleaned and counted (see text.py).

    `on_bytes` is told how many bytes of the file were taken since the last call. Raises Failed for a file that is cut
    short, damaged or not text, and for a record without the field.
    """
    if source.format == "dataset":
        from .datasets_input import read_dataset

        yield from _strings(read_dataset(source.path, options, on_bytes), counts, options)
    elif source.format == "parquet":
        yield from _strings(_parquet(source, start, stop, options.field, on_bytes), counts, options)
    else:
        with _open(source, start, on_bytes) as stream:
            if source.format == "jsonl":
                yield from _jsonl(stream, source, start, stop, options, counts)
            elif options.documents == "file":
                yield from _whole(stream, source, options, counts)
            else:
                yield from _txt(stream, source, start, stop, options, counts)


class _Stream:
    """A file from `offset` on, decompressed, in blocks; damage becomes Failed with the file's name."""

    def __init__(self, file: BinaryIO, source: Source, on_bytes: Callable[[int], None]):
        self.source, self._file, self._on_bytes, self._told = source, file, on_bytes, file.tell()
        self._blocks = self._decompressed()

    def _decompressed(self) -> Iterator[bytes]:
        kind = self.source.compression
        if kind == "zst":
            yield from _unzstd(self._file)
            return
        opened: Any = gzip.open(self._file) if kind == "gz" else bz2.open(self._file) if kind == "bz2" else self._file
        while block := opened.read(BLOCK_BYTES):
            yield block

    def blocks(self) -> Iterator[bytes]:
        """The rest of the stream. Raises Failed when the compressed data are cut short or damaged."""
        try:
            for block in self._blocks:
                place = self._file.tell()
                self._on_bytes(place - self._told)
                self._told = place
                yield block
        except EOFError as error:
            raise Failed(
                "a compressed file is cut short", where=self.source.path,
                why="it ends in the middle of its compressed data", fix="copy or download the file again",
            ) from error  # fmt: skip
        except (zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError) as error:
            raise _damaged(self.source, error) from error
        except OSError as error:
            if error.errno is not None:
                raise Failed("cannot read a file", where=self.source.path, why=str(error), fix="check the disk and the file") from error
            raise _damaged(self.source, error) from error  # bz2 reports damage as an OSError without a number


def _damaged(source: Source, error: Exception) -> Failed:
    return Failed("a compressed file is damaged", where=source.path, why=str(error), fix="copy or download the file again")


@contextmanager
def _open(source: Source, offset: int, on_bytes: Callable[[int], None]) -> Iterator[_Stream]:
    try:
        file = open(source.path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise Failed(
            "cannot open an input", where=source.path, why=error.strerror or str(error),
            fix="put the file back, or leave it out and start again with another --out",
        ) from error  # fmt: skip
    with file:
        file.seek(offset)
        yield _Stream(file, source, on_bytes)  # type: ignore[arg-type]


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Zstandard frames in blocks. Small input steps bound the memory of highly compressed data (32,000 : 1)."""
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


def _aligned(stream: _Stream, source: Source, start: int, stop: int, counts: Counter[str], options: ReadOptions) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of the lines that begin in [start, stop), each with its offset; a line without end stays open.

    A compressed stream is read from its beginning to its end. The stream must have been opened at max(start - 1, 0).
    """
    offset = max(start - 1, 0)
    skipping = start > 0
    carry, first = b"", True
    for block in stream.blocks():
        if first:
            check_is_text(block, source.path, at_start=start == 0)
            if start == 0:
                trimmed = strip_bom(block, counts)
                offset += len(block) - len(trimmed)
                block = trimmed
            first = False
        if skipping:  # to the first line that begins at or after `start`
            place = block.find(b"\n")
            if place < 0:
                offset += len(block)
                if offset >= stop and not source.compression:
                    return
                continue
            offset += place + 1
            block, skipping = block[place + 1 :], False
        buffer = carry + block
        place = buffer.rfind(b"\n") + 1
        if place:
            if not source.compression and offset + place >= stop:
                yield _until(buffer, offset, stop), offset
                if (done := _line_end(buffer, offset, stop)) is not None:
                    return
                raise AssertionError(done)
            yield buffer[:place], offset
        offset += place
        carry = buffer[place:]
