"""Training straight from text: it is tokenised once and then a store like any other; the run says what it read, goes
on only on the same text, and refuses what it cannot do.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import read_manifest
from throughline.core.errors import Refused
from throughline.core.recipe import dump_toml
from throughline.data.ingest.tokenize import tokenize
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.samples import open_dataset
from throughline.data.store import TokenStore
from throughline.data.tokenizer import Tokenizer
from throughline.train import corpus
from throughline.train.build import RunPlan, build_trainer, dataset_options, plan_run, training_rows
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.evaluate import Validation
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe

WORDS = ["the cat", "a dog", "my horse", "an old king", "some bird", "her brother", "this child", "the moon"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 300 documents of a few sentences, and tokenizers trained on them."""
    folder = tmp_path_factory.mktemp("text")
    documents = [
        " ".join(f"{WORDS[(n + i) % 8]} sees {WORDS[n * i % 8]}." for i in range(n % 7 + 3))
        for n in range(600)
    ]
    documents = [". ".join(part.capitalize() for part in text.split(". ")) for text in documents]
    (folder / "a.txt").write_text("\n\n".join(documents[:300]))
    (folder / "b.txt").write_text("\n\n".join(documents[300:]))
    (folder / "empty.txt").write_text("\n\n")
    train_tokenizer(documents, "bpe", 300).save(folder / "bpe")
    train_tokenizer(documents, "wordpiece", 120).save(folder / "wp")
    return folder


@pytest.fixture
def from_text(place: Path, make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., RunPlan]:
    """`from_text("gpt", train={...})`: a plan that reads a.txt and b.txt."""

    def make(family: str = "gpt", data: dict[str, Any] | None = None, **sections: Any) -> RunPlan:
        recipe = make_recipe(family, data=text_section(place, family) | (data or {}), **sections)
        return plan_run(recipe, tmp_path / "cache")

    return make


def text_section(place: Path, family: str) -> dict[str, Any]:
    return {
        "train": [str(place / "a.txt"), str(place / "b.txt")],
        "tokenizer": str(place / ("bpe" if family == "gpt" else "wp")),
    }


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run) if "loss" in r]


