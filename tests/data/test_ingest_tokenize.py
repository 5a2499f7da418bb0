"""The stage: the same bytes whoever does the work; clear errors and nothing half-written."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Failed, Refused, ThroughlineError
from throughline.data import backends
from throughline.data.ingest.readers import DocumentBatch, ReadOptions
from throughline.data.ingest.tasks import Encoder
from throughline.data.ingest.text import split_sentences
from throughline.data.ingest.tokenize import Work, tokenize
from throughline.data.store import TokenStore
from throughline.data.tokenizer import Tokenizer
from tokenizer_fixtures import characters, unigram, wordpiece


def test_tokens_are_those_of_a_plain_loop(stage: Any, plain: Path) -> None:
    """An independent reader in five lines: documents split by hand, encoded one by one, EOS after each."""
    import gzip

    tokenizer = Tokenizer.load(stage.place / "bpe")
    corpus = stage.place / "corpus"
    packed = gzip.decompress((corpus / "b.txt.gz").read_bytes()).decode()
    documents = (corpus / "a.txt").read_text().split("\n\n") + packed.split("\n\n")
    documents += [json.loads(line)["text"] for line in (corpus / "c.jsonl").read_text().splitlines()]
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos_id) for text in documents])
    store = TokenStore.open(plain)
    assert np.array_equal(store.read(0, store.tokens), expected) and store.documents == len(documents)
    facts = read_manifest(plain, "tokens").facts
    assert facts["tokens"] == len(expected) and facts["documents"] == len(documents) == facts["sequences"]
    assert facts["text_bytes"] == sum(len(text.encode()) for text in documents)
    assert (
        facts["largest_id"] == tokenizer.eos_id and facts["dtype"] == "uint16" and facts["append_eos"] is True
    )
    assert len(facts["shards"]) > 10 and sum(shard["tokens"] for shard in facts["shards"]) == facts["tokens"]


@pytest.mark.parametrize("tokenizer", ["bpe", "wp"])
def test_same_bytes_for_workers_shards_backends(stage: Any, tmp_path: Path, tokenizer: str) -> None:
    sentences = tokenizer == "wp"
    common = {"tokenizer": tokenizer, "sentences": sentences, "shard_bytes": 20_000}
    one = stage.run(tmp_path / "one", **common)
    two = stage.run(tmp_path / "two", work=Work(workers=2), **common)
    reference = stage.run(tmp_path / "ref", work=Work(backend="tokenizers"), **common)
    assert stage.files_hash(one) == stage.files_hash(two) == stage.files_hash(reference)
    wide = stage.run(tmp_path / "wide", **common | {"shard_bytes": 1 << 30})
    odd = stage.run(tmp_path / "odd", **common | {"shard_bytes": 7_777})
    assert len(list(wide.glob("*.bin"))) == 1 and len(list(odd.glob("*.bin"))) > 20
    assert stage.tokens_hash(one) == stage.tokens_hash(wide) == stage.tokens_hash(odd)
    assert not list(tmp_path.glob("*.partial"))


def test_long_documents_in_pieces_are_the_same_documents(stage: Any, tmp_path: Path) -> None:
    for tokenizer, sentences in (("bpe", False), ("wp", True)):
        whole = stage.run(tmp_path / f"whole-{tokenizer}", tokenizer, sentences=sentences)
        cut = stage.run(
            tmp_path / f"cut-{tokenizer}",
            tokenizer,
            sentences=sentences,
            options=ReadOptions("block", piece_bytes=300),
        )
        assert stage.tokens_hash(whole) == stage.tokens_hash(cut)


def test_sentences_are_sequences_and_documents_are_kept(stage: Any, tmp_path: Path) -> None:
    store = TokenStore.open(stage.run(tmp_path / "s", "wp", sentences=True))
    tokenizer = Tokenizer.load(stage.place / "wp")
    first = (stage.place / "corpus" / "a.txt").read_text().split("\n\n")[:50]
    expected = [[tokenizer.encode(sentence).tolist() for sentence in split_sentences(text)] for text in first]
    bounds, starts = store.document_bounds, store.sequence_starts
    for document, sentences in enumerate(expected):
        rows = range(bounds[document], bounds[document + 1])
        assert [store.read(starts[row], starts[row + 1]).tolist() for row in rows] == sentences


def test_a_flipped_bit_in_a_store_is_found(plain: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(plain, tmp_path / "s")
    verify_artifact(tmp_path / "s")
    raw = bytearray((tmp_path / "s" / "00003.bin").read_bytes())
    raw[100] ^= 4
    (tmp_path / "s" / "00003.bin").write_bytes(raw)
    with pytest.raises(Refused, match=r"damaged(.|\n)*00003\.bin"):
        verify_artifact(tmp_path / "s")


BAD = {
    "no text": ({"t.txt": b" \n\n \n"}, {}, "no text in the input", 1),
    "empty file": ({"t.txt": b""}, {}, "no text in the input", 1),
    "binary": ({"t.txt": bytes(range(256)) * 99}, {}, "not a text file", 1),
    "truncated": ({"t.txt.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03KL\x04\x00"}, {}, "cut short", 1),
    "latin-1": (
        {"t.txt": "déjà vu, encore ".encode("latin1") + b"and more plain words after it " * 40},
        {},
        "too many",
        1,
    ),
    "eos without one": ({"t.txt": b"text"}, {"append_eos": True}, "no end-of-text token", 2),
    "eos and sentences": ({"t.txt": b"text"}, {"append_eos": True, "sentences": True}, "exclude", 2),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_and_leaves_nothing(stage: Any, tmp_path: Path, case: str) -> None:
    files, settings, said, code = BAD[case]
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(ThroughlineError) as error:
        tokenize([str(tmp_path / "in")], stage.place / "wp", tmp_path / "out", **settings)
    assert said in str(error.value) and error.value.exit_code == code
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_single_bad_bytes_are_replaced_and_counted(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"good text " * 500 + b"\xff\x00" + b" good text" * 500)
    manifest = tokenize([str(tmp_path / "t.txt")], stage.place / "bpe", tmp_path / "out")
    assert manifest.facts["made"]["counts"]["replaced"] == 2 and manifest.facts["made"]["counts"]["nul"] == 1


def test_vocabulary_decides_the_dtype(stage: Any, tmp_path: Path) -> None:
    """Megatron-LM's rule: uint16 below 65,500 entries, int32 from there on."""
    config = json.loads(Tokenizer.load(stage.place / "bpe").to_json())
    for size, dtype in ((65499, "uint16"), (65500, "int32")):
        vocab = config["model"]["vocab"] | {
            f"unused{i}": i for i in range(len(config["model"]["vocab"]) + 1, size)
        }
        config["model"]["vocab"] = vocab
        (tmp_path / f"{size}.json").write_text(json.dumps(config))
        manifest = tokenize(
            [str(stage.place / "corpus" / "a.txt")], tmp_path / f"{size}.json", tmp_path / str(size)
        )
        assert manifest.facts["vocab_size"] == size and manifest.facts["dtype"] == dtype
        assert TokenStore.open(tmp_path / str(size)).dtype == dtype


