"""Fields of JSON lines, Parquet files and datasets: every form gives the same documents, whole or in parts."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from reading import documents, read_all
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions
from throughline.data.ingest.tokenize import make_plan
from throughline.data.new_tokenizer import train_tokenizer


def test_jsonl_parquet_and_saved_dataset_agree(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["one", "zwei é", "", "three\n\nblocks", "nul\0", "x" * 3000]
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)] + [
        '{"id": 9, "body": null}',
        "",
    ]
    (tmp_path / "t.jsonl").write_text("\r\n".join(lines))
    table = pa.table({"id": range(len(texts)), "body": texts})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    options = ReadOptions(field="body", piece_bytes=1000)
    size = (tmp_path / "t.parquet").stat().st_size
    expected = ["one", "zwei é", "three\n\nblocks", "nul\ufffd", "x" * 3000]
    assert documents(tmp_path / "t.jsonl", [], options)[0] == expected
    assert documents(tmp_path / "t.jsonl", [1, 30, 31, 60], options)[0] == expected
    assert documents(tmp_path / "t.parquet", [], options)[0] == expected
    assert documents(tmp_path / "t.parquet", [size // 4, size // 2], options)[0] == expected
    assert documents(tmp_path / "saved", [], options)[0] == expected


def test_columns_of_any_name_and_progress_in_bytes_of_the_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"text {i} " + "again " * 200 for i in range(3000)]
    pq.write_table(pa.table({"meta.text": texts, "other": texts}), tmp_path / "t.parquet", row_group_size=500)
    [source] = expand_inputs([str(tmp_path / "t.parquet")])
    told: list[int] = []
    batches = list(Reader(ReadOptions(field="meta.text"), Counter(), told.append).read(source))
    assert [text for batch in batches for text in batch.texts] == texts
    assert 0.5 * source.bytes < sum(told) <= source.bytes


def test_datasets_streamed_split_and_without_text(tmp_path: Path) -> None:
    """`datasets:NAME` (here a directory: no network), a split of a saved dictionary, and columns that hold no
    text.
    """
    import datasets

    (tmp_path / "hub").mkdir()
    rows = [{"text": f"row {i}", "count": i, "words": ["a"]} for i in range(130)]
    (tmp_path / "hub" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"one": table, "two": table.select(range(3))}).save_to_disk(str(tmp_path / "saved"))

    def texts(name: str, **options) -> list[str]:
        [source] = expand_inputs([name])
        return [
            text for batch in Reader(ReadOptions(**options), Counter()).read(source) for text in batch.texts
        ]

    assert texts(f"datasets:{tmp_path / 'hub'}") == [row["text"] for row in rows]
    assert texts(str(tmp_path / "saved"), split="two") == ["row 0", "row 1", "row 2"]
    with pytest.raises(WrongUse, match="splits: one, two"):
        texts(str(tmp_path / "saved"))
    for column in ("count", "words"):
        with pytest.raises(WrongUse, match="holds no text"):
            texts(str(tmp_path / "saved"), split="one", field=column)
    for name in (f"datasets:{tmp_path / 'hub'}", str(tmp_path / "saved")):
        with pytest.raises(WrongUse, match="no column 'body'"):
            texts(name, split="train" if "hub" in name else "one", field="body")
    with pytest.raises(Failed, match="cannot read a dataset"):
        texts(f"datasets:{tmp_path / 'absent'}")


def test_datasets_are_read_in_parts(tmp_path: Path) -> None:
    """A saved dataset is cut by rows and a streamed one by its files, so that workers share them and a kill
    loses one part; every row comes once and in order.
    """
    import datasets

    rows = [{"text": f"row {i}"} for i in range(1000)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "hub").mkdir()
    for file in range(4):
        lines = "".join(json.dumps(row) + "\n" for row in rows[file * 250 : file * 250 + 250])
        (tmp_path / "hub" / f"train-{file}.jsonl").write_text(lines)
    tokenizer = train_tokenizer(["row 0123456789"], "char", 300)
    for name, least in ((str(tmp_path / "saved"), 4), (f"datasets:{tmp_path / 'hub'}", 4)):
        plan = make_plan([name], tokenizer, ReadOptions(), None, False, 3000)
        tasks = plan.tasks()
        assert len(tasks) >= least
        spans = [(plan.sources[span.source], span) for task in tasks for span in task.spans]
        batches = [
            Reader(plan.options, Counter()).read(source, span.start, span.stop) for source, span in spans
        ]
        assert [text for part in batches for batch in part for text in batch.texts] == [
            row["text"] for row in rows
        ]
    (tmp_path / "hub" / "train-4.jsonl").write_text('{"text": "a row of today"}\n')
    with pytest.raises(Refused, match="has changed while it was read"):
        list(Reader(plan.options, Counter()).read(plan.sources[0], 0, 1))


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_a_field_inside_of_others(form: str, tmp_path: Path) -> None:
    """`doc.text`, three deep too; a null on the way is an empty document; a column of that name goes first."""
    rows = [{"id": 1, "doc": {"text": "one\r\n", "more": {"body": "deep"}}}, {"id": 2, "doc": None}]
    rows.append({"id": 3, "doc": {"text": "three", "more": {"body": "end"}}})
    path = tmp_path / f"t.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(path)
    found, counts = read_all(path, field="doc.text")
    assert found == ["one\n", "three"] and counts["empty"] == 1
    assert read_all(path, field="doc.more.body")[0] == ["deep", "end"]
    [source] = expand_inputs([str(path)])
    records = [
        row
        for batch in Reader(ReadOptions(field="doc.text"), Counter()).read_records(source)
        for row in batch
    ]
    assert records == [{"id": 1, "doc": {"text": "one\n", "more": {"body": "deep"}}}, rows[2]]
    for field in ("doc.title", "doc", "id.text"):
        with pytest.raises((Failed, WrongUse)) as refused:
            read_all(path, field=field)
        assert form == "dataset" or "doc.text" in str(refused.value) or "holds no text" in str(refused.value)
    if form != "dataset":
        rows = [{"doc.text": "flat", "doc": {"text": "inside"}}]
        if form == "jsonl":
            path.write_text(json.dumps(rows[0]) + "\n")
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"doc.text": "flat"}]), path)
        assert read_all(path, field="doc.text")[0] == ["flat"]
