"""Deduplication keeps the first of equal and of nearly equal documents, in every script, with all their fields."""

import datetime
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import Failed
from throughline.data.ingest import dedup as dedup_module
from throughline.data.ingest.dedup import dedup
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import ReadOptions


def near_copy(text: str) -> str:
    return text.replace("word17 ", "other ")


def test_dedup_keeps_the_first_and_counts_per_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    texts = [" ".join(f"word{i}" for i in rng.integers(0, 500, 150)) for _ in range(40)]
    long = " ".join(f"word{i}" for i in range(200))
    (tmp_path / "a.txt").write_text("\n".join([*texts[:20], long, texts[3]]))
    (tmp_path / "b.txt").write_text("\n".join([texts[5].replace(" ", "   "), *texts[20:], near_copy(long)]))
    inputs, options = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], ReadOptions(documents="line")
    assert dedup(inputs, tmp_path / "new" / "out", options, dry_run=True)["exact"] == 2
    counted = dedup(inputs, None, options, near=True, dry_run=True)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]
    assert [(row["exact"], row["near"]) for row in counted["sources"]] == [(1, 0), (1, 1)]
    assert counted["documents"] == 44 and counted["kept"] == 41
    found = dedup(inputs, tmp_path / "out", options, near=True)
    assert {**found, "dry_run": True} == counted
    kept = []
    for path in sorted((tmp_path / "out").glob("*.jsonl.zst")):
        with zstandard.open(path, "rt") as file:
            kept += [json.loads(line)["text"] for line in file]
    assert kept == [*texts[:20], long, *texts[20:]]
    assert json.loads((tmp_path / "out" / ".report.json").read_text()) == found["sources"]
    capsys.readouterr()
    assert (
        len(expand_inputs([str(tmp_path / "out")])) == len(expand_inputs([str(tmp_path / "out" / "*")])) == 2
    )
    assert not capsys.readouterr().err  # the report is taken for no text
    assert dedup(inputs, None, options, dry_run=True)["near"] == 0


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_dedup_keeps_every_field(tmp_path: Path, form: str) -> None:
    """Records that stay are the source's own, under the same names; the text alone is cleaned."""
    day = datetime.date(2024, 2, 29)
    rows = [
        {"id": i, "body": text, "meta": {"url": f"https://a/{i}", "tags": ["x", None]}, "day": day}
        for i, text in enumerate(["one two", "three", "one  two", "", "four\r\nfive"])
    ]
    if form == "jsonl":
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    else:
        import pyarrow as pa

        path = tmp_path / "t.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        if form == "dataset":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(str(tmp_path / "saved"))
            path = tmp_path / "saved"
    found = dedup([str(path)], tmp_path / "out", ReadOptions(field="body"))
    assert (found["documents"], found["exact"], found["kept"]) == (4, 1, 3)
    (file,) = (tmp_path / "out").glob("*.jsonl.zst")
    with zstandard.open(file, "rt") as lines:
        kept = [json.loads(line) for line in lines]
    expected = [{**rows[i], "day": "2024-02-29"} for i in (0, 1, 4)]
    expected[2]["body"] = "four\nfive"
    assert kept == expected


def test_dedup_holds_to_the_policy_for_dirty_text(tmp_path: Path) -> None:
    """What it writes is clean, so that what was replaced must be said here: afterwards nobody can."""
    (tmp_path / "t.txt").write_bytes(b"good text " * 200 + b"\xff\n\nmore")
    assert dedup([str(tmp_path / "t.txt")], tmp_path / "out", ReadOptions())["counts"]["replaced"] == 1
    (tmp_path / "t.txt").write_bytes(b"good text " * 20 + b"\xff\xff\xff\n\nmore")
    with pytest.raises(Failed, match="too many characters"):
        dedup([str(tmp_path / "t.txt")], tmp_path / "two", ReadOptions())
    assert (
        dedup([str(tmp_path / "t.txt")], None, ReadOptions(), dry_run=True, max_replaced=0.1)["counts"][
            "replaced"
        ]
        == 3
    )
    assert sorted(os.listdir(tmp_path)) == ["out", "t.txt"]


def test_near_duplicates_of_a_long_document_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"w{i}" for i in np.random.default_rng(0).integers(0, 10**6, 100_000)]
    tracemalloc.start()
    found = dedup_module._bands(words, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 << 20, "112 hashes of 8 bytes for each of its grams would take 90 MB"
    monkeypatch.setattr(dedup_module, "GRAMS_AT_ONCE", 10**9)
    assert np.array_equal(dedup_module._bands(words, 3), found)


SCRIPTS = {  # letters, of which words and texts are drawn; no spaces between words
    "chinese": [chr(code) for code in range(0x4E00, 0x4F00)],
    "japanese": [
        chr(code) for code in [*range(0x3042, 0x3090), *range(0x30A2, 0x30F0), *range(0x5C00, 0x5C80)]
    ],
    "thai": [chr(code) for code in [*range(0x0E01, 0x0E2F), *range(0x0E30, 0x0E3A), 0x0E48, 0x0E49]],
    "lao": [chr(code) for code in [*range(0x0E94, 0x0EA0), *range(0x0EB0, 0x0EBA), 0x0EC8, 0x0EC9]],
    "khmer": [chr(code) for code in [*range(0x1780, 0x17A3), *range(0x17B6, 0x17C6), 0x17D2]],
    "burmese": [chr(code) for code in range(0x1000, 0x1040)],
    "tibetan": [
        chr(code) for code in [*range(0x0F40, 0x0F48), *range(0x0F49, 0x0F6A), 0x0F0B, 0x0F0B, 0x0F0B]
    ],
    "no spaces at all": list("abcdefghijklmnopqrstuvwxyz0123456789"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_near_duplicates_of_scripts_without_spaces(script: str, tmp_path: Path) -> None:
    """Two texts that differ in one character are found, a third of the same letters is another text."""
    rng = np.random.default_rng(1)
    first, other = ("".join(rng.choice(SCRIPTS[script], 2000)) for _ in range(2))
    changed = first[:1000] + ("x" if first[1000] != "x" else "y") + first[1001:]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (first, changed, other)))
    found = dedup([str(path)], None, ReadOptions(), near=True, dry_run=True)
    assert (found["exact"], found["near"], found["kept"], found["short"]) == (0, 1, 2, 0)


def test_near_duplicates_differ_in_punctuation_and_case(tmp_path: Path) -> None:
    """As datatrove simplifies text. Of fewer than five words those with the same words meet, and they are counted."""
    texts = ["Hello, world!", "hello world", "hello moon", "...", "日本、です。", "日本です", "日本だよ"]
    words = [f"word{number}" for number in range(12)]
    texts += [" ".join(words), ", ".join(words).upper() + ".", "«" + " – ".join(words) + "»"]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = dedup([str(path)], None, ReadOptions(), near=True, dry_run=True)
    assert (found["exact"], found["near"], found["short"]) == (0, 4, 7)
    done = CliRunner().invoke(main, ["data", "dedup", str(path), "--near", "--dry-run"])
    assert "7 documents of fewer than 5 words" in done.output
    assert dedup([str(path)], None, ReadOptions(), dry_run=True)["short"] == 0
