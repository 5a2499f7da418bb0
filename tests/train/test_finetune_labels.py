"""Labels are inspected before training: what problem they pose, how they are named, and what is learnt from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.core.recipe import build_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.models.bert import BERTWithHead
from throughline.models.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from throughline.models.huggingface import load_huggingface, to_huggingface
from throughline.train.finetune.labels import check_common, inspect_labels, inspect_tags, label_notes
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.finetune.records import class_names
from throughline.train.finetune.tasks import Classification, TokenClassification
from throughline.train.parallel.mesh import ALONE


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, "1", 1.0, "1.0", 0, "0", 0.0, "+1", "1e0"], ("0", "1")),
        ([1, "1", 1.0, 0, "0", True, False], ("0", "1")),
        ([True, "True", "FALSE", False], ("false", "true")),
        (["true", "false", "mixed"], ("false", "mixed", "true")),
        ([True, "mixed", False], ("false", "mixed", "true")),
        (["TRUE", "FALSE", "MIXED"], ("FALSE", "MIXED", "TRUE")),
        (["10", 9, 2.0, "-1"], ("-1", "2", "9", "10")),
        ([10**20, 10**20 + 1], (str(10**20), str(10**20 + 1))),
        (["007", "7", "b", " b "], ("7", "007", "b")),
        (["b", "10", "a", 9], ("9", "10", "a", "b")),
    ],
)
def test_a_class_is_named_by_its_content(labels: list[Any], names: tuple[str, ...]) -> None:
    """1, "1" and 1.0 are one class, numbers come first by their size, and every label has one of the names."""
    found = inspect_labels(labels)
    assert (found.problem, found.names) == (SINGLE_LABEL, names)
    assert {found.value(label) for label in labels} == set(names)


@pytest.mark.parametrize(
    ("labels", "problem", "match"),
    [
        ([0.5, 1.0, "n/a"], "auto", "mix numbers and names"),
        (["a", "b"], REGRESSION, "mix numbers and names"),
        ([True, 2, 3], "auto", "mix true and false with numbers"),
        (["a", ""], "auto", "empty"),
        ([1.0, float("nan")], "auto", "no finite number"),
        (["a", {"b": 1}], "auto", "no text and no number"),
        ([["a"], ["b"]], SINGLE_LABEL, "a label is a list"),
        ([[], []], "auto", "empty"),
        ([[0.2, 0.8], [0.5, 0.5]], "auto", "lists of numbers that are not whole"),
        ([0.5, 1.0], MULTI_LABEL, "lists of numbers that are not whole"),
        (["a", "a"], "auto", "one label only"),
        (["['a', 'b']", "['a' 'b']"], "auto", "not JSON"),
    ],
)
def test_labels_of_no_problem_are_refused_with_a_fix(labels: list[Any], problem: str, match: str) -> None:
    with pytest.raises(WrongUse, match=match) as error:
        inspect_labels(labels, problem)
    assert error.value.fix


def test_fractions_are_a_regression_and_lists_are_several_classes() -> None:
    """Unless the recipe says otherwise. Lists of 0 and 1 have one for each class."""
    scores = inspect_labels([0.25, "4.5", 3])
    assert scores.problem == REGRESSION and [scores.value(label) for label in (0.25, "4.5", 3)] == [
        0.25,
        4.5,
        3.0,
    ]
    assert inspect_labels([1, 2, 5], REGRESSION).problem == REGRESSION
    assert inspect_labels([0.5, "1.50", 1.5], SINGLE_LABEL).names == ("0.5", "1.5")
    several = inspect_labels([["b", 1], [], ["a"], [1.0], "b"])
    assert (several.problem, several.names) == (MULTI_LABEL, ("1", "a", "b"))
    assert (
        several.value(["b", 1]) == {"b", "1"}
        and several.value([]) == frozenset()
        and several.value("b") == {"b"}
    )
    marked = inspect_labels([[0.0, 1.0, 1.0], [0, 0, 0]], class_names=["x", "y", "z"])
    assert marked.problem == MULTI_LABEL and marked.value([0.0, 1.0, 1.0]) == {"y", "z"}
    assert inspect_labels(["a", "b"], MULTI_LABEL).value("a") == {"a"}
    cells = inspect_labels(['["a", "b"]', "[]", '["a"]'])
    assert cells.problem == MULTI_LABEL and cells.value('["a", "b"]') == {"a", "b"}
    assert inspect_labels(["[0, 1]", "[1, 1]"]).value("[0, 1]") == {"1"}
    assert inspect_labels(["[sports]", "news"]).names == ("[sports]", "news")


def test_numbers_get_the_names_that_are_given() -> None:
    """In the order of the list, which the hub's ids index; a number beyond it is refused."""
    found = inspect_labels([2, "0", 1.0], class_names=["neg", "neutral", "pos"])
    assert found.names == ("neg", "neutral", "pos")
    assert [found.value(label) for label in (2, "0", 1.0, "pos")] == ["pos", "neg", "neutral", "pos"]
    with pytest.raises(WrongUse, match="no name"):
        found.value(3)
    with pytest.raises(WrongUse, match="no name"):
        found.value(-1)
    asked = inspect_labels([0, 1, 2], REGRESSION, ["neg", "neutral", "pos"])
    assert (asked.problem, asked.names, asked.value(2)) == (REGRESSION, ("score",), 2.0)


