"""Readers: byte ranges share and lose nothing, long documents are cut by their own content, dirt is counted,
damage is named.
"""

import bz2
import gzip
import json
import os
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from throughline.core.errors import Failed, Refused, ThroughlineError, WrongUse
from throughline.core.files import json_lines
from throughline.data.ingest import formats, readers
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions
from throughline.data.ingest.text import cut_place
from throughline.data.ingest.tokenize import make_plan
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.records import read_records


def documents(path: Path, cuts: list[int], options: ReadOptions) -> tuple[list[str], Counter[str]]:
    """The documents of a file read as ranges between `cuts`."""
    [source] = expand_inputs([str(path)])
    counts: Counter[str] = Counter()
    found: list[str] = []
    bounds = [0, *sorted(set(cuts)), None]
    for start, stop in pairwise(bounds):
        going = False
        for texts, continues in Reader(options, counts).read(source, start, stop):
            texts = list(texts)
            if going:
                found[-1] += texts.pop(0)
            found += texts
            going = continues
        assert not going, "a document was left open"
    return found, counts


PIECES = ["a", "bc", "\n", "\n\n", " ", "\r", "\r\n", "\t", "é", "漢", "\0", "\n \n", "\n\r\n"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=50).map(lambda parts: "".join(parts).encode())


@settings(max_examples=150, deadline=None)
@example(raw=b"aabc\r\na", cuts=[], block=1, piece=5)  # a forced cut would fall between CR and LF
@given(
    raw=TEXT,
    cuts=st.lists(st.integers(1, 60), max_size=5),
    block=st.integers(1, 20),
    piece=st.sampled_from([5, 8, 1000]),
)
@pytest.mark.parametrize("mode", ["line", "block"])
def test_ranges_partition_the_documents(tmp_path_factory, mode, raw, cuts, block, piece) -> None:
    """Any cuts, any size of read: the same documents in the same order with the same counts as one range."""
    path = tmp_path_factory.mktemp("r") / "t.txt"
    path.write_bytes(raw)
    options = ReadOptions(documents=mode, piece_bytes=piece)
    cuts = [cut for cut in cuts if cut < len(raw)]
    whole, counts = documents(path, [], options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK_BYTES", block)
        parts, part_counts = documents(path, cuts, options)
    assert parts == whole
    assert {key: n for key, n in part_counts.items() if n} == {key: n for key, n in counts.items() if n}
    text = raw.decode().replace("\0", "\ufffd").replace("\r\n", "\n").replace("\r", "\n") + "\n\n"
    plain = text.split("\n") if mode == "line" else re.split(r"\n(?:[ \t]*\n)+", text)
    assert counts["crlf"] == raw.count(b"\r\n") and counts["cr"] == raw.count(b"\r") - raw.count(b"\r\n")
    # White space alone is no document, unless it is longer than a piece: then it was begun before it was
    # seen.
    assert whole == [document for document in plain if document.strip() or len(document) > piece]


def test_blocks_are_split_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"\n\n one\ntwo\n\n \t\r\n\nthree\n   \nfour\nfive\n\n")
    assert documents(path, [], ReadOptions("block"))[0] == [" one\ntwo", "three", "four\nfive"]


def test_long_line_is_cut_before_white_space(tmp_path: Path) -> None:
    """Pieces of a document begin at white space, join to the document, and do not depend on how the file was
    read.
    """
    words = "word " * 5000 + "\u3000 " + "x" * 3000 + " tail"
    (tmp_path / "t.txt").write_text(f"first\n{words}\nlast\n")
    [source] = expand_inputs([str(tmp_path / "t.txt")])
    counts: Counter[str] = Counter()
    batches = list(Reader(ReadOptions(documents="line", piece_bytes=1000), counts).read(source))
    pieces = [text for batch in batches for text in batch.texts]
    assert max(map(len, pieces)) <= 1000 and counts["long"] == 1 and counts["forced_cuts"] == 3
    joined = "".join(pieces)
    assert joined == "first" + words + "last"
    place = len("first")
    for batch in batches[1:]:
        place += len(batch.texts[0])
    starts = [batches[i].texts[0][:1] for i in range(1, len(batches)) if batches[i - 1].continues]
    assert sum(start == " " for start in starts) >= len(starts) - counts["forced_cuts"]


def test_a_long_run_of_mixed_white_space_takes_no_time() -> None:
    """Spaces and no-break spaces in turn, as web pages have them, are gone through once: 4 MiB took 18 s of
    CPU time, not 2.
    """
    window = ("\u00a0 ".encode() * 400_000)[: 1 << 20]
    start = time.process_time()
    assert [cut_place(window) for _ in range(4)] == [((1 << 20) - 1, True)] * 4
    assert time.process_time() - start < 10


