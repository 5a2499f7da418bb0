"""Text in, text or vectors out, for the command line: the model at a path runs here. Of a file of requests each line is
answered in a line, in the same order (`data.answered`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from ...core.backend import AUTO, BackendOptions
from ...core.console import warn
from ...core.errors import ThroughlineError, WrongUse
from ...data.answered import Numbered, answer_records, text_of
from ...data.model_settings import end_ids
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_text_model
from ..runtimes.sampling import Sampling
from .encoding import Encoding, Reader, embed
from .generation import Job, TextDelta
from .slots import PREFIX_BYTES, SlotBatch, answer

SLOTS, GPU_SLOTS = 8, 64
EMBEDDED_TOGETHER = 256  # texts, sorted by length among themselves


def open_reader(
    path: Path | str, options: BackendOptions, prompt: str | None = None
) -> tuple[Loaded, Reader]:
    """The BERT at `path`, and its reader of texts behind this prompt (its own or any). Raises as `open_text_model`."""
    loaded, tokenizer = open_text_model(path, "bert", options)
    loaded = dataclasses.replace(loaded, sentence=loaded.sentence.prompted(prompt))
    context = loaded.sentence.context(loaded.backend.context)
    return loaded, Reader(tokenizer, context, loaded.backend.vocab_size)


def text_job(
    loaded: Loaded, tokenizer: Tokenizer, prompt: str, like: Job, add_special_tokens: bool = True
) -> Job:
    """Continue `prompt` as a job without one says, at most to the context's end. Raises WrongUse when it fills it."""
    ids = tokenizer.encode_prompt(prompt, add_special_tokens)
    context = loaded.backend.context
    if len(ids) >= context:
        what, why = "the prompt fills the model's context", f"{len(ids)} tokens, the context is {context}"
        raise WrongUse(what, where="prompt", why=why, fix="shorten the prompt")
    return replace(like, prompt_ids=ids, max_tokens=min(like.max_tokens, context - len(ids)))


def continue_text(
    path: Path | str,
    prompt: str,
    like: Job,
    options: BackendOptions = AUTO,
    *,
    add_special_tokens: bool = True,
) -> Iterator[tuple[int, TextDelta]]:
    """Continue `prompt` with the GPT at `path`; yields (number of the answer, delta). Raises WrongUse as `text_job`."""
    loaded, tokenizer = open_text_model(path, "gpt", options)
    job = text_job(loaded, tokenizer, prompt, like, add_special_tokens)
    batch = batch_of(loaded, tokenizer, min(job.n, SLOTS), prefix_bytes=0)
    for _, number, delta in answer(batch, [job]):
        yield number, delta


def batch_of(loaded: Loaded, tokenizer: Tokenizer, slots: int, prefix_bytes: int = PREFIX_BYTES) -> SlotBatch:
    """A batch of answers by this model, which end where its files say."""
    assert loaded.causal is not None and loaded.tokenizer is not None
    ends = end_ids(loaded.tokenizer.parent, tokenizer)
    return SlotBatch(loaded.causal, tokenizer, slots, tokenizer.vocab_size, ends, prefix_bytes)


def embed_texts(
    path: Path | str,
    texts: Sequence[str],
    options: BackendOptions = AUTO,
    *,
    truncate: bool = False,
    prompt: str | None = None,
) -> np.ndarray:
    """Embeddings by the encoder at `path`, of length 1, float32 (texts, width); `truncate`: of the beginnings."""
    loaded, reader = open_reader(path, options, prompt)
    names = [f"text {place}: {text[:60]}" for place, text in enumerate(texts, 1)]
    rows = [reader.frame({name: loaded.sentence.text(text)}, truncate) for name, text in zip(names, texts)]
    return embed(loaded.backend, rows, reader.tokenizer.pad_id or 0, loaded.sentence.output())


def embed_each(
    loaded: Loaded, reader: Reader, texts: Sequence[str], truncate: bool = False
) -> tuple[np.ndarray, dict[int, ThroughlineError]]:
    """Embeddings of length 1, float32 (texts, width), and by its place the error of each text that has none: its row is
    zeros. `truncate` embeds the beginning of longer texts.
    """
    rows: dict[int, Encoding] = {}
    errors: dict[int, ThroughlineError] = {}
    for place, text in enumerate(texts):
        try:
            _check_has_tokens(loaded, reader, text)
            rows[place] = reader.frame({"the text": loaded.sentence.text(text)}, truncate)
        except ThroughlineError as error:
            errors[place] = error
    vectors = np.zeros((len(texts), loaded.config.width), np.float32)
    if rows:
        pad_id = reader.tokenizer.pad_id or 0
        vectors[list(rows)] = embed(loaded.backend, list(rows.values()), pad_id, loaded.sentence.output())
    return vectors, errors


def _check_has_tokens(loaded: Loaded, reader: Reader, text: str) -> None:
    """Refuse a text without a token of its own, whatever prompt stands before it."""
    if not text.strip() or (loaded.sentence.prompt and not len(reader.encode(text, "text", truncate=True))):
        raise WrongUse("the text is empty", where="text", fix="give at least one token of text")


def embed_lines(
    path: Path | str,
    texts: Sequence[str],
    options: BackendOptions = AUTO,
    *,
    truncate: bool = False,
    prompt: str | None = None,
) -> tuple[np.ndarray, dict[int, str]]:
    """Embeddings by the encoder at `path` as `embed_each` has them, with the errors as one line each."""
    loaded, reader = open_reader(path, options, prompt)
    vectors, errors = embed_each(loaded, reader, texts, truncate)
    return vectors, {place: one_line(error) for place, error in errors.items()}


