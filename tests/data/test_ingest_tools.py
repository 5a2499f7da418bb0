"""inspect, export and the commands from text to tokens: what they say is true of the store, what they write opens
elsewhere, their memory does not grow with the corpus, and sentences end where a reader would end them.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from common import index_file
from throughline.cli.data import BACKENDS as CLI_BACKENDS
from throughline.cli.data import size
from throughline.cli.main import main
from throughline.core.artifact import read_manifest
from throughline.core.errors import WrongUse
from throughline.data.backends import BACKENDS
from throughline.data.export import export_store
from throughline.data.ingest.text import split_sentences
from throughline.data.ingest.tokenize import tokenize
from throughline.data.inspect import inspect_store
from throughline.data.new_tokenizer import import_tokenizer, train_tokenizer
from throughline.data.store import TokenStore
from throughline.data.tokenizer import Tokenizer

DOCUMENTS = [f"document {i} says hello " + "again and again " * (i % 9) for i in range(300)] + [
    "the same"
] * 7


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    train_tokenizer(DOCUMENTS, "bpe", 300).save(folder / "bpe")
    tokenize([str(folder / "t.jsonl")], folder / "bpe", folder / "store", shard_bytes=4000)
    return folder / "store"


def test_inspect_tells_the_truth(store: Path) -> None:
    found = inspect_store(store, samples=2, top=2)
    lengths = np.diff(TokenStore.open(store).document_starts)
    assert found["documents"] == len(DOCUMENTS) and found["tokens"] == lengths.sum() and found["shards"] > 3
    assert found["bytes_per_token"] == sum(map(len, DOCUMENTS)) / lengths.sum()
    assert sum(found["lengths"].values()) == len(DOCUMENTS)
    assert found["lengths"]["16"] == ((lengths > 8) & (lengths <= 16)).sum()
    assert found["samples"][0]["text"].startswith(DOCUMENTS[0].rstrip()[:20])
    assert found["repeated"] == [{"times": 7, "text": "the same<|endoftext|>"}]


def test_exports_hold_the_same_tokens(store: Path, tmp_path: Path) -> None:
    opened = TokenStore.open(store)
    every = opened.read(0, opened.tokens)
    names = [path.name for path in export_store(store, "nanogpt", tmp_path / "nano", val_fraction=0.2)]
    assert names == ["meta.pkl", "train.bin", "val.bin"]
    train, val = (np.fromfile(tmp_path / "nano" / f"{part}.bin", np.uint16) for part in ("train", "val"))
    assert np.array_equal(np.concatenate([train, val]), every) and 0.15 < len(val) / len(every) < 0.25
    meta = pickle.loads((tmp_path / "nano" / "meta.pkl").read_bytes())
    assert meta["vocab_size"] == 300 and "".join(meta["itos"][i] for i in every[:9]) == Tokenizer.load(
        store
    ).decode(every[:9])
    assert meta["stoi"]["\n"] == Tokenizer.load(store).encode("\n")[0], "what nanoGPT's sample.py begins with"
    olmo = [np.fromfile(path, np.uint16) for path in export_store(store, "olmo", tmp_path / "olmo")]
    assert np.array_equal(np.concatenate(olmo), every)
    read = []
    for path in export_store(store, "llmc", tmp_path / "llmc"):
        header = np.fromfile(path, np.int32, 256)
        assert header[:2].tolist() == [20240520, 1]
        read.append(np.fromfile(path, np.uint16, offset=1024))
        assert len(read[-1]) == header[2]
    assert np.array_equal(np.concatenate(read), every)
    rows = [
        row
        for path in export_store(store, "parquet", tmp_path / "pq")
        for row in pq.read_table(path)["input_ids"].to_pylist()
    ]
    assert rows == [every[a:b].tolist() for a, b in zip(opened.document_starts, opened.document_starts[1:])]
    with pytest.raises(WrongUse, match="already exists"):
        export_store(store, "olmo", tmp_path / "olmo")
    with pytest.raises(WrongUse, match="no part for validation"):
        export_store(store, "olmo", tmp_path / "other", val_fraction=0.1)
    np.arange(5).tofile(tmp_path / "wide.bin")
    index_file(tmp_path / "wide.idx", np.array([5]), np.array([0, 1]), "int64")
    with pytest.raises(WrongUse, match="does not read"):
        export_store(tmp_path / "wide", "llmc", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_sentences_end_where_a_reader_would_end_them() -> None:
    cases = {
        'He left. "Why?" she asked. Nobody knew!': ["He left.", '"Why?" she asked.', "Nobody knew!"],
        "Mr. Smith met Dr. A. Jones at 3.15 p.m. in St. Louis. They spoke.": [
            "Mr. Smith met Dr. A. Jones at 3.15 p.m. in St. Louis.",
            "They spoke.",
        ],
        "Wait... what? Yes… No.": ["Wait... what?", "Yes…", "No."],
        "这是一句。那是另一句！好吗？": ["这是一句。", "那是另一句！", "好吗？"],
        "यह एक वाक्य है। यह दूसरा है।": ["यह एक वाक्य है।", "यह दूसरा है।"],
        "A title\n\nThen text without a stop\n\n": ["A title", "Then text without a stop"],
        " \n ": [],
    }
    for text, expected in cases.items():
        found = split_sentences(text)
        assert found == expected
        assert "".join("".join(found).split()) == "".join(text.split())


@pytest.mark.parametrize("marks", [".", "!?", "।", '."', ". ", "\n ", "("])
def test_long_runs_of_marks_take_no_time(marks: str) -> None:
    """A quarter of a megabyte in well under a second; ten seconds of CPU time are for slow machines (it was
    an hour).
    """
    text = "He left." + marks * (250_000 // len(marks)) + "x"
    start = time.process_time()
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
    assert time.process_time() - start < 10


def test_command_line_from_text_to_tokens(tmp_path: Path) -> None:
    """The four commands a user types, each with --json, in the exit codes of the design."""
    (tmp_path / "t.txt").write_text("\n\n".join(DOCUMENTS))
    run = CliRunner()

    def call(*arguments: str) -> dict:
        done = run.invoke(main, ["data", *arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    text, tok, out = (str(tmp_path / name) for name in ("t.txt", "tok", "out"))
    trained = call("tokenizer", text, "--vocab-size", "300", "--out", tok)
    assert trained["vocab_size"] == 300 and trained["counts"]["replaced"] == 0
    made = call("tokenize", text, "--tokenizer", tok, "--out", out, "--workers", "1")
    assert made["complete"] and made["tokens"] > 1000 and made["counts"]["replaced"] == 0
    assert call("inspect", out)["tokens"] == made["tokens"]
    assert call("export", out, "--to", "olmo", "--out", str(tmp_path / "olmo"))["files"] == ["00000.npy"]
    assert call("dedup", text, "--documents", "block", "--dry-run")["exact"] == 6
    assert call("tokenizer", tok, "--type", "import", "--out", str(tmp_path / "again"))["vocab_size"] == 300
    for arguments, code, said in (
        (["tokenize", str(tmp_path / "no.txt"), "--tokenizer", tok, "--out", out + "2"], 2, "no such input"),
        (["tokenize", text, "--tokenizer", text, "--out", out + "2"], 3, "not a tokenizer"),
        (["tokenize", text, "--tokenizer", tok, "--out", tok], 2, "already exists"),
        (["tokenize", text, "--tokenizer", tok, "--out", out + "2", "--task-index", "1"], 2, "go together"),
        (["inspect", str(tmp_path / "olmo")], 2, "no token store"),
        (["dedup", text], 2, "no output given"),
        (["tokenize", text, "--tokenizer", tok, "--out", text + "/2"], 2, "a part of the path is a file"),
        (["tokenizer", text, "--vocab-size", "300", "--out", text + "/2"], 2, "a part of the path is a file"),
        (["dedup", text, "--out", text + "/2"], 2, "something else has that name"),
        (["tokenizer", text, "--uncased", "--out", out + "2"], 2, "keeps text as it is"),
        (["tokenizer", text, "--sample-bytes", "0", "--out", out + "2"], 2, "'--sample-bytes'"),
        (
            ["tokenizer", tok, "--type", "import", "--vocab-size", "500", "--out", out + "2"],
            2,
            "trains nothing",
        ),
        (["tokenizer", tok, "--type", "import", "--uncased", "--out", out + "2"], 2, "says itself"),
        (
            ["tokenize", text, "--tokenizer", tok, "--out", out + "2", "--shard-bytes", "9" * 400],
            2,
            "'--shard-bytes'",
        ),
        (
            ["tokenize", text, "--tokenizer", tok, "--out", out + "2", "--executor", "ray", "--workers", "2"],
            2,
            "its own workers",
        ),
        (
            [
                "tokenize",
                text,
                "--tokenizer",
                tok,
                "--out",
                out,
                "--task-index",
                "0",
                "--task-count",
                "2",
                "--overwrite",
            ],
            2,
            "anew",
        ),
    ):
        done = run.invoke(main, ["data", *arguments])
        assert done.exit_code == code and said in done.output, done.output
    assert not list(tmp_path.glob("*2*"))
    for arguments in (["export", out, "--to", "olmo"], ["dedup", text]):  # which have no --overwrite
        done = run.invoke(main, ["data", *arguments, "--out", tok])
        assert done.exit_code == 2 and "already exists" in done.output and "--overwrite" not in done.output
    name = os.fsdecode(b"no \xff UTF-8.txt")
    (tmp_path / name).write_text("some text")
    assert (
        r"no \udcff UTF-8.txt"
        in run.invoke(main, ["data", "dedup", str(tmp_path / name), "--dry-run"]).output
    )


def test_a_sample_of_a_large_text_does_not_hash_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("throughline.cli.data.CHECK_BYTES", 1000)
    (tmp_path / "t.txt").write_text("\n\n".join(DOCUMENTS))
    run = CliRunner()
    made = run.invoke(
        main, ["data", "tokenizer", str(tmp_path / "t.txt"), "--type", "char", "--out", str(tmp_path / "tok")]
    )
    assert made.exit_code == 0 and read_manifest(tmp_path / "tok").inputs[0].hash == ""
    assert (
        "t.txt    (too large to hash again here)" in run.invoke(main, ["show", str(tmp_path / "tok")]).output
    )


def test_sizes_and_backends_of_the_command_line() -> None:
    assert [size(text) for text in ("512", "64M", "1.5G", "8MiB", "2kb")] == [
        512,
        64_000_000,
        1_500_000_000,
        8 << 20,
        2000,
    ]
    assert set(CLI_BACKENDS) == {"auto", "tokenizers", *(made.name for made in BACKENDS.values())}


def peak_mb(code: str) -> float:
    """Peak resident memory of a fresh process in MB: the kernel's mark of its own address space, because
    ru_maxrss begins with the peak of the process that started it.
    """
    measure = f"{code}\nprint(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    done = subprocess.run([sys.executable, "-c", measure], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) / 1024


@pytest.mark.parametrize("kind", ["many lines", "one line"])
def test_memory_is_flat_in_the_size_of_the_corpus(store: Path, tmp_path: Path, kind: str) -> None:
    """Ten times the text, 60 MB against 6 MB, may take 40 MB more (allocator slack); one line of 60 MB as
    well.
    """
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(5000)], object)
    part = " ".join(rng.choice(words, 1_000_000))[:6_000_000].replace(
        " w1", "\nw1" if kind == "many lines" else " w1"
    )
    peaks = []
    for times in (1, 10):
        path = tmp_path / f"{times}.txt"
        with open(path, "w") as file:
            for _ in range(times):
                file.write(part + " ")
        peaks.append(peak_mb(tokenize_code(path, store, tmp_path / str(times))))
    assert peaks[1] < peaks[0] + 40, peaks


def tokenize_code(text: Path, tokenizer: Path, out: Path) -> str:
    return (
        "from throughline.data.ingest.tokenize import ReadOptions, tokenize\n"
        f"tokenize([{str(text)!r}], {str(tokenizer)!r}, {str(out)!r}, options=ReadOptions('line'), shard_bytes=1 << 30)"
    )


@pytest.mark.slow
def test_a_gigabyte_takes_less_than_600_mb(shared: Path, tmp_path: Path) -> None:
    """1 GB of text with ever new words (what caches of words do not like), a 100 MB line in it, GPT-2's
    vocabulary.
    """
    import_tokenizer(shared / "data/gpt2-bpe")[0].save(tmp_path / "gpt2")
    rng = np.random.default_rng(0)
    with open(tmp_path / "t.txt", "w") as file:
        for part in range(100):
            words = np.array([f"{number:x}" for number in rng.integers(0, 2**40, 400_000)], object)
            text = " ".join(rng.choice(words, 950_000))[:10_000_000]
            file.write(text + " " if 40 <= part < 50 else text.replace(" a", "\na") + "\n")
    assert (tmp_path / "t.txt").stat().st_size > 10**9
    assert peak_mb(tokenize_code(tmp_path / "t.txt", tmp_path / "gpt2", tmp_path / "out")) < 600


def test_nanogpt_takes_gpt2_for_granted(samples: Path, tmp_path: Path) -> None:
    """With a meta.pkl its sample.py would decode token by token, without one as GPT-2 does."""
    tokenizer = import_tokenizer(samples / "gpt2-bpe")[0]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    tokenizer.encode("Hello world").astype(np.uint16).tofile(tmp_path / "store" / "00000.bin")
    index_file(tmp_path / "store" / "00000.idx", np.array([2]), np.array([0, 1]), "uint16")
    assert [path.name for path in export_store(tmp_path / "store", "nanogpt", tmp_path / "nano")] == [
        "train.bin"
    ]


def test_a_worker_for_each_core_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job or a container has fewer than the machine."""
    found: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr(
        "throughline.data.ingest.tokenize.tokenize", lambda *_, work, **__: found.append(work.workers)
    )
    done = CliRunner().invoke(main, ["data", "tokenize", "x", "--tokenizer", "t", "--out", "o"])
    assert done.exit_code == 0 and found == [1], done.output