def test_empty_documents_and_open_documents(stage: Any) -> None:
    """Documents without tokens get no EOS; a document that goes on over batches is one document."""
    tokenizer = Tokenizer.load(stage.place / "wp")
    tokenizer.eos_id = 3
    encode = Encoder(tokenizer, tokenizer, behind=[tokenizer.eos_id])
    ids, lengths, documents = encode(DocumentBatch(["\u200b", "a"], continues=True))
    assert len(lengths) == 0 and len(documents) == 0 and 3 not in ids
    ids, lengths, documents = encode(DocumentBatch(["", "\u200b", "a"]))
    assert (
        ids.tolist() == [3, *tokenizer.encode("a"), 3]
        and lengths.tolist() == [2, 2]
        and documents.tolist() == [1, 1]
    )


def test_documents_begin_and_end_over_batches() -> None:
    """What begins a document comes once, before its first token, wherever batches part it."""
    tokenizer = Tokenizer(characters().to_str())
    encode = Encoder(tokenizer, tokenizer, before=[70, 71], behind=[72])
    found = [
        encode(DocumentBatch(["", "ab"], continues=True)),
        encode(DocumentBatch(["c"], continues=True)),
        encode(DocumentBatch(["", "", "d", "e"])),
    ]
    a, b, c, d, e = tokenizer.encode("abcde").tolist()
    ids = [i for part in found for i in part[0].tolist()]
    assert ids == [70, 71, a, b, c, 72, 70, 71, d, 72, 70, 71, e, 72]
    assert [length for part in found for length in part[1].tolist()] == [6, 4, 4]


