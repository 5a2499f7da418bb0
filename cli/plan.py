"""`throughline plan`: what fits, which layout is best, how long it takes and what it costs, before it is paid for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import Failed, WrongUse
from ..planner import report
from ..planner.run import REPAIR_DAYS, RESTART_S, Run, run_facts
from ..planner.search import Candidate, Search, fewest_chips, usual_worlds
from ..planner.serve import plan_service
from ..planner.view import compared, days_by_chips, write_comparison, write_plan
from ..prove.validate import own_validation, validation
from . import plan_question as ask
from .common import PATH, flag, option, throughline_command, together


class Plans(click.Group):
    """`plan NAME ...` is `plan layouts NAME ...` unless NAME is a subcommand."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["layouts", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=Plans)
def command() -> None:
    """Plan a run: layouts, time, memory and cost before it is paid for.

    \b
    Example:  throughline plan gpt3-13b --gpus 64 --on a100-80gb --rows 512 --target-tokens 300e9
              throughline plan my-recipe.toml --gpus 8 --on h100-80gb --write-recipe planned.toml
    """


@command.command()
@together(ask.on_option, ask.gpus_option, *ask.MODEL, *ask.RUN, *ask.MACHINES)
@option("--write-recipe", PATH, "Write a recipe in the best layout to this file.")
@flag("--pareto", "Also print days against numbers of chips; needs --target-tokens.")
@option("--out", PATH, "Write the plan as an artifact: plan.html, JSON, CSV and a trace.")
@throughline_command
def layouts(gpus: int, write_recipe: Path | None, pareto: bool, out: Path | None, **options: Any) -> None:
    """Rank the layouts of MODEL (a recipe, a preset or a directory of weights) on a number of chips.

    \b
    Example:  throughline plan gpt-1t-deepspeed --gpus 800 --on v100-32gb --rows 2048
    """
    search, recipe = ask.make_search(gpus, options)
    run = ask.make_run(options, recipe)
    if pareto and not run.tokens:
        raise WrongUse("days of how many tokens?", where="--pareto", fix="--target-tokens 300e9")
    found = ask.fitting(search)
    facts, lines = report.ranked(found, run)
    if write_recipe:
        write_recipe.write_text(ask.planned_recipe(found, recipe, options), encoding="utf-8")
        lines += ["", f"recipe in the best layout: {write_recipe}"]
    if pareto:
        lines += ["", *report.pareto_lines(days_by_chips(found, run))]
    if out:
        write_plan(out, found, facts | {"model": options["model"]}, run)
        lines += ["", f"plan in {out}: open {out / 'plan.html'}"]
    console.result(facts, lines)


@command.command()
@together(ask.on_option, ask.gpus_option, *ask.MODEL, *ask.RUN, *ask.MACHINES)
@throughline_command
def explain(gpus: int, **options: Any) -> None:
    """Where the time and the memory of the best layout go; with --layout, of that one.

    \b
    Example:  throughline plan explain gpt3-13b --gpus 64 --on a100-80gb --layout tensor=8,data=8
    """
    search, recipe = ask.make_search(gpus, options)
    console.result(*report.explain(search, ask.fitting(search).best[0], ask.make_run(options, recipe)))


@command.command()
@together(ask.on_option, *ask.MODEL, *ask.RUN, *ask.MACHINES)
@option(
    "--target-days",
    ask.Amount(0, 1e6),
    "Days that --target-tokens may take (default: any, it only has to fit).",
)
@option("--max-gpus --most", ask.CHIPS, "Maximum number of chips to try.", 8192)
@throughline_command
def recommend(target_days: float | None, max_gpus: int, **options: Any) -> None:
    """The fewest chips on which MODEL fits, or that meet --target-days for --target-tokens.

    The numbers of chips that are tried are parts of a node, and nodes by 1, 3, 5 and 7 times a power of two. Days are
    met when the upper end of the prediction's band meets them, failures counted.

    \b
    Example:  throughline plan recommend gpt-1t-megatron --on a100-40gb --rows 3072
    """
    if target_days and not options["target_tokens"]:
        raise WrongUse("days of how many tokens?", where="--target-days", fix="--target-tokens 300e9")
    search, recipe = ask.make_search(1, options)
    run = ask.make_run(options, recipe)
    node, joined = search.cluster.chips_per_node, search.cluster.node_network_gb_s
    worlds = usual_worlds(node, max_gpus if joined else min(max_gpus, node))

    def by(end: str) -> Any:
        return lambda asked, best: not target_days or run_facts(asked, best, run)[end] <= target_days

    found = fewest_chips(search, worlds, by("days_high"))
    if found is None:
        what = f"not on up to {worlds[-1] if worlds else max_gpus:,} chips"
        why = "" if joined else f"nothing joins its nodes of {node:,}"
        fix = "--max-gpus a larger number, or other chips: --on"
        raise Failed(what, where=search.cluster.name, why=why, fix=fix)
    facts, lines = report.ranked(found, run)
    lines = [f"fewest: {found.search.world:,} chips, in whole machines of {node}", *lines]
    if target_days:
        hopeful = fewest_chips(search, [n for n in worlds if n <= found.search.world], by("expected_days"))
        world = hopeful.search.world if hopeful else found.search.world
        lines[0] += f": the whole band meets {target_days:g} days; its middle does on {world:,}"
        facts["middle_meets"] = world
    console.result(facts, lines)