CASES = {
    "gpt": ("gpt", {}),
    "gpt best_fit": ("gpt", {"data": {"packing": "best_fit"}}),
    "bert": ("bert", {}),
    "bert packed without pairs": ("bert", {"objective": {"sentences": "none", "packing": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rows_are_those_of_stores_of_the_text(
    from_text: Callable[..., RunPlan], place: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One store a source, by weight, made once: a second plan, as of a restart, tokenises nothing."""
    family, sections = CASES[case]
    weighted = [{"path": str(place / "a.txt"), "weight": 3.0}, {"path": str(place / "b.txt"), "weight": 1.0}]
    sections["data"] = {"train": weighted, "validation_fraction": 0.0} | sections.get("data", {})
    plan = from_text(family, **sections)
    pairs = family == "bert" and "objective" not in sections
    stores = []
    for name in ("a", "b"):
        tokenize(
            [str(place / f"{name}.txt")],
            text_section(place, family)["tokenizer"],
            tmp_path / name,
            sentences=pairs,
        )
        stores.append(TokenStore.open(tmp_path / name))
    expected = open_dataset(stores, dataset_options(plan), [3.0, 1.0]).batch(0, 50)
    monkeypatch.delattr(corpus, "tokenize")
    for again in (plan, from_text(family, **sections)):
        found = training_rows(again).batch(0, 50)
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in expected)


def test_the_manifest_names_the_text_and_other_text_does_not_continue(
    from_text: Callable[..., RunPlan], place: Path, tmp_path: Path
) -> None:
    constant = {"kind": "constant"}
    train(from_text("gpt", train={"steps": 2}, schedule=constant), tmp_path / "run")
    inputs = read_manifest(tmp_path / "run", "run").inputs
    assert [item.path for item in inputs] == [str(place / name) for name in ("bpe", "a.txt", "b.txt")]
    before = (place / "b.txt").read_text()
    (place / "b.txt").write_text(before.replace("moon", "Moon"))
    try:
        with pytest.raises(Refused, match=r"data have changed(.|\n)*b\.txt"):
            train(from_text("gpt", train={"steps": 4}, schedule=constant), tmp_path / "run")
    finally:
        (place / "b.txt").write_text(before)


def test_data_that_moved_continue(from_text: Callable[..., RunPlan], place: Path, tmp_path: Path) -> None:
    """A run knows its text, its tokenizer and its stores by their content."""
    constant = {"kind": "constant"}
    train(from_text("gpt", train={"steps": 6}, schedule=constant), tmp_path / "whole")
    train(from_text("gpt", train={"steps": 3}, schedule=constant), tmp_path / "parts")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text((place / name).read_text())
    shutil.copytree(place / "bpe", tmp_path / "tok")
    moved = {"train": [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], "tokenizer": str(tmp_path / "tok")}
    train(from_text("gpt", data=moved, train={"steps": 6}, schedule=constant), tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_the_end_of_text_of_a_model_directory_reaches_the_checkpoint(
    from_text: Callable[..., RunPlan], place: Path, tmp_path: Path
) -> None:
    """Its tokenizer_config.json names the token, and is not kept; another one there is another text."""
    config = json.loads((place / "bpe" / "tokenizer.json").read_text())
    known = config["added_tokens"][0]
    config["added_tokens"].append(known | {"id": known["id"] + 1, "content": "<|im_end|>"})
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": known["content"]})
    )
    constant = {"kind": "constant"}
    train(
        from_text("gpt", data={"tokenizer": str(model)}, train={"steps": 1}, schedule=constant),
        tmp_path / "run",
    )
    assert Tokenizer.load(load_model(tmp_path / "run")[1]).special == {
        "eos": known["id"] + 1,
        "pad": known["id"],
    }
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": known["content"]}))
    with pytest.raises(Refused, match="data have changed"):
        train(
            from_text("gpt", data={"tokenizer": str(model)}, train={"steps": 2}, schedule=constant),
            tmp_path / "run",
        )


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_validation_is_that_of_a_store_of_the_same_text(
    from_text: Callable[..., RunPlan],
    place: Path,
    tmp_path: Path,
    family: str,
) -> None:
    """`validation` names b.txt, or a store made of it: the same figures; without it the end of the text is
    held out.
    """
    tokenizer = place / ("bpe" if family == "gpt" else "wp")
    tokenize([str(place / "b.txt")], tokenizer, tmp_path / "store", sentences=family == "bert")
    plans = [
        from_text(family, data={"train": str(place / "a.txt"), "validation": str(path)})
        for path in (place / "b.txt", tmp_path / "store")
    ]
    model = build_trainer(plans[0]).engine
    first, second = (Validation(plan).measure(model) for plan in plans)
    assert first == second and (first.get("tokens") or first["masked_tokens"]) > 500
    held = from_text(family)
    validation = sum(store.tokens for store in held.corpus.validation)
    share = validation / (validation + sum(store.tokens for store in held.corpus.train))
    assert 0.09 < share < 0.11 and validation > 500
    figures = Validation(held).measure(model)
    assert figures.keys() >= first.keys() and "sources/a.txt/" in " ".join(figures)


def test_text_of_another_tokenizer_is_refused(from_text: Callable[..., RunPlan], gpt_store: Path) -> None:
    with pytest.raises(Refused, match="different tokenizers"):
        from_text("gpt", data={"validation": str(gpt_store)})


def test_a_megatron_prefix_is_trained_on(
    make_plan: Callable[..., RunPlan], gpt_store: Path, tmp_path: Path
) -> None:
    """PREFIX.bin and PREFIX.idx: no path of that name is there, and a run still knows both files by their
    content.
    """
    prefix = tmp_path / "corpus_text_document"
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").write_bytes((gpt_store / f"00000{suffix}").read_bytes())
    model = {"overrides": {"layers": 2, "width": 32, "heads": 2, "vocab_size": 64}}
    plan = make_plan(data={"train": str(prefix)}, model=model)
    assert plan.corpus.train[0].facts["foreign"] and plan.corpus.tokenizer is None
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    other = make_plan(data={"train": str(prefix)}, model=model)
    with pytest.raises(Refused, match=r"do not fit(.|\n)*vocab_size to at least"):
        make_plan(data={"train": str(prefix)}, model={"overrides": model["overrides"] | {"vocab_size": 5}})
    (before,), (after,) = plan.corpus.inputs, other.corpus.inputs
    assert before.path == str(prefix) and before.hash != after.hash
    (tmp_path / "tokenizer.json").write_bytes((gpt_store / "tokenizer.json").read_bytes())
    assert make_plan(data={"train": str(prefix)}, model=model).corpus.tokenizer is not None, (
        "beside them, as the message says"
    )


@pytest.fixture
def recipe(
    place: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.toml"
    path.write_text(
        dump_toml(make_recipe("gpt", data=text_section(place, "gpt"), train={"precision": "fp64"}))
    )
    return path


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (['data.train="nowhere.txt"'], 2, "nowhere.txt"),
        (['data.train=["{place}/a.txt", "{place}/gone.txt"]'], 2, "gone.txt"),
        (['data.tokenizer="gone"'], 2, "gone"),
        (['data.train="{place}/empty.txt"'], 1, "no text in the input"),
        (['data.tokenizer=""', 'data.train="nowhere"', 'data.documents="line"'], 2, "belongs to text"),
        (
            [
                "train.sequence_length=30000",
                "train.batch_rows=1",
                "train.micro_batch_rows=1",
                "data.validation_fraction=0.0",
            ],
            2,
            "too little text",
        ),
        (
            ['data.packing="best_fit"', "data.separate_documents=true", "model.overrides.vocab_size=100"],
            3,
            "vocabulary",
        ),
    ],
)
def test_bad_text_is_one_clear_error(
    place: Path, recipe: Path, settings: list[str], code: int, words: str
) -> None:
    arguments = [part for text in settings for part in ("--set", text.replace("{place}", str(place)))]
    done = CliRunner().invoke(main, ["train", str(recipe), *arguments])
    assert done.exit_code == code and words in done.stderr and "fix:" in done.stderr, done.output
    assert "Traceback" not in done.stderr


def test_dry_run_and_layout_say_what_is_read(recipe: Path) -> None:
    done = CliRunner().invoke(main, ["train", str(recipe), "--dry-run"])
    assert done.exit_code == 0 and "of text, tokenised before the first step" in done.output, done.output
    assert not Path("runs").exists(), "a dry run writes nothing"
    done = CliRunner().invoke(main, ["train", str(recipe), "--show-layout"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_two_data_processes_read_the_same_rows_as_one(recipe: Path, tmp_path: Path) -> None:
    def trained(run: str, *words: str) -> list[float]:
        command = [
            sys.executable,
            "-m",
            "throughline.cli.main",
            *words,
            "train",
            str(recipe),
            "--run-dir",
            run,
        ]
        command += ["--set", "train.micro_batch_rows=2"] + (["--set", "parallel.data=2"] if words else [])
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in read_metrics(tmp_path / run) if "loss" in record]

    one, two = trained("one"), trained("two", "launch", "--nproc", "2", "--")
    assert len(one) == 6 and one == pytest.approx(two, rel=1e-12)