@pytest.mark.parametrize("add", [True, False])
def test_documents_have_the_special_tokens_of_a_decoder(
    sentencepiece_dir: Path, tmp_path: Path, add: bool
) -> None:
    """Each document is transformers' `tokenizer(text)` with EOS behind it; literal special text stays text."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(sentencepiece_dir))
    documents = ["hello world", "a <s> 日本 😀", "the\n answer"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    out = tmp_path / "out"
    tokenize([str(tmp_path / "a.jsonl")], sentencepiece_dir, out, add_special_tokens=add)
    bos = [1] if add else []
    plain = [
        theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in documents
    ]
    expected = [i for ids in plain for i in (*bos, *ids, 2)]
    store = TokenStore.open(out)
    assert store.read(0, store.tokens).tolist() == expected and store.documents == 3
    facts = read_manifest(out, "tokens").facts
    assert (facts["documents_begin"], facts["documents_end"]) == (bos, [2])


def test_the_end_that_a_post_processor_adds_is_not_added_twice(tmp_path: Path) -> None:
    unigram().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "b.txt").write_text("world\n")
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    for eos, ends in ((None, [1]), (False, []), (True, [1])):
        tokenize(texts, tmp_path, tmp_path / str(eos), append_eos=eos)
        assert read_manifest(tmp_path / str(eos), "tokens").facts["documents_end"] == ends
        store = TokenStore.open(tmp_path / str(eos))
        assert store.read(0, store.tokens).tolist().count(1) == 2 * len(ends)


def test_an_unknown_end_token_is_reported_with_its_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, in words that work when they are typed; an encoder's tokenizer needs no end."""
    library = characters().to_str().replace("<|endoftext|>", "<end>")
    (tmp_path / "tokenizer.json").write_text(library)
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "b.txt").write_text("world\n")
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    tokenize(texts, tmp_path, tmp_path / "without")
    told = capsys.readouterr().err
    assert told.count("no end-of-text token is known") == 1
    subprocess.run(told.split("name it: ")[1].splitlines()[0], shell=True, check=True)
    tokenize(texts, tmp_path, tmp_path / "with")
    store = TokenStore.open(tmp_path / "with")
    assert store.read(0, store.tokens).tolist().count(0) == 2
    wordpiece().save(str(tmp_path / "wordpiece.json"))
    tokenize(texts, tmp_path / "wordpiece.json", tmp_path / "encoder")
    assert "end-of-text" not in capsys.readouterr().err


class Astray:
    """The reference, but for texts in which an "@" stands: their last token is another."""

    name = "astray"

    def __init__(self, tokenizer: Tokenizer):
        self._reference = tokenizer.encode_batch

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._reference(texts)
        ids = np.array(ids)
        for text, end in zip(texts, np.cumsum(lengths)):
            if "@" in text:
                ids[end - 1] += 1
        return ids, lengths


@pytest.mark.parametrize("size", [100, 3 * backends.WATCHED], ids=["a short text", "a stretch of a long one"])
def test_a_backend_that_goes_astray_at_work_is_noticed(
    size: int, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch of a task is watched, and a later one after WATCH_EVERY characters, not before."""
    monkeypatch.setattr(backends, "WATCH_EVERY", 10 * size)
    tokenizer = Tokenizer.load(stage.place / "bpe")
    good, bad = "cat " * (size // 4), "@cat " * (size // 5)
    with pytest.raises(Failed, match="astray differs from the tokenizers library") as caught:
        Encoder(tokenizer, Astray(tokenizer))(DocumentBatch([bad]))
    assert "reference" in caught.value.why and "characters" in caught.value.where
    encode = Encoder(tokenizer, Astray(tokenizer))
    encode(DocumentBatch([good]))
    for _ in range(8):
        encode(DocumentBatch([bad]))
    with pytest.raises(Failed):
        for _ in range(3):
            encode(DocumentBatch([bad]))
    plain = Encoder(tokenizer, tokenizer)
    assert len(plain(DocumentBatch([bad]))[0]) > 0


def test_errors_of_workers_reach_the_caller(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcd":
        (tmp_path / "in" / f"{name}.jsonl").write_text(
            '{"text": "fine"}\n' * 999 + ('{"tex\n' if name == "c" else "")
        )
    with pytest.raises(Failed, match=r"c\.jsonl, line 350 after byte"):
        tokenize(
            [str(tmp_path / "in")],
            stage.place / "bpe",
            tmp_path / "out",
            shard_bytes=9000,
            work=Work(workers=2),
        )
