"""Tokenizers: deterministic training, exact imports, no special token out of text, backends equal to the
reference.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.core.errors import Failed, Refused, ThroughlineError, WrongUse
from throughline.data import backends
from throughline.data.backends import BACKENDS, NASTY, difference, open_backend
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.text import cut_place
from throughline.data.new_tokenizer import import_tokenizer, sample, train_tokenizer
from throughline.data.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox, naïve and slow, jumps over the lazy dog's 42 bones.\n\nThen it sleeps; 日本語 too. ",
    "def f(x):\n    return x ** 2  # squared\n\n\nA second paragraph isn't here — or is it?",
] * 40


@pytest.fixture(scope="module", params=["bpe", "wordpiece", "char"])
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXTS, request.param, {"bpe": 400, "wordpiece": 300, "char": 100}[request.param])


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_gives_the_same_file_in_another_process(kind: str) -> None:
    """Another process has other hash seeds: the trainer must not follow the order of a hash map."""
    code = (
        "import sys, json\nfrom throughline.data.new_tokenizer import train_tokenizer\n"
        f"print(train_tokenizer(json.load(sys.stdin), {kind!r}, 300).fingerprint())"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(prints) == 1


def test_trained_roles_and_round_trip(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "t")
    loaded = Tokenizer.load(tmp_path / "t")
    assert loaded.fingerprint() == trained.fingerprint() and loaded.type == trained.type
    assert loaded.special == trained.special
    if trained.type == "wordpiece":
        assert [loaded.pad_id, loaded.unk_id, loaded.cls_id, loaded.sep_id, loaded.mask_id] == [0, 1, 2, 3, 4]
        assert loaded.eos_id is None
    else:
        assert loaded.eos_id == loaded.vocab_size - 1 and loaded.mask_id is None
        assert loaded.decode(loaded.encode(TEXTS[0])) == TEXTS[0]
    ids, lengths = loaded.encode_batch(TEXTS)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64
    assert np.array_equal(
        ids, np.concatenate([loaded.encode(text) for text in TEXTS])
    ) and lengths.sum() == len(ids)


def test_text_never_becomes_a_special_token(trained: Tokenizer) -> None:
    """Literal names of special tokens are text, for every backend that this machine has."""
    texts = ["a<|endoftext|>b", "[CLS] [MASK] [SEP][PAD]", "<|unk|>", "<|endoftext|>"]
    roles = {i for role, i in trained.special.items() if role != "unk"}
    for name in ("auto", "tokenizers"):
        ids, _ = open_backend(trained, name).encode_batch(texts)
        assert not roles & set(ids.tolist())


def test_characters_are_in_code_point_order() -> None:
    made = train_tokenizer(["cab\n"], "char", 10)
    assert made.encode("\nabcz").tolist() == [0, 1, 2, 3, made.unk_id]


def test_gpt2_and_bert_vocabularies(samples: Path) -> None:
    """Known ids of known texts (GPT-2's and BERT's own), roles, and the types."""
    gpt2, files = import_tokenizer(samples / "gpt2-bpe")
    assert [file.name for file in files] == ["encoder.json", "vocab.bpe"]
    assert gpt2.encode("Hello world").tolist() == [15496, 995] and gpt2.eos_id == 50256 == gpt2.vocab_size - 1
    bert, _ = import_tokenizer(samples / "bert-base-uncased")
    assert bert.encode("Hello World").tolist() == [7592, 2088] and bert.special == {
        "pad": 0,
        "unk": 100,
        "cls": 101,
        "sep": 102,
        "mask": 103,
    }
    assert import_tokenizer(samples / "bert-base-uncased/vocab.txt", lowercase=False)[0].encode(
        "Hello"
    ).tolist() != [7592]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "char"])
def test_no_text_and_no_room_are_errors(kind: str) -> None:
    with pytest.raises(Failed, match="no text"):
        train_tokenizer([], kind, 1000)  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match="too small"):
        train_tokenizer(TEXTS, kind, 2)  # type: ignore[arg-type]


def test_training_that_would_not_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("throughline.data.new_tokenizer.WORD_BYTES", 1 << 40)
    for kind in ("bpe", "wordpiece"):
        with pytest.raises(Failed, match="not enough memory"):
            train_tokenizer(TEXTS, kind, 1000)  # type: ignore[arg-type]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "encoder.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "gpt" / "vocab.bpe").write_text("#version: 0.2\na b\n")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "vocab.txt").write_bytes(b"[PAD]\n\xe9\n")
    for path in ("vocab.txt", "bad", "gpt", "latin", "nothing", "."):
        with pytest.raises(ThroughlineError) as error:
            import_tokenizer(tmp_path / path if path != "." else tmp_path / "..")
        assert error.value.fix or error.value.why
    with pytest.raises(WrongUse, match="no tokenizer here"):
        Tokenizer.load(tmp_path)
    (tmp_path / "bad" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(Refused, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "bad")
    (tmp_path / "model.bin").write_bytes(bytes(range(256)))
    with pytest.raises(Refused, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "model.bin")


def test_sample_keeps_to_its_budget_and_reaches_every_file(tmp_path: Path) -> None:
    """A quarter of two files of unlike size: about a quarter of each, from its whole length."""
    for name, lines in (("a.txt", 120_000), ("b.txt", 360_000)):
        (tmp_path / name).write_text("".join(f"{name} line {i:07d}\n\n" for i in range(lines)))
    sources = expand_inputs([str(tmp_path)])
    total = sum(source.bytes for source in sources)
    found = list(sample(sources, ReadOptions(), total // 4, Counter()))
    size = {
        name: sum(len(text) + 2 for text in found if text.startswith(name)) for name in ("a.txt", "b.txt")
    }
    for source, name in zip(sources, size):
        assert 0.1 < size[name] / source.bytes < 0.5
    assert int(found[-1].split()[-1]) > 180_000
    assert found == list(sample(sources, ReadOptions(), total // 4, Counter()))


def test_many_small_files_keep_to_the_budget(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number:03d} 在这里，在这里，在这里\n\n" * 500)
    sources = expand_inputs([str(tmp_path)])
    total = sum(source.bytes for source in sources)
    found = list(sample(sources, ReadOptions(), total // 10, Counter()))
    assert 0.05 < sum(len(text.encode()) for text in found) / total < 0.12
    assert len({text[:3] for text in found}) > 15, "of every tenth file"
    whole = sample(sources, ReadOptions(documents="file"), total // 10, Counter())
    assert 0.05 < sum(len(text.encode()) for text in whole) / total < 0.12


def test_what_has_no_document_in_most_stripes_gives_its_beginning(tmp_path: Path) -> None:
    """One sentence a line and no blank line, read as blocks; a parquet file of one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [f"this is line {i:07d} of the text" for i in range(120_000)]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    pq.write_table(
        pa.table({"text": lines}), tmp_path / "t.parquet", compression="none", use_dictionary=False
    )
    for name in ("t.txt", "t.parquet"):
        [source] = expand_inputs([str(tmp_path / name)])
        assert source.bytes > 3 << 20
        found = list(sample([source], ReadOptions(), source.bytes // 2, Counter()))
        assert found[0].startswith(lines[0]) and 0.3 < sum(map(len, found)) / source.bytes < 0.9


def test_a_dataset_of_unknown_size_gives_the_budget_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": f"row {i:04d}"}) + "\n" for i in range(1000))
    )
    sources = expand_inputs([f"datasets:{tmp_path}"])
    found = list(sample(sources, ReadOptions(), 2000, Counter()))
    assert found[0] == "row 0000" and 2000 < sum(map(len, found)) < 3000


def test_a_sample_of_invalid_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("déjà vu ".encode("latin1") + b"and more plain words after it " * 40)
    sources = expand_inputs([str(tmp_path / "t.txt")])
    with pytest.raises(Failed, match="too many characters"):
        list(sample(sources, ReadOptions(), 10**6, Counter()))
    assert len(list(sample(sources, ReadOptions(), 10**6, Counter(), max_replaced=0.1))) == 1


class Wrong:
    """A backend with one fault that only an unusual text shows."""

    name = "wrong"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._tokenizer.encode_batch([text.replace("Ǆ", "Dz") for text in texts])


def test_a_backend_that_differs_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = train_tokenizer(TEXTS, "bpe", 300)
    monkeypatch.setitem(backends.BACKENDS, "bpe", Wrong)
    with pytest.raises(Refused, match=r"differs(.|\n)*Ǆ"):
        open_backend(made, "wrong")
    assert open_backend(made).name == "tokenizers" and "is not used" in capsys.readouterr().err
    with pytest.raises(WrongUse, match="cannot encode bpe"):
        open_backend(made, "char-numpy")


def test_gigatoken_one_by_one_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two calls, and a fresh instance after every call, give the reference's ids."""
    pytest.importorskip("gigatoken", reason="gigatoken is not installed ")
    made = train_tokenizer(TEXTS, "bpe", 300)
    texts = [*NASTY, *TEXTS[:2]]
    expected = [array.tolist() for array in made.encode_batch(texts)]
    for few in (len(texts), 0):
        monkeypatch.setattr(backends, "FEW_TEXTS", few)
        monkeypatch.setattr(backends, "CACHE_BYTES", few)
        backend = backends.Gigatoken(made)
        assert [array.tolist() for array in backend.encode_batch(texts)] == expected
        assert [array.tolist() for array in backend.encode_batch(texts)] == expected


def test_a_sample_text_decides_too() -> None:
    made = train_tokenizer(TEXTS, "bpe", 300)
    assert difference(Wrong(made), made).count("Ǆ") and "ŉ" not in "".join(NASTY)

    class Other(Wrong):
        def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            return self._tokenizer.encode_batch([text.replace("ŉ", "n") for text in texts])

    assert not difference(Other(made), made) and difference(Other(made), made, ["an ŉ here"])


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=80), max_size=6))
@pytest.mark.parametrize("kind", BACKENDS)
def test_backends_equal_the_reference_on_any_text(made_once, kind: str, texts: list[str]) -> None:
    made, opened = made_once(kind)
    ids, lengths = opened.encode_batch(texts)
    expected, expected_lengths = made.encode_batch(texts)
    assert ids.tolist() == expected.tolist() and lengths.tolist() == expected_lengths.tolist()
    assert ids.dtype == np.int32 and lengths.dtype == np.int64


