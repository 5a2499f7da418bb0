"""Tables are read as tables and markup is refused; what leads nowhere says where to go."""

from collections import Counter
from pathlib import Path

import pytest
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions
from throughline.data.tokenizer import Tokenizer


def texts(path: Path, field: str = "text") -> tuple[list[str], Counter[str]]:
    counts: Counter[str] = Counter()
    [source] = expand_inputs([str(path)])
    return [
        text for batch in Reader(ReadOptions(field=field), counts).read(source) for text in batch.texts
    ], counts


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", b'id,text\n1,"a, ""b""\nc"\n2,plain\n', ['a, "b"\nc', "plain"]),
        ("t.csv", b"\xef\xbb\xbftext,id\r\nw\xc3\xb6rter,1\r\n\r\n,2\r\n", ["wörter"]),
        ("t.tsv", b'id\ttext\n1\tsaid "so\n2\tx, y\n', ['said "so', "x, y"]),
        ("t.CSV", b"text\nbad \xff byte\n", ["bad \ufffd byte"]),
        ("t.csv", b"text\n" + b"long " * 60_000, ["long " * 60_000]),
    ],
    ids=["quotes", "mark and blank", "tsv", "no UTF-8", "longer than csv's own limit"],
)
def test_a_cell_is_a_document(tmp_path: Path, name: str, content: bytes, expected: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    found, counts = texts(tmp_path / name)
    assert found == expected and counts["replaced"] == content.count(b"\xff")


def test_a_compressed_table_is_one_too(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"text\none\ntwo\n"))
    assert texts(tmp_path / "t.csv.gz")[0] == ["one", "two"]


@pytest.mark.parametrize(
    "name", ["page.html", "page.HTM", "feed.xml", "page.html.gz", "book.epub", "n.ipynb"]
)
def test_markup_is_no_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("<p>words</p>")
    with pytest.raises(WrongUse, match="is markup, not text") as refused:
        expand_inputs([str(tmp_path / name)])
    assert "extract its text" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("t.csv", "id,body\n1,x\n", "--field, for train with --set data.field"),
        ("t.json", '[{"text": "a"}, {"text": "b"}]', "jq -c .[] FILE"),
        ("t.json", '{"data": [{"text": "a"}]}', "jq -c '.data[]' FILE"),
        ("t.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}\n', ".messages[].content"),
    ],
)
def test_what_has_no_text_there_leads_on(tmp_path: Path, name: str, content: str, fix: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((Failed, WrongUse)) as refused:
        texts(tmp_path / name)
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cl100k.tiktoken", b"IQ== 0\nIg== 1\n", "tiktoken"),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\xff\xfe\x00", "SentencePiece"),
        ("dir/vocab.json", b"{}", "--type import"),
        ("dir/tokenizer.model", b"\n\x0e\xff", "save_pretrained"),
    ],
)
def test_tokenizers_of_other_programs_are_recognised(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises((Refused, WrongUse)) as refused:
        Tokenizer.load(file.parent if name.startswith("dir/") else file)
    assert said in str(refused.value)


def test_a_saved_dataset_under_a_hubs_name_is_named_as_a_directory(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(WrongUse) as refused:
        expand_inputs([f"datasets:{tmp_path}"])
    assert refused.value.fix == f"name it as it is: {tmp_path}"
