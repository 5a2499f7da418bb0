"""The stage: text to a token store. Work is kept in `OUT.partial` until the store is whole, then renamed to `OUT`.

A run that was stopped, killed or filled the disk continues with the same command: committed shards are skipped. Any number
of processes may work on one plan at a time (a job array); the one that commits the last shard completes the store.
"""

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..core.artifact import Input, Manifest, check_free, input_record, is_artifact, read_manifest, seal
from ..core.console import progress, say, warn
from ..core.errors import Failed, Stopped, ThroughlineError, WrongUse
from ..core.files import full_disk, sha256_json, sync_dir, write_atomic
from .backends import open_backend
from .executors import run_here, run_processes, run_ray
from .inputs import expand_inputs
from .plan import Plan, Task, default_shard_bytes, write_plan
from .readers import ReadOptions, read
from .store import token_dtype
from .tasks import STORE, read_record
from .text import COUNTS, MAX_REPLACED, check_replaced
from .tokenizer import FILE, Tokenizer


@dataclass(frozen=True)
class Work:
    """How the tasks are run; nothing here changes a byte of the result. `share` is (index, count) in a job array."""

    workers: int = 1
    executor: Literal["local", "ray"] = "local"
    backend: str = "auto"
    share: tuple[int, int] | None = None


def tokenize(
    inputs: Sequence[str],
    tokenizer_path: Path | str,
    out: Path | str,
    *,
    options: ReadOptions = ReadOptions(),
    append_eos: bool | None = None,
    sentences: bool = False,
    shard_bytes: int | None = None,
    max_replaced: float = MAX_REPLACED,
    work: Work = Work(),
    overwrite: bool = False,
) -> Manifest | None:
    """Tokenise `inputs` into the store `out`; returns its manifest, or None when other elements of a job array have work left.

    `append_eos` None appends the tokenizer's end-of-text token to every document when it has one and `sentences` is off.
    Raises WrongUse, Failed and Refused for the user's and the input's faults, Stopped on SIGTERM.
    """
    out = Path(out)
    tokenizer = Tokenizer.load(tokenizer_path)
    plan = _plan(list(inputs), tokenizer, options, append_eos, sentences, shard_bytes, max_replaced)
    if _complete(out, plan) and not overwrite:
        say(f"{out} is complete already: same inputs, tokenizer and settings")
        return read_manifest(out, "tokens")
    check_free(out, overwrite)
    folder = out.with_name(f"{out.name}.partial")
    if overwrite and work.share is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with full_disk(folder), _stoppable():
            (folder / STORE).mkdir(parents=True, exist_ok=True)
            write_plan(folder, plan)
            write_atomic(folder / STORE / FILE, tokenizer.to_json())
            tasks = plan.tasks()
            _run(folder, plan, tasks, tokenizer, work)
            missing = [task.index for task in tasks if read_record(folder, task.index) is None]
            if missing:
                say(
                    f"{len(tasks) - len(missing)} of {len(tasks)} shards committed; whoever commits the last completes {out}"
                )
                return None
            return _finish(folder, out, plan, tasks, tokenizer, tokenizer_path, overwrite)
    except BaseException as error:
        if isinstance(error, FileNotFoundError) and _complete(out, plan):
            return read_manifest(out, "tokens")  # another process completed the same plan meanwhile
        _clear_up(folder, error)
        raise


def _plan(
    inputs: list[str], tokenizer: Tokenizer, options: ReadOptions, append_eos: bool | None, sentences: bool,
    shard_bytes: int | None, max_replaced: float,
) -> Plan:  # fmt: skip
    if append_eos and sentences:
        raise WrongUse(
            "--eos and --sentences exclude each other", why="BERT stores keep sentences as they are", fix="give one"
        )
    if append_eos and tokenizer.eos_id is None:
        raise WrongUse(
            "the tokenizer has no end-of-text token", where="--eos", fix="leave --eos out or use another tokenizer"
        )
    if append_eos is None:
        append_eos = tokenizer.eos_id is not None and not sentences
    if not tokenizer.splits_at_space:
        options = replace(options, piece_bytes=None)
    sources = tuple(expand_inputs(inputs))
    size = shard_bytes or default_shard_bytes(sum(source.bytes for source in sources))
    return Plan(sources, options, tokenizer.fingerprint(), append_eos, sentences, size, max_replaced)


def _run(folder: Path, plan: Plan, tasks: list[Task], tokenizer: Tokenizer, work: Work) -> None:
    if work.share is not None:
        index, count = work.share
        if not 0 <= index < count:
            raise WrongUse(
                "no such element of the job array", where="--task-index", why=f"{index} is not within 0 to {count - 1}"
            )
        tasks = tasks[index::count]
    todo = [task for task in tasks if read_record(folder, task.index) is None]
    if not todo:
        return
    backend = open_backend(tokenizer, work.backend, _sample(plan, todo[0]))
    total = sum(task.bytes for task in tasks) or None
    with progress(f"tokenise ({backend.name})", total, "B") as bar:
        bar.start_at(sum(task.bytes for task in tasks) - sum(task.bytes for task in todo))
        if work.executor == "ray":
            run_ray(folder, todo, backend.name, bar.advance)
        elif work.workers == 1 or len(todo) == 1:
            run_here(folder, plan, todo, tokenizer, backend, bar.advance)
        else:
            run_processes(folder, todo, work.workers, backend.name, bar.advance)


