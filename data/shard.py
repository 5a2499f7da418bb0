"""One shard of a token store: Megatron-LM's `.bin` and `.idx`, written, mapped, or held in memory.

`.bin` holds token ids back to back. `.idx` (little-endian) holds

    "MMIDIDX\\0\\0"  version u64 = 1  dtype code u8  sequences u64  documents + 1 u64      (34 bytes)
    int32 lengths[sequences]   int64 byte pointers[sequences]   int64 first sequence of each document[documents + 1]

Nothing is read up front but the header; tokens and index stay in the page cache (mmap advised for random access),
so resident memory grows with what is read and the kernel takes it back. At most MAPPED_SHARDS files are mapped at a
time: a mapping holds a file descriptor.
"""

import mmap
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..core.errors import Refused

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
UINT16_VOCABULARY = 65500  # Megatron-LM writes uint16 below this vocabulary size and int32 from it on
MAPPED_SHARDS = 400


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron-LM gives a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def write_index(
    path: str | Path,
    counts: tuple[int, int],
    lengths: Callable[[], Iterable[np.ndarray]],
    documents: Callable[[], Iterable[np.ndarray]],
    dtype: np.dtype | str,
) -> None:
    """Write one `.idx` in the memory of a block: `counts` (sequences, documents), `lengths` blocks of int32 tokens a
    sequence, asked for twice, `documents` blocks of int64 sequences a document.
    """
    code = {known: code for code, known in CODES.items()}[np.dtype(dtype).name]
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, counts[0], counts[1] + 1))
        for block in lengths():
            file.write(np.ascontiguousarray(block, "<i4").data)
        begin = 0
        for block in lengths():
            ends = begin + np.cumsum(block, dtype="<i8")
            file.write(((ends - block) * np.dtype(dtype).itemsize).astype("<i8").data)
            begin = int(ends[-1]) if len(ends) else begin
        file.write(np.zeros(1, "<i8").data)
        begin = 0
        for block in documents():
            ends = begin + np.cumsum(block, dtype="<i8")
            file.write(ends.data)
            begin = int(ends[-1]) if len(ends) else begin
        assert begin == counts[0], "the documents must hold all sequences"


@lru_cache(maxsize=MAPPED_SHARDS)
def _map(path: Path, which: tuple[int, int]) -> mmap.mmap:
    """`which` tells a file from another that has its name since."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


class Shard:
    """One `.bin` + `.idx` pair. Raises Refused when the two do not fit together."""

    def __init__(self, prefix: Path):
        self.bin, self.idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.bin, self.idx):
            if not path.is_file():
                fix = "tokenise again or restore the file"
                raise Refused("a token shard lacks a file", where=path, fix=fix)
        facts = {path: path.stat() for path in (self.bin, self.idx)}
        self._which = {path: (found.st_ino, found.st_mtime_ns) for path, found in facts.items()}
        size = facts[self.idx].st_size
        with open(self.idx, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            why = "the file does not begin with MMIDIDX"
            raise Refused("not a Megatron index", where=self.idx, why=why)
        _, version, code, self.sequences, bounds = HEADER.unpack(head)
        self.documents = bounds - 1
        if version != 1 or code not in CODES:
            why = f"version {version}, dtype code {code}"
            raise Refused("unknown index format", where=self.idx, why=why)
        needed = HEADER.size + 12 * self.sequences + 8 * bounds
        if size < needed:
            why = f"{size:,} bytes, the header asks for {needed:,}"
            raise Refused("index cut short", where=self.idx, why=why)
        self.dtype = np.dtype(CODES[code])
        stored = int(self.pointers[-1] // self.dtype.itemsize + self.lengths[-1]) if self.sequences else 0
        held = facts[self.bin].st_size
        if held != stored * self.dtype.itemsize or self.bounds[0] != 0 or self.bounds[-1] != self.sequences:
            why = f"{held:,} bytes of tokens, the index describes {stored * self.dtype.itemsize:,}"
            fix = "tokenise again"
            raise Refused("tokens and index do not fit together", where=self.bin, why=why, fix=fix)
        self.tokens = stored

    def _mapped(self, path: Path) -> mmap.mmap:
        return _map(path, self._which[path])

    def _part(self, dtype: str, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(self._mapped(self.idx), dtype, count, offset) if count else np.empty(0, dtype)

    @property
    def lengths(self) -> np.ndarray:
        return self._part("<i4", self.sequences, HEADER.size)

    @property
    def pointers(self) -> np.ndarray:
        return self._part("<i8", self.sequences, HEADER.size + 4 * self.sequences)

    @property
    def bounds(self) -> np.ndarray:
        return self._part("<i8", self.documents + 1, HEADER.size + 12 * self.sequences)

    @property
    def data(self) -> np.ndarray:
        return np.frombuffer(self._mapped(self.bin), self.dtype) if self.tokens else np.empty(0, self.dtype)

    def sequence_start(self, sequences: np.ndarray) -> np.ndarray:
        """Token offset in the shard at which each sequence begins; the count of sequences gives the end."""
        if not self.sequences:
            return np.zeros(len(sequences), np.int64)
        starts = self.pointers[np.minimum(sequences, self.sequences - 1)] // self.dtype.itemsize
        return np.where(sequences < self.sequences, starts, self.tokens)
