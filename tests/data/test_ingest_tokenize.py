"""The stage: the same bytes whoever does the work and however it is interrupted; clear errors and nothing
half-written.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Failed, Refused, ThroughlineError, WrongUse
from throughline.data import tasks as tasks_module
from throughline.data import tokenize as tokenize_module
from throughline.data.backends import Reference
from throughline.data.readers import DocumentBatch, ReadOptions
from throughline.data.sentences import split_sentences
from throughline.data.store import TokenStore
from throughline.data.tasks import Encoder
from throughline.data.tokenize import Work, tokenize
from throughline.data.tokenizer import Tokenizer
from throughline.data.train_tokenizer import train_tokenizer

WORDS = "the cat sat on a mat and saw the other dog which ran away from it very fast indeed".split()  # noqa: SIM905


def make_corpus(folder: Path, size: int = 400_000) -> None:
    """Three files of pseudo-random sentences, one compressed, one .jsonl, with blank lines and one long line."""
    import gzip

    rng = np.random.default_rng(5)

    def block() -> str:
        drawn = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(rng.integers(1, 6))]
        return "\n".join(sentence.capitalize() + "." for sentence in drawn)

    blocks = [block() for _ in range(size // 150)]
    third = len(blocks) // 3
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(blocks[:third]) + "\n\n" + "long " * 9000)
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(blocks[third : 2 * third]).encode(), mtime=0))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": b}) + "\n" for b in blocks[2 * third :]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    make_corpus(folder / "corpus")
    texts = [(folder / "corpus" / "a.txt").read_text()]
    train_tokenizer(texts, "bpe", 400).save(folder / "bpe")
    train_tokenizer(texts, "wordpiece", 200).save(folder / "wp")
    return folder


def tokens_hash(store: Path) -> str:
    """The whole stream, the sequences and the documents of a store, whatever its shards."""
    opened = TokenStore.open(store)
    digest = hashlib.sha256(opened.read(0, opened.tokens).tobytes())
    digest.update(np.diff(opened.sequence_starts).tobytes())
    digest.update(opened.document_bounds.astype(np.int64).tobytes())
    return digest.hexdigest()


def files_hash(store: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in store.iterdir()
        if file.name != "manifest.json"
    }


def run(place: Path, out: Path, tokenizer: str = "bpe", **settings) -> Path:
    tokenize([str(place / "corpus")], place / tokenizer, out, **settings)
    return out


def command(place: Path, out: Path, *more: str) -> list[str]:
    main = "import sys; from throughline.cli.main import main; sys.exit(main())"
    return [
        sys.executable,
        "-c",
        main,
        "data",
        "tokenize",
        str(place / "corpus"),
        "--tokenizer",
        str(place / "bpe"),
        "--out",
        str(out),
        "--shard-bytes",
        "20000",
        "--workers",
        "1",
        "--backend",
        "tokenizers",
        *more,
    ]


@pytest.fixture(scope="module")
def plain(place: Path) -> Path:
    return run(place, place / "plain", shard_bytes=20_000, work=Work(backend="tokenizers"))


def test_tokens_are_those_of_a_plain_loop(place: Path, plain: Path) -> None:
    """An independent reader in five lines: documents split by hand, encoded one by one, EOS after each."""
    import gzip

    tokenizer = Tokenizer.load(place / "bpe")
    corpus = place / "corpus"
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
def test_same_bytes_for_workers_shards_backends(place: Path, tmp_path: Path, tokenizer: str) -> None:
    sentences = tokenizer == "wp"
    common = {"tokenizer": tokenizer, "sentences": sentences, "shard_bytes": 20_000}
    one = run(place, tmp_path / "one", **common)
    two = run(place, tmp_path / "two", work=Work(workers=2), **common)
    reference = run(place, tmp_path / "ref", work=Work(backend="tokenizers"), **common)
    assert files_hash(one) == files_hash(two) == files_hash(reference)
    wide = run(place, tmp_path / "wide", **common | {"shard_bytes": 1 << 30})
    odd = run(place, tmp_path / "odd", **common | {"shard_bytes": 7_777})
    assert len(list(wide.glob("*.bin"))) == 1 and len(list(odd.glob("*.bin"))) > 20
    assert tokens_hash(one) == tokens_hash(wide) == tokens_hash(odd)
    assert not list(tmp_path.glob("*.partial"))


def test_long_documents_in_pieces_are_the_same_documents(place: Path, tmp_path: Path) -> None:
    for tokenizer, sentences in (("bpe", False), ("wp", True)):
        whole = run(place, tmp_path / f"whole-{tokenizer}", tokenizer, sentences=sentences)
        cut = run(
            place,
            tmp_path / f"cut-{tokenizer}",
            tokenizer,
            sentences=sentences,
            options=ReadOptions(piece_bytes=300),
        )
        assert tokens_hash(whole) == tokens_hash(cut)


def test_sentences_are_sequences_and_documents_are_kept(place: Path, tmp_path: Path) -> None:
    store = TokenStore.open(run(place, tmp_path / "s", "wp", sentences=True))
    tokenizer = Tokenizer.load(place / "wp")
    first = (place / "corpus" / "a.txt").read_text().split("\n\n")[:50]
    expected = [[tokenizer.encode(sentence).tolist() for sentence in split_sentences(text)] for text in first]
    bounds, starts = store.document_bounds, store.sequence_starts
    for document, sentences in enumerate(expected):
        rows = range(bounds[document], bounds[document + 1])
        assert [store.read(starts[row], starts[row + 1]).tolist() for row in rows] == sentences


def test_job_array_completes_whoever_is_last(place: Path, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "array"
    common = {"shard_bytes": 20_000}
    for index in (2, 0):
        assert (
            tokenize([str(place / "corpus")], place / "bpe", out, work=Work(share=(index, 3)), **common)
            is None
        )
        assert not out.exists()
    assert (
        tokenize([str(place / "corpus")], place / "bpe", out, work=Work(share=(1, 3)), **common) is not None
    )
    assert files_hash(out) == files_hash(plain)
    # and once more by anyone: it is complete, nothing is done
    assert (
        tokenize([str(place / "corpus")], place / "bpe", out, work=Work(share=(0, 3)), **common) is not None
    )


class Killed(BaseException):
    """Stands for a kill that nothing can catch."""


PHASES = {
    "before the shard is opened": ("ShardWriter.__init__", 2),
    "while tokens are written": ("ShardWriter.write", 3),
    "before the index": ("write_index", 1),
    "between the two renames": ("os.replace", 4),
    "before the record": ("write_atomic", 1),
    "before the manifest": ("seal", 1),
    "before the last rename": ("os.rename", 1),
    "while clearing up": ("shutil.rmtree", 1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_in_every_phase_then_continue(place: Path, plain: Path, tmp_path: Path, phase: str) -> None:
    """kill -9 (os.kill from inside) at each step of a task and of the end; the same command then gives the
    same bytes.
    """
    target, count = PHASES[phase]
    module = "finalize" if target in ("seal", "os.rename", "shutil.rmtree") else "tasks"
    code = f"""
