"""Tokenizers and tables that others wrote: which token ends a text, what is special, and what of a place is
recorded.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from throughline.core.artifact import chain
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.core.files import write_atomic
from throughline.data.backends import BACKENDS, open_backend
from throughline.data.ingest import executors
from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions
from throughline.data.ingest.task_plan import write_plan
from throughline.data.ingest.tokenize import Work, make_plan, tokenize
from throughline.data.inspect import inspect_store
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.store import TokenStore
from throughline.data.tokenizer import CONFIG, FILE, Tokenizer

TEXTS = [f"The cat {i} sat on a mat and saw {i % 7} dogs." for i in range(400)]

BLOCKS = ReadOptions("block")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and `model`, a directory whose end of text is a token that only its tokenizer_config.json
    names.
    """
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "t.txt").write_text("\n\n".join(TEXTS))
    config = json.loads(train_tokenizer(TEXTS, "bpe", 300).to_json())
    known = config["added_tokens"][0]
    config["added_tokens"].append(known | {"id": known["id"] + 1, "content": "<|im_end|>"})
    (folder / "model").mkdir()
    (folder / "model" / FILE).write_text(json.dumps(config))
    roles = {"eos_token": "<|im_end|>", "pad_token": known["content"]}
    (folder / "model" / CONFIG).write_text(json.dumps(roles))
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_appends_the_end_of_text_that_is_meant(
    place: Path, tmp_path: Path, workers: int
) -> None:
    work = Work(workers=workers, backend="tokenizers")
    tokenize(
        [str(place / "t.txt")], place / "model", tmp_path / "out", options=BLOCKS, shard_bytes=8000, work=work
    )
    store, tokenizer = TokenStore.open(tmp_path / "out"), Tokenizer.load(place / "model")
    tokens = store.read(0, store.tokens)
    assert len(store.shards) == 3 and tokenizer.eos_id == tokenizer.vocab_size - 1
    assert np.array_equal(np.flatnonzero(tokens == tokenizer.eos_id) + 1, store.document_starts[1:])


def work_of(place: Path, folder: Path) -> None:
    """A work directory as other processes find it."""
    tokenizer = Tokenizer.load(place / "model")
    write_plan(folder, make_plan([str(place / "t.txt")], tokenizer, BLOCKS, None, False, None))
    (folder / "store").mkdir()
    write_atomic(folder / FILE, tokenizer.to_json())


