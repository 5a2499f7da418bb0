"""Tasks inside a training run: the scores of `throughline eval` on the same step's checkpoint, whatever
stopped the run.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from throughline.cli.main import main
from throughline.core.recipe import load_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.eval.asked import Settings
from throughline.eval.causal import CausalScorer
from throughline.eval.inloop import TaskEvaluator
from throughline.eval.masked import MaskedScorer
from throughline.eval.runner import evaluate
from throughline.eval.task import find_tasks
from throughline.models.bert import BERT
from throughline.models.config import GPTConfig
from throughline.models.gpt import GPT
from throughline.models.init import empty_model
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import plan_run
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.engine import Engine
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES

TASKS = ["lambada_openai", "blimp_wh_island", "blimp_transitive"]
RECIPE = f"""
[data]
train = "tokens"
[model.overrides]
layers = 2
width = 32
heads = 2
[train]
steps = 8
sequence_length = 96
batch_rows = 4
eval_every_steps = 2
eval_rows = 4
compile = "off"
device = "cpu"
[evaluation]
tasks = {json.dumps(TASKS)}
every_steps = 4
limit = 6
[checkpoint]
save_every_steps = 4
keep = 0
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def recipe(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of Shakespeare and a recipe that scores shipped tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text((samples / "tinyshakespeare" / "input.txt").read_text()[:60_000])
    assert call("data", "tokenizer", "text.txt", "--vocab-size", "400", "--out", "tokenizer").exit_code == 0
    assert (
        call(
            "data", "tokenize", "text.txt", "--tokenizer", "tokenizer", "--workers", "1", "--out", "tokens"
        ).exit_code
        == 0
    )
    (tmp_path / "small.toml").write_text(RECIPE)
    return "small.toml"


def scores_by_step(run: Path) -> dict[int, dict[str, float]]:
    """The tasks' figures of the run's records."""
    found = {}
    for record in read_metrics(run):
        figures = {name: value for name, value in (record.get("validation") or {}).items() if "/" in name}
        if figures:
            found[record["step"]] = figures
    return found


def test_a_run_scores_its_tasks_as_eval_does_and_a_crash_changes_nothing(recipe: str, tmp_path: Path) -> None:
    """Every figure equal to the last bit: curve against checkpoints, and a run that crashed at step 6 against
    one that did not.
    """
    result = call("train", recipe, "--json")
    assert result.exit_code == 0, result.output
    curve = scores_by_step(tmp_path / "runs/small")
    assert set(curve) == {4, 8}
    figures = ["lambada_openai/acc", "lambada_openai/perplexity", "blimp/acc"]
    assert set(curve[4]) == {*figures, *(f"{name}_stderr" for name in figures)}
    assert json.loads(result.stdout)["validation"].items() >= curve[8].items()
    page = (tmp_path / "runs/small/report.html").read_text()
    assert "tasks: acc" in page and "lambada_openai" in page and "acc_stderr" not in page
    assert '"bands":[0,1]' in page, "a band around both accuracies"

    result = call(
        "eval", "runs/small", "--all-checkpoints", "--tasks", ",".join(TASKS), "--limit", "6", "--json"
    )
    assert result.exit_code == 0, result.output
    for found in json.loads(result.stdout)["checkpoints"]:
        summaries = {summary["task"]: summary["metrics"] for summary in (*found["tasks"], *found["groups"])}
        for name, value in curve[found["step"]].items():
            task, _, metric = name.partition("/")
            which = "stderr" if metric.endswith("_stderr") else "value"
            assert summaries[task][metric.removesuffix("_stderr")][which] == value

    plan = plan_run(resolve(load_recipe(recipe, Recipe, (), RULES)))

    def crash(model: Any, step: int) -> dict[str, float]:
        if step == 6:
            raise ZeroDivisionError
        return {}

    with pytest.raises(ZeroDivisionError):
        train(plan, tmp_path / "crashed", evaluators=[TaskEvaluator(plan), crash])
    train(plan, tmp_path / "crashed", evaluators=[TaskEvaluator(plan)])
    assert scores_by_step(tmp_path / "crashed") == curve


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2}, {"data": 2, "sharding": "full"}], ids=str)
def test_a_layout_scores_the_checkpoint_of_the_step(
    parallel: dict[str, Any], recipe: str, tmp_path: Path
) -> None:
    """The first process has the weights of all; the others keep no figures of their own and stop with it."""
    warm()
    changes = [f"parallel.{key}={value}" for key, value in parallel.items()]
    wanted = resolve(load_recipe(recipe, Recipe, (*changes, "evaluation.every_steps=0"), RULES))

    def work() -> dict[str, Any]:
        torch.set_num_threads(1)
        plan = plan_run(wanted)
        return train(plan, tmp_path / "run", evaluators=[TaskEvaluator(plan)])["validation"]

    first, second = run_ranks(2, work)
    assert first == second and len(first) == 6
    model, tokenizer = load_model(tmp_path / "run")
    scorer = CausalScorer(model, Tokenizer.load(tokenizer), bos=False)
    found = evaluate(scorer, find_tasks(["lambada_openai"]), Settings(limit=wanted.evaluation.limit))
    for name, metric in found[0].summary["metrics"].items():
        assert first[f"lambada_openai/{name}"] == metric["value"]