def test_names_of_the_hub_are_read_from_a_parquet_file(tmp_path: Path) -> None:
    """As the `datasets` library writes them, of a class and of a list of classes."""
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-PER", "I-PER"]
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=datasets.List(datasets.ClassLabel(names=names)),
        label=datasets.ClassLabel(names=["no", "yes"]),
    )
    rows = {"tokens": [["a", "b"]], "ner_tags": [[0, 1]], "label": [1]}
    path = str(tmp_path / "train.parquet")
    datasets.Dataset.from_dict(rows, features).to_parquet(path)
    assert class_names(path, "ner_tags") == tuple(names)
    assert class_names(path, "label") == ("no", "yes")
    assert class_names(path, "tokens") == class_names(path, "other") == ()


@pytest.mark.parametrize(
    ("tags", "names", "scheme", "is_suffix"),
    [
        (["O", "B-PER", "I-PER"], ("O", "B-PER", "I-PER"), "IOBES", False),
        (["O", "S-PER", "E-LOC", "B-LOC"], ("O", "B-LOC", "E-LOC", "S-PER"), "IOBES", False),
        (["U-PER", "O", "L-LOC"], ("O", "L-LOC", "U-PER"), "BILOU", False),
        (["B-PER", "O", "L-PER"], ("O", "B-PER", "L-PER"), "BILOU", False),
        (["PER-B", "PER-I", "O"], ("O", "PER-B", "PER-I"), "IOBES", True),
        (["B", "I", "O"], ("O", "B", "I"), "IOBES", False),
        (["PER", "ORG", "O"], ("O", "ORG", "PER"), "plain", False),
        (["A", "B", "S"], ("A", "B", "S"), "plain", False),
        (["NN", "VB"], ("NN", "VB"), "plain", False),
    ],
)
def test_the_scheme_of_tags_is_seen(
    tags: list[str], names: tuple[str, ...], scheme: str, is_suffix: bool
) -> None:
    found = inspect_tags(tags)
    assert (found.names, found.scheme, found.is_suffix) == (names, scheme, is_suffix)


def test_tags_that_cannot_be_scored_are_refused() -> None:
    """Numbers without names, which the hub's files have, and mixed schemes."""
    with pytest.raises(WrongUse, match="numbers") as error:
        inspect_tags([0, 1, 10, 2])
    assert error.value.why.startswith("they are 0, 1, 2, 10")
    assert error.value.fix.count("NAME") == 10 and '["O", "NAME1", ' in error.value.fix
    named = inspect_tags([0, "2", 1], ["O", "B-PER", "I-PER"])
    assert named.names == ("O", "B-PER", "I-PER") and named.value(2) == "I-PER" and named.scheme == "IOBES"
    for mixed in (["B-PER", "LOC"], ["B-PER", "M-PER"], ["U-PER", "E-PER"]):
        with pytest.raises(WrongUse, match="several schemes"):
            inspect_tags(["O", *mixed])


def test_what_a_user_should_know_of_labels_is_said() -> None:
    """Counts of classes; more than half as many as records; those of one record; those that training lacks."""

    def notes(learnt: list[Any], measured: list[Any]) -> list[tuple[bool, str]]:
        labels = inspect_labels([*learnt, *measured])
        return list(label_notes(labels, [*map(labels.value, learnt)], [*map(labels.value, measured)]))

    assert notes(["a"] * 4 + ["b"] * 3, ["a"]) == [(False, "2 classes: 'a' (4), 'b' (3)")]
    warnings = [text for is_warning, text in notes([1, 2, 3, 3], [4, 4, 3]) if is_warning]
    assert warnings == [
        "4 classes in 4 records, more than one for every two: if the labels are amounts, --set problem_type=regression",
        "classes of one record: 2, such as '1', '2'",
        "2 labels of the validation records are in no training record: '4' (2)",
    ]
    assert notes([0.5, 5], [1]) == [
        (
            False,
            "the labels are numbers from 0.5 to 5: a regression, by the squared error; to make each a class: "
            "--set problem_type=single_label_classification",
        )
    ]


def test_validation_labels_that_training_has_none_of_are_refused() -> None:
    """Such as names beside the numbers of the same classes; one that is common makes it a warning."""
    labels = inspect_labels(["yes", "no", 1, 0])
    with pytest.raises(WrongUse, match="no label of the validation") as error:
        check_common(labels, ["yes", "no"], ["1", "0"])
    assert "'yes' (1)" in error.value.why and "data.class_names" in error.value.fix
    check_common(labels, ["yes", "no"], ["1", "no"])
    check_common(inspect_labels([["a"], ["b"]]), [frozenset("a")], [frozenset()])