def one_line(error: ThroughlineError) -> str:
    """Return the error and its reason, as written to the output line of a failed record."""
    return f"{error.what} ({error.why})" if error.why else error.what


def generate_file(
    path: Path | str,
    source: Path,
    out: Path,
    like: Job,
    options: BackendOptions = AUTO,
    *,
    add_special_tokens: bool = True,
) -> dict[str, Any]:
    """Continue the "prompt" of every line with the GPT at `path`, as a job without one says or the line's own settings
    (`Answering`) do: the line with "answers" and "finish". Returns counts. Raises WrongUse for a file without any
    request and for an OUT that is there already.
    """
    loaded, tokenizer = open_text_model(path, "gpt", options)
    given = [loaded.input.hash, repr(like.sampling), like.max_tokens, like.stop, like.n]
    given += [like.skip_special_tokens, add_special_tokens]

    def generate(records: Iterator[Numbered]) -> Iterator[Numbered]:
        return _generate(loaded, tokenizer, records, like, add_special_tokens)

    return answer_records(source, out, given, "prompt", generate)


def embed_file(
    path: Path | str,
    source: Path,
    out: Path,
    options: BackendOptions = AUTO,
    *,
    truncate: bool = False,
    field: str = "text",
    prompt: str | None = None,
    chunk: bool = False,
) -> dict[str, Any]:
    """Embed this field of every record with the BERT at `path`: the record with "embedding", of length 1. `truncate`
    embeds the beginning of what is too long, else refused; `chunk` makes records of its pieces, each with its number as
    "chunk". `prompt`: one of the model's, or a text. Returns counts and raises as `generate_file` does.
    """
    loaded, reader = open_reader(path, options, prompt)
    given = [loaded.input.hash, field, truncate, prompt, chunk]
    cut = partial(reader.chunks, prompt=loaded.sentence.prompt) if chunk else None
    how = truncate or chunk, field
    return answer_records(
        source, out, given, field, lambda records: _embed(loaded, reader, records, *how), cut
    )


class Answering(Sampling, frozen=True, kw_only=True):
    """What a line may say of its answers."""

    max_tokens: int
    stop: str | tuple[str, ...]
    samples: Annotated[int, msgspec.Meta(ge=1)]


def _with_own(like: Job, record: dict[str, Any]) -> Job:
    """The job with a line's own settings. Raises WrongUse for what is none or out of range."""
    for name in record:
        _warn_misspelt(name)
    given = {"max_tokens": like.max_tokens, "stop": like.stop, "samples": like.n} | asdict(like.sampling)
    try:
        own = msgspec.convert({name: record.get(name, value) for name, value in given.items()}, Answering)
    except msgspec.ValidationError as error:
        raise WrongUse("a setting is not what it should be", why=str(error)) from error
    stop = (own.stop,) if isinstance(own.stop, str) else own.stop
    return replace(like, max_tokens=own.max_tokens, stop=stop, n=own.samples, sampling=own)


@lru_cache(1024)  # told once
def _warn_misspelt(name: str) -> None:
    """A line's other fields are carried along; one that looks like a setting may have been meant to be one."""
    known = Answering.__struct_fields__
    if name not in known and (near := get_close_matches(name.lower(), known, 1, 0.8)):
        warn(f"the field {name!r} is no setting and is carried along; did you mean {near[0]}?")


def _generate(
    loaded: Loaded, tokenizer: Tokenizer, records: Iterator[Numbered], like: Job, add_special_tokens: bool
) -> Iterator[Numbered]:
    asked: list[tuple[Numbered, list[str], list[str | None]]] = []  # in the order of the jobs
    refused: list[Numbered] = []
    broken: set[int] = set()

    def fail(place: int, error: Exception) -> None:
        number, record = asked[place][0]
        if place not in broken:
            refused.append((number, record | {"error": str(error)}))
        broken.add(place)

    def jobs() -> Iterator[Job]:
        for number, record in records:
            try:
                prompt, own = text_of(record, "prompt"), _with_own(like, record)
                job = text_job(loaded, tokenizer, prompt, own, add_special_tokens)
            except ThroughlineError as error:
                refused.append((number, record | {"error": one_line(error)}))
                continue
            asked.append(((number, record), [""] * job.n, [None] * job.n))
            yield job

    slots = SLOTS if loaded.backend.device == "cpu" else GPU_SLOTS
    batch = batch_of(loaded, tokenizer, slots)
    for place, copy, delta in answer(batch, jobs(), fail):
        (number, record), texts, ends = asked[place]
        texts[copy] += delta.text
        ends[copy] = delta.finish
        if all(ends) and place not in broken:
            yield number, record | {"answers": texts, "finish": ends}
        yield from refused
        refused.clear()
    yield from refused


def _embed(
    loaded: Loaded, reader: Reader, records: Iterator[Numbered], truncate: bool, field: str
) -> Iterator[Numbered]:
    while group := list(islice(records, EMBEDDED_TOGETHER)):
        kept, texts = [], []
        for number, record in group:
            try:
                texts.append(text_of(record, field))
                kept.append((number, record))
            except ThroughlineError as error:
                yield number, record | {"error": one_line(error)}
        vectors, errors = embed_each(loaded, reader, texts, truncate)
        for place, (number, record) in enumerate(kept):
            if place in errors:
                yield number, record | {"error": one_line(errors[place])}
            else:
                yield number, record | {"embedding": vectors[place].tolist()}
