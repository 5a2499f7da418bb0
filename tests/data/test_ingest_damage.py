"""Dirt in a text is replaced and counted; a damaged file is one error that names the file and the fix."""

import bz2
import gzip
from pathlib import Path

import pytest
import zstandard
from reading import documents
from throughline.core.errors import Failed
from throughline.data.ingest import formats
from throughline.data.ingest.readers import ReadOptions


def test_empty_files_are_no_damaged_ones(tmp_path: Path) -> None:
    """Nor is a compressed file of no text, which has some bytes itself."""
    packed = {"c.txt.gz": gzip.compress, "d.txt.bz2": bz2.compress, "e.jsonl.zst": zstandard.compress}
    for name, pack in {"a.txt": bytes, "b.jsonl": bytes, **packed}.items():
        (tmp_path / name).write_bytes(pack(b""))
        assert documents(tmp_path / name, [], ReadOptions())[0] == []


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