def _sample(plan: Plan, task: Task) -> list[str]:
    """The first documents of a task, for the check of the backend."""
    span = task.spans[0]
    batches: Iterator[Any] = read(plan.sources[span.source], span.start, span.stop, plan.options, Counter())
    return next(batches, ([],))[0]


def _finish(
    folder: Path,
    out: Path,
    plan: Plan,
    tasks: list[Task],
    tokenizer: Tokenizer,
    tokenizer_path: Path | str,
    overwrite: bool,
) -> Manifest:
    """Check the whole, write the manifest, rename. Safe when several processes do it at once: one rename wins."""
    records = [record for task in tasks if (record := read_record(folder, task.index)) is not None]
    facts = facts_of(plan, records, tokenizer)
    check_replaced(facts["counts"]["replaced"], facts["characters"], plan.max_replaced, str(out))
    if not facts["tokens"]:
        why = f"{len(plan.sources)} inputs, {plan.bytes:,} bytes, {facts['counts']['empty']:,} empty documents"
        raise Failed("no text in the input", where=plan.sources[0].path, why=why, fix="name inputs that hold text")
    store = folder / STORE
    for record in records:
        for name, file in record["files"].items():
            if not (store / name).is_file() or (store / name).stat().st_size != file["bytes"]:
                raise Failed(
                    "a committed shard is gone or cut",
                    where=store / name,
                    fix=f"remove {folder} and run the command again",
                )
    hashes = {path: digest for record in records for path, digest in record["sources"].items()}
    inputs = [input_record(tokenizer_path)]
    inputs += [
        Input(source.path, "foreign", hashes.get(source.path) or sha256_json(source.path)) for source in plan.sources
    ]
    known = {name: file["sha256"] for record in records for name, file in record["files"].items()}
    seal(store, "tokens", inputs, None, facts, known)
    if overwrite and out.exists():
        old = out.with_name(f".{out.name}.old.tmp")
        os.rename(out, old)
        shutil.rmtree(old, ignore_errors=True)
    with suppress(FileExistsError):
        out.rmdir() if out.is_dir() and not any(out.iterdir()) else None
    os.rename(store, out)
    sync_dir(out.parent)
    shutil.rmtree(folder, ignore_errors=True)
    _report(facts["counts"])
    return read_manifest(out, "tokens")


def facts_of(plan: Plan, records: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts of a store's manifest, from the records of its tasks."""
    total = {
        key: sum(record[key] for record in records)
        for key in ("tokens", "documents", "sequences", "text_bytes", "characters")
    }
    counts = {key: sum(record["counts"].get(key, 0) for record in records) for key in COUNTS}
    shards = [
        {
            "name": f"{record['task']:05d}",
            **{key: record[key] for key in ("tokens", "documents", "sequences", "text_bytes")},
        }
        for record in records
        if record["tokens"]
    ]
    return {
        **total,
        "dtype": str(token_dtype(tokenizer.vocab_size)),
        "largest_id": max((record["largest_id"] for record in records), default=-1),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint(),
        "tokenizer_type": tokenizer.type,
        "special": tokenizer.special,
        "append_eos": plan.append_eos,
        "sentences": plan.sentences,
        "documents_are": plan.options.documents,
        "counts": counts,
        "backends": sorted({record["backend"] for record in records}),
        "plan": plan.hash,
        "shards": shards,
    }


def _report(counts: dict[str, int]) -> None:
    notes = {
        "replaced": "characters replaced by U+FFFD (invalid UTF-8 or NUL)",
        "forced_cuts": "cuts inside runs of over 1 MiB without a space",
    }
    for key, what in notes.items():
        if counts[key]:
            warn(f"{counts[key]:,} {what}")


def _complete(out: Path, plan: Plan) -> bool:
    return is_artifact(out) and read_manifest(out).facts.get("plan") == plan.hash


def _clear_up(folder: Path, error: BaseException) -> None:
    """After a failure keep what is committed, and leave nothing when nothing is."""
    if any(folder.glob("[0-9]*.json")):
        if isinstance(error, ThroughlineError):
            error.fix += (
                "; " if error.fix else ""
            ) + f"finished shards are kept in {folder}, the same command continues"
    elif not any(folder.glob(".*.tmp")):  # no other process is at work in it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM becomes Stopped: workers are ended, committed shards stay."""

    def stop(*_: object) -> None:
        raise Stopped(
            "stopped by SIGTERM", why="finished shards are kept", fix="run the same command again to continue"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
