"""One task: its documents to one shard. Any process on any machine may run any task any number of times.

Files are written under temporary names and renamed; `NNNNN.json`, renamed last, is the commit record. A task whose
record is there is skipped; what a killed one leaves goes with the directory.
"""

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...core.artifact import input_record
from ...core.errors import Failed
from ...core.files import full_disk, read_json, sha256_file, sync, write_atomic
from ..backends import Backend, Watched
from ..shard import token_dtype, write_index
from ..tokenizer import Tokenizer
from .readers import DocumentBatch, Reader
from .task_plan import Task, TaskPlan, read_unchanged
from .text import PIECE_BYTES, split_sentences, utf8_bytes

LONGEST = 2**31 - 1  # tokens of a sequence: Megatron's index has 32 bits for them
SPILL_BYTES = 1 << 20  # of lengths read back at a time
STORE = "store"  # inside the work directory: what becomes the artifact


def read_record(work: Path, index: int) -> dict[str, Any] | None:
    """The commit record of a task, or None while it is not committed."""
    path = work / f"{index:05d}.json"
    return read_json(path) if path.exists() else None


class Encoder:
    """Batches of text to tokens, sequences and documents, by the plan's policy."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: Backend,
        before: Sequence[int] = (),
        behind: Sequence[int] = (),
        sentences: bool = False,
    ):
        """`before` and `behind` are the ids that begin and end every document."""
        self._backend, self._sentences = Watched(backend, tokenizer), sentences
        self._before, self._behind = np.array(before, np.int32), np.array(behind, np.int32)
        self._open = 0  # tokens of a document whose end is still to come
        self._tail, self._pieces = "", 0  # with sentences: its last one so far, those written

    def __call__(self, batch: DocumentBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, lengths of sequences, sequences of each document that ends here), without empty documents."""
        return self._by_sentence(batch) if self._sentences else self._by_document(batch)

    def _by_document(self, batch: DocumentBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, lengths = self._backend.encode_batch(batch.texts)
        ends = np.cumsum(lengths)
        totals = lengths.copy()
        totals[0] += self._open
        ended = len(totals) - batch.continues
        kept = totals[:ended] > 0
        begun = lengths > 0
        begun[0] &= self._open == 0
        starts = (ends - lengths)[begun]
        # where a document ends and the next one begins, what ends the first stands before what begins the second
        ids = _inserted(ids, (ends[:ended][kept], self._behind), (starts, self._before))
        totals[:ended] += kept * len(self._behind)
        totals += begun * len(self._before)
        self._open = int(totals[-1]) if batch.continues else 0
        done = totals[:ended][kept]
        return ids, done, np.ones(len(done), np.int64)

    def _by_sentence(self, batch: DocumentBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sentences: list[str] = []
        counts = []
        for place, text in enumerate(batch.texts):
            found = split_sentences(self._tail + text)
            self._tail = ""
            if batch.continues and place + 1 == len(batch.texts):
                self._tail = found.pop() if found and len(found[-1]) < PIECE_BYTES else ""
            sentences += found
            counts.append(len(found))
        ids, lengths = self._backend.encode_batch(sentences)
        owners = np.repeat(np.arange(len(counts)), counts)
        written = np.bincount(owners[lengths > 0], minlength=len(counts))
        written[0] += self._pieces
        self._pieces = int(written[-1]) if batch.continues else 0
        documents = written[: len(counts) - batch.continues]
        return ids, lengths[lengths > 0], documents[documents > 0]


def _inserted(ids: np.ndarray, *parts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The ids with others put in: of each part (places, ids) all its ids before each of its places."""
    places = [np.repeat(where, len(new)) for where, new in parts]
    added = [np.tile(new, len(where)) for where, new in parts]
    if not sum(map(len, added)):
        return ids
    return np.insert(ids, np.concatenate(places), np.concatenate(added))


class ShardWriter:
    """One shard under temporary names. Lengths are spilled to disk, so memory does not grow with the shard."""

    def __init__(self, work: Path, index: int, dtype: np.dtype):
        self._work, self._name, self._dtype = work, f"{index:05d}", dtype
        self._mark = f"{socket.gethostname()}.{os.getpid()}.tmp"
        kinds = ("bin", "lengths", "documents")
        self._bin, self._lengths, self._documents = (self._aside(kind).open("w+b") for kind in kinds)
        self._digest = hashlib.sha256()
        self.tokens = self.sequences = self.documents = 0
        self.largest_id = -1

    def _aside(self, kind: str) -> Path:
        return self._work / f".{self._name}.{kind}.{self._mark}"

    def write(self, ids: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> None:
        if len(lengths) and lengths.max() > LONGEST:
            why = f"{lengths.max():,} tokens, the format counts to {LONGEST:,}"
            fix = "divide it: --documents block or line"
            raise Failed("a document is too long for a token store", where=self._work, why=why, fix=fix)
        if len(ids):
            self.largest_id = max(self.largest_id, int(ids.max()))
            data = ids.astype(self._dtype)
            self._digest.update(data.data)
            self._bin.write(data.data)
        self._lengths.write(lengths.astype(np.int32).data)
        self._documents.write(documents.astype(np.int64).data)
        self.tokens += len(ids)
        self.sequences += len(lengths)
        self.documents += len(documents)

    def commit(self) -> dict[str, Any]:
        """Rename the shard into the store; an empty one is left out. Returns the files' sizes and hashes."""
        files = {}
        if self.tokens:
            for file in (self._bin, self._lengths, self._documents):
                file.flush()
            write_index(
                self._aside("idx"),
                (self.sequences, self.documents),
                lambda: _spilled(self._lengths, np.int32),
                lambda: _spilled(self._documents, np.int64),
                self._dtype,
            )
            hashes = {"bin": self._digest.hexdigest(), "idx": sha256_file(self._aside("idx"))}
            for kind, digest in hashes.items():
                aside, name = self._aside(kind), f"{self._name}.{kind}"
                sync(aside)
                files[name] = {"bytes": aside.stat().st_size, "sha256": digest}
                os.replace(aside, self._work / STORE / name)
            sync(self._work / STORE)
        self.close()
        return files

    def close(self) -> None:
        """Close and remove what is temporary."""
        for file in (self._bin, self._lengths, self._documents):
            with suppress(OSError):  # flushing the rest to a full disk
                file.close()
        for kind in ("bin", "idx", "lengths", "documents"):
            with suppress(OSError):
                self._aside(kind).unlink(missing_ok=True)


def _spilled(file: BinaryIO, dtype: type) -> Iterator[np.ndarray]:
    file.seek(0)
    while block := file.read(SPILL_BYTES):
        yield np.frombuffer(block, dtype)


def run_task(
    work: Path,
    plan: TaskPlan,
    task: Task,
    tokenizer: Tokenizer,
    backend: Backend,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Write and commit the shard of `task`; returns its record. Raises Failed for bad input, a full disk."""
    if committed := read_record(work, task.index):
        on_bytes(task.bytes)
        return committed
    counts, size = Counter[str](), Counter(characters=0, text_bytes=0)
    left = task.bytes

    def tell(done: int) -> None:  # what is read before and behind a range is no progress
        nonlocal left
        done = min(done, left) if task.bytes else done
        left -= done
        on_bytes(done)

    with full_disk(work):
        writer = ShardWriter(work, task.index, token_dtype(tokenizer.vocab_size))
        try:
            encode = Encoder(tokenizer, backend, plan.before, plan.behind, plan.sentences)
            reader = Reader(plan.options, counts, tell)
            read = (read_unchanged(reader, plan.sources[at.source], at.start, at.stop) for at in task.spans)
            for batch in chain.from_iterable(read):
                size["characters"] += sum(map(len, batch.texts))
                size["text_bytes"] += utf8_bytes(batch.texts)
                found = encode(batch)
                counts["empty"] += len(batch.texts) - batch.continues - len(found[2])
                writer.write(*found)
            # hashed are what this task begins (1.7 GB/s: little beside the encoding)
            begun = [plan.sources[span.source].path for span in task.spans if span.start == 0]
            record = {
                "task": task.index,
                "files": writer.commit(),
                **{key: getattr(writer, key) for key in ("tokens", "sequences", "documents", "largest_id")},
                **size,
                "counts": dict(counts),
                "sources": {path: input_record(path).hash for path in begun if os.path.exists(path)},
                "backend": backend.name,
            }
            write_atomic(work / f"{task.index:05d}.json", json.dumps(record) + "\n")
            tell(max(left, 0))
        finally:
            writer.close()
    return record