PROBLEMS: dict[str, tuple[list[Any], int]] = {
    SINGLE_LABEL: (["a", "b", "c", "a"], 3),
    MULTI_LABEL: ([["a"], [], ["a", "c"], ["b"]], 3),
    REGRESSION: ([0.1, -2.3, 3, -100.0], 1),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_and_gradients_are_those_of_transformers(
    problem: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """In float64 on their directory, whose config names the problem: a sum over micro-batches divided by the count of
    the batch. -100 is a number like others. What is written names the same problem.
    """
    transformers = pytest.importorskip("transformers")
    labels, outputs = PROBLEMS[problem]
    tokenizer = Tokenizer.load(bases["bert"] / "tokenizer.json")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 16}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, num_labels=outputs, problem_type=problem)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config).double().eval()
    theirs.save_pretrained(tmp_path)
    ours: Any = load_huggingface(tmp_path, torch.float64)
    assert isinstance(ours, BERTWithHead) and ours.head.problem == problem

    task = Classification(build_recipe({"task": "classification"}, FinetuneRecipe), tokenizer)
    records = [
        {"text": text, "label": label} for text, label in zip(("the cat", "a", "moon in rome", "it"), labels)
    ]
    task.prepare(records, [])
    rows = task.rows(records)
    whole, parts = task.collated(rows), [task.collated(rows[:1]), task.collated(rows[1:])]
    loss = torch.zeros(1, dtype=torch.float64)
    for part in parts:
        batch = {name: torch.from_numpy(values) for name, values in part.items()}
        inputs = {name: batch[name] for name in ("input_ids", "token_types", "attention_mask")}
        loss = loss + task.sums(ours.eval(), ours.encoder.hidden(**inputs), batch, ALONE)
    loss = loss / task.count(whole)
    loss.backward()

    wanted = [0, 1, 2, 0]
    if problem == MULTI_LABEL:
        wanted = [[1.0, 0, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
    if problem == REGRESSION:
        wanted = labels
    answer = theirs(
        input_ids=torch.from_numpy(whole["input_ids"]),
        token_type_ids=torch.from_numpy(whole["token_types"]),
        attention_mask=torch.from_numpy(whole["attention_mask"]).long(),
        labels=torch.tensor(wanted, dtype=torch.long if problem == SINGLE_LABEL else torch.float64),
    )
    answer.loss.backward()
    assert loss.item() == pytest.approx(answer.loss.item(), rel=1e-12)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    fields, gradients = to_huggingface(ours)
    assert fields["problem_type"] == problem
    for name, parameter in theirs.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12), name


def test_words_without_a_prediction_are_scored_as_outside(bases: dict[str, Path]) -> None:
    """A word beyond the row counts, so that a cut text does not raise the score; texts are parted at white space."""
    recipe = {
        "task": "token-classification",
        "train": {"sequence_length": 4},
        "data": {"label_field": "tags"},
    }
    tokenizer = Tokenizer.load(bases["bert"] / "tokenizer.json")
    task = TokenClassification(build_recipe(recipe, FinetuneRecipe), tokenizer)
    records = [{"text": "rome likes paris", "tags": '["LOC", "O", "LOC"]'}, {"text": ["it"], "tags": "O"}]
    task.prepare(records, [])
    assert task.kind.scheme == "plain" and task.labels == ("O", "LOC")
    rows = task.rows(records)
    assert task.cut_rows == 1 and rows[0]["targets"].tolist() == [-100, 1, 0, -100]
    logits = torch.tensor([[[9.0, 0], [0, 9], [9, 0], [9, 0]], [[9.0, 0], [9, 0], [9, 0], [9, 0]]])
    found = task.measure(
        lambda **inputs: logits[:, : inputs["input_ids"].shape[1]], records, torch.device("cpu")
    )
    assert found == pytest.approx({"precision": 1, "recall": 0.5, "f1": 2 / 3, "accuracy": 3 / 4})


def test_numbers_of_a_regression_are_measured_as_glue_does(bases: dict[str, Path]) -> None:
    """Pearson's and Spearman's correlation by scipy, over every record once."""
    stats = pytest.importorskip("scipy.stats")
    tokenizer = Tokenizer.load(bases["bert"] / "tokenizer.json")
    recipe = {"task": "classification", "train": {"batch_rows": 4}}
    task = Classification(build_recipe(recipe, FinetuneRecipe), tokenizer)
    draw = np.random.default_rng(1)
    wanted = np.round(draw.uniform(0, 5, 11), 1)
    wanted[3] = wanted[5]  # ranks that are shared
    records = [{"text": "the cat", "label": json.loads(json.dumps(value))} for value in wanted.tolist()]
    task.prepare(records, [])
    said, given = torch.from_numpy(draw.normal(size=(11, 1))), iter(range(0, 11, 4))

    def model(**inputs: Any) -> torch.Tensor:
        start = next(given)
        return said[start : start + len(inputs["input_ids"])]

    found = task.measure(model, records, torch.device("cpu"))
    ours = said[:, 0].numpy()
    assert found["pearson"] == pytest.approx(stats.pearsonr(ours, wanted)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(ours, wanted)[0])
    assert found["mean_squared_error"] == pytest.approx(np.mean((ours - wanted) ** 2))