import os, signal, sys, throughline.data.{module} as module
from throughline.data.tokenize import Work, tokenize
owner, name = module, {target!r}
while "." in name:
    first, name = name.split(".", 1)
    owner = getattr(owner, first)
real, left = getattr(owner, name), [{count}]
def planted(*args, **kwargs):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(owner, name, planted)
tokenize([{str(place / "corpus")!r}], {str(place / "bpe")!r}, {str(tmp_path / "out")!r}, shard_bytes=20_000)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run(place, tmp_path / "out", shard_bytes=20_000)
    assert files_hash(tmp_path / "out") == files_hash(plain)
    verify_artifact(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_what_is_committed_is_not_done_again(
    place: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    real = tasks_module.ShardWriter.commit

    def commit(self):
        if len(written) == 5:
            raise Killed
        written.append(self._name)
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Killed):
        run(place, tmp_path / "out", shard_bytes=20_000)
    monkeypatch.setattr(
        tasks_module.ShardWriter, "commit", lambda self: written.append(self._name) or real(self)
    )
    run(place, tmp_path / "out", shard_bytes=20_000)
    assert len(written) == len(set(written)) and files_hash(tmp_path / "out") == files_hash(plain)


def test_two_builders_at_once(place: Path, plain: Path, tmp_path: Path) -> None:
    builders = [
        subprocess.Popen(command(place, tmp_path / "out"), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for builder in builders:
        _, said = builder.communicate(timeout=500)
        assert builder.returncode == 0, said
    assert files_hash(tmp_path / "out") == files_hash(plain)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_another_builder_completes_before_the_first_look(
    place: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", tokenize_module.write_plan

    def late(folder, plan) -> None:
        monkeypatch.setattr(tokenize_module, "write_plan", real)
        run(place, out, shard_bytes=20_000)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(tokenize_module, "write_plan", late)
    assert tokenize([str(place / "corpus")], place / "bpe", out, shard_bytes=20_000) is not None
    assert files_hash(out) == files_hash(plain) and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("left", [False, True])
def test_another_builder_completes_first(
    place: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """The store appears, and the directory of work goes, between this builder's last task and its look at the
    records.
    """
    out, real = tmp_path / "out", tokenize_module._run

    def late(*args) -> None:
        monkeypatch.setattr(tokenize_module, "_run", real)
        run(place, out, shard_bytes=20_000)
        if left:  # this one was writing while the other removed
            (tmp_path / "out.partial").mkdir()
            (tmp_path / "out.partial" / ".00003.bin.host.1.tmp").touch()

    monkeypatch.setattr(tokenize_module, "_run", late)
    assert tokenize([str(place / "corpus")], place / "bpe", out, shard_bytes=20_000) is not None
    assert files_hash(out) == files_hash(plain) and os.listdir(tmp_path) == ["out"]


def test_sigterm_exits_75_and_the_same_command_continues(place: Path, plain: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(place, tmp_path / "out"), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out.partial/0*.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=500)
    if process.returncode != 0:  # it may have been done before the signal came
        assert process.returncode == 75 and "run the same command again" in said, said
    assert subprocess.run(command(place, tmp_path / "out"), capture_output=True).returncode == 0
    assert files_hash(tmp_path / "out") == files_hash(plain)


def test_full_disk_keeps_committed_shards(place: Path, plain: Path, tmp_path: Path) -> None:
    """A file-size limit stops the writing for real (EFBIG); without it the same command completes the store."""
    sized = [*command(place, tmp_path / "out"), "--shard-bytes", "60000"]
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); {sized[2]}"
    process = subprocess.run([sized[0], "-c", limited, *sized[3:]], capture_output=True, text=True)
    assert (
        process.returncode == 1 and "file-size limit" in process.stderr and "Traceback" not in process.stderr
    )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.partial/.*.tmp"))
    assert subprocess.run(sized, capture_output=True).returncode == 0
    assert tokens_hash(tmp_path / "out") == tokens_hash(plain)


def test_other_settings_do_not_continue_a_build(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed tokenizer, shard size or input is refused by name; --overwrite starts again."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("some text here\n\n" * 2000)
    real = tasks_module.ShardWriter.commit
    calls = []

    def commit(self):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Killed):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=9000)
    monkeypatch.undo()
    with pytest.raises(Refused, match="the tokenizer has changed"):
        tokenize([str(corpus)], place / "wp", tmp_path / "out", append_eos=None, shard_bytes=9000)
    with pytest.raises(Refused, match="shard_bytes was 9000"):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=8000)
    (corpus / "b.txt").write_text("other text\n\n" * 2000)
    with pytest.raises(Refused, match=r"b\.txt has changed"):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=9000)
    (corpus / "b.txt").unlink()
    with pytest.raises(Refused, match=r"b\.txt is gone"):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=9000)
    assert (
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=9000, overwrite=True) is not None
    )
    with pytest.raises(WrongUse, match="already exists"):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=8000)


