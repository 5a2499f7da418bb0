"""Fine-tuning: tasks that learn what can be learnt, and a result that opens with its head."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from finetune_cases import CASES, recipe_for, scored, several, write_records
from throughline.cli.main import main
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Failed, WrongUse
from throughline.data.new_tokenizer import import_tokenizer
from throughline.data.tokenizer import Tokenizer
from throughline.models.bert import BERT, BERTWithHead
from throughline.models.config import MULTI_LABEL, REGRESSION, BERTConfig
from throughline.models.gpt import GPT
from throughline.models.init import build
from throughline.train.checkpoints.weights_in import open_weights
from throughline.train.finetune.run import _split, finetune, write_model
from throughline.train.finetune.tasks import TASKS

HALVES = {"classification": "bf16", "retrieval": "fp16", "instruction": "bf16"}


@pytest.mark.parametrize(("task", "precision"), [*((task, "fp32") for task in CASES), *HALVES.items()])
def test_learns_what_can_be_learnt(task: str, precision: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Records that a rule decides, measured on others. An untrained model is far below each bound: classes 0.5,
    tags and spans near 0, ranks 0.15, tokens 0.04. In 16 bits too: the figures are those of the saved model in fp32,
    and its weights have more bits than were computed with. Heads that the task does not train are what they were.
    """
    _, family, _, figure, bound = CASES[task]
    records = write_records(task, tmp_path, 320)
    recipe = recipe_for(task, bases, records, epochs=8, learning_rate=3e-3, precision=precision)
    facts = finetune(recipe, tmp_path / "out")
    assert facts["validation"][figure] >= bound, facts["validation"]
    assert "learning check" in facts["measured_on"]
    verify_artifact(tmp_path / "out")
    assert read_manifest(tmp_path / "out", "model").facts["task"] == task
    model, tokenizer = open_weights(tmp_path / "out")
    assert tokenizer is not None
    assert type(model) is {"retrieval": BERT, "instruction": GPT}.get(task, BERTWithHead)
    assert not isinstance(model, BERTWithHead) or model.head.kind in (task, f"sequence-{task}")
    again, (learnt, measured) = TASKS[task](recipe, Tokenizer.load(tokenizer)), _split(recipe)
    again.prepare(learnt, measured)
    with torch.no_grad():
        assert again.measure(model.eval(), measured, torch.device("cpu")) == facts["validation"]
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    before = dict(open_weights(bases[family])[0].named_parameters())
    for name, value in model.named_parameters():
        if name.startswith(again.untrained) and again.untrained:
            assert torch.equal(value, before[name]), name
        elif value.dim() > 1:
            assert not torch.equal(value, value.to(dtype).float()), name


def test_what_cannot_be_learnt_leaves_nothing(bases: dict[str, Path], tmp_path: Path) -> None:
    """A loss that is not finite ends it, and a task of the other family is refused."""
    records = write_records("classification", tmp_path, 60)
    recipe = recipe_for("classification", bases, records, epochs=2, batch_rows=8, learning_rate=1e38)
    with pytest.raises(Failed, match="not finite"):
        finetune(recipe, tmp_path / "out")
    other = recipe_for("instruction", {"gpt": bases["bert"]}, write_records("instruction", tmp_path, 9))
    with pytest.raises(WrongUse, match="needs a GPT"):
        finetune(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_measured(bases: dict[str, Path], tmp_path: Path) -> None:
    records = write_records("classification", tmp_path, 60)
    settings = [f"model.init_from={bases['bert']}", f"data.train={records}", "data.text_field=text"]
    settings += ["train.epochs=1", "train.sequence_length=32"]
    arguments = ["finetune", "finetune-classification", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(main, [*arguments, *(word for each in settings for word in ("--set", each))])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["records"]["train"] + facts["records"]["validation"] == 60
    assert 0 <= facts["validation"]["accuracy"] <= 1


@pytest.mark.slow
def test_learning_check_on_sst2(shared: Path, tmp_path: Path) -> None:
    """From random weights, four fifths of SST-2's 872 development rows and the published vocabulary. The rest has
    183 rows, half of each class: 0.6 is 2.7 standard deviations above 0.5.
    """
    (base := tmp_path / "base").mkdir()
    tokenizer, _ = import_tokenizer(shared / "data" / "bert-base-uncased" / "vocab.txt")
    shape = BERTConfig(
        vocab_size=tokenizer.vocab_size, sequence_length=64, layers=2, width=64, heads=2, dropout=0.1
    )
    write_model(build(shape), tokenizer, tokenizer.to_json().encode(), base)
    data = {"train": str(shared / "data" / "sst2" / "test.tsv"), "text_field": "sentence"}
    usual = {"epochs": 6, "batch_rows": 32, "sequence_length": 64, "learning_rate": 1e-3}
    recipe = recipe_for("classification", {"bert": base}, Path(), data=data, **usual)
    facts = finetune(recipe, tmp_path / "out")
    assert facts["records"]["train"] + facts["records"]["validation"] == 872
    assert facts["validation"]["accuracy"] > 0.6, facts["validation"]
    assert facts["validation"]["matthews"] > 0.15
    assert "learning check" in facts["measured_on"]


KINDS: dict[str, tuple[Any, set[str]]] = {
    REGRESSION: (scored, {"pearson", "spearman", "mean_squared_error"}),
    MULTI_LABEL: (several, {"micro_f1", "macro_f1", "accuracy"}),
}


@pytest.mark.parametrize("problem", KINDS)
def test_numbers_and_several_classes_are_trained(
    problem: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """From records alone to a model that opens as what it is, whose figures are those that were measured. That the
    loss is the right one is proven beside transformers.
    """
    draw, figures = KINDS[problem]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(draw()) + "\n" for _ in range(60)))
    recipe = recipe_for("classification", bases, path, epochs=2, learning_rate=2e-3)
    facts = finetune(recipe, tmp_path / "out")
    assert facts["validation"].keys() == figures
    losses = [
        row["loss"] for row in map(json.loads, (tmp_path / "out" / "metrics.jsonl").open()) if "loss" in row
    ]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    model, tokenizer = open_weights(tmp_path / "out")
    assert isinstance(model, BERTWithHead) and model.head.problem == problem
    again, (learnt, measured) = TASKS["classification"](recipe, Tokenizer.load(tokenizer)), _split(recipe)
    again.prepare(learnt, measured)
    assert again.head == model.head
    with torch.no_grad():
        assert again.measure(model.eval(), measured, torch.device("cpu")) == facts["validation"]