def test_blank_blocks_take_no_time() -> None:
    """20,000 blocks of blanks, which would be copied 200 GB when each joined what is held of the run before it."""
    blank = [b" \n" * 512] * 20_000
    start = time.process_time()
    found = b"".join(formats.between([b"one", *blank, b"two", *blank], 0, None, formats.BLANK_LINES))
    assert found == b"one" + b"".join(blank) + b"two" + b"".join(blank) and time.process_time() - start < 5


@pytest.mark.parametrize("mode", ["line", "block"])
def test_a_long_document_held_whole_is_looked_at_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """As for removing duplicates: a file without separators, of 1,000 reads, is not scanned again at every
    one of them.
    """
    text = "first\n\n" + "words without end " * 5000 + "\n\nlast"
    (tmp_path / "t.txt").write_text(text)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 90)
    scanned, real = [], readers._last_end
    monkeypatch.setattr(
        readers, "_last_end", lambda raw, separator: scanned.append(len(raw)) or real(raw, separator)
    )
    found, _ = documents(tmp_path / "t.txt", [], ReadOptions(documents=mode, piece_bytes=None))
    assert found == text.split("\n\n") and sum(scanned) < 5 * len(text)


@pytest.mark.parametrize(
    "pack", [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstandard.compress)]
)
@pytest.mark.parametrize("mode", ["file", "line", "block"])
def test_every_compression_reads_the_same(tmp_path: Path, pack, mode: str) -> None:
    raw = "".join(f"line {i} é\n" + ("\n" if i % 7 == 0 else "") for i in range(3000)).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    # two members or frames
    (tmp_path / f"b.txt{pack[0]}").write_bytes(pack[1](raw[:20000]) + pack[1](raw[20000:]))
    options = ReadOptions(documents=mode)
    assert documents(tmp_path / f"b.txt{pack[0]}", [], options) == documents(tmp_path / "a.txt", [], options)


def test_empty_files_are_no_damaged_ones(tmp_path: Path) -> None:
    """Nor is a compressed file of no text, which has some bytes itself."""
    packed = {"c.txt.gz": gzip.compress, "d.txt.bz2": bz2.compress, "e.jsonl.zst": zstandard.compress}
    for name, pack in {"a.txt": bytes, "b.jsonl": bytes, **packed}.items():
        (tmp_path / name).write_bytes(pack(b""))
        assert documents(tmp_path / name, [], ReadOptions())[0] == []


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


def test_dirt_is_counted(tmp_path: Path) -> None:
    raw = (
        b"\xef\xbb\xbfgood\r\nbad \xff\xfe byte \xe2\x82 and \0\r\n\r\nwrapped\r\nline\r\n"
        + b"clean text\n" * 500
    )
    (tmp_path / "t.txt").write_bytes(raw)
    found, counts = documents(tmp_path / "t.txt", [], ReadOptions(documents="block", unwrap=True))
    assert found[:1] == ["good bad \ufffd\ufffd byte \ufffd and \ufffd"] and found[1].startswith(
        "wrapped line clean text"
    )
    assert counts["bom"] == 1 and counts["crlf"] == 5 and counts["nul"] == 1 and counts["replaced"] == 4
    assert counts["unwrapped"] == 1 + 501


def test_lone_surrogate_in_json_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a \\ud800 b"}\n')
    found, counts = documents(tmp_path / "t.jsonl", [], ReadOptions())
    assert found == ["a \ufffd b"] and counts["replaced"] == 1


