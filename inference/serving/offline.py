"""Answers to a file of requests: .jsonl in, .jsonl out, one line for each, in the same order.

Finished lines are appended to OUT.partial as they come, with their number; the same command goes on where it
stopped, and the last step puts them in order as OUT. A line that cannot be answered (a prompt longer than the
context) gets an "error" and stops nobody else.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import AUTO, BackendOptions
from ...core.console import progress
from ...core.errors import ThroughlineError, WrongUse
from ...core.files import full_disk, sha256_file, sha256_json, sync
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded
from ..runtimes.sampling import Sampling
from .encoding import embed, frame, shortened
from .generation import Request
from .slots import SlotBatch
from .texts import open_text_model

SLOTS, GPU_SLOTS = 8, 64
EMBEDDED_TOGETHER = 256  # texts, sorted by length among themselves
Record = tuple[int, dict[str, Any]]


def generate_file(
    path: Path | str,
    source: Path,
    out: Path,
    sampling: Sampling,
    max_tokens: int,
    stop: tuple[str, ...] = (),
    samples: int = 1,
    options: BackendOptions = AUTO,
) -> dict[str, int]:
    """Continue the "prompt" of every line with the GPT at `path`: the line with "answers" and "finish".

    A line's own `max_tokens`, `stop`, `samples` and sampling settings take the place of those given.
    Returns counts. Raises WrongUse for a line that is no request and for an OUT that is there already.
    """
    loaded, tokenizer = open_text_model(path, "gpt", options)
    given = {"sampling": repr(sampling), "max_tokens": max_tokens, "stop": stop, "samples": samples}

    def answer(records: Iterator[Record]) -> Iterator[Record]:
        yield from _generate(loaded, tokenizer, records, sampling, max_tokens, stop, samples)

    return _run(source, out, given | {"model": loaded.input.hash}, "prompt", answer)


def embed_file(
    path: Path | str, source: Path, out: Path, options: BackendOptions = AUTO, *, truncate: bool = False
) -> dict[str, int]:
    """Embed the "text" of every line with the BERT at `path`: the line with "embedding", of length 1.

    `truncate` embeds the beginning of what is longer than the model's context, which is refused without it.
    Returns counts and raises as `generate_file` does.
    """
    loaded, tokenizer = open_text_model(path, "bert", options)

    def answer(records: Iterator[Record]) -> Iterator[Record]:
        yield from _embed(loaded, tokenizer, records, truncate)

    given = {"model": loaded.input.hash} | ({"truncate": True} if truncate else {})
    return _run(source, out, given, "text", answer)


def _run(
    source: Path,
    out: Path,
    settings: dict[str, Any],
    field: str,
    answer: Callable[[Iterator[Record]], Iterator[Record]],
) -> dict[str, int]:
    if out.exists():
        raise WrongUse("there is a file already", where=out, fix="choose another --out, or remove it")
    total = sum(1 for _ in _records(source, field))  # every line is checked before the first is answered
    if total == 0:
        raise WrongUse(
            "there is nothing to answer", where=source, fix=f'give lines like {{"{field}": "..."}}'
        )
    partial = out.with_name(out.name + ".partial")
    with full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    places = _resume(partial, sha256_json([settings, sha256_file(source)]))
    resumed, errors = len(places), 0
    todo = (record for record in _records(source, field) if record[0] not in places)
    with progress(out.name, total, " lines") as bar, open(partial, "ab") as file:
        bar.start_at(resumed)
        for number, row in answer(todo):
            errors += "error" in row
            places[number] = file.tell()
            with full_disk(partial):
                file.write(f"{number}\t{json.dumps(row, ensure_ascii=False)}\n".encode())
                file.flush()
            bar.advance(1)
    ordered = out.with_name(out.name + ".ordered")
    with full_disk(out), open(ordered, "wb") as target, open(partial, "rb") as file:
        for number in range(total):
            file.seek(places[number])
            target.write(file.readline().split(b"\t", 1)[1])
    sync(ordered)
    os.replace(ordered, out)
    partial.unlink()
    return {"lines": total, "resumed": resumed, "errors": errors}


def _records(source: Path, field: str) -> Iterator[Record]:
    """Numbered lines. Raises WrongUse for one that is no JSON object with this field."""
    with open(source, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        number = 0
        for place, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise WrongUse("this line is no JSON", where=f"{source}:{place}", why=str(error)) from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                fix = f'write {{"{field}": "..."}}'
                raise WrongUse(f'this line has no text "{field}"', where=f"{source}:{place}", fix=fix)
            yield number, record
            number += 1


def _resume(partial: Path, identity: str) -> dict[int, int]:
    """Where the answers of an earlier run stand in OUT.partial, which is begun when there is none.

    Raises WrongUse when it belongs to another model, file or setting.
    """
    if not partial.exists():
        partial.write_text(identity + "\n")
        return {}
    places: dict[int, int] = {}
    with open(partial, "rb+") as file:
        if file.readline().decode(errors="replace").strip() != identity:
            raise WrongUse(
                "the answers so far are of another model, input or setting",
                where=partial,
                fix="give the command that began them, or remove the file to begin anew",
            )
        at = file.tell()
        for line in file:
            if not line.endswith(b"\n"):  # cut by a crash
                break
            places[int(line.split(b"\t", 1)[0])] = at
            at += len(line)
        file.truncate(at)
    return places


def _generate(
    loaded: Loaded,
    tokenizer: Tokenizer,
    records: Iterator[Record],
    sampling: Sampling,
    max_tokens: int,
    stop: tuple[str, ...],
    samples: int,
) -> Iterator[Record]:
    backend = loaded.causal
    assert backend is not None
    slots = SLOTS if backend.device == "cpu" else GPU_SLOTS
    batch = SlotBatch(backend, tokenizer.decode, slots, tokenizer.vocab_size)
    open_rows: dict[int, tuple[dict[str, Any], list[str], list[str | None]]] = {}
    more = True
    while more or batch.busy:
        while more and len(batch.waiting) < slots:
            number, record = next(records, (-1, {}))
            if more := number >= 0:
                try:
                    asked = _requests(tokenizer, record, backend.context, sampling, max_tokens, stop, samples)
                    for copy, request in enumerate(asked):
                        batch.add(request).owner = (number, copy)
                except ThroughlineError as error:
                    yield number, record | {"error": str(error)}
                    continue
                open_rows[number] = (record, [""] * len(asked), [None] * len(asked))
        for sequence, delta in batch.step():
            number, copy = sequence.owner
            record, texts, ends = open_rows[number]
            texts[copy] += delta.text
            ends[copy] = delta.finish
            if all(ends):
                del open_rows[number]
                yield number, record | {"answers": texts, "finish": ends}


def _requests(
    tokenizer: Tokenizer,
    record: dict[str, Any],
    context: int,
    sampling: Sampling,
    max_tokens: int,
    stop: tuple[str, ...],
    samples: int,
) -> list[Request]:
    """The requests of one line. Raises WrongUse for settings out of range and a prompt that does not fit."""
    own = {f.name: record[f.name] for f in fields(Sampling) if f.name in record and f.name != "logit_bias"}
    try:
        sampling = replace(sampling, **own)
        count, most = int(record.get("samples", samples)), int(record.get("max_tokens", max_tokens))
    except (TypeError, ValueError) as error:
        raise WrongUse("a setting is no number", why=str(error)) from error
    stops = record.get("stop", stop)
    ids = tokenizer.encode(record["prompt"])
    if len(ids) == 0 and tokenizer.eos_id is not None:
        ids = np.array([tokenizer.eos_id])
    if len(ids) >= context:
        raise WrongUse("the prompt fills the model's context", why=f"{len(ids)} tokens of {context}")
    most = min(most, context - len(ids))
    return [
        Request(
            ids,
            most,
            sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + copy),
            (stops,) if isinstance(stops, str) else tuple(stops),
            tokenizer.eos_id,
        )
        for copy in range(count)
    ]


def _embed(
    loaded: Loaded, tokenizer: Tokenizer, records: Iterator[Record], truncate: bool
) -> Iterator[Record]:
    encoder, config = loaded.encoder, loaded.config
    assert encoder is not None
    more = True
    while more:
        kept: list[Record] = []
        rows = []
        while more and len(kept) < EMBEDDED_TOGETHER:
            number, record = next(records, (-1, {}))
            if more := number >= 0:
                try:
                    text, context = record["text"], config.sequence_length
                    given = shortened(tokenizer, text, context) if truncate else text
                    rows.append(frame(tokenizer, given, context, config.vocab_size))
                    kept.append((number, record))
                except ThroughlineError as error:
                    yield number, record | {"error": str(error)}
        if kept:
            vectors = embed(encoder, rows, tokenizer.pad_id or 0)
            for (number, record), vector in zip(kept, vectors):
                yield number, record | {"embedding": vector.tolist()}