@command.command()
@together(ask.on_option, ask.gpus_option, *ask.MODEL, *ask.RUN, *ask.MACHINES)
@option(
    "--save-seconds",
    ask.Amount(0, 1e5, min_open=True),
    "Seconds that a save stops a run (default: reckoned).",
)
@option("--restart-seconds", ask.Amount(0, 1e6), "Seconds from a failure to the first new step.", RESTART_S)
@option("--repair-days", ask.Amount(0, 1000), "Days that a failed node is away.", REPAIR_DAYS)
@throughline_command
def checkpoint(
    gpus: int, save_seconds: float | None, restart_seconds: float, repair_days: float, **options: Any
) -> None:
    """How often to save, and how many spare nodes to hold, for a run that fails as published ones did.

    \b
    Example:  throughline plan checkpoint llama-70b --gpus 1024 --on dgx-h100 --rows 2048
    """
    search, recipe = ask.make_search(gpus, options)
    run = ask.make_run(options, recipe, tokens=1e12)
    run = replace(run, save_s=save_seconds or 0.0, restart_s=restart_seconds, repair_days=repair_days)
    best, told = ask.fitting(search).best[0], bool(options["target_tokens"])
    console.result(*report.checkpoint_facts(search, best, run, told))


@command.command()
@together(*ask.MODEL, *ask.RUN, *ask.MACHINES)
@option(
    "--option choices",
    None,
    "One of the choices, with a price of a chip and hour if it is not the list's. Two to five times.",
    multiple=True,
    required=True,
    metavar="CHIPS:CLUSTER[:PRICE]",
)
@option("--by", click.Choice(["cost", "days", "energy"]), "What decides the best.", "cost")
@option("--out", PATH, "Write the page as an artifact: compare.html and JSON.")
@throughline_command
def compare(choices: tuple[str, ...], by: str, out: Path | None, **options: Any) -> None:
    """Two to five choices of chips side by side: time, money, energy, memory and risk of the whole run.

    \b
    Example:  throughline plan compare llama-70b --rows 1024 --target-tokens 1e12
              --option 512:dgx-h100 --option 1024:dgx-a100-80gb --option 256:dgx-b200
    """
    if not 2 <= len(choices) <= 5:
        raise WrongUse(f"{len(choices)} choices", where="--option", fix="two to five")
    if not options["target_tokens"]:
        raise WrongUse("a whole run has tokens", where="--target-tokens", fix="--target-tokens 1e12")
    if options["price"] is not None:
        raise WrongUse("which choice has this price?", where="--price", fix="--option CHIPS:CLUSTER:PRICE")
    found: list[tuple[str, Search, Candidate, Run]] = []
    for text in choices:
        chips, on, price = read_choice(text)
        search, recipe = ask.make_search(chips, options | {"price": price}, on)
        found.append((text, search, ask.fitting(search).best[0], ask.make_run(options, recipe)))
    facts, lines = compared(found, by)
    if out:
        write_comparison(out, facts | {"model": options["model"]})
        lines += ["", f"page in {out}: open {out / 'compare.html'}"]
    console.result(facts, lines)


