"""`throughline plan`: what fits, which layout is best, how long it takes and what it costs, before it is paid for."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core import console
from ..core.errors import Failed, WrongUse
from ..core.recipe import load_recipe, shipped_recipes
from ..models.presets import preset, preset_names
from ..planner.constants import constants_here
from ..planner.hardware import find_cluster, read_calibration, this_machine
from ..planner.report import explain as explained
from ..planner.report import pareto_lines, ranked
from ..planner.search import Found, Search, candidate_at, fewest_chips, find_or_offload
from ..planner.serve import plan_service
from ..planner.software import PROCESSOR_RUNTIME_BYTES, find_software, on_processor
from ..planner.view import days_by_chips, write_plan
from ..planner.work import AXES, RECOMPUTES, SHARDINGS, Work
from ..prove.own import own_validation
from ..prove.validate import validation
from .common import throughline_command

if TYPE_CHECKING:
    from ..train.recipes.recipe import Recipe


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


own_hardware = click.option(
    "--hardware",
    type=click.Path(exists=True, path_type=Path),
    help="TOML file with chips and clusters of your own, [chips.KEY] and [clusters.KEY].",
)
number_of_chips = click.option("--gpus", type=click.IntRange(1), required=True, help="Number of chips.")
QUESTION = (
    click.argument("model"),
    click.option(
        "--on",
        required=True,
        help="Chip or cluster, for example a100-80gb, dgx-2h, aws-p5.48xlarge or here.",
    ),
    click.option(
        "--rows",
        type=int,
        help="Number of rows in an optimizer step (default: the recipe's, or 512).",
    ),
    click.option(
        "--length",
        type=int,
        help="Number of tokens in a row (default: the recipe's, or the model's).",
    ),
    click.option(
        "--precision",
        help="Precision of products: fp32, tf32, fp16 or bf16 (default: the recipe's, or the chip's 16 bits).",
    ),
    click.option(
        "--predicted",
        type=float,
        help="For a BERT: share of positions that get logits (default: the recipe's masked share, or 0.15).",
    ),
    click.option(
        "--fill",
        type=float,
        default=1.0,
        help="Share of a row's tokens that are no padding, where padding is left out.",
    ),
    click.option(
        "--layout",
        "fixed",
        default="",
        show_default=False,
        help="Parts of the layout to hold fixed, for example tensor=8,data=64,recompute=full (default: none).",
    ),
    click.option(
        "--software",
        default="throughline",
        help="Name of the training program, as planner/software.toml describes it.",
    ),
    own_hardware,
    click.option(
        "--target-tokens",
        default=0.0,
        show_default=False,
        help="Number of tokens in the whole run, for its days and cost.",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Override a field of the recipe. Repeatable.",
    ),
)


def question(function: Any) -> Any:
    """The options that describe the model, the batch and the machines, shared by all commands on layouts."""
    for option in reversed(QUESTION):
        function = option(function)
    return function


def make_search(gpus: int, options: dict[str, Any]) -> "tuple[Search, Recipe | None]":
    """What was asked, from a recipe or from the name of a preset."""
    cluster = find_cluster(options["on"], options["hardware"])
    recipe, rows, length, precision = None, options["rows"] or 512, options["length"], options["precision"]
    is_recipe = Path(options["model"]).is_file() or options["model"] in shipped_recipes()
    if options["model"] in preset_names() and not is_recipe:
        config = preset(options["model"])
        if length and length > config.sequence_length:
            config = dataclasses.replace(config, sequence_length=length)
        length = length or config.sequence_length
    else:
        from ..train.recipes.recipe import Recipe, model_config, resolve
        from ..train.recipes.rules import RULES

        loaded = load_recipe(options["model"], Recipe, options["overrides"], RULES)
        recipe = resolve(loaded)
        config, length = model_config(recipe), length or recipe.train.sequence_length
        rows = options["rows"] or recipe.train.rows_per_step
        if loaded.train.precision != "auto":  # else what the planned chip is made for, not this machine
            precision = precision or loaded.train.precision
    dtypes = cluster.chip.tflops
    precision = precision or ("bf16" if "bf16" in dtypes else "fp16" if "fp16" in dtypes else "fp32")
    predicted = options["predicted"]
    if predicted is None:
        predicted = recipe.objective.mask_fraction if recipe is not None and recipe.objective else 0.15
    work = Work(config, rows, length, predicted, options["fill"])
    software = find_software(options["software"], precision)
    if software.name == "throughline":
        software = dataclasses.replace(software, dropout=config.dropout > 0)
    measured = read_calibration() if cluster.key == "here" else {}
    if cluster.chip.key == "cpu":  # one processor and one memory, which all processes share
        cluster = this_machine(gpus)
        software = on_processor(software, measured.get("runtime_bytes", PROCESSOR_RUNTIME_BYTES))
    fixed = read_fixed(options["fixed"])
    return Search(work, cluster, software, gpus, fixed, constants_here(measured), bool(measured)), recipe


def read_fixed(text: str) -> dict[str, tuple[int, ...]]:
    """`tensor=8,recompute=full` as values of the search's axes. Raises WrongUse naming the axes."""
    fixed: dict[str, tuple[int, ...]] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.strip().partition("=")
        words = {"sharding": SHARDINGS, "recompute": RECOMPUTES}.get(name, ())
        if name not in AXES or not (value.isdigit() or value in words):
            fix = f"axes: {', '.join(AXES)}" + (f"; {name} is one of {', '.join(words)}" if words else "")
            raise WrongUse(f"{item!r} fixes no axis", where="--layout", fix=fix)
        fixed[name] = (words.index(value) if value in words else int(value),)
    return fixed


