"""What the forms of `plan` on layouts share: options with their ranges, the search, and its best layout's recipe."""

import dataclasses
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ..core.errors import Failed, WrongUse
from ..core.recipe import build_recipe, dump_toml, load_recipe, parse_override, shipped_recipes
from ..models.config import BERTConfig, ModelConfig, family_of, preset, preset_names
from ..planner.hardware import Cluster, find_cluster, require_network, this_machine
from ..planner.run import Ramp, Run, grid_intensity, run_facts
from ..planner.search import Candidate, Found, Search, candidate_at, enumerate_layouts, find_or_offload
from ..planner.traffic import with_compression
from ..planner.work import AXES, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS, Work, find_software
from ..train.recipes.new_recipe import usual_sections
from ..train.recipes.recipe import Recipe
from ..train.recipes.resolved import model_config, resolve, shape_of
from ..train.recipes.rules import RULES
from .common import flag, option, set_option

MOST_CHIPS = 2**20
CHIPS, COUNT = click.IntRange(1, MOST_CHIPS), click.IntRange(1, 2**24)


class Amount(click.FloatRange):
    """A finite number in a range: nan compares with nothing, and would pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


SHARE = Amount(0, 1, min_open=True)
on_option = option(
    "--on", None, "Chip or cluster, for example a100-80gb, dgx-2h, aws-p5.48xlarge or here.", required=True
)
gpus_option = option("--gpus", CHIPS, "Number of chips.", required=True)
MACHINES = (
    option(
        "--hardware",
        click.Path(exists=True, path_type=Path),
        "TOML file with chips and clusters of your own, [chips.KEY] and [clusters.KEY].",
    ),
    option("--price", Amount(0, 1e4), "Price of a chip and hour (default: the cluster's list price)."),
)
MODEL = (
    click.argument("model"),
    option("--rows", COUNT, "Number of rows in an optimizer step (default: the recipe's, or 512)."),
    option("--length", COUNT, "Number of tokens in a row (default: the recipe's, or the model's)."),
    option(
        "--precision",
        click.Choice(PRECISIONS),
        "Precision of products; fp8 and narrower for the blocks' alone (default: the recipe's, or 16 bits).",
    ),
    option(
        "--predicted",
        SHARE,
        "For a BERT: share of positions that get logits (default: the recipe's masked share, or 0.15).",
    ),
    option("--fill", SHARE, "Share of a row's tokens that are no padding, where padding is left out.", 1.0),
    option(
        "--layout fixed", None, "Parts of the layout held fixed, for example tensor=8,data=64,recompute=full."
    ),
    option("--software", None, "Name of the training program, one of planner/software.toml.", "throughline"),
    option("--optimizer", click.Choice(OPTIMIZERS), "Optimizer (default: the recipe's, or the program's)."),
    set_option("Override a field of the recipe, or model.overrides.KEY of a preset. Repeatable."),
)
RUN = (
    option("--target-tokens", Amount(0, 1e18), "Number of tokens in the whole run, for its days and cost."),
    option(
        "--ramp",
        None,
        "Batch that grows from START rows by STEP rows, whole after OVER rows (default: the recipe's, or none).",
        metavar="START,STEP,OVER",
    ),
    option(
        "--failures", Amount(0, 10, min_open=True), "Failures of a node in a day (default: published median)."
    ),
    flag("--production", "Count days 1.25 times, as long runs were reported beside benchmarks."),
    option("--grid", None, "Country, or grams of CO2 that a kWh causes, for the run's carbon."),
)


def priced_cluster(on: str, hardware: Path | None, price: float | None) -> Cluster:
    """The cluster of that name, at the price that was given."""
    cluster = find_cluster(on, hardware)
    if price is None:
        return cluster
    return dataclasses.replace(cluster, price_per_chip_hour=price, priced="--price")


def make_search(gpus: int, options: dict[str, Any], on: str = "") -> tuple[Search, Recipe | None]:
    """What was asked, from a recipe or from the name of a preset."""
    cluster = priced_cluster(on or options["on"], options["hardware"], options["price"])
    if cluster.device == "cpu":  # one processor and one memory, which all processes share
        price, priced = cluster.price_per_chip_hour, cluster.priced
        cluster = dataclasses.replace(this_machine(gpus), price_per_chip_hour=price, priced=priced)
    require_network(cluster, gpus)
    config, recipe, length, rows, precision = read_model(options)
    length, rows = options["length"] or length, options["rows"] or rows
    if length > config.sequence_length:
        config = dataclasses.replace(config, sequence_length=length)
    bert = isinstance(config, BERTConfig)
    if options["predicted"] is not None and not bert:
        raise WrongUse("only a BERT predicts a share of its positions", where="--predicted")
    masked = recipe.objective.mask_fraction if recipe is not None and recipe.objective else 0.15
    work = Work(config, rows, length, options["predicted"] or masked if bert else 1.0, options["fill"])
    asked = options["precision"] or precision
    where = "--precision" if options["precision"] else "train.precision of the recipe"
    software = find_software(options["software"], usable_precision(cluster, asked, where))
    if software.name == "throughline":
        software = dataclasses.replace(software, dropout=config.dropout > 0)
    if name := options["optimizer"] or (recipe and recipe.optimizer.name):
        software = software.with_optimizer(name, config, bool(recipe and recipe.optimizer.ema_decay))
    if recipe is not None and software.name == "throughline":
        if recipe.compression.scheme != "none":
            software = with_compression(software, config, recipe.compression.scheme, recipe.compression.rank)
        if recipe.train.compile == "off" and cluster.device != "cpu":
            software = software.uncompiled()
    software = software.on_processor() if cluster.device == "cpu" else software
    return Search(work, cluster, software, gpus, read_fixed(options["fixed"])), recipe


def named_shape(name: str, **fields: Any) -> ModelConfig:
    """The shape of a preset or of the weights in a directory, with other `fields`. Raises WrongUse for unknown ones."""
    if Path(name).is_dir() and (found := shape_of(name)):
        return type(found).from_dict(found.to_dict() | fields)
    return preset(name, **fields)


def read_model(options: dict[str, Any]) -> tuple[ModelConfig, Recipe | None, int, int, str]:
    """Config, recipe, length, rows and precision ("" where any will do) of a preset, weights or a recipe."""
    name = options["model"]
    if Path(name).is_dir() or (name in {*preset_names()} - {*shipped_recipes()} and not Path(name).is_file()):
        fields = {}
        for item in options["overrides"]:
            key, value = parse_override(item)
            if not key.startswith("model.overrides."):
                fix = "model.overrides.KEY=VALUE; every other field belongs to a recipe"
                raise WrongUse(f"{name} is no recipe and has no {key}", where="--set", fix=fix)
            fields[key.removeprefix("model.overrides.")] = value
        config = named_shape(name, **fields)
        return config, None, config.sequence_length, 512, ""
    loaded = load_recipe(name, Recipe, options["overrides"], RULES)
    recipe = resolve(loaded)
    if recipe.train.matmul == "fp8-emulated":
        why = "it rounds as fp8 and is slower than anything that is planned here"
        fix = "--set train.matmul=same"
        raise WrongUse("fp8-emulated has no plan", where="train.matmul", why=why, fix=fix)
    precision = "fp8" if recipe.train.matmul == "fp8" else str(loaded.train.precision)
    precision = precision.replace("auto", "")  # what the planned chip is made for, not this machine
    return model_config(recipe), recipe, recipe.train.sequence_length, recipe.train.rows_per_step, precision


def usable_precision(cluster: Cluster, precision: str, where: str) -> str:
    """The precision asked for, or the chip's 16 bits. Raises WrongUse for one that the chip cannot compute fast."""
    able = [name for name in PRECISIONS if name in cluster.chip.tflops]
    if precision and precision not in able:
        fix = f"--precision {' or '.join(able)}" if able else "tflops of the chip in the --hardware file"
        raise WrongUse(f"{cluster.chip.name} has no rate in {precision}", where=where, fix=fix)
    found = precision or next((name for name in ("bf16", "fp16", "fp32", *able) if name in able), "")
    if not found:
        raise WrongUse(f"{cluster.chip.name} has no rate in any of {', '.join(PRECISIONS)}", where="--on")
    return found


