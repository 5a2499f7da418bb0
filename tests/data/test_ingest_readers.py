"""Readers: byte ranges share and lose nothing, long documents are cut by their own content, dirt is counted,
damage is named.
"""

import bz2
import gzip
import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import documents, read_all
from throughline.core.files import json_lines
from throughline.data.ingest import formats, readers
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions
from throughline.data.ingest.text import cut_place
from throughline.data.records import read_records

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