def read_choice(text: str) -> tuple[int, str, float | None]:
    """Chips, cluster and price of `64:dgx-h100:2.5`. Raises WrongUse."""
    found = re.fullmatch(r"0*(\d{1,7}):([^:]+)(?::(\d+\.?\d*|\.\d+))?", text, re.ASCII)
    chips, on, price = found.groups() if found else ("0", "", None)
    if not 1 <= int(chips) <= ask.MOST_CHIPS or float(price or 0) > 1e4:
        fix = f"CHIPS:CLUSTER[:PRICE], chips from 1 to {ask.MOST_CHIPS}, a price from 0 to 10000"
        raise WrongUse(f"{text!r} is no choice", where="--option", fix=fix)
    return int(chips), on, None if price is None else float(price)


@command.command()
@flag("--rows all_rows", "Print every row, not only the tables.")
@option(
    "--own",
    PATH,
    "Replay instead the predictions in this folder, which were written before their measurement "
    "(default: benchmarks/results/predictions).",
    is_flag=False,
    flag_value="benchmarks/results/predictions",
)
@throughline_command
def validate(all_rows: bool, own: Path | None) -> None:
    """Replay every published measurement in planner/published: predicted, reported and error.

    \b
    Example:  throughline plan validate
              throughline plan validate --own
    """
    if own and all_rows:
        raise WrongUse("own predictions are all printed", where="--rows", fix="leave it out beside --own")
    facts, lines, good = own_validation(own) if own else validation(all_rows)
    console.result(facts, lines)
    if not good:
        raise Failed("a goal of accuracy is missed", where=own or "planner/published", fix="see the table")


@command.command()
@click.argument("model")
@ask.on_option
@option(
    "--length", ask.COUNT, "Number of tokens in a request (default: 128, or the model's if it has fewer)."
)
@option("--new-tokens", click.IntRange(0, 2**24), "For a GPT: number of tokens generated per request.")
@option(
    "--precision",
    click.Choice(["int8", "fp8", "fp16", "bf16", "fp32"]),
    "Precision of the weights and products (default: fp16, or bf16 where the chip has no fp16).",
)
@option(
    "--tensor",
    click.IntRange(1, 64),
    "Number of cards that share one copy (default: those that serve most for each).",
)
@option("--p99 p99_ms", ask.Amount(0, 1e9), "Milliseconds in which 99 of 100 answers come (default: any).")
@option("--qps", ask.Amount(0, 1e9), "Number of requests per second that must be served (default: any).")
@together(*ask.MACHINES)
@throughline_command
def serve(model: str, on: str, hardware: Path | None, price: float | None, **asked: Any) -> None:
    """Latency and throughput of MODEL (a preset or a directory of weights) in an engine, by batch; cost of a load.

    \b
    Example:  throughline plan serve bert-base --on t4 --length 128 --p99 10 --qps 2000
              throughline plan serve llama-70b --on dgx-h100 --length 2048 --new-tokens 256 --qps 20
    """
    given = {name: value for name, value in asked.items() if value is not None}
    facts = plan_service(ask.named_shape(model), ask.priced_cluster(on, hardware, price), **given)
    console.result(facts, service_lines(model, facts))


def service_lines(model: str, facts: dict[str, Any]) -> list[str]:
    """The plan of a service in words."""
    new, best = facts["new_tokens"], facts["best"]
    header = ["batch", "ms", "first token ms", "requests/s", "GiB"]
    header[3:3] = ["next token ms", "tokens/s"] if new else []
    rows = []
    for row in facts["rows"]:
        cells = [row["batch"], f"{row['seconds'] * 1e3:,.2f}", f"{row['first_token_seconds'] * 1e3:,.2f}"]
        if new:
            cells += [f"{row['next_token_seconds'] * 1e3:,.2f}", f"{row['tokens_per_second']:,.0f}"]
        rows.append((*cells, f"{row['per_second']:,.4g}", f"{row['bytes'] / 2**30:,.2f}"))
    shared = f", {best['tensor']} cards a copy" if best["tensor"] > 1 else ""
    asked = f"{facts['length']} tokens" + (f" and {new} new ones" if new else "")
    first = f"{model}, {asked}, {facts['precision']}, on {facts['cluster']}{shared}"
    lines = [first, "", *console.table(header, rows)]
    load = f" for {facts['qps']:,g} requests/s" if facts["qps"] else ""
    lines += ["", f"best batch {best['batch']}; copies{load}: {facts['copies']}; cards: {facts['cards']}"]
    if facts["cost_per_million"]:
        whole = f"{facts['cost_per_million']:,.2f} {facts['currency']} a million requests"
        each = f"{facts['cost_per_million_tokens']:,.3g} a million {'new ' if new else ''}tokens"
        lines.append(f"{whole}, {each} ({facts['priced']})")
    return lines