def read_fixed(text: str | None) -> dict[str, tuple[int, ...]]:
    """`tensor=8,recompute=full` as values of the search's axes. Raises WrongUse naming the axes and their ranges."""
    fixed: dict[str, tuple[int, ...]] = {}
    for item in filter(None, (text or "").split(",")):
        name, _, value = item.strip().partition("=")
        words = {"sharding": SHARDINGS, "recompute": RECOMPUTES, "offload": ("0", "1")}.get(name, ())
        whole = value.isascii() and value.isdigit() and not words and 1 <= int(value[:9]) <= MOST_CHIPS
        if name not in AXES or name in fixed or not (whole or value in words):
            ranges = f"one of {', '.join(words)}" if words else f"a whole number from 1 to {MOST_CHIPS}"
            fix = f"axes, each once: {', '.join(AXES)}" + (f"; {name} is {ranges}" if name in AXES else "")
            raise WrongUse(f"{item!r} fixes no axis", where="--layout", fix=fix)
        fixed[name] = (words.index(value) if words else int(value),)
    return fixed


def make_run(options: dict[str, Any], recipe: Recipe | None, tokens: float | None = None) -> Run:
    """The whole run that was asked about; of `tokens` where it need not be said."""
    ramp, told = read_ramp(options["ramp"]), options["target_tokens"]
    of_a_run = {"--ramp": ramp, "--grid": options["grid"] is not None, "--production": options["production"]}
    if tokens is None:
        of_a_run["--failures"] = options["failures"]
    for name, given in of_a_run.items():
        if given and not told:
            raise WrongUse("a whole run has tokens", where=name, fix="--target-tokens 300e9")
    if ramp is None and recipe is not None and (own := recipe.train.batch_ramp):
        ramp = own.start_rows, own.step_rows, own.over_rows
    grid = grid_intensity(options["grid"]) if options["grid"] is not None else 0.0
    failures = options["failures"] or 0.0
    return Run(told or tokens or 0.0, ramp, failures, production=options["production"], grid=grid)


