"""Inputs: names, globs, directories and links become files in order, each once; what cannot be read is named."""

import os
from collections import Counter
from pathlib import Path

import pytest
from throughline.core.errors import ThroughlineError, WrongUse
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    [source] = expand_inputs([str(tmp_path / "t.txt")])
    (tmp_path / "t.txt").unlink()
    with pytest.raises(ThroughlineError, match=r"cannot open an input(.|\n)*t\.txt"):
        list(Reader(ReadOptions(), Counter()).read(source))


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


def test_empty_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text("text\n" if name == "a.txt" else "")
    assert len(expand_inputs([str(tmp_path)])) == 3
    assert "2 input files are empty (0 bytes)" in capsys.readouterr().err