def damaged_bz2() -> bytes:
    raw = bytearray(bz2.compress(b"text " * 9999))
    raw[len(raw) // 2] ^= 0xFF
    return bytes(raw)


DAMAGED = {
    "gzip cut": ("t.txt.gz", gzip.compress(b"text " * 9999)[:-20], "cut short"),
    "bzip2 cut": ("t.txt.bz2", bz2.compress(b"text " * 9999)[:-20], "cut short"),
    "zstandard cut": ("t.txt.zst", zstandard.compress(b"text " * 9999)[:-5], "cut short"),
    "no gzip": ("t.txt.gz", b"this is no gzip data", "damaged"),
    "no zstandard": ("t.txt.zst", b"this is no zstandard data", "damaged"),
    "bzip2 with a flipped byte": ("t.txt.bz2", damaged_bz2(), "damaged"),
    "every byte": ("t.txt", bytes(range(256)) * 50, "not a text file"),
    "gzip by another name": ("t.txt", gzip.compress(bytes(range(256)) * 50), "name it .gz"),
    "UTF-16": ("t.txt", "Hello UTF-16 world".encode("utf-16"), "UTF-16"),
    "JSON cut": ("t.jsonl", b'{"text": "a"}\n{"text": \n', "t.jsonl:2"),
    "another field": ("t.jsonl", b'{"body": "a"}\n', "fields with text: body"),
    "a number for text": ("t.jsonl", b'{"text": 3}\n', "holds no text"),
    "a list": ("t.jsonl", b"[1]\n", "not a JSON object"),
    "a nest": ("t.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "t.jsonl:1"),
    "no parquet": ("t.parquet", b"PAR1 but not really", "damaged"),
}


# gzip writes the time: no name for a test
@pytest.mark.parametrize(("name", "content", "said"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_one_clear_error(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Failed) as error:
        documents(tmp_path / name, [], ReadOptions(documents="line"))
    assert said in str(error.value) and error.value.where and error.value.fix


def test_inputs_expand_in_order_and_complain(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "sub/c.parquet", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = expand_inputs([str(tmp_path)])
    assert [Path(source.path).name for source in found] == ["a.jsonl.gz", "b.txt", "c.parquet"]
    assert [source.format for source in found] == ["jsonl", "txt", "parquet"] and found[0].compression == "gz"
    assert [Path(source.path).name for source in expand_inputs([str(tmp_path / "*.txt")])] == ["b.txt"]
    (tmp_path / "empty").mkdir()
    for wrong in ([], [str(tmp_path / "no")], [str(tmp_path / "empty")], [str(tmp_path / "b.txt")] * 2):
        with pytest.raises(WrongUse):
            expand_inputs(wrong)


def test_directories_are_walked_whole(tmp_path: Path) -> None:
    """A glob of directories, links to directories (in circles too) and whatever spelling of a path: each file
    once, none lost.
    """
    corpus = tmp_path / "my corpus"
    for name in ("é/a.txt", ".git/b.txt", "c.txt", "../elsewhere/d.txt"):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text("x")
    (corpus / "linked").symlink_to(tmp_path / "elsewhere")

    def found(*inputs: str) -> list[str]:
        return [
            str(Path(source.path).relative_to(tmp_path))
            for source in expand_inputs([str(tmp_path / name) for name in inputs])
        ]

    whole = ["my corpus/c.txt", "my corpus/linked/d.txt", "my corpus/é/a.txt"]
    assert found("my corpus") == found("my corpus/*") == whole
    (corpus / "é" / "round").symlink_to(corpus)
    assert found("my corpus") == whole
    (corpus / "é" / "round").unlink()
    assert found("*/**/a*.txt") == ["my corpus/é/a.txt"] and found("else*") == ["elsewhere/d.txt"]
    with pytest.raises(WrongUse, match="no file in the input"):
        found("**/é")
    with pytest.raises(WrongUse, match="named twice"):
        expand_inputs([str(corpus / "c.txt"), f"{corpus}/./c.txt"])
    (corpus / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(WrongUse, match=r"cannot read an input(.|\n)*gone\.txt"):
        found("my corpus")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WrongUse, match="no regular file"):
        found("pipe")


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may read everything
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(WrongUse, match=r"cannot read a directory(.|\n)*closed"):
        expand_inputs([str(tmp_path)])


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    [source] = expand_inputs([str(tmp_path / "t.txt")])
    (tmp_path / "t.txt").unlink()
    with pytest.raises(ThroughlineError, match=r"cannot open an input(.|\n)*t\.txt"):
        list(Reader(ReadOptions(), Counter()).read(source))


@pytest.mark.parametrize("end", ["\n", " \r\n  "])
@pytest.mark.parametrize("mode", ["file", "block"])
def test_lines_of_a_long_document_join_where_it_is_cut_too(tmp_path: Path, mode: str, end: str) -> None:
    lines = ["nine words of a line that is wrapped hard"] * 60
    (tmp_path / "t.txt").write_text(end.join(lines), newline="")
    whole, counts = documents(tmp_path / "t.txt", [], ReadOptions(mode, unwrap=True))
    for size in range(90, 110):
        cut, cut_counts = documents(tmp_path / "t.txt", [], ReadOptions(mode, unwrap=True, piece_bytes=size))
        assert cut == whole == [" ".join(lines)] and cut_counts["long"] == 1
        assert cut_counts["unwrapped"] == counts["unwrapped"] == 59


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_compressed_file_of_no_bytes_is_cut_short(suffix: str, tmp_path: Path) -> None:
    """Text of no bytes, compressed, has some: 0 bytes are what a download leaves that failed at once."""
    file = tmp_path / f"docs.jsonl{suffix}"
    file.touch()
    with (
        pytest.raises(Failed, match="cut short") as refused,
        formats.open_blocks(str(file), suffix[1:], 0, lambda count: None) as blocks,
    ):
        list(blocks)
    assert refused.value.where == str(file)


def test_a_file_and_links_to_it_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever their names and order; the links are named. Two inputs that are one content are refused."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "m.txt").write_text("the text")
    (corpus / "other.txt").write_text("the text")  # the same words, another file
    (corpus / "a.txt").symlink_to("m.txt")
    os.link(corpus / "m.txt", corpus / "z.txt")
    (tmp_path / "link.txt").symlink_to(corpus / "m.txt")
    names = [Path(source.path).name for source in expand_inputs([str(corpus)])]
    assert names == ["m.txt", "other.txt"]
    assert "2 files are links to others of them and were left out" in capsys.readouterr().err
    with pytest.raises(WrongUse, match="named twice") as refused:
        expand_inputs([str(corpus), str(tmp_path / "link.txt")])
    assert refused.value.why == f"it is the same file as {corpus / 'm.txt'}"


def read_all(path: Path, **options: Any) -> tuple[list[str], Counter[str]]:
    return documents(path, [], ReadOptions(**options))


@pytest.mark.parametrize("name", ["notes.md", "notes.txt", "notes.md.gz"])
def test_a_document_is_a_file(name: str, tmp_path: Path) -> None:
    """Of Markdown and of plain text; lines and blocks where they are asked for."""
    text = "# Title\n\nfirst\n\n- [ ] task\n\n```python\n\nx = 1\n```\n"
    raw = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(raw)
    assert read_all(tmp_path / name)[0] == [text]
    assert len(read_all(tmp_path / name, documents="block")[0]) == 5


YAML = "---\ntitle: a note\ntags: [x]\n---\n"


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("a.md", YAML + "text\n", "text\n"),
        ("a.md", "---\na: 1\n...\n\ntext", "\ntext"),
        ("a.md", "+++\na = 1\n+++\ntext", "text"),
        ("a.md", "\ufeff" + YAML + "text", "text"),
        ("a.md", "---\n---\ntext", "text"),
        ("a.md", "---\n\na break, no front matter\n\n---\n", None),
        ("a.md", "---\nno end\n", None),
        ("a.md", "text\n" + YAML, None),
        ("a.txt", YAML + "text", None),
    ],
)
def test_front_matter_is_left_out_when_asked(
    name: str, text: str, kept: str | None, line_end: str, tmp_path: Path
) -> None:
    """Of Markdown files alone, at their beginning alone; counted."""
    (tmp_path / name).write_bytes(text.replace("\n", line_end).encode())
    plain = text.removeprefix("\ufeff")
    assert read_all(tmp_path / name)[0] == [plain]
    found, counts = read_all(tmp_path / name, skip_front_matter=True)
    assert found == [plain if kept is None else kept] and counts["front_matter"] == (kept is not None)
    lines = [line for line in (plain if kept is None else kept).split("\n") if line.strip()]
    assert read_all(tmp_path / name, skip_front_matter=True, documents="line")[0] == lines


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
def test_cr_alone_ends_a_line(form: str, tmp_path: Path) -> None:
    """As of an old Mac or of Excel there; counted apart from CRLF. U+2028 and form feeds end none."""
    lines = ["one", "two\u2028\x0cstill", "three"]
    if form == "jsonl":
        written = [json.dumps({"text": line}) for line in lines]
    else:
        written = (["text"] if form == "csv" else []) + lines
    path = tmp_path / f"t.{form}"
    path.write_bytes("\r".join(written).encode() + b"\r\n")
    found, counts = read_all(path, documents="line")
    assert found == lines and counts["crlf"] == 1 and counts["cr"] == len(written) - 1
    records = [record.data for record in read_records([path], lines=1)]
    assert [row["lines"][0] if form == "txt" else row["text"] for row in records] == lines
    if form == "jsonl":
        assert [row["text"] for _, row in json_lines(path)] == lines


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


def test_empty_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text("text\n" if name == "a.txt" else "")
    assert len(expand_inputs([str(tmp_path)])) == 3
    assert "2 input files are empty (0 bytes)" in capsys.readouterr().err