def test_what_cannot_be_scored_is_refused_before_the_first_step(
    recipe: str, samples: Path, tmp_path: Path
) -> None:
    shutil.copytree(samples / "blimp", tmp_path / "data" / "blimp")
    file = tmp_path / "data" / "lambada" / "lambada_test.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "one two"}\n{"text": "a ' + "x9" * 200 + '"}\n')
    for changes, code, complaint in (
        (["evaluation.data_dir=data"], 1, "longer than the model's window"),
        (['evaluation.tasks=["lambadda"]'], 2, "unknown task"),
        (["evaluation.data_dir=none"], 2, "no such directory"),
        (["evaluation.every_steps=3"], 2, "evaluation.every_steps"),
    ):
        result = call("train", recipe, *(word for change in changes for word in ("--set", change)))
        assert (result.exit_code, complaint in result.stderr) == (code, True), result.stderr
        assert not (tmp_path / "runs").exists()


def test_bos_is_put_where_eval_puts_it(bos_tokenizer: Tokenizer) -> None:
    """A tokenizer whose file puts BOS before a text does so inside a run too."""
    evaluation = SimpleNamespace(tasks=["blimp_wh_island"], data_dir=None, limit=2, every_steps=1)
    recipe = SimpleNamespace(evaluation=evaluation, train=SimpleNamespace(steps=1))
    config = GPTConfig(layers=1, width=16, heads=1, sequence_length=64)
    inside = TaskEvaluator(
        SimpleNamespace(corpus=SimpleNamespace(tokenizer=bos_tokenizer), config=config, recipe=recipe)
    )
    assert inside._scorer(GPT(config)).recipe["bos"] is True


def test_a_bert_scores_its_tasks_inside_a_run(bert: BERT, bert_tokenizer: Tokenizer) -> None:
    """Pseudo-log-likelihoods as `throughline eval` takes them, at its own steps alone; a model in training
    stays so.
    """
    evaluation = SimpleNamespace(
        tasks=["blimp_wh_island", "lambada_openai"], data_dir=None, limit=3, every_steps=2
    )
    recipe = SimpleNamespace(evaluation=evaluation, train=SimpleNamespace(steps=9))
    inside = TaskEvaluator(
        SimpleNamespace(corpus=SimpleNamespace(tokenizer=bert_tokenizer), config=bert.config, recipe=recipe)
    )
    engine = Engine.holding(bert, "fp32", torch.device("cpu"))
    assert inside(engine, 3) == {}
    opened = empty_model(bert.config, "cpu").eval()  # as a checkpoint is opened
    opened.load_state_dict(bert.state_dict())
    alone = evaluate(MaskedScorer(opened, bert_tokenizer), find_tasks(evaluation.tasks), Settings(limit=3))
    found = inside(engine, 4)
    assert engine.stages[0].training
    metrics = [(score.summary["task"], score.summary["metrics"].items()) for score in alone]
    wanted = {f"{task}/{name}": metric["value"] for task, own in metrics for name, metric in own}
    errors = {f"{task}/{name}_stderr": metric["stderr"] for task, own in metrics for name, metric in own}
    assert found == wanted | errors
    assert len(found) == 6


def test_the_split_is_measured_on_any_machine(recipe: str, tmp_path: Path) -> None:
    """A run of eight processes on GPUs, by its recipe: on one CPU the figures are still those of the run's
    last step.
    """
    result = call("train", recipe, "--set", "train.steps=2", "--set", "evaluation.tasks=[]", "--json")
    assert result.exit_code == 0, result.output
    wanted = json.loads(result.stdout)["validation"]
    written = tmp_path / "runs/small/recipe.toml"
    changed = (
        written.read_text().replace('device = "cpu"', 'device = "cuda"').replace("tensor = 1", "tensor = 8")
    )
    assert changed.count("cuda") == 1 and changed.count("tensor = 8") == 1
    written.write_text(changed)
    result = call("eval", "runs/small", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["validation"] == pytest.approx(wanted)
