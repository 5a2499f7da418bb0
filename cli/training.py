"""`throughline train|finetune|study|prove RECIPE`: everything that trains, also to measure or to prove something."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import Refused
from ..core.recipe import find_recipe, load_recipe, recipe_hash
from . import common
from .common import PATH, flag, option, pretraining_recipe, recipe_options, throughline_command


@click.command()
@recipe_options
@option("--run-dir", click.Path(), "Directory of the run (default: runs/<name of the recipe>).")
@common.init_from_option
@option(
    "--resume",
    click.Choice(["auto", "never"]),
    "Whether to continue the run that is in the directory: auto continues it, never refuses it.",
    "auto",
)
@flag("--profile", "Write a trace of a few steps and the time spent in each class of kernel.")
@flag("--dry-run", "Check everything and print the plan, without training.")
@flag("--show-layout", "Print what each process holds and sends in a step, without training.")
@throughline_command
def train(
    recipe: str, overrides: tuple[str, ...], run_dir: str | None, init_from: str | None, **how: Any
) -> None:
    """Train a model from RECIPE (a file or the name of a shipped one), or a small GPT on a bare text, for which a
    recipe is picked.

    \b
    Example:  throughline train my.txt
              throughline train gpt-shakespeare --set data.train=tokens/shakespeare
              throughline train my.jsonl --set data.field=body
              throughline train gpt-shakespeare --set data.train=my.txt --set data.tokenizer=tok
    The same command continues a run that was stopped or killed.
    """
    from ..train.recipes.own_text import VOCABULARY, recipe_for_text, with_tokenizer
    from ..train.recipes.resolved import is_text

    name = Path(recipe).name.removesuffix(".toml")
    settings: Sequence[str] = common.with_weights(overrides, init_from)
    if is_text(recipe):
        name = Path(recipe).absolute().stem
        recipe, settings = recipe_for_text(recipe, settings)
    directory = Path(run_dir) if run_dir else Path("runs") / name
    resolved = pretraining_recipe(recipe, settings)
    from ..train.parallel.mesh import running_processes, started_again  # not before: torch takes seconds

    dry_run = how.pop("dry_run")
    if how.pop("show_layout"):
        from ..data.store import TokenStore
        from ..data.tokenizer import Tokenizer
        from ..train.recipes.resolved import layout_facts, model_config

        named, source = resolved.data.tokenizer, resolved.data.sources()[0].path
        vocab_size: int | None = VOCABULARY  # of a tokenizer that is still to be trained on text
        if named:
            vocab_size = Tokenizer.load(named).vocab_size
        elif not is_text(source):
            vocab_size = TokenStore.open(source).facts.get("vocab_size")
        if running_processes()[0] == 0:
            console.result(*layout_facts(resolved, model_config(resolved, vocab_size)))
        return
    from ..eval.inloop import TaskEvaluator, TextSample
    from ..train.build import plan_run
    from ..train.evaluate import Validation
    from ..train.logs.report import figure_name, figure_text
    from ..train.loop import Evaluator, train

    if not dry_run:
        resolved = with_tokenizer(resolved, directory / "cache")
    plan = plan_run(resolved, None if dry_run else directory / "cache")
    if dry_run:
        if running_processes()[0] == 0:  # it speaks for all
            console.result(*plan.summary())
        return
    evaluators: list[Evaluator] = [Validation(plan)] if plan.corpus.validation else []
    if TextSample.suits(plan):
        evaluators.append(TextSample(plan, directory))
    if resolved.evaluation.tasks:
        evaluators.append(TaskEvaluator(plan))
    if started_again():  # a run that is there is then the one that was to be begun
        how["resume"] = "auto"
    summary = train(plan, directory, evaluators=evaluators, **how)
    if running_processes()[0] > 0:
        return  # the first process says it
    figures = {"loss": summary["loss"]}
    figures |= {figure_name(name): value for name, value in summary["validation"].items()}
    if summary["skipped_steps"]:
        figures["steps skipped"] = summary["skipped_steps"]
    told = {name: figure_text(value) for name, value in figures.items()}
    told["tokens/s"] = f"{summary['tokens_per_s']:,.0f}"
    console.result(summary, [*figure_lines(told), f"run in {directory}; report: {directory / 'report.html'}"])


def figure_lines(figures: dict[str, str]) -> list[str]:
    """A line for each figure, the values below one another."""
    width = max(map(len, figures)) + 2
    return [f"{name:<{width}}{text}" for name, text in figures.items()]


@click.command()
@recipe_options
@common.init_from_option
@option("--out", click.Path(), "Directory of the model (default: models/<name of the recipe>).")
@flag("--overwrite", "Replace the model that is already at --out.")
@throughline_command
def finetune(
    recipe: str, overrides: tuple[str, ...], init_from: str | None, out: str | None, overwrite: bool
) -> None:
    """Fine-tune a model by RECIPE (a file or the name of a shipped one); the result is a model artifact.

    Tasks: classification, token-classification, question-answering and retrieval with a BERT, instruction with
    a GPT. Without validation records a part of the training records is held out by hash, and its scores are a
    learning check.

    \b
    Example:  throughline finetune finetune-classification --init-from runs/my-bert --set data.train=my/labels.tsv
              throughline export models/finetune-classification --to onnx --out onnx/classifier
    """
    from ..train.finetune.recipe import RULES, FinetuneRecipe, resolve

    given = common.with_weights(overrides, init_from)
    resolved = resolve(load_recipe(recipe, FinetuneRecipe, given, RULES))
    target = Path(out) if out else Path("models") / find_recipe(recipe).stem
    from ..train.finetune.run import figures_text, finetune

    facts = finetune(resolved, target, overwrite)
    if facts is None:
        return  # the first process says it
    lines = [
        figures_text(facts["validation"]),
        f"measured on {facts['records']['validation']:,} records: {facts['measured_on']}",
        f"model in {target}",
    ]
    console.result({"model": str(target)} | facts, lines)


@click.command()
@recipe_options
@option("--out", PATH, "Directory to write.", "calibration")
@option("--steps", click.IntRange(4), "Number of timed steps in each short run.", 20)
@throughline_command
def study(recipe: str, overrides: tuple[str, ...], out: Path, steps: int) -> None:
    """Probe this machine, run RECIPE for a few steps at two sizes, and write what was learned as a calibration.

    \b
    Example:  throughline study gpt-shakespeare --set data.train=tokens/shakespeare --out calibration
    Then THROUGHLINE_CALIBRATION=calibration makes `plan --on here` and every run's prediction use it.
    """
    from ..core.artifact import check_free, create_artifact

    resolved = pretraining_recipe(recipe, overrides)
    check_free(out)
    from ..train.parallel.mesh import running_processes
    from ..train.study import study

    facts = study(resolved, steps)
    if running_processes()[0] > 0:
        return
    with create_artifact(out, "calibration", recipe_hash=recipe_hash(resolved)) as draft:
        (draft.path / "calibration.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        told = ("machine", "device", "torch", "threads", "precision", "probes", "runs")
        draft.facts |= {key: facts[key] for key in told}
    rows = []
    for row in facts["runs"]:
        name = row["run"] + (" (left out)" if row["left_out"] else "")
        seconds, size = row["measured_seconds"], row["measured_bytes"]
        errors = [f"{row[f'{by}_seconds'] / seconds - 1:+.0%}" for by in ("datasheet", "probes", "refit")]
        peak = console.amount(size, "B"), f"{row['refit_bytes'] / size - 1:+.0%}"
        rows.append((name, f"{seconds:.4g}", f"{row['spread_seconds']:.2g}", *errors, *peak))
    probes = facts["probes"]
    lines = [
        f"products {probes['tflops'] * 1e3:,.0f} GFLOP/s in {facts['precision']}, "
        f"copies {probes['bandwidth_gb_s']:.1f} GB/s, "
        f"smallest kernel {probes['launch_s'] * 1e6:.1f} us",
        "",
        *console.table(("run", "s/step", "spread", "datasheet", "probes", "refit", "peak", "refit"), rows),
        "",
        f"calibration in {out}; use it with THROUGHLINE_CALIBRATION={out}",
    ]
    console.result(facts, lines)


@click.command()
@recipe_options
@throughline_command
def prove(recipe: str, overrides: tuple[str, ...]) -> None:
    """Prove that the layout of RECIPE trains the same model as one process.

    A small twin of the model is trained for four steps on forked processes of this CPU (at most 64) and on one
    process: losses, gradient norms, the first gradient of every parameter and the final parameters are compared, in
    float64 to rounding and in the recipe's own precision to its bounds. Exit code 0: equal; 3: not.

    \b
    Example:  throughline prove gpt-shakespeare --set parallel.tensor=2 --set parallel.data=2
    """
    from ..prove.forked import warm

    resolved = pretraining_recipe(recipe, overrides)
    warm()
    from ..prove.proof import BOUNDS, Prover
    from ..prove.twin import twin

    case, notes = twin(resolved)
    prover, rows, lines = Prover(), [], [f"{case.layout.product()}: {case.layout.describe()}", *notes, ""]
    for precision in dict.fromkeys(("fp64", case.precision)):
        tried = dataclasses.replace(case, precision=precision)
        errors = prover.prove(tried, timeout_s=540.0)
        broken, bounds = errors.beyond(tried.bounds), BOUNDS[tried.bounds]
        figures = {name: getattr(errors, name) for name in bounds}
        rows.append({"precision": precision, "equal": not broken, "errors": figures, "bounds": bounds})
        shown = ", ".join(f"{name} {value:.1e} of {bounds[name]:g}" for name, value in figures.items())
        lines.append(f"{precision}: {'NOT EQUAL' if broken else 'equal'}: {shown}")
        if broken:
            worst = f"the gradient that differs most: {errors.worst}"
            lines.append(f"  beyond the bound: {', '.join(broken)}; {worst}")
    equal = all(row["equal"] for row in rows)
    facts = {"layout": case.layout.facts(), "notes": notes, "proofs": rows, "equal": equal}
    console.result(facts, lines)
    if not equal:
        fix = "train in another layout, and report this one"
        raise Refused("the layout does not train what one process trains", where="parallel", fix=fix)