@pytest.fixture(scope="module")
def made_once():
    cache = {}

    def get(kind: str):
        if kind not in cache:
            made = train_tokenizer(TEXTS, kind, 400)  # type: ignore[arg-type]
            cache[kind] = (made, open_backend(made))
            assert cache[kind][1].name == BACKENDS[kind].name
        return cache[kind]

    return get


PARTS = ["word", " ", "\n", "  ", "\t", "\u3000", "é", "漢字", "don't", "12", "\r\n", ".", "<|endoftext|>"]


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=8, max_size=60), at=st.integers(10, 40))
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "char"])
def test_tokens_of_pieces_are_those_of_the_whole(made_once, kind: str, parts: list[str], at: int) -> None:
    """The promise behind reading a 100 MB line in pieces: a cut that is not forced changes no token."""
    made, _ = made_once(kind)
    raw = "".join(parts).encode()
    place, forced = cut_place(raw[:at])
    if forced or len(raw) <= at:
        return
    left, right = raw[:place].decode(), raw[place:].decode()
    assert made.encode(left).tolist() + made.encode(right).tolist() == made.encode(raw.decode()).tolist()


def test_tokenizers_that_cross_spaces_are_known() -> None:
    """A tokenizer that puts a prefix before every text must get documents whole."""
    made = train_tokenizer(TEXTS, "bpe", 300)
    config = json.loads(made.to_json())
    assert made.splits_at_space
    for change in (
        {"pre_tokenizer": {**config["pre_tokenizer"], "add_prefix_space": True}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"added_tokens": [config["added_tokens"][0] | {"special": False, "rstrip": True}]},
    ):
        assert not Tokenizer(json.dumps(config | change)).splits_at_space


