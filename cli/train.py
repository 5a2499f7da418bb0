"""`throughline train RECIPE`: pretrain a GPT or a BERT, or continue a run that was stopped."""

from pathlib import Path

import click

from ..core import console
from .common import (
    flag,
    init_from_option,
    option,
    pretraining_recipe,
    recipe_options,
    throughline_command,
    with_weights,
)


@click.command()
@recipe_options
@option("--run-dir", click.Path(), "Directory of the run (default: runs/<name of the recipe>).")
@init_from_option
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
def command(
    recipe: str,
    overrides: tuple[str, ...],
    run_dir: str | None,
    init_from: str | None,
    resume: str,
    profile: bool,
    dry_run: bool,
    show_layout: bool,
) -> None:
    """Train a model from RECIPE (a file or the name of a shipped one), or a small GPT on a bare text, for which a
    recipe is picked.

    \b
    Example:  throughline train my.txt
              throughline train gpt-shakespeare --set data.train=tokens/shakespeare
              throughline train gpt-shakespeare --set data.train=my.txt --set data.tokenizer=tok
    The same command continues a run that was stopped or killed.
    """
    from ..train.recipes.own_text import is_text, recipe_for_text

    name = Path(recipe).name.removesuffix(".toml") if not is_text(recipe) else Path(recipe).stem
    directory = Path(run_dir) if run_dir else Path("runs") / name
    if is_text(recipe):
        recipe, *given = recipe_for_text(recipe, directory, bool(init_from))
        overrides = (*given, *overrides)
    resolved = pretraining_recipe(recipe, with_weights(overrides, init_from))
    from ..train.parallel.mesh import running_processes, started_again  # not before: torch takes seconds

    if show_layout:
        from ..data.store import TokenStore
        from ..data.tokenizer import Tokenizer
        from ..train.recipes.predict import layout_facts
        from ..train.recipes.recipe import model_config

        data = resolved.data
        if data.tokenizer:
            facts = Tokenizer.load(data.tokenizer).facts()
        else:
            facts = TokenStore.open(data.sources()[0].path).facts
        if running_processes()[0] == 0:
            console.result(*layout_facts(resolved, model_config(resolved, facts.get("vocab_size"))))
        return
    from ..eval.inloop import TaskEvaluator, TextSample
    from ..train.build import plan_run
    from ..train.evaluate import Validation
    from ..train.logs.report import figure_name, figure_text
    from ..train.loop import Evaluator, train

    plan = plan_run(resolved, None if dry_run else directory / "cache")
    if dry_run:
        if running_processes()[0] == 0:  # it speaks for all
            console.result(plan.summary(), plan.lines())
        return
    evaluators: list[Evaluator] = [Validation(plan)] if plan.corpus.validation else []
    if TextSample.suits(plan):
        evaluators.append(TextSample(plan, directory))
    if resolved.evaluation.tasks:
        evaluators.append(TaskEvaluator(plan))
    resume = "auto" if started_again() else resume  # a run that is there is then the one that was to be begun
    summary = train(plan, directory, resume=resume, evaluators=evaluators, profile=profile)
    if running_processes()[0] > 0:
        return  # the first process says it
    figures = {"loss": summary["loss"]}
    figures |= {figure_name(name): value for name, value in summary["validation"].items()}
    figures |= {"steps skipped": summary["skipped_steps"]} if summary["skipped_steps"] else {}
    lines = [f"{name:<26}{figure_text(value)}" for name, value in figures.items()]
    lines += [
        f"{'tokens/s':<26}{summary['tokens_per_s']:,.0f}",
        f"run in {directory}; report: {directory / 'report.html'}",
    ]
    console.result(summary, lines)
