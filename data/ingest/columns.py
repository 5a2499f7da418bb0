"""Text columns: parquet files by row group, and Hugging Face datasets, streamed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import Failed, MissingExtra, Refused, ThroughlineError, WrongUse
from .inputs import DATASET_PREFIX, is_saved_dataset

TARGET_BYTES = 4 << 20  # of text per batch of rows


def parquet_rows(
    path: str, start: int, stop: int | None, column: str, on_bytes: Callable[[int], None], whole: bool = False
) -> Iterator[list[Any]]:
    """Rows of the row groups whose first byte lies in [start, stop), in lists: dicts with bytes or None in
    `column`, and with all other columns when `whole`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise no_column(path, column, names)
            kind = file.schema_arrow.field(column).type
            # a dictionary's values: categories, as pandas writes them
            kept = kind.value_type if pa.types.is_dictionary(kind) else kind
            texts = (pa.string(), pa.large_string(), pa.string_view())
            if kept not in (*texts, pa.binary(), pa.large_binary(), pa.binary_view()):
                raise _no_text(path, column, f"its type is {kind}")
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                if _offset(facts) >= start and (stop is None or _offset(facts) < stop):
                    size = _column(facts, column).total_uncompressed_size
                    rows = max(1, min(4096, TARGET_BYTES * max(facts.num_rows, 1) // max(size, 1)))
                    for batch in file.iter_batches(rows, [group], None if whole else [column]):
                        place = batch.schema.get_field_index(column)
                        values = batch.column(place)
                        values = values.dictionary_decode() if kept is not kind else values
                        values = values.cast(pa.large_binary())  # arrow does not check bytes for UTF-8
                        yield batch.set_column(place, column, values).to_pylist()
                    on_bytes(sum(facts.column(i).total_compressed_size for i in range(facts.num_columns)))
    except (pa.ArrowInvalid, OSError) as error:
        fix = "copy or download the file again"
        raise Failed("a parquet file is damaged", where=path, why=str(error), fix=fix) from error


def no_column(where: str, column: str, names: list[str]) -> WrongUse:
    """The error of a column that is not there."""
    why = f"columns: {', '.join(names)}"
    return WrongUse(f"no column {column!r}", where=where, why=why, fix="name one with --field")


def _no_text(where: str, column: str, why: str) -> WrongUse:
    return WrongUse(f"column {column!r} holds no text", where=where, why=why, fix="name another with --field")


def _column(row_group: Any, name: str) -> Any:
    columns = map(row_group.column, range(row_group.num_columns))
    return next(column for column in columns if column.path_in_schema == name)


def _offset(row_group: Any) -> int:
    first = row_group.column(0)
    return first.dictionary_page_offset if first.has_dictionary_page else first.data_page_offset


def _hub_name(name: str) -> tuple[str, str, str]:
    """Repository, revision and configuration of `datasets:NAME[@REVISION][:CONFIG]`."""
    repository, _, config = name.removeprefix(DATASET_PREFIX).partition(":")
    if Path(repository).exists():
        return repository, "", config
    repository, _, revision = repository.partition("@")
    return repository, revision, config


def pinned(name: str) -> str:
    """A dataset of the hub at the commit that it is at now, or at the revision that its name has: what is read over
    days is one version. Raises Failed when it cannot be found.
    """
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
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "reading a Hugging Face dataset", "datasets") from None
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
    """Rows as `parquet_rows` has them, of a `save_to_disk` directory or of `datasets:NAME[:CONFIG]`, streamed.

    `part` (start, stop, of) reads that share: rows of a saved dataset in proportion, files of a streamed one.
    """
    with _readable(name):
        rows = _open_dataset(name, split)
        if part is not None:
            rows = _part_of(rows, part, name)
        if (names := rows.column_names) is not None:
            if column not in names:
                raise no_column(name, column, names)
            rows = rows if whole else rows.select_columns([column])
        for batch in rows.iter(batch_size=64):
            if column not in batch:  # of a stream whose columns were not known
                raise no_column(name, column, list(batch))
            values = batch[column]
            if odd := [value for value in values if not isinstance(value, str | bytes | None)]:
                raise _no_text(name, column, f"it holds {type(odd[0]).__name__}")
            on_bytes(sum(len(value) for value in values if value))
            yield [dict(zip(batch, row)) for row in zip(*batch.values())]
