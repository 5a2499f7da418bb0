"""The stage: text to a token store. Work is kept in `OUT.partial` until the store is whole, then renamed.

The same command continues a run that was stopped, killed or filled the disk: committed shards are skipped. Any number
of processes may work on one plan at a time (a job array); the one that commits the last shard completes the store.
"""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ...core import artifact
from ...core.artifact import Draft, Input, Manifest, check_free, input_record, read_manifest, seal
from ...core.console import amount, progress, say, warn, warn_once
from ...core.errors import Failed, Stopped, ThroughlineError, WrongUse
from ...core.files import full_disk, sha256_json, swap_in, write_atomic
from ...core.signals import raising
from ..backends import Backend, open_backend
from ..model_settings import no_end
from ..shard import token_dtype
from ..store import partial
from ..tokenizer import FILE, Tokenizer, tokenizer_records
from .executors import run_processes, run_ray
from .formats import hub_parts, pinned
from .inputs import expand_inputs
from .readers import DocumentBatch, Reader, ReadOptions
from .task_plan import Task, TaskPlan, default_shard_bytes, write_plan
from .tasks import STORE, read_record, run_task
from .text import COUNTS, MAX_REPLACED, PIECE_BYTES, check_replaced

MOST_SHARDS = 1_000_000
KEEP_BYTES = 64 << 20  # after an error, what is done of a smaller input is not worth a directory left


@dataclass(frozen=True)
class Work:
    """How the tasks are run, without a byte's difference; `share` is (index, count) in a job array."""

    workers: int = 1
    executor: Literal["local", "ray"] = "local"
    backend: str = "auto"
    share: tuple[int, int] | None = None


def tokenize(
    inputs: Sequence[str],
    tokenizer_path: Path | str,
    out: Path | str,
    *,
    options: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    append_eos: bool | None = None,
    add_special_tokens: bool = True,
    sentences: bool = False,
    shard_bytes: int | None = None,
    max_replaced: float = MAX_REPLACED,
    work: Work = Work(),
    overwrite: bool = False,
) -> Manifest | None:
    """Tokenise `inputs` into the store `out`; returns its manifest, None while a job array has work left. `append_eos`
    None: where the tokenizer has an end-of-text token and `sentences` is off. Raises WrongUse, Failed and Refused for
    the user's and the input's faults, Stopped on SIGTERM and SIGHUP.
    """
    out = Path(os.path.realpath(out))  # a link leads to the disk that is meant
    if overwrite and work.share is not None:
        what = "no element of a job array knows whether another has begun anew"
        raise WrongUse(what, where="--overwrite", fix="remove the old store, or choose another --out")
    tokenizer = Tokenizer.load(tokenizer_path)
    plan = make_plan(list(inputs), tokenizer, options, append_eos, sentences, shard_bytes, add_special_tokens)
    if plan.bytes > MOST_SHARDS * plan.shard_bytes:
        why = f"{plan.bytes:,} bytes of input in shards of {plan.shard_bytes:,}"
        fix = f"give at least {-(-plan.bytes // MOST_SHARDS):,}"
        raise WrongUse("too many shards", where="--shard-bytes", why=why, fix=fix)
    folder = partial(out)
    if not overwrite and (complete := _completed(out, plan, folder)):
        say(f"{out} is complete already: same inputs, tokenizer and settings")
        return complete
    check_free(out, overwrite)
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        write_plan(folder, plan)  # refuses a directory in which another plan is being worked on
    except (FileNotFoundError, WrongUse):
        if complete := _completed(out, plan, folder):  # the directory went while this process looked into it
            return complete
        raise
    try:
        with full_disk(folder), raising(_stopped):
            (folder / STORE).mkdir(exist_ok=True)
            write_atomic(folder / FILE, tokenizer.to_json())
            tasks = plan.tasks()
            _run(folder, plan, tasks, tokenizer, work)
            done = sum(read_record(folder, task.index) is not None for task in tasks)
            if done < len(tasks):
                if complete := _completed(out, plan, folder):  # and the records went with its directory
                    return complete
                say(f"{done} of {len(tasks)} shards committed; whoever commits the last completes {out}")
                return None
            with alone(folder):
                if (folder / STORE).is_dir():  # or another process has completed it while this one waited
                    finalize(folder, out, plan, tasks, tokenizer, tokenizer_path, max_replaced)
    except BaseException as error:
        if isinstance(error, (FileNotFoundError, WrongUse)) and (complete := _completed(out, plan, folder)):
            return complete
        _clear_up(folder, plan, error)
        raise
    return read_manifest(out, "tokens")


