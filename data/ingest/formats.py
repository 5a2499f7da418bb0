"""Files as blocks of bytes, decompressed and cut at separators; text columns of parquet files and of datasets."""

import bz2
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...core.errors import Failed, Refused, ThroughlineError, WrongUse
from ..fields import field_value
from .inputs import DATASET_PREFIX, is_saved_dataset

BLOCK_BYTES = 1 << 20
BLANK = b" \t\r\n"
ANOTHER_FIELD = "name another with --field, for train with --set data.field"
# A line ends with LF, CRLF or CR alone. The groups are atomic: a CRLF is never taken for two line ends.
LINE_END = re.compile(rb"\r\n|\n|\r")
BLANK_LINES = re.compile(rb"(?>\r\n|\n|\r)(?:[ \t]*(?>\r\n|\n|\r))+")  # greedy: a whole run of blank lines


@contextmanager
def open_blocks(
    path: str, compression: str, offset: int, on_bytes: Callable[[int], None]
) -> Iterator[Iterator[bytes]]:
    """The (decompressed) content of a file from `offset` on, in blocks of about BLOCK_BYTES; `on_bytes` is told what
    each took of the file. Raises Failed when it cannot be opened or its compressed data are cut short or damaged.
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
    if compression and not os.fstat(file.fileno()).st_size:
        why = "it is empty; compressed text of no bytes has some itself"
        raise Failed("a compressed file is cut short", where=path, why=why, fix=fix)
    try:
        for block in _decompressed(file, compression):
            on_bytes(file.tell() - told)
            told = file.tell()
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
    if compression:
        opened = gzip.GzipFile(fileobj=file) if compression == "gz" else bz2.BZ2File(file)
    yield from iter(lambda: opened.read(BLOCK_BYTES), b"")


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    """Zstandard frames; one cut short is noticed, as zstandard's stream reader does not. Input goes in 4 KiB at a time:
    data compressed 32,000 : 1 expand to 128 MiB at once and not more.
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
    """The part of a file from the end of the first separator at or after `start - 1` to that for `stop - 1`, so that
    ranges that touch share nothing and lose nothing. `blocks` begin at max(start - 1, 0); start 0 is the beginning of
    the file, stop None its end.
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


TARGET_BYTES = 4 << 20  # of text per batch of rows


def parquet_rows(
    path: str, start: int, stop: int | None, column: str, on_bytes: Callable[[int], None], whole: bool = False
) -> Iterator[list[Any]]:
    """Rows of the row groups that begin in bytes [start, stop): dicts of `column` (bytes or None; its name with
    dots is inside of others), or `whole`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            path_of_text = _column_path(file.schema_arrow, column)
            if not path_of_text:
                raise no_column(path, column, _column_names(file.schema_arrow))
            kind = _type_at(file.schema_arrow, path_of_text)
            # a dictionary's values: categories, as pandas writes them
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            texts = (pa.string(), pa.large_string(), pa.string_view())
            if values not in (*texts, pa.binary(), pa.large_binary(), pa.binary_view()):
                why = f"its type is {kind}"
                raise WrongUse(f"column {column!r} holds no text", where=path, why=why, fix=ANOTHER_FIELD)
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                columns = [facts.column(i) for i in range(facts.num_columns)]
                first = columns[0]
                offset = first.dictionary_page_offset if first.has_dictionary_page else first.data_page_offset
                if offset >= start and (stop is None or offset < stop):
                    size = next(c.total_uncompressed_size for c in columns if c.path_in_schema == column)
                    rows = max(1, min(4096, TARGET_BYTES * max(facts.num_rows, 1) // max(size, 1)))
                    for batch in file.iter_batches(rows, [group], None if whole else [column]):
                        place = batch.schema.get_field_index(path_of_text[0])
                        texts_as_bytes = _text_as_bytes(batch.column(place), path_of_text[1:])
                        yield batch.set_column(place, path_of_text[0], texts_as_bytes).to_pylist()
                    on_bytes(sum(each.total_compressed_size for each in columns))
    except (pa.ArrowInvalid, OSError) as error:
        fix = "copy or download the file again"
        raise Failed("a parquet file is damaged", where=path, why=str(error), fix=fix) from error


def _column_path(schema: Any, name: str) -> list[str]:
    """The fields from a column to the one of this name, or none when it is not there."""
    if name in schema.names:
        return [name]
    path = name.split(".")
    try:
        _type_at(schema, path)
    except KeyError:
        return []
    return path


def _type_at(schema: Any, path: list[str]) -> Any:
    """The type of a column, or of a field inside. Raises KeyError when it is not there."""
    import pyarrow as pa

    if path[0] not in schema.names:
        raise KeyError(path[0])
    kind = schema.field(path[0]).type
    for part in path[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            raise KeyError(part)
        kind = kind.field(part).type
    return kind


def _column_names(schema: Any) -> list[str]:
    """The columns of a table, of one with fields these."""
    import pyarrow as pa

    names = []
    for field in schema:
        inner = _column_names(_inner(field.type)) if pa.types.is_struct(field.type) else []
        names += [f"{field.name}.{name}" for name in inner] or [field.name]
    return names


def _inner(kind: Any) -> list[Any]:
    """The fields of a struct."""
    return [kind.field(number) for number in range(kind.num_fields)]


def _text_as_bytes(array: Any, path: list[str]) -> Any:
    """A column with the text in it, at this path of fields, as bytes: arrow does not check them for UTF-8."""
    import pyarrow as pa

    if not path:
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        return array.cast(pa.large_binary())
    names = [field.name for field in _inner(array.type)]
    columns = array.flatten()
    place = names.index(path[0])
    columns[place] = _text_as_bytes(columns[place], path[1:])
    return pa.StructArray.from_arrays(columns, names, mask=array.is_null())


def no_column(where: str, column: str, names: list[str]) -> WrongUse:
    """The error of a column that is not there."""
    why, fix = f"columns: {', '.join(names)}", "name one with --field, for train with --set data.field"
    return WrongUse(f"no column {column!r}", where=where, why=why, fix=fix)


def _hub_name(name: str) -> tuple[str, str, str]:
    """Repository, revision and configuration of `datasets:NAME[@REVISION][:CONFIG]`."""
    repository, _, config = name.removeprefix(DATASET_PREFIX).partition(":")
    if Path(repository).exists():
        return repository, "", config
    repository, _, revision = repository.partition("@")
    return repository, revision, config


def pinned(name: str) -> str:
    """A dataset of the hub at its present commit, unless its name has one: it may be read for days. Raises Failed."""
    repository, revision, config = _hub_name(name)
    if revision or Path(repository).exists():
        return name
    from huggingface_hub import HfApi

    with _readable(name):
        commit = HfApi().dataset_info(repository).sha
    return f"{DATASET_PREFIX}{repository}@{commit}" + f":{config}" * bool(config)


def hub_parts(name: str, split: str) -> int:
    """Files of a streamed dataset, which can be read apart. Raises Failed when it cannot be opened."""
    with _readable(name):
        return int(_open_dataset(name, split).num_shards)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except ThroughlineError:
        raise
    except Exception as error:  # of the network, of formats of every kind: the library has no root for them
        why, fix = str(error).partition("\n")[0] or type(error).__name__, "check its name and the network"
        raise Failed("cannot read a dataset", where=name, why=why, fix=fix) from error


def _open_dataset(name: str, split: str) -> Any:
    import datasets

    if name.startswith(DATASET_PREFIX):
        repository, revision, config = _hub_name(name)
        more = {"revision": revision} if revision else {}
        return datasets.load_dataset(repository, config or None, split=split, streaming=True, **more)
    assert is_saved_dataset(name)
    rows: Any = datasets.load_from_disk(name)
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            why = f"splits: {', '.join(rows)}"
            raise WrongUse(f"no split {split!r}", where=name, why=why, fix="name one with --split")
        return rows[split]
    if split not in ("train", str(rows.split)):  # the default says nothing
        why = "a single table was saved there"
        raise WrongUse(f"no split {split!r}", where=name, why=why, fix="leave --split out")
    return rows


def _part_of(rows: Any, part: tuple[int, int, int], name: str) -> Any:
    start, stop, scale = part
    if not name.startswith(DATASET_PREFIX):
        return rows.select(range(start * len(rows) // scale, stop * len(rows) // scale))
    if rows.num_shards != scale:
        why = f"{scale} files when the plan was made, {rows.num_shards} now"
        fix = "start again with --overwrite"
        raise Refused("a dataset has changed while it was read", where=name, why=why, fix=fix)
    if (start, stop) == (0, scale):
        return rows
    assert stop == start + 1, "a task reads one file of a streamed dataset"
    return rows.shard(num_shards=scale, index=start)


def dataset_rows(
    name: str,
    split: str,
    column: str,
    on_bytes: Callable[[int], None],
    whole: bool = False,
    part: tuple[int, int, int] | None = None,
) -> Iterator[list[Any]]:
    """Rows as `parquet_rows` has them, of a `save_to_disk` directory or of `datasets:NAME[:CONFIG]`, streamed; of the
    share `part` (start, stop, of): rows of a saved dataset in proportion, files of a streamed one.
    """
    with _readable(name):
        rows = _open_dataset(name, split)
        if part is not None:
            rows = _part_of(rows, part, name)
        names = rows.column_names
        first = column if names is None or column in names else column.partition(".")[0]
        if names is not None:
            if first not in names:
                raise no_column(name, column, names)
            rows = rows if whole else rows.select_columns([first])
        for batch in rows.iter(batch_size=64):
            records = [dict(zip(batch, row)) for row in zip(*batch.values())]
            try:
                values = [field_value(record, column) for record in records]
            except KeyError:  # of a stream whose columns were not known, or inside of a column
                raise no_column(name, column, list(batch)) from None
            if odd := [value for value in values if not isinstance(value, str | bytes | None)]:
                why = f"it holds {type(odd[0]).__name__}"
                raise WrongUse(f"column {column!r} holds no text", where=name, why=why, fix=ANOTHER_FIELD)
            on_bytes(sum(len(value) for value in values if value))
            yield records