def test_empty_files_take_no_share_of_a_sample(tmp_path: Path) -> None:
    """A text below the budget is taken whole, whatever else lies beside it."""
    line = "some words of a text\n\n"
    (tmp_path / "t.txt").write_text(line * 150_000)
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    found = sample(expand_inputs([str(tmp_path)]), ReadOptions("block"), 10**7, Counter())
    assert sum(1 for _ in found) == 150_000


def test_memory_is_what_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit ends a training that the machine would have room for."""
    monkeypatch.setattr("throughline.data.new_tokenizer.memory_limit_bytes", lambda: 100 << 20)
    with pytest.raises(Failed, match=r"100\.0 MiB are free"):
        train_tokenizer(TEXTS, "bpe", 1000)


def test_a_long_run_of_white_space_takes_no_time() -> None:
    """The trainer moves what is behind a pair at every merge, of 100,000 spaces 15 s of CPU time, of a
    megabyte hours.
    """
    start = time.process_time()
    made = train_tokenizer([" " * 100_000 + "some text", "\n \t" * 50_000, *TEXTS], "bpe", 300)
    assert made.vocab_size == 300 and time.process_time() - start < 10


LONG_TRAINING = """
import random
from throughline.data.new_tokenizer import _train
from tokenizers import Tokenizer, models, trainers

def texts():
    yield "".join(random.Random(0).choices("abcdefghij", k=1_000_000))  # one word: hours of merging
    print("given", flush=True)

_train(Tokenizer(models.BPE()), texts(), trainers.BpeTrainer(vocab_size=30_000, show_progress=False))
"""


def test_a_signal_ends_the_training_of_a_tokenizer() -> None:
    """The library itself hears no signal until its merging is done, which takes hours here; the thread that waits
    for it does. 30 s are a hundred times what it takes on an idle machine.
    """
    child = subprocess.Popen([sys.executable, "-c", LONG_TRAINING], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "given\n"
        time.sleep(0.3)  # and now it merges
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT
    finally:
        child.kill()