def make_plan(
    inputs: list[str],
    tokenizer: Tokenizer,
    options: ReadOptions,
    append_eos: bool | None,
    sentences: bool,
    shard_bytes: int | None,
    add_special_tokens: bool = True,
) -> TaskPlan:
    """The plan for the inputs as they are now. Raises WrongUse for inputs or settings that cannot be."""
    if append_eos and sentences:
        why = "a sentence store keeps sentences as they are"
        raise WrongUse("--eos and --sentences exclude each other", why=why, fix="give one of them")
    if append_eos and tokenizer.eos_id is None:
        fix = "leave --eos out, name the token as eos_token in a tokenizer_config.json, or use another tokenizer"
        raise WrongUse("the tokenizer has no end-of-text token", where="--eos", fix=fix)
    before, behind = tokenizer.document_framing if add_special_tokens and not sentences else ([], [])
    ends = behind[-1:] == [tokenizer.eos_id]
    if append_eos is False and ends:
        behind = behind[:-1]
    if append_eos is None:
        append_eos = tokenizer.eos_id is not None and not sentences
        if tokenizer.eos_id is None and tokenizer.mask_id is None and not sentences:
            warn_once(f"documents are not separated: {no_end(tokenizer)}")
    if append_eos and not ends:
        behind = [*behind, cast(int, tokenizer.eos_id)]
    if not tokenizer.splits_at_space:
        options = replace(options, piece_bytes=None)
    sources = expand_inputs(inputs)
    for place, source in enumerate(sources):
        if source.streamed:
            path = pinned(source.path)
            sources[place] = replace(source, path=path, parts=hub_parts(path, options.split))
    size = shard_bytes or default_shard_bytes(sum(source.bytes for source in sources))
    made = tokenizer.fingerprint(), append_eos, sentences, size, tokenizer.special
    return TaskPlan(tuple(sources), options, *made, before=tuple(before), behind=tuple(behind))


def _run(folder: Path, plan: TaskPlan, tasks: list[Task], tokenizer: Tokenizer, work: Work) -> None:
    if work.share is not None:
        index, count = work.share
        if index >= count:
            why = f"{index} is not within 0 to {count - 1}"
            raise WrongUse("no such element of the job array", where="--task-index", why=why)
        tasks = tasks[index::count]
    todo = [task for task in tasks if read_record(folder, task.index) is None]
    if not todo:
        return
    backend = _checked_backend(plan, todo[0], tokenizer, work.backend)
    total = sum(task.bytes for task in tasks)
    with progress(f"tokenise ({backend.name})", total or None, "B") as bar:
        bar.start_at(total - sum(task.bytes for task in todo))
        if work.executor == "ray":
            run_ray(folder, todo, backend.name, bar.advance)
        elif work.workers == 1 or len(todo) == 1:
            for task in todo:
                run_task(folder, plan, task, tokenizer, backend, bar.advance)
        else:
            run_processes(folder, todo, work.workers, backend.name, bar.advance)


def _checked_backend(plan: TaskPlan, task: Task, tokenizer: Tokenizer, name: str) -> Backend:
    """The backend, checked on a task's first documents; text that starts badly is said before the work."""
    span, counts = task.spans[0], Counter[str]()
    source = plan.sources[span.source]
    read = Reader(plan.options, counts).read(source, span.start, span.stop)
    texts = next(read, DocumentBatch([])).texts
    if counts["replaced"] > MAX_REPLACED * (size := sum(map(len, texts))):
        warn(f"{source.path}: {counts['replaced']:,} invalid characters in the first {amount(size, 'B')}")
    return open_backend(tokenizer, name, texts)


def _completed(out: Path, plan: TaskPlan, folder: Path) -> Manifest | None:
    """The manifest of `out` when it is this plan's store, of these files or of others with this content; what is left
    of work goes.
    """
    if not artifact.is_artifact(out):
        return None
    manifest = read_manifest(out)
    made = manifest.facts.get("made", {})
    if made.get("plan") != plan.hash:
        paths = [source.path for source in plan.sources]
        if made.get("settings") != plan.settings or not all(map(os.path.exists, paths)):
            return None
        if [item.hash for item in manifest.inputs[-len(paths) :]] != [input_record(p).hash for p in paths]:
            return None
    shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _clear_up(folder: Path, plan: TaskPlan, error: BaseException) -> None:
    """After an error keep what is committed where it is worth it; leave nothing when nothing is."""
    worth = plan.bytes > KEEP_BYTES or isinstance(error, Stopped) or not isinstance(error, ThroughlineError)
    if worth and any(folder.glob("[0-9]*.json")):
        if isinstance(error, ThroughlineError):
            kept = f"finished shards are kept in {folder}; the same command continues"
            error.fix = f"{error.fix}\n{kept}" if error.fix else kept
    elif not any(folder.glob(".[0-9]*.tmp")):  # no other process is at work in it
        shutil.rmtree(folder, ignore_errors=True)