def test_an_input_that_goes_or_grows_while_it_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("some text here\n\n" * 2000)
    real = tasks_module.ShardWriter.commit

    def commit(self):
        (corpus / "b.txt").unlink(missing_ok=True)
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Failed, match=r"cannot open an input(.|\n)*b\.txt"):
        tokenize([str(corpus)], place / "bpe", tmp_path / "out", shard_bytes=20_000)


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
def test_bad_input_is_one_error_and_leaves_nothing(place: Path, tmp_path: Path, case: str) -> None:
    files, settings, said, code = BAD[case]
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(ThroughlineError) as error:
        tokenize([str(tmp_path / "in")], place / "wp", tmp_path / "out", **settings)
    assert said in str(error.value) and error.value.exit_code == code
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_single_bad_bytes_are_replaced_and_counted(place: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"good text " * 500 + b"\xff\x00" + b" good text" * 500)
    manifest = tokenize([str(tmp_path / "t.txt")], place / "bpe", tmp_path / "out")
    assert manifest.facts["made"]["counts"]["replaced"] == 2 and manifest.facts["made"]["counts"]["nul"] == 1


def test_vocabulary_decides_the_dtype(place: Path, tmp_path: Path) -> None:
    """Megatron-LM's rule: uint16 below 65,500 entries, int32 from there on."""
    config = json.loads(Tokenizer.load(place / "bpe").to_json())
    for size, dtype in ((65499, "uint16"), (65500, "int32")):
        vocab = config["model"]["vocab"] | {
            f"unused{i}": i for i in range(len(config["model"]["vocab"]) + 1, size)
        }
        config["model"]["vocab"] = vocab
        (tmp_path / f"{size}.json").write_text(json.dumps(config))
        manifest = tokenize(
            [str(place / "corpus" / "a.txt")], tmp_path / f"{size}.json", tmp_path / str(size)
        )
        assert manifest.facts["vocab_size"] == size and manifest.facts["dtype"] == dtype
        assert TokenStore.open(tmp_path / str(size)).dtype == dtype


def test_empty_documents_and_open_documents(place: Path) -> None:
    """Documents without tokens get no EOS; a document that goes on over batches is one document."""
    tokenizer = Tokenizer.load(place / "wp")
    tokenizer.special["eos"] = 3
    encode = Encoder(tokenizer, Reference(tokenizer), append_eos=True, sentences=False)
    ids, lengths, documents = encode(DocumentBatch(["\u200b", "a"], continues=True))
    assert len(lengths) == 0 and len(documents) == 0 and 3 not in ids
    ids, lengths, documents = encode(DocumentBatch(["", "\u200b", "a"]))
    assert (
        ids.tolist() == [3, *tokenizer.encode("a"), 3]
        and lengths.tolist() == [2, 2]
        and documents.tolist() == [1, 1]
    )


def test_errors_of_workers_reach_the_caller(place: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcd":
        (tmp_path / "in" / f"{name}.jsonl").write_text(
            '{"text": "fine"}\n' * 999 + ('{"tex\n' if name == "c" else "")
        )
    with pytest.raises(Failed, match=r"c\.jsonl, line 350 after byte"):
        tokenize(
            [str(tmp_path / "in")], place / "bpe", tmp_path / "out", shard_bytes=9000, work=Work(workers=2)
        )
