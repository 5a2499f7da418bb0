"""Fine-tuning: tasks that learn what can be learnt, and a result that opens with its head."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from throughline.cli.main import main
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Failed, WrongUse
from throughline.core.recipe import build_recipe, recipe_hash
from throughline.data.new_tokenizer import import_tokenizer
from throughline.data.tokenizer import Tokenizer
from throughline.inference.serving.encoding import Reader
from throughline.models.bert import BERT, BERTWithHead
from throughline.models.config import MULTI_LABEL, REGRESSION, BERTConfig
from throughline.models.gpt import GPT
from throughline.models.init import build
from throughline.models.sentence import MEAN, Sentence, read_sentence
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import build_trainer
from throughline.train.checkpoints.weights_in import open_weights
from throughline.train.evaluate import whole_model
from throughline.train.finetune.recipe import RULES, FinetuneRecipe
from throughline.train.finetune.records import held_out, pair_row
from throughline.train.finetune.run import _split, finetune, plan_task, write_model
from throughline.train.finetune.tasks import TASKS
from throughline.train.loop import train
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.step import train_step
from tokenizers import processors

SPOKEN = "the a cat dog king moon likes sees hates good bad fine poor in paris rome york new old"
WORDS = [*SPOKEN.split(), "who", "where", "is", "it"]
DRAW = np.random.default_rng(3)


def phrase(*extra: str) -> str:
    return " ".join(DRAW.permutation([*DRAW.choice(["the", "a", "cat", "dog", "king", "moon"], 4), *extra]))


def classes() -> dict[str, Any]:
    good = DRAW.random() < 0.5
    return {"text": phrase(DRAW.choice(["good", "fine"] if good else ["bad", "poor"])), "label": int(good)}


def tagged() -> dict[str, Any]:
    words = [*phrase().split(), "in", *(["new", "york"] if DRAW.random() < 0.5 else ["paris"])]
    tags = ["O"] * 5 + ["B-LOC", "I-LOC"][: len(words) - 5]
    return {"text": words, "label": tags}


def passages() -> dict[str, Any]:
    kind = DRAW.choice(["cat", "dog", "king", "moon"])
    place = DRAW.choice(["paris", "rome", "york", "new", "old"])
    return {"text": f"who likes the {kind} in {place}", "passage": f"{place} sees a {kind}"}


def prompts() -> dict[str, Any]:
    animal, place = [("cat", "paris"), ("dog", "rome"), ("king", "york"), ("moon", "old")][DRAW.integers(4)]
    return {"text": f"{phrase()} where is the {animal}", "label": f"{place} likes it"}


def question() -> dict[str, Any]:
    place = DRAW.choice(["paris", "rome", "york"])
    context = f"{phrase()} is in {place} {phrase()}"
    answer = {"answer_start": context.index(place), "text": str(place)}
    return {"context": context, "qas": [{"id": "1", "question": "where is the cat", "answers": [answer]}]}


CASES: dict[str, tuple[Any, str, dict[str, str], str, float]] = {
    "classification": (classes, "bert", {}, "accuracy", 0.9),
    "token-classification": (tagged, "bert", {}, "f1", 0.9),
    "question-answering": (question, "bert", {}, "exact_match", 70.0),
    "retrieval": (passages, "bert", {"pair_field": "passage"}, "mean_reciprocal_rank", 0.4),
    "instruction": (prompts, "gpt", {}, "response_token_accuracy", 0.9),
}


def write_records(task: str, folder: Path, count: int) -> Path:
    records = [CASES[task][0]() for _ in range(count)]
    squad = [{"data": [{"paragraphs": records}]}] if task == "question-answering" else None
    path = folder / ("records.json" if squad else "records.jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in squad or records))
    return path


def recipe_for(task: str, bases: dict[str, Path], records: Path, **more: Any) -> FinetuneRecipe:
    """For rows of 32 tokens; `more` of `train`, and whole sections as dicts."""
    _, family, fields, _, _ = CASES[task]
    sections = {name: more.pop(name) for name in list(more) if isinstance(more[name], dict)}
    if rate := more.pop("learning_rate", None):
        sections["optimizer"] = {"learning_rate": rate}
    tree = {
        "task": task,
        "model": {"init_from": str(bases[family])},
        "data": {"train": str(records), **fields},
        "train": {"batch_rows": 16, "sequence_length": 32} | more,
    }
    return build_recipe(tree | {"window_stride": 4} | sections, FinetuneRecipe, RULES)


def task_for(task: str, bases: dict[str, Path], **data: str) -> Any:
    """The task over one of the tiny models."""
    recipe = build_recipe({"task": task, "data": data}, FinetuneRecipe)
    return TASKS[task](recipe, Tokenizer.load(bases[CASES[task][1]] / "tokenizer.json"))


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


def test_stopped_accumulated_and_shared_out_it_learns_the_same(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """A run that failed in its second epoch goes on to the weights of one that did not; two processes that share the
    weights, and micro-batches of 4 records, come to them within the rounding of sums.
    """
    warm()
    records = write_records("classification", tmp_path, 70)
    usual = partial(recipe_for, "classification", bases, records, epochs=2, learning_rate=1e-3)

    def weights(out: str, **more: Any) -> dict[str, Any]:
        recipe = usual(**more)

        def work() -> None:
            torch.set_num_threads(1)
            finetune(recipe, tmp_path / out)

        run_ranks(recipe.parallel.data, work)
        return dict(open_weights(tmp_path / out)[0].named_parameters())

    whole = weights("whole")
    shared = weights("shared", parallel={"data": 2, "sharding": "full"}, micro_batch_rows=4)
    for name, value in shared.items():
        assert (value - whole[name]).norm() <= 1e-4 * whole[name].norm() + 1e-6, name

    def fail(engine: Any, step: int) -> dict[str, Any]:
        if step > 5:
            raise ZeroDivisionError
        return plan.measure(engine, step)

    recipe = usual()
    plan = plan_task(recipe)
    home = Path(f"{tmp_path / 'again'}.{recipe_hash(recipe)[-8:]}.run")
    with pytest.raises(ZeroDivisionError):
        train(plan, home, evaluators=[fail])
    again = weights("again")
    assert not home.exists()
    assert all(torch.equal(value, whole[name]) for name, value in again.items())


def test_processes_that_share_experts_learn_what_one_does(bases: dict[str, Path], tmp_path: Path) -> None:
    """Responses, by a Mixtral whose experts two processes share, with the weights sharded and without."""
    warm()
    records, base = write_records("instruction", tmp_path, 70), bases | {"gpt": bases["mixtral"]}
    found = []
    for out, parallel in {
        "one": {},
        "shared": {"data": 2, "expert": 2},
        "sharded": {"data": 2, "expert": 2, "sharding": "full"},
    }.items():
        recipe = recipe_for("instruction", base, records, epochs=2, learning_rate=1e-3, parallel=parallel)

        def work(recipe: FinetuneRecipe = recipe, out: str = out) -> None:
            torch.set_num_threads(1)
            finetune(recipe, tmp_path / out)

        run_ranks(recipe.parallel.data, work)
        model = open_weights(tmp_path / out)[0]
        assert model.config.experts == 4
        found.append(dict(model.named_parameters()))
    one, *others = found
    before = dict(open_weights(bases["mixtral"])[0].named_parameters())
    for shared in others:
        for name, value in shared.items():
            way = (one[name] - before[name]).norm()
            assert 0 < (value - one[name]).norm() <= 1e-2 * way or torch.equal(value, one[name]), name
            assert way > 0, name


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


def test_the_split_is_decided_by_the_content() -> None:
    """About the share asked for (4 standard deviations of 2,000 draws), and equal texts on one side."""
    records = [{"text": f"number {i}", "label": i % 2} for i in range(2000)]
    share = np.mean([held_out(record, ["text"], 0.2) for record in records])
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    assert len({held_out({"text": "x", "label": label}, ["text"], 0.5) for label in (0, 1)}) == 1


@pytest.mark.parametrize("form", [processors.BertProcessing, processors.RobertaProcessing])
def test_pairs_are_cut_as_the_library_cuts_them(form: type, bases: dict[str, Path]) -> None:
    """`longest_first` of the tokenizers library; RoBERTa's has two separators between. Served pairs are alike."""
    library = tokenizers.Tokenizer.from_file(str(bases["bert"] / "tokenizer.json"))
    library.post_processor = form(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = Tokenizer(library.to_str())
    whole = library.encode("the king", "dog").ids
    assert Reader(tokenizer, 12, 99).frame({"a": "the king", "b": "dog"}).ids.tolist() == whole
    library.enable_truncation(12, strategy="longest_first")
    for first, second in ((9, 3), (3, 9), (10, 10), (6, 4), (2, 2)):
        texts = [" ".join(DRAW.choice(WORDS, size)) for size in (first, second)]
        expected = library.encode(*texts)
        row = pair_row(tokenizer, tokenizer.encode(texts[0]), tokenizer.encode(texts[1]), 12)
        assert row["input_ids"].tolist() == expected.ids
        assert row["token_types"].tolist() == expected.type_ids or form is processors.RobertaProcessing


@pytest.mark.parametrize("sentence", [MEAN, Sentence("cls", longest=5, prompt="who ")])
def test_embeddings_trained_are_embeddings_given(
    bases: dict[str, Path], tmp_path: Path, sentence: Sentence
) -> None:
    """What the loss compares is what `throughline embed` gives, of the base and of the model that was tuned."""
    from throughline.inference.serving.offline import embed_texts

    base = shutil.copytree(bases["bert"], tmp_path / "base")
    sentence.write(base, 32, 32)
    task = task_for("retrieval", bases, pair_field="b")
    task.sentence, (model, _) = read_sentence(base), open_weights(base)
    texts = ["the cat likes a dog", "the moon"]
    with torch.no_grad():
        (answer,) = task.answers(model.hidden, [{"text": texts[0], "b": texts[1]}], torch.device("cpu"))
    vectors = task.vectors(*answer)
    assert np.abs(vectors.numpy() - embed_texts(base, texts, truncate=True)).max() < 1e-5
    records = write_records("retrieval", tmp_path, 20)
    recipe = recipe_for("retrieval", {"bert": base}, records, epochs=1, batch_rows=4)
    finetune(recipe, tmp_path / "out")
    assert read_sentence(tmp_path / "out") == read_sentence(base)
    bare = json.loads((base / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (base / "config.json").write_text(json.dumps(bare))
    state = {n: v for n, v in load_file(base / "model.safetensors").items() if not n.startswith("cls.")}
    save_file(state, base / "model.safetensors")
    finetune(recipe, tmp_path / "bare")
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"] == ["BertModel"]


def test_an_answer_is_learnt_from_its_first_token_to_its_end(bases: dict[str, Path]) -> None:
    """And nothing of the prompt is, of which the end is kept where both are too long."""
    task = task_for("instruction", bases, label_field="answer")
    tokenizer = task.tokenizer
    for prompt_words, answer_words in ((1, 1), (6, 3), (3, 6), (4 * task.length, 2)):
        prompt, answer = (" ".join(DRAW.choice(WORDS, size)) for size in (prompt_words, answer_words))
        (row,) = task.rows([{"text": prompt, "answer": answer}])
        told, said = tokenizer.encode(prompt).tolist(), [*tokenizer.encode(answer).tolist(), tokenizer.eos_id]
        told = told[max(len(told) + len(said) - task.length, 0) :]
        assert row["input_ids"].tolist() == [*told, *said]
        assert row["targets"].tolist() == [-100] * (len(told) - 1) + said + [-100]


def test_the_rank_of_a_passage_is_its_place_among_all(bases: dict[str, Path]) -> None:
    """Counted plainly: 1 for the nearest of the different passages. Some queries share theirs."""
    task, cpu = task_for("retrieval", bases, pair_field="b"), torch.device("cpu")
    model, _ = open_weights(bases["bert"])
    passages = [" ".join(DRAW.choice(WORDS, 4)) for _ in range(12)]
    records = [{"text": " ".join(DRAW.choice(WORDS, 3)), "b": passages[i % 12]} for i in range(20)]
    with torch.no_grad():
        found = task.measure(model, records, cpu)
        (answer,) = task.answers(model.hidden, records, cpu)
    vectors = task.vectors(*answer).numpy()
    ranks = []
    for number, record in enumerate(records):
        likeness = {other["b"]: vectors[2 * number] @ vectors[2 * i + 1] for i, other in enumerate(records)}
        ranks.append(sorted(likeness, key=lambda text: -likeness[text]).index(record["b"]) + 1)
    assert found["passages"] == 12 and max(ranks) > 1
    assert found["accuracy_at_1"] == pytest.approx(np.mean(np.array(ranks) == 1))
    assert found["accuracy_at_10"] == pytest.approx(np.mean(np.array(ranks) <= 10))
    assert found["mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(ranks)))


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


def scored() -> dict[str, Any]:
    """A text and a number that one of its words decides."""
    word, score = [("good", 0.9), ("fine", 0.7), ("bad", 0.2), ("poor", 0.35)][DRAW.integers(4)]
    return {"text": f"{word} {phrase()}", "label": score}


def several() -> dict[str, Any]:
    """A text and the classes that one of its words decides, or none."""
    word, found = [("good", ["warm"]), ("fine", ["warm", "dry"]), ("bad", []), ("poor", ["dry"])][
        DRAW.integers(4)
    ]
    return {"text": f"{word} {phrase()}", "label": found}


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


def repeated_passages() -> dict[str, Any]:
    kind = DRAW.choice(["cat", "dog", "king", "moon"])
    return {"text": f"{phrase()} {kind}", "passage": f"{kind} in rome"}


LOSSES: dict[str, tuple[str, Any, dict[str, str]]] = {
    "regression": ("classification", scored, {}),
    "several": ("classification", several, {}),
    "retrieval": ("retrieval", repeated_passages, {"pair_field": "passage"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_compute_what_one_does(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Losses, gradient norms and weights of two steps in float64: with copies of the weights and with shares of them,
    the records of a process all at once or in parts. Retrieval compares what a micro-batch has, which is as much.
    """
    warm()
    task, draw, fields = LOSSES[name]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(draw()) + "\n" for _ in range(60)))
    results = []
    for parallel in ({}, {"data": 2}, {"data": 2, "sharding": "full"}):
        data = {"train": str(path), **fields}
        recipe = recipe_for(task, bases, path, data=data, parallel=parallel, micro_batch_rows=4)

        def work(recipe: FinetuneRecipe = recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
            torch.set_num_threads(1)
            plan = plan_task(recipe)
            section = plan.recipe.train.model_copy(update={"precision": "fp64"})
            plan = dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"train": section}))
            layout = plan.recipe.parallel.layout()
            if layout.world > 1:
                start_group(plan.device, 60)
            mesh = make_mesh(layout, plan.device, 60)
            trainer, batches, figures = build_trainer(plan, mesh), plan.batches(mesh), []
            own = section.rows_per_step // layout.data
            for step in range(2):
                batch = batches.batch(step * section.rows_per_step + mesh.data.rank * own, own)
                result = train_step(trainer, batch, 1.0)
                figures += [result.loss, result.grad_norm]
            return figures, dict(whole_parameters(trainer.engine))

        results.append(run_ranks(recipe.parallel.layout().world, work)[0])
    (one, weights), *others = results
    assert one[0] > 0.01 and one[1] > 0
    for figures, shared in others:
        assert figures == pytest.approx(one, rel=1e-12)
        for parameter, value in shared.items():
            assert (value - weights[parameter]).abs().max() < 1e-12, parameter


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, of all processes together. Collective."""
    model = whole_model(engine)
    return {} if model is None else {name: value.detach() for name, value in model.named_parameters()}
