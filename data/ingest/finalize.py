"""The end of a tokenisation: judge the whole, write the manifest, rename the store to its place."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...core.artifact import Draft, Input, seal
from ...core.console import warn
from ...core.errors import Failed
from ...core.files import sha256_json, swap_in
from ..shard import token_dtype
from ..tokenizer import FILE, Tokenizer, tokenizer_records
from .task_plan import Task, TaskPlan
from .tasks import STORE, read_record
from .text import COUNTS, PIECE_BYTES, check_replaced


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
    """Make the committed shards in `folder` the artifact `out`, and remove `folder`.

    Raises Failed for a corpus without text or with too many invalid characters, and for a shard that has
    gone.
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
    """The facts of a store's manifest, from the records of its tasks.

    Facts under `made` are no part of the store's hash: the same text at another place, tokenised by another
    encoder or more workers, is the same store.
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