def _stopped(name: str) -> Stopped:
    """The error of a signal: workers are ended, committed shards stay."""
    return Stopped(f"stopped by {name}", fix="run the same command again to continue")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time completes a store; the lock goes with its process."""
    with open(folder / ".finalize.lock", "ab") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def finalize(
    folder: Path,
    out: Path,
    plan: TaskPlan,
    tasks: list[Task],
    tokenizer: Tokenizer,
    tokenizer_path: Path | str,
    max_replaced: float,
) -> None:
    """Make the committed shards in `folder` the artifact `out`, and remove `folder`. Raises Failed for a corpus without
    text or with too many invalid characters, and for a shard that has gone.
    """
    records = [record for task in tasks if (record := read_record(folder, task.index)) is not None]
    facts = facts_of(plan, records, tokenizer)
    counts = facts["made"]["counts"]
    where = f"{len(plan.sources)} inputs for {out}"
    check_replaced(counts["replaced"], facts["characters"], max_replaced, where)
    if not facts["tokens"]:
        why = f"{len(plan.sources)} inputs, {plan.bytes:,} bytes, {counts['empty']:,} empty documents"
        fix = "name inputs that hold text"
        raise Failed("no text in the input", where=plan.sources[0].path, why=why, fix=fix)
    store = folder / STORE
    files = {name: file for record in records for name, file in record["files"].items()}
    for name, file in files.items():
        if not (store / name).is_file() or (store / name).stat().st_size != file["bytes"]:
            fix = f"remove {folder} and run the command again"
            raise Failed("a committed shard is gone or cut", where=store / name, fix=fix)
    for left in [path for path in store.iterdir() if path.name not in files]:
        left.unlink()  # by an end that was killed
    shutil.copyfile(folder / FILE, store / FILE)
    hashes = {path: digest for record in records for path, digest in record["sources"].items()}
    inputs = tokenizer_records(tokenizer_path)
    inputs += [Input(s.place, "foreign", hashes.get(s.path) or sha256_json(s.path)) for s in plan.sources]
    seal(Draft(store, facts, inputs, {name: file["sha256"] for name, file in files.items()}), "tokens")
    swap_in(store, out)  # what is there is an empty directory, or an artifact that the caller wants replaced
    shutil.rmtree(folder, ignore_errors=True)
    if counts["replaced"]:
        warn(f"{counts['replaced']:,} characters replaced by U+FFFD (invalid UTF-8 or NUL)")
    if counts["forced_cuts"]:
        warn(f"{counts['forced_cuts']:,} cuts inside runs of over {PIECE_BYTES:,} bytes without a space")


def facts_of(plan: TaskPlan, records: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts of a store's manifest, from the records of its tasks. Those under `made` are no part of its hash: the
    same text at another place, tokenised by another encoder or more workers, is the same store.
    """
    measures = ("tokens", "documents", "sequences", "text_bytes")
    return {
        **{key: sum(record[key] for record in records) for key in (*measures, "characters")},
        "dtype": str(token_dtype(tokenizer.vocab_size)),
        "largest_id": max((record["largest_id"] for record in records), default=-1),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint(),
        "tokenizer_type": tokenizer.type,
        "special": tokenizer.special,
        "append_eos": plan.append_eos,
        "documents_begin": list(plan.before),
        "documents_end": list(plan.behind),
        "sentences": plan.sentences,
        "documents_are": plan.options.documents,
        "shards": [
            {"name": f"{record['task']:05d}", **{key: record[key] for key in measures}}
            for record in records
            if record["tokens"]
        ],
        "made": {
            "counts": {key: sum(record["counts"].get(key, 0) for record in records) for key in COUNTS},
            "backends": sorted({record["backend"] for record in records}),
            "plan": plan.hash,
            "settings": plan.settings,
        },
    }
