"""Data files: every format and compression gives the same records, the local benchmark files ask what the
harness is asked, and damage is named.
"""

import bz2
import csv
import gzip
import importlib.util
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from throughline.core.errors import Failed, ThroughlineError, WrongUse
from throughline.data import records
from throughline.data.records import Record, find_files, read_records
from throughline.eval.task import find_tasks, shipped_tasks

ROWS = [
    {"text": 'one, "two"', "label": "0"},
    {"text": "Zürich — 東京", "label": "1"},
    {"text": "last", "label": "0"},
]


def _zstd(data: bytes) -> bytes:
    """Two frames, as parallel compressors write."""
    import zstandard

    return b"".join(zstandard.compress(part) for part in (data[: len(data) // 2], data[len(data) // 2 :]))


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zstd}


def _written(folder: Path, form: str) -> bytes:
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()
    if form == "json":
        return json.dumps({"data": ROWS}).encode()
    if form == "tsv":
        return "".join("\t".join(row) + "\n" for row in (ROWS[0], *(row.values() for row in ROWS))).encode()
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
        file.write("\r\n")
    return (folder / "rows.csv").read_bytes()


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv"])
def test_every_format_gives_the_same_records(tmp_path: Path, form: str, suffix: str) -> None:
    """Plain and compressed, with a byte order mark before them and blank lines between or behind."""
    for name, mark in (("plain", b""), ("marked", "\ufeff".encode())):
        data = mark + _written(tmp_path, form)
        file = tmp_path / f"{name}.{form}{suffix}"
        file.write_bytes(COMPRESS[suffix](data) if suffix else data)
        records = read_records([file])
        assert [record.data for record in records] == ROWS
        assert all(record.where.startswith(f"{file}:") for record in records)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_parquet_gives_the_same_records(tmp_path: Path, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    data = (tmp_path / "rows.parquet").read_bytes()
    file = tmp_path / f"rows.parquet{suffix}"
    for content in (data, b"PAR1 no more"):
        file.write_bytes(COMPRESS[suffix](content) if suffix else content)
        if content is data:
            assert [record.data for record in read_records([file])] == ROWS
            continue
        with pytest.raises(Failed, match="parquet"):
            read_records([file])
    if suffix:
        file.write_bytes(COMPRESS[suffix](data)[:-12])
        with pytest.raises(Failed):
            read_records([file])


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_is_cut_or_damaged_is_refused(tmp_path: Path, suffix: str) -> None:
    """Cut at the end of a line, so that nothing but the compression can tell; and with a byte changed."""
    data = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(5000)).encode()
    whole = COMPRESS[suffix](data)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 0xFF
    for broken in (whole[:-20], bytes(changed)):
        file = tmp_path / f"rows.jsonl{suffix}"
        file.write_bytes(broken)
        with pytest.raises(Failed) as caught:
            read_records([file])
        assert caught.value.where.startswith(str(file))


def test_a_table_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for text, place in (
        ("a,b\n1,2\n3\n", ":3"),
        ("a\n" + "x" * (1 << 24) + "x\n", ""),
        ("a,b,a\n1,2,3\n", ":1"),
    ):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(Failed) as caught:
            read_records([tmp_path / "rows.csv"])
        assert caught.value.where == f"{tmp_path / 'rows.csv'}{place}"


@pytest.mark.parametrize("pattern", ["/etc/*.jsonl", "", "a**/x.jsonl"])
def test_what_cannot_be_a_pattern_is_said(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(WrongUse, match="no pattern of files"):
        find_files([pattern], tmp_path)


def test_local_files_ask_what_the_harness_is_asked(shared: Path) -> None:
    """Each task over the shared files as they are: the questions that its hub form gives, which the parity
    tests compare.
    """
    spec = importlib.util.spec_from_file_location("eval_hub", Path(__file__).parents[1] / "eval" / "hub.py")
    hub = importlib.util.module_from_spec(spec)
    sys.modules["eval_hub"] = hub
    spec.loader.exec_module(hub)
    rows: dict[str, list[dict[str, Any]]] = hub.records(shared, 100)
    assert len(rows) == 27
    assert len(rows["wikitext_2"]) == 62  # two of them begin at a line of prose that looks like a title
    for name, hub_rows in rows.items():
        (task,) = find_tasks([name])
        ours = task.kind.items(task.records(shared / "data", 100))
        theirs = task.kind.items([Record("hub", row) for row in hub_rows])
        for one, other in zip(ours, theirs, strict=True):
            assert (one.pairs, one.choices, one.gold, one.text) == (
                other.pairs,
                other.choices,
                other.gold,
                other.text,
            ), one.where
    for name in ("wsc273", "triviaqa"):
        (task,) = find_tasks([name])
        assert len(task.kind.items(task.records(shared / "data", None))) > 200


@pytest.mark.parametrize("group", shipped_tasks())
def test_a_copy_of_the_hub_s_repository_is_read_by_its_configuration(tmp_path: Path, group: str) -> None:
    """Other languages, sizes and forms that lie beside it in the same repository are not evaluated with it."""
    for task in find_tasks([group]):
        source = task.source
        if not source.dataset:  # CORE's data are a bundle of files
            continue
        repository = tmp_path / task.name / source.dataset.rpartition("/")[2]
        names = [source.config, "aa-other", "zz-other"] if source.config else ["data"]
        for name in names:
            file = repository / name / f"{source.split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True)
            file.write_bytes(b"")
        wanted = repository / names[0] / f"{source.split}-00000-of-00001.parquet"
        assert task.files(tmp_path / task.name) == [wanted], task.name


@pytest.mark.parametrize("name", ["mrpc", "rte", "sst2"])
def test_tasks_of_glue_are_found_in_its_repository(tmp_path: Path, name: str) -> None:
    """RTE's prompt is SuperGLUE's, and its records are also those of GLUE, under other names."""
    (task,) = find_tasks([name])
    for split, fewshot in (("validation", False), ("train", True)):
        file = tmp_path / "glue" / name / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        assert task.files(tmp_path, fewshot=fewshot) == [file]


ORIGINAL = {
    "hans": (
        "hans/heuristics_evaluation_set.txt",
        "gold_label\tsentence1_parse\tsentence1\tsentence2\tpairID\n"
        'non-entailment\t(ROOT (S "))\tThe doctor saw the "actor .\tThe actor saw .\tex0\n',
    ),
    "anli_r2": (
        "anli/R2/test.jsonl",
        '{"uid": "x", "label": "n", "context": "The doctor saw the \\"actor .", "hypothesis": "The actor saw ."}\n',
    ),
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_the_authors_own_files_ask_what_the_hub_s_form_asks(tmp_path: Path, name: str) -> None:
    """HANS as a table called .txt with bare quotes in it, ANLI with other names and labels: the questions of
    the hub's schema.
    """
    place, text = ORIGINAL[name]
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    (task,) = find_tasks([name])
    (found,) = task.kind.items(task.records(tmp_path, None))
    hub_row = {"premise": 'The doctor saw the "actor .', "hypothesis": "The actor saw .", "label": 1}
    (wanted,) = task.kind.items([Record("hub", hub_row)])
    assert (found.pairs, found.choices, found.gold) == (wanted.pairs, wanted.choices, wanted.gold)


def hub_lines(text: str) -> list[dict[str, str]]:
    """WikiText in the hub's form: a line a record, blank ones emptied."""
    return [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]


@pytest.mark.parametrize("name", ["wikitext_2", "wikitext_masked_2"])
def test_the_lines_of_wikitext_are_its_articles(tmp_path: Path, name: str) -> None:
    """The authors' file, and the hub's with a line a record: the articles, to the last blank of the
    originals, and as many.
    """
    import pyarrow
    import pyarrow.parquet

    text = " \n = One = \n \n A b , c . \n \n = = Part = = \n \n D e . \n \n \n = Two = \n \n F g . \n \n"
    raw = tmp_path / "raw" / "wikitext-2-raw" / "wiki.test.raw"
    lines = tmp_path / "lines" / "wikitext" / "wikitext-2-raw-v1" / "test-00000-of-00001.parquet"
    raw.parent.mkdir(parents=True), lines.parent.mkdir(parents=True)
    raw.write_text(text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(hub_lines(text)), lines)
    (task,) = find_tasks([name])
    ours, theirs = (task.records(tmp_path / form, None) for form in ("raw", "lines"))
    assert [record.data for record in theirs] == [record.data for record in ours] and len(ours) == 2
    assert [record.where for record in theirs] == [f"{lines}:2", f"{lines}:11"]
    assert [record.data for record in task.records(tmp_path / "lines", 1)] == [ours[0].data]


def test_a_stream_is_one_whatever_its_file(tmp_path: Path) -> None:
    """Megatron's WikiText from a text file, and the same lines as records of their own (the hub's form): one
    stream of one text, of as many words.
    """
    text = " \n = Title = \n \n A sentence , with words . \n Another one . \n"
    (stream,) = [task for task in find_tasks(["wikitext_megatron"]) if task.name == "wikitext_megatron_2"]
    found = []
    for name, data in (
        ("wiki.test.tokens", text),
        ("test.jsonl", "".join(json.dumps(line) + "\n" for line in hub_lines(text))),
    ):
        folder = tmp_path / name / "wikitext-2"
        folder.mkdir(parents=True)
        (folder / name).write_text(data)
        found.append(stream.kind.items(stream.records(tmp_path / name, None)))
    ((one,), (other,)) = found
    assert (one.text, one.original) == (other.text, other.original) and one.original == text


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('metrics = ["acc"]', 'metrics = ["accuracy"]', "'accuracy' is none of acc, acc_norm"),
        ('metrics = ["acc"]', "metrics = []", "metrics: at least one"),
        ('choices = ["no", "yes"]', "", "prompt 1 lacks choices"),
        ('gold = "label"', "", "prompt 1 lacks gold"),
        ("metrics =", "metric =", "the task file has 2 problems"),
        ("[source]", "stride = -1\n[source]", "[stride]"),  # a stream would never end
        ('about = "own"', 'about = "own', "not valid TOML"),
        ('about = "own"', 'about = "Z\udcfcrich"', "cannot read"),
        ('files = ["own.jsonl"]', 'files = ["/own.jsonl"]', "no pattern of files"),
        ('"{{ q }}"', '"{{ q"', "the task's prompt"),
        ('"{{ q }}"', '"{{ empty }}"', "a field is null"),
        ('"{{ q }}"', '"{{ 1 / 0 }}"', "cannot make the context"),
        ("[source]", 'until = ["\\n", ""]\n[source]', "until: an empty string"),
        ('files = ["own.jsonl"]', 'files = ["own.toml"]', "unknown data format"),
        ("[[prompt]]", '[members]\nown_a = { place = "x" }\n[[prompt]]', None),
        ("[[prompt]]", "[members]\nown_a = { }\n[[prompt]]", "'place' is not among name"),
    ],
)
def test_a_wrong_task_file_is_named(tmp_path: Path, old: str, new: str, complaint: str | None) -> None:
    """The user's own task: each fault is an error of ours that says which; the file as it stands is none."""
    task = (
        'about = "own"\nkind = "multiple_choice"\nmetrics = ["acc"]\n[source]\nfiles = ["own.jsonl"]\n'
        '[[prompt]]\nfields = ["q", "label"]\ncontext = "{{ q }}"\nchoices = ["no", "yes"]\ngold = "label"\n'
    )
    if "place" in (complaint or "place"):
        task = task.replace('"own.jsonl"', '"{place}.jsonl", "own.jsonl"')
    assert old in task
    (tmp_path / "own.jsonl").write_text('{"q": "Q", "label": 1, "empty": null}\n')
    (tmp_path / "own.toml").write_bytes(task.replace(old, new).encode(errors="surrogateescape"))

    def asked() -> list[str]:
        tasks = find_tasks([str(tmp_path / "own.toml")])
        return [task.name for task in tasks for _ in task.kind.items(task.records(tmp_path, None))]

    if complaint is None:
        assert asked() == ["own_a"]
        return
    with pytest.raises(ThroughlineError) as caught:
        asked()
    assert complaint in str(caught.value)


def test_a_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files and without --data-dir the `datasets` library is asked; with --data-dir never."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "test.jsonl").write_text('{"q": "Q1", "label": 1}\n{"q": "Q2", "label": 0}\n')
    (tmp_path / "own.toml").write_text(
        'about = "own"\nkind = "multiple_choice"\nmetrics = ["acc"]\n'
        f'[source]\nfiles = ["own.jsonl"]\ndataset = "{tmp_path / "hub"}"\n'
        '[[prompt]]\nfields = ["q", "label"]\ncontext = "{{ q }}"\nchoices = ["no", "yes"]\ngold = "label"\n'
    )
    (task,) = find_tasks([str(tmp_path / "own.toml")])
    assert [(item.context, item.gold) for item in task.kind.items(task.records(None, None))] == [
        ("Q1", 1),
        ("Q2", 0),
    ]
    assert len(task.records(None, 1)) == 1
    with pytest.raises(WrongUse, match="no data for task own"):
        task.records(tmp_path, None)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    """Scores go by the name: the second would take the first one's place."""
    shipped = Path(find_tasks.__code__.co_filename).parent / "tasks" / "piqa.toml"
    (tmp_path / "piqa.toml").write_text(shipped.read_text())
    with pytest.raises(WrongUse, match="two tasks are called piqa"):
        find_tasks(["piqa", str(tmp_path / "piqa.toml")])
    assert len(find_tasks(["piqa", "piqa"])) == 1


def test_an_unreachable_hub_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network only the library's cache is read; its six retries would take 25 seconds."""
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    def load(name: str, config: str | None, split: str) -> None:
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        raise ConnectionError("not in the cache")

    monkeypatch.setattr(records, "_hub_answers", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(WrongUse, match="cannot get the data set some/name") as refused:
        records.hub_records("some/name", None, "test", 2)
    assert "does not answer from here" in refused.value.why and "--data-dir" in refused.value.fix
    assert before == constants.HF_HUB_OFFLINE
