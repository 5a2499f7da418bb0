"""The plan of a tokenisation: which bytes of which file make which shard, computed from file sizes alone.

Documents are in the order of the sources given and of their bytes, whatever the shard size or who runs a task. A plan
of 10 TB takes a second and a few megabytes.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import Failed, Refused
from ...core.files import full_disk, read_json, sha256_json, write_atomic
from .inputs import Source
from .readers import DocumentBatch, Reader, ReadOptions, splittable

PLAN = "plan.json"
LEAST_SHARD, MOST_SHARD = 8 << 20, 256 << 20  # bytes: seconds to minutes for the slowest backend


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of source number `source` (parts of a streamed dataset); stop None is its end."""

    source: int
    start: int
    stop: int | None


@dataclass(frozen=True)
class Task:
    """The work for one shard; `bytes` of input."""

    index: int
    spans: tuple[Span, ...]
    bytes: int


@dataclass(frozen=True)
class TaskPlan:
    """All that decides the tokens, and the shard size.

    `tokenizer` is a fingerprint, `special` has its roles' ids, `before` and `behind` the ids around every document.
    """

    sources: tuple[Source, ...]
    options: ReadOptions
    tokenizer: str
    append_eos: bool
    sentences: bool
    shard_bytes: int
    special: dict[str, int] = field(default_factory=dict)
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    @property
    def hash(self) -> str:
        return sha256_json(asdict(self))

    @property
    def settings(self) -> str:
        """A hash of what decides the store besides the content of its sources: not where they are, nor how old."""
        kept = {key: value for key, value in asdict(self).items() if key != "sources"}
        return sha256_json(kept | {"count": len(self.sources)})

    def tasks(self) -> list[Task]:
        """Every task, in the order of its documents. A source that cannot be split is in one."""
        tasks: list[Task] = []
        spans: list[Span] = []
        size = 0

        def close() -> None:
            nonlocal spans, size
            if spans:
                tasks.append(Task(len(tasks), tuple(spans), size))
            spans, size = [], 0

        def add(number: int, start: int, stop: int | None, length: int) -> None:
            nonlocal size
            spans.append(Span(number, start, stop))
            size += length
            if size >= self.shard_bytes:
                close()

        for number, source in enumerate(self.sources):
            if source.streamed:  # a task for each part
                for part in range(max(source.parts, 1)):
                    close()
                    add(number, part, part + 1 if source.parts else None, 0)
                close()
            elif not source.bytes or not splittable(source, self.options):
                if size + source.bytes > self.shard_bytes:
                    close()
                add(number, 0, None, source.bytes)
            else:
                place = 0
                while place < source.bytes:
                    stop = min(source.bytes, place + self.shard_bytes - size)
                    add(number, place, stop if stop < source.bytes else None, stop - place)
                    place = stop
        close()
        return tasks


def default_shard_bytes(total: int) -> int:
    """64 shards, but none below 8 MiB nor above 256 MiB of input, whatever the workers."""
    return min(max(-(-total // 64), LEAST_SHARD), MOST_SHARD)


def write_plan(work: Path, plan: TaskPlan) -> None:
    """Put the plan into the work directory. Raises Refused naming what differs from the one there, with which alone a
    run is continued, Failed when it cannot be written.
    """
    file = work / PLAN
    if not file.exists():
        try:
            with full_disk(work):
                work.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(asdict(plan)) + "\n")
        except Failed:
            with suppress(OSError):
                work.rmdir()
            raise
    if differs := differences(read_json(file), json.loads(json.dumps(asdict(plan)))):
        what = "an unfinished tokenisation with other inputs or settings is here"
        fix = "repeat the first command to continue it, pass --overwrite to start again, or choose another --out"
        raise Refused(what, where=work, why="; ".join(differs), fix=fix)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two plans, in words."""
    found = []
    for key in (
        "tokenizer",
        "special",
        "append_eos",
        "before",
        "behind",
        "sentences",
        "shard_bytes",
        "options",
    ):
        if old.get(key) != new[key]:
            what = "the tokenizer has changed"
            found.append(what if key == "tokenizer" else f"{key} was {old.get(key)}, is {new[key]}")
    before = {source["path"]: source for source in old["sources"]}
    after = {source["path"]: source for source in new["sources"]}
    found += [f"input {path} is gone" for path in before if path not in after][:3]
    found += [f"input {path} is new" for path in after if path not in before][:3]
    changed = [path for path in after if before.get(path, after[path]) != after[path]]
    found += [f"input {path} has changed" for path in changed[:3]]
    if not found and list(before) != list(after):
        found.append("the inputs are in another order")
    return found


def read_plan(work: Path) -> TaskPlan:
    """The plan in a work directory. Raises WrongUse when there is none."""
    raw = read_json(work / PLAN)
    raw["sources"] = tuple(Source(**source) for source in raw["sources"])
    raw["options"] = ReadOptions(**raw["options"])
    raw["before"], raw["behind"] = tuple(raw["before"]), tuple(raw["behind"])
    return TaskPlan(**raw)


def check_unchanged(source: Source) -> None:
    """Raise Refused when a file is not what it was when the plan was made."""
    if source.format == "dataset" or not os.path.exists(source.path):
        return  # a missing file is reported by the reader that opens it
    facts = os.stat(source.path)
    if (facts.st_size, facts.st_mtime_ns) != (source.bytes, source.modified_ns):
        why = f"{source.bytes:,} bytes when the plan was made, {facts.st_size:,} now, or written since"
        fix = "put it back, or start again (data tokenize: with --overwrite)"
        raise Refused("an input has changed while it was read", where=source.path, why=why, fix=fix)


def read_unchanged(
    reader: Reader, source: Source, start: int = 0, stop: int | None = None
) -> Iterator[DocumentBatch]:
    """What the reader reads. Raises Refused when the file is not the plan's, before or after."""
    check_unchanged(source)
    yield from reader.read(source, start, stop)
    check_unchanged(source)