def fitting(search: Search) -> Found:
    """The layouts of a search. Raises Failed, with the layout that needs least, when nothing fits."""
    found = find_or_offload(search)
    if found.best:
        return found
    if not len(found.seconds):
        raise Failed(
            "no layout is legal",
            where=f"{found.search.world} chips",
            fix="another number of chips, or --rows that they divide",
        )
    nearest = candidate_at(found.search, found.layouts.take(int(found.needed.argmin())))
    needed = f"{nearest.needed_bytes / 2**30:,.1f} of {found.capacity / 2**30:,.1f} GiB"
    if nearest.host_bytes:
        needed += f" and {nearest.host_bytes / 2**30:,.0f} GiB of host memory for each process"
    raise Failed(
        f"nothing fits on {found.search.world} x {found.search.cluster.chip.name}",
        where=nearest.describe(),
        why=f"the layout that needs least needs {needed}",
        fix="throughline plan recommend names the fewest chips that fit",
    )


@command.command()
@question
@number_of_chips
@click.option(
    "--write-recipe", type=click.Path(path_type=Path), help="Write a recipe in the best layout to this file."
)
@click.option(
    "--pareto", is_flag=True, help="Also print days against numbers of chips; needs --target-tokens."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the plan as an artifact: plan.html, JSON, CSV and a trace.",
)
@throughline_command
def layouts(gpus: int, write_recipe: Path | None, pareto: bool, out: Path | None, **options: Any) -> None:
    """Rank the layouts of MODEL (a recipe or a preset) on a number of chips.

    \b
    Example:  throughline plan gpt-1t-deepspeed --gpus 800 --on v100-32gb --rows 2048
    """
    search, recipe = make_search(gpus, options)
    found = fitting(search)
    facts, lines = ranked(found, options["target_tokens"])
    if write_recipe:
        from .planned_recipe import planned_recipe

        write_recipe.write_text(planned_recipe(found, recipe, options), encoding="utf-8")
        lines += ["", f"recipe in the best layout: {write_recipe}"]
    if pareto:
        lines += ["", *pareto_lines(days_by_chips(found, options["target_tokens"]))]
    if out:
        write_plan(out, found, facts, options["target_tokens"])
        lines += ["", f"plan in {out}: open {out / 'plan.html'}"]
    console.result(facts, lines)


@command.command()
@question
@number_of_chips
@throughline_command
def explain(gpus: int, **options: Any) -> None:
    """Where the time and the memory of the best layout go; with --layout, of that one.

    \b
    Example:  throughline plan explain gpt3-13b --gpus 64 --on a100-80gb --layout tensor=8,data=8
    """
    search, _ = make_search(gpus, options)
    console.result(*explained(search, fitting(search).best[0], options["target_tokens"]))