def test_a_task_on_another_node_appends_it_too_and_checks_its_backend(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_of(place, tmp_path / "work")
    executors._ray_task(str(tmp_path / "work"), 0, "tokenizers")
    tokens = np.fromfile(tmp_path / "work" / "store" / "00000.bin", np.uint16)
    assert (tokens == Tokenizer.load(place / "model").eos_id).sum() == len(TEXTS)

    class Other:
        name = "other"

        def __init__(self, tokenizer: Tokenizer):
            self.encode_batch = lambda texts: tokenizer.encode_batch([text.lower() for text in texts])

    monkeypatch.setitem(BACKENDS, "bpe", Other)
    with pytest.raises(Refused, match="differs"):
        executors._ray_task(str(tmp_path / "work"), 0, "other")


def test_another_end_of_text_does_not_continue_a_build(place: Path, tmp_path: Path) -> None:
    """The tokenizer.json is the same; what the tokens become is not."""
    work_of(place, tmp_path / "work")
    tokenizer = Tokenizer.load(place / "model", {"eos": 299})
    with pytest.raises(Refused, match="special was"):
        write_plan(tmp_path / "work", make_plan([str(place / "t.txt")], tokenizer, BLOCKS, None, False, None))


def test_what_else_lies_in_a_model_directory_is_not_recorded(place: Path, tmp_path: Path) -> None:
    """Nor hashed: weights of gigabytes, or the store itself, made in the same place."""
    shutil.copytree(place / "model", tmp_path / "model")
    tokenize([str(place / "t.txt")], tmp_path / "model", tmp_path / "model" / "tokens")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    assert [(item.path, same) for _, item, same in chain(tmp_path / "model" / "tokens")] == [
        (str(tmp_path / "model" / FILE), True),
        (str(tmp_path / "model" / CONFIG), True),
        (str(place / "t.txt"), True),
    ]


def changed(place: Path, **change: object) -> Tokenizer:
    config = json.loads((place / "model" / FILE).read_text())
    config["added_tokens"][0] |= change
    return Tokenizer(json.dumps(config))


def test_a_role_is_special_whatever_the_file_calls_it(place: Path) -> None:
    tokenizer = changed(place, special=False)
    assert tokenizer.special["eos"] == 299 and 299 not in tokenizer.encode("a<|endoftext|>b")
    assert (
        299 not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
        and tokenizer.decode([299]) == "<|endoftext|>"
    )


def test_added_tokens_that_are_not_special_are_left_to_the_reference(place: Path) -> None:
    """Their text does become their id; no sample need hold it, so that no check of a backend would show the
    difference.
    """
    tokenizer = changed(place, special=False, content="<tool>")
    assert 299 in tokenizer.encode("a <tool> b")
    with pytest.raises(WrongUse, match=r"gigatoken(.|\n)*not special"):
        open_backend(tokenizer, "gigatoken")
    assert open_backend(tokenizer).name == "tokenizers"


def test_a_tokenizer_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(Refused, match="vocabulary is empty"):
        Tokenizer('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')


def test_the_tokenizer_beside_a_megatron_prefix_is_found(place: Path, tmp_path: Path) -> None:
    tokenize([str(place / "t.txt")], place / "model", tmp_path / "store")
    for suffix in (".bin", ".idx"):
        shutil.copyfile(tmp_path / "store" / f"00000{suffix}", tmp_path / f"corpus_text_document{suffix}")
    with pytest.raises(WrongUse, match="no tokenizer of its own"):
        inspect_store(tmp_path / "corpus_text_document")
    shutil.copyfile(place / "model" / FILE, tmp_path / FILE)
    assert inspect_store(tmp_path / "corpus_text_document")["samples"][0]["text"].startswith(TEXTS[0])


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string(), pa.binary()]
)
def test_text_columns_of_every_kind_are_read(place: Path, tmp_path: Path, kind: pa.DataType) -> None:
    """Categories, as pandas writes a column of few values, and views, as polars does."""
    pq.write_table(
        pa.table({"text": pa.array([*TEXTS, None]).cast(kind)}), tmp_path / "t.parquet", row_group_size=90
    )
    manifest = tokenize([str(tmp_path / "t.parquet")], place / "model", tmp_path / "out")
    assert (
        manifest is not None
        and manifest.facts["documents"] == len(TEXTS)
        and manifest.facts["made"]["counts"]["empty"] == 1
    )
    assert manifest.facts["text_bytes"] == sum(map(len, TEXTS))


def test_whatever_a_dataset_fails_with_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is cut is no OSError of the client that the library uses."""
    import datasets
    import httpx

    class Cut:
        column_names = None

        def iter(self, batch_size: int):
            yield {"text": ["a row"]}
            raise httpx.RemoteProtocolError("peer closed connection")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Cut())
    [source] = expand_inputs(["datasets:some/name"])
    with pytest.raises(Failed, match=r"cannot read a dataset(.|\n)*peer closed connection"):
        list(Reader(ReadOptions(), Counter()).read(source))
    with pytest.raises(WrongUse, match="no dataset is named"):
        expand_inputs(["datasets:"])


def test_a_dataset_of_the_hub_is_read_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the day of the plan is in the name that everything reads by; a revision that is named stays."""
    import datasets
    import huggingface_hub
    from throughline.data.ingest.formats import hub_parts, pinned

    asked: list[dict] = []
    dataset = type("Dataset", (), {"num_shards": 7})()
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: asked.append(more) or dataset)
    info = type("Info", (), {"sha": "c0ffee"})()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: info)
    assert pinned("datasets:some/name:en") == "datasets:some/name@c0ffee:en"
    assert pinned("datasets:some/name@v1") == "datasets:some/name@v1"
    assert hub_parts(pinned("datasets:some/name"), "train") == 7 and asked[-1]["revision"] == "c0ffee"


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text('{"_data_files": [')
    with pytest.raises(Refused, match=r"damaged(.|\n)*state\.json"):
        expand_inputs([str(tmp_path)])


def test_a_split_of_a_single_table_is_refused(tmp_path: Path) -> None:
    import datasets

    for split in (None, "test"):
        datasets.Dataset.from_dict({"text": ["a row"]}, split=split).save_to_disk(str(tmp_path / f"{split}"))
        [source] = expand_inputs([str(tmp_path / f"{split}")])
        assert next(Reader(ReadOptions(), Counter()).read(source)).texts == ["a row"]
        with pytest.raises(WrongUse, match=r"no split 'valid'(.|\n)*single table"):
            list(Reader(ReadOptions(split="valid"), Counter()).read(source))
    assert next(Reader(ReadOptions(split="test"), Counter()).read(source)).texts == ["a row"]