def read_ramp(text: str | None) -> Ramp | None:
    """`32,32,5000000` as a growing batch. Raises WrongUse."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,11}),([1-9]\d{0,11}),([1-9]\d{0,11})", text.replace(" ", ""), re.ASCII)
    if found is None:
        raise WrongUse(f"{text!r} is no ramp", where="--ramp", fix="START,STEP,OVER in rows from 1 to 1e12")
    start, step, over = map(int, found.groups())
    return start, step, over


def fitting(search: Search) -> Found:
    """The layouts of a search. Raises Failed with the one that needs least, or with the rules that all break."""
    found = find_or_offload(search)
    if found.best:
        return found
    if not len(found.seconds):
        refused: Counter[str] = Counter()
        enumerate_layouts(search, refused)
        where = f"{search.world:,} chips, {search.work.rows:,} rows of {search.work.length:,} tokens"
        why = "\n".join(rule for rule, _ in refused.most_common(4))
        fix = "another number of chips, --rows that they divide, or fewer axes in --layout"
        raise Failed("no layout is legal", where=where, why=why, fix=fix)
    nearest = candidate_at(found.search, found.layouts.take(int(found.needed.argmin())))
    needed = f"{nearest.needed_bytes / 2**30:,.1f} of {found.capacity / 2**30:,.1f} GiB"
    if nearest.host_bytes:
        needed += f" and {nearest.host_bytes / 2**30:,.0f} GiB of host memory for each process"
    chip, why = found.search.cluster.chip.name, f"the layout that needs least needs {needed}"
    what = f"nothing fits on {found.search.world} x {chip}"
    fix = f"throughline plan recommend MODEL --on {found.search.cluster.chip.key}: the fewest chips that fit"
    raise Failed(what, where=nearest.describe(), why=why, fix=fix)


def planned_recipe(found: Found, recipe: Recipe | None, options: dict[str, Any]) -> str:
    """The best layout as a recipe that `recipe check` accepts: the given one with another layout, or a new one."""
    refused = []
    for best in found.best:  # the fastest that the rest of the recipe, such as its optimizer, can be had in
        try:
            return _recipe_text(found, best, recipe, options)
        except WrongUse as error:
            refused.append(error)
    raise refused[0]


def _recipe_text(found: Found, best: Candidate, recipe: Recipe | None, options: dict[str, Any]) -> str:
    search, work, layouts = found.search, found.search.work, best.layouts
    if recipe is None:
        steps = max(1, round((options["target_tokens"] or 1000 * work.tokens) / work.tokens))
        model = {"preset": options["model"], "family": family_of(work.config)}
        if work.length > work.config.sequence_length:
            model["overrides"] = {"sequence_length": work.length}
        if Path(options["model"]).is_dir():
            weights = shlex.quote(options["model"])
            fix = f"throughline recipe new --from {weights} --data tokens --machine cpu --out my.toml"
            raise WrongUse("a recipe is planned of a preset or a recipe", where="--write-recipe", fix=fix)
        tree = usual_sections(work.config, work.rows, work.length, steps)
        tree |= {"data": {"train": "tokens", "validation_fraction": 0.001}, "model": model}
        tree["train"]["steps"] = steps
        minutes = run_facts(search, best, make_run(options, None, steps * work.tokens))["save_every_minutes"]
        saves = tree["checkpoint"]
        saves["save_every_steps"] = min(saves["save_every_steps"], max(1, round(minutes * 60 / best.seconds)))
    else:
        tree = recipe.model_dump(mode="json", exclude_none=True)
        tree["train"].pop("batch_tokens", None)
    tree["train"] |= {
        "sequence_length": work.length,
        "batch_rows": work.rows,
        "micro_batch_rows": layouts.micro_rows,
        "precision": search.software.precision.compute,
        "recompute": RECOMPUTES[layouts.recompute],
        "offload": bool(layouts.offload),
    }
    tree["parallel"] = {key: value for key, value in best.layout().facts().items() if key != "world"}
    text = dump_toml(build_recipe(tree, Recipe, RULES, where="the planned recipe"))
    planned = f"{search.world} x {search.cluster.chip.name}: {best.describe()}"
    return f"# Planned for {planned}, {best.seconds:.3g} s a step predicted\n{text}"