@command.command()
@question
@click.option(
    "--target-days",
    default=0.0,
    show_default=False,
    help="Days that --target-tokens may take (default: any, the model only has to fit).",
)
@click.option("--max-gpus", "--most", type=int, default=8192, help="Maximum number of chips to try.")
@throughline_command
def recommend(target_days: float, max_gpus: int, **options: Any) -> None:
    """The fewest chips on which MODEL fits, or that meet --target-days for --target-tokens.

    \b
    Example:  throughline plan recommend gpt-1t-megatron --on a100-40gb --rows 3072
    """
    if target_days and not options["target_tokens"]:
        raise WrongUse("days of how many tokens?", where="--target-days", fix="--target-tokens 300e9")
    search, _ = make_search(1, options)
    node = search.cluster.chips_per_node
    worlds = [*(n for n in (1, 2, 4, 8, 16) if n < node), *range(node, max_gpus + 1, node)]
    found = fewest_chips(search, worlds, target_days, options["target_tokens"])
    if found is None:
        raise Failed(
            f"not on up to {max_gpus} chips",
            where=search.cluster.name,
            fix="--max-gpus a larger number, or other chips: --on",
        )
    facts, lines = ranked(found, options["target_tokens"])
    console.result(facts, [f"fewest: {found.search.world} chips, in whole machines of {node}", *lines])


@command.command()
@click.option("--rows", "all_rows", is_flag=True, help="Print every row, not only the tables.")
@click.option(
    "--own",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value="benchmarks/results/predictions",
    help="Replay instead the predictions in this folder, which were written before their measurement "
    "(default: benchmarks/results/predictions).",
)
@throughline_command
def validate(all_rows: bool, own: Path | None) -> None:
    """Replay every published measurement in planner/published: predicted, reported and error.

    \b
    Example:  throughline plan validate
              throughline plan validate --own
    """
    facts, lines, good = own_validation(own) if own else validation(all_rows)
    console.result(facts, lines)
    if not good:
        raise Failed("a goal of accuracy is missed", where=own or "planner/published", fix="see the table")


@command.command()
@click.argument("model")
@click.option("--on", required=True, help="Chip or rented machine, for example t4, l4 or aws-g4dn.xlarge.")
@click.option(
    "--length", type=int, help="Number of tokens in a request (default: 128, or the model's if it has fewer)."
)
@click.option(
    "--new-tokens", default=0, show_default=False, help="For a GPT: number of tokens generated per request."
)
@click.option(
    "--precision",
    type=click.Choice(["int8", "fp8", "fp16", "bf16", "fp32"]),
    default="fp16",
    help="Precision of the weights and products.",
)
@click.option(
    "--p99",
    default=0.0,
    show_default=False,
    help="Milliseconds within which 99 of 100 requests must be answered (default: any).",
)
@click.option(
    "--qps",
    default=0.0,
    show_default=False,
    help="Number of requests per second that must be served (default: any).",
)
@own_hardware
@throughline_command
def serve(
    model: str,
    on: str,
    length: int | None,
    new_tokens: int,
    precision: str,
    p99: float,
    qps: float,
    hardware: Path | None,
) -> None:
    """Latency and throughput of the preset MODEL in an engine, by batch; cards and cost of a load.

    \b
    Example:  throughline plan serve bert-base --on t4 --length 128 --p99 10 --qps 2000
    """
    config, cluster = preset(model), find_cluster(on, hardware)
    length = length or min(128, config.sequence_length)
    facts = plan_service(config, cluster, length, new_tokens, precision, p99, qps)
    rows = [
        (row["batch"], f"{row['seconds'] * 1e3:,.2f}", f"{row['first_token_seconds'] * 1e3:,.2f}",
         f"{row['per_second']:,.0f}", f"{row['bytes'] / 2**30:,.2f}")
        for row in facts["rows"]
    ]  # fmt: skip
    new = f" and {new_tokens} new ones" if new_tokens else ""
    lines = [f"{model}, {length} tokens{new}, {precision}, on {cluster.name}", ""]
    lines += console.table(("batch", "ms", "first token ms", "requests/s", "GiB"), rows)
    load = f" for {qps:,g} requests/s" if qps else ""
    lines += ["", f"best batch {facts['best']['batch']}; cards{load}: {facts['cards']}"]
    if facts["cost_per_million"]:
        lines += [
            f"{facts['cost_per_million']:,.2f} {facts['currency']} a million requests ({facts['priced']})"
        ]
    console.result(facts, lines)
