"""The rules of a training recipe that span fields: each returns its problems, and all are shown at once."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from ...core.errors import WrongUse
from ...core.recipe import Problem
from ...core.recipe_names import familiar
from ...models.config import BERTConfig, ModelConfig, family_of
from ...planner import layout as layouts
from .recipe import DataSection, ObjectiveSection, Recipe
from .resolved import is_text, micro_rows, model_config, model_family

FP8_TILE = 16  # what the sides of a factor are multiples of: torch's _scaled_mm, cuBLAS


def batch_rule(recipe: Recipe) -> Iterable[Problem]:
    """The batch is given once, in whole rows, and the micro-batch divides it."""
    train = recipe.train
    rows, tokens, length = train.batch_rows, train.batch_tokens, train.sequence_length
    if rows is None and tokens is None:
        yield Problem("train.batch_rows", "no batch is given", "set train.batch_rows or train.batch_tokens")
    elif tokens is not None and tokens % length:
        text = f"{tokens} tokens are no whole number of rows of {length}"
        yield Problem("train.batch_tokens", text, f"for example {max(tokens // length, 1) * length}")
    elif rows is not None and tokens not in (None, rows * length):
        text = f"{tokens} tokens contradict {rows} rows of {length}"
        yield Problem("train.batch_tokens", text, "give one of train.batch_rows and train.batch_tokens")
    elif train.rows_per_step % (micro := train.rows_per_micro_batch):
        batch = train.rows_per_step
        near = min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: abs(n - micro))
        text = f"{micro} does not divide the batch of {batch} rows"
        yield Problem("train.micro_batch_rows", text, f"for example {near}")


def ramp_rule(recipe: Recipe) -> Iterable[Problem]:
    """A batch that grows has whole micro-batches on every data process at every size, enough for its pipeline."""
    ramp, layout, train = recipe.train.batch_ramp, recipe.parallel.layout(), recipe.train
    if ramp is None:
        return
    growth = train.rows_per_step - ramp.start_rows
    if growth <= 0 or growth % ramp.step_rows:
        steps = f"from {ramp.start_rows} rows in steps of {ramp.step_rows}"
        text = f"{steps} does not come to {train.rows_per_step}"
        yield Problem("train.batch_ramp.step_rows", text, f"a divisor of {growth}")
        return
    unit = layout.data * micro_rows(recipe)
    for name, rows in (("start_rows", ramp.start_rows), ("step_rows", ramp.step_rows)):
        if rows % unit:
            text = f"{rows} rows are no whole micro-batches on each of {layout.data} data processes"
            yield Problem(f"train.batch_ramp.{name}", text, f"a multiple of {unit}")
    takes_fewer = layout.pipeline == 1 or layout.schedule in ("gpipe", "1f1b")
    if not takes_fewer and ramp.start_rows < unit * layout.stages:
        text = f"{ramp.start_rows // unit} micro-batches at first for {layout.stages} stages of {layout.schedule}"
        yield Problem("train.batch_ramp.start_rows", text, 'parallel.schedule = "1f1b", which takes fewer')


def schedule_rule(recipe: Recipe) -> Iterable[Problem]:
    """Warm-up ends before the run does, and warm-up and decay fit in it. While the batch grows the schedule counts
    whole batches, of which the run has fewer than steps.
    """
    schedule, train, ramp = recipe.schedule, recipe.train, recipe.train.batch_ramp
    warmup, decay = schedule.warmup_steps, schedule.decay_steps or 0
    steps, unit = train.steps, f"train.steps = {train.steps}"
    if ramp is not None:
        growth = train.rows_per_step - ramp.start_rows
        if growth <= 0 or growth % ramp.step_rows:
            return  # `ramp_rule` and `batch_rule` say what is wrong
        steps = train.rows_before(train.steps) // train.rows_per_step
        unit = f"the {steps} whole batches that train.steps = {train.steps} come to while the batch grows"
    # counted from the first step, the decay contains the warm-up
    before_decay = 0 if schedule.decay_from_start and schedule.kind != "wsd" else warmup
    if warmup >= steps:
        yield Problem("schedule.warmup_steps", f"{warmup} is not below {unit}", f"for example {steps // 20}")
    elif before_decay + decay > steps:
        text = f"{decay} of decay is" if not before_decay else f"{warmup} of warm-up and {decay} of decay are"
        yield Problem("schedule.decay_steps", f"{text} more than {unit}", f"at most {steps - before_decay}")


def family_rule(recipe: Recipe) -> Iterable[Problem]:
    """Fields that belong to one family stay with it."""
    family = model_family(recipe)
    if family == "gpt" and recipe.objective is not None:
        text = "belongs to BERT; a GPT predicts the next token"
        yield Problem("objective", text, "leave it out or set model.family")
    if family == "bert" and recipe.train.z_loss:
        yield Problem("train.z_loss", "belongs to GPT", "train.z_loss = 0")
    if family == "bert" and (recipe.data.separate_documents or recipe.data.packing != "windows"):
        key = "data.separate_documents" if recipe.data.separate_documents else "data.packing"
        fix = "for BERT, objective.packing fits pairs together and keeps them apart"
        yield Problem(key, "belongs to GPT", fix)


def data_rule(recipe: Recipe) -> Iterable[Problem]:
    """There is something to train on, and to validate on when evaluation is asked for."""
    if not recipe.data.sources() or not all(source.path for source in recipe.data.sources()):
        fix = "--set data.train=DIRECTORY; make one with: throughline data tokenize; "
        fix += "or name files of text"
        yield Problem("data.train", "no token store", fix)
    weights = [source.weight for source in recipe.data.sources()]
    if None in weights and any(weights):
        unweighted = next(source.path for source in recipe.data.sources() if source.weight is None)
        fix = "give every store a weight, or none: each is then read in proportion to its size"
        yield Problem("data.train", f"{unweighted} has no weight, and another store has one", fix)
    reading = ("documents", "field", "split", "unwrap", "skip_front_matter")
    of_text = [key for key in reading if _is_changed(recipe.data, key)]
    has_text = recipe.data.tokenizer or any(is_text(source.path) for source in recipe.data.sources())
    if of_text and not has_text:
        text = f"{' and '.join(of_text)} belongs to text, and these are token stores"
        yield Problem(f"data.{of_text[0]}", text, "leave it out, or name text in data.train")
    measured = recipe.data.validation or recipe.data.validation_fraction or recipe.evaluation.tasks
    if recipe.train.eval_every_steps and not measured:
        fix = "set data.validation_fraction or data.validation"
        yield Problem("train.eval_every_steps", "there is no validation split", fix)


def _is_changed(section: DataSection, key: str) -> bool:
    return getattr(section, key) != type(section).model_fields[key].default


def model_rule(recipe: Recipe) -> Iterable[Problem]:
    """The preset exists, its fields can be set, the shape can be built, holds a row and suits the other sections."""
    try:
        config = model_config(recipe)
    except WrongUse as error:
        key = "model.preset" if error.where.endswith("presets.toml") else error.where or "model"
        if "has no field" in error.what:
            key = key.replace("model.", "model.overrides.")
        text = ": ".join(filter(None, (error.what, error.why.replace("\n", "; "))))
        theirs = familiar(key.removeprefix("model.overrides."), ("model.overrides", "train.sequence_length"))
        yield Problem(key, text, f"it is {theirs} here" if theirs else error.fix)
        return
    if recipe.model.family and recipe.model.family != family_of(config):
        text = f"preset {recipe.model.preset} is a {family_of(config)}"
        yield Problem("model.family", text, "leave model.family out")
    length, positions = recipe.train.sequence_length, config.sequence_length
    if positions < length:
        text = f"{length} is more than the model's {positions} positions"
        fix = f"at most {positions}, or set model.overrides.sequence_length"
        yield Problem("train.sequence_length", text, fix)
    if isinstance(config, BERTConfig):
        sentences = (recipe.objective or ObjectiveSection()).sentences
        if sentences != "none" and not (config.nsp and config.token_types >= 2):
            text = f"{sentences} needs a model with nsp and two token types"
            yield Problem("objective.sentences", text, 'set it to "none"')
    for rule in (width_rule, parallel_rule, products_rule, expert_rule):
        yield from rule(recipe, config)


def width_rule(recipe: Recipe, config: ModelConfig) -> Iterable[Problem]:
    """muP is for AdamW and new weights of a dense GPT, whose output matrix begins smaller than its table."""
    key, shape = "model.base_width", getattr(config, "tied", True) or getattr(config, "experts", 0)
    if recipe.model.base_width and shape:
        yield Problem(key, "it is for a GPT with tied = false and no experts", "base_width = 0")
    if recipe.model.zero_projections and recipe.model.init_from:
        yield Problem("model.zero_projections", "it is for new weights", "zero_projections = false")
    if recipe.model.base_width and (recipe.optimizer.name != "adamw" or recipe.model.init_from):
        yield Problem(key, "it is for AdamW and new weights", "base_width = 0")


def parallel_rule(recipe: Recipe, config: ModelConfig) -> Iterable[Problem]:
    """The degrees fit the model and the batch, and one another."""
    layout = recipe.parallel.layout()
    rows, micro = recipe.train.rows_per_step, micro_rows(recipe)
    batch = recipe.train.sequence_length, rows, micro
    problems = layouts.layout_problems(layout, config, *batch)
    last = next((found for found in reversed(problems) if found.field in layouts.AXES), None)
    for found in problems:
        key, fix = found.field if "." in found.field else f"parallel.{found.field}", found.fix
        if found is last:  # the degrees are judged together
            others = layouts.nearest_layouts(
                layout, layout.world, config, *batch, partial(can_be_had, recipe)
            )
            near = [layouts.set_options(layout, other) for other in others]
            nearest = f"{layout.product()}, nearest that fit: {' or '.join(near) or 'none'}"
            fix = "; ".join(filter(None, (fix, nearest)))
        yield Problem(key, found.text, fix)


def spread_rule(recipe: Recipe) -> Iterable[Problem]:
    """What else the recipe asks for can be had in its layout, and nothing of it is known to be wrong there."""
    layout, rows, micro = recipe.parallel.layout(), recipe.train.rows_per_step, micro_rows(recipe)
    if layout.schedule in layouts.ZERO_BUBBLE and recipe.train.compile == "on":
        text = f"{layout.schedule} takes the gradients of inputs and weights apart, a compiled backward has them in one"
        yield Problem("train.compile", text, 'leave it at "auto", or parallel.schedule = "1f1b"')
    halves = recipe.train.precision in ("bf16", "fp16")
    if recipe.train.offload and layout.pipeline > 1:
        text = "the gradients of a pipeline's micro-batches would be added in 16 bits"
        fix = 'parallel.pipeline = 1: with sharding = "full" data processes share a model as well'
        yield Problem("train.offload", text, fix)
    elif recipe.train.offload and layout.world > 1 and halves and micro * layout.data != rows:
        text = f"gradients of {rows // (micro * layout.data)} micro-batches would be added in 16 bits"
        fix = f"train.micro_batch_rows = {rows // layout.data}; train.recompute makes room for it"
        yield Problem("train.offload", text, fix)
    if recipe.optimizer.name == "muon" and recipe.train.offload and (layout.tensor > 1 or layout.shards > 1):
        text = "muon puts cut matrices together on the devices, and offload has them on the host"
        yield Problem("optimizer.name", text, 'name = "adamw"')
    if recipe.optimizer.name in ("lamb", "adafactor") and recipe.train.offload:
        text = f"{recipe.optimizer.name} needs norms of whole tensors, and offload updates them one by one"
        yield Problem("train.offload", text, 'optimizer.name = "adamw"')


def products_rule(recipe: Recipe, config: ModelConfig) -> Iterable[Problem]:
    """fp8 products have bf16 weights, and matrices of whole tiles on each tensor process."""
    train = recipe.train
    if train.matmul == "same":
        return
    if train.precision not in ("auto", "bf16"):
        text = f"fp8 products are made of bf16 weights, and train.precision is {train.precision}"
        yield Problem("train.matmul", text, 'train.precision = "bf16"')
    parts, kv_heads = recipe.parallel.tensor, config.key_value_heads
    sizes = {
        "width": (config.width, 1),
        "mlp_width": (config.feed_forward_size, parts),
        "heads": (config.heads * config.head_size, parts),
        "kv_heads": (2 * kv_heads * config.head_size, parts if kv_heads > 1 else 1),
    }
    for name, (size, parts) in sizes.items():
        tile = FP8_TILE * parts
        if size % tile:
            cut = f" for {parts} tensor processes" if parts > 1 else ""
            text = f"fp8 products are of multiples of {FP8_TILE}, and {name} makes a matrix of {size}{cut}"
            near = max(round(size / tile), 1) * tile
            yield Problem(f"model.overrides.{name}", text, f'{near} fits, or train.matmul = "same"')


def expert_rule(recipe: Recipe, config: ModelConfig) -> Iterable[Problem]:
    """What is not there yet for a model of experts."""
    if not getattr(config, "experts", 0):
        return
    if (name := recipe.optimizer.name) != "adamw":
        text = f"{name} takes the stacked matrices of experts for one"
        yield Problem("optimizer.name", text, 'name = "adamw"')
    if recipe.train.matmul != "same":
        yield Problem("train.matmul", "products of experts are not made in fp8", 'train.matmul = "same"')
    if recipe.train.offload:
        yield Problem("train.offload", "experts are not proven with offload", "train.offload = false")
    if recipe.compression.scheme != "none":
        yield Problem("compression.scheme", "experts are not proven with it", 'scheme = "none"')


def wrong_processes(recipe: Recipe, config: ModelConfig, processes: int) -> WrongUse:
    """The error of processes that are not as many as the layout's, with the nearest layouts that can be had."""
    train, layout = recipe.train, recipe.parallel.layout()
    batch = train.sequence_length, train.rows_per_step, train.rows_per_micro_batch
    return layouts.wrong_world(layout, processes, config, *batch, partial(can_be_had, recipe))


def can_be_had(recipe: Recipe, layout: layouts.Layout, micro: int) -> bool:
    """Whether the optimizer, offload and compression of a recipe can be had in another layout."""
    update = asdict(layout) | {"layers_per_stage": list(layout.layers_per_stage)}
    parallel = recipe.parallel.model_copy(update=update)
    train = recipe.train.model_copy(update={"micro_batch_rows": micro, "compile": "auto"})
    other = recipe.model_copy(update={"parallel": parallel, "train": train})
    return not any(list(rule(other)) for rule in (spread_rule, compression_rule))


def compression_rule(recipe: Recipe) -> Iterable[Problem]:
    """Compression is for whole copies of a model; 1-bit Adam is an optimizer, for data processes alone."""
    scheme, parallel, key = recipe.compression.scheme, recipe.parallel, "compression.scheme"
    if scheme == "none":
        return
    if parallel.data == 1:
        yield Problem(key, "one data process sends no gradients", 'set it to "none", or parallel.data')
    if parallel.sharding != "replicated":
        text = f"{parallel.sharding} sums gradients by itself"
        yield Problem(key, text, 'parallel.sharding = "replicated"')
    if scheme != "one-bit-adam":
        return
    if recipe.optimizer.name != "adamw":
        yield Problem(key, f"{scheme} is AdamW, not {recipe.optimizer.name}", 'optimizer.name = "adamw"')
    if recipe.train.offload:
        yield Problem(key, f"{scheme} updates where its sums are", '"bf16" and "powersgd" work with offload')
    if parallel.tensor * parallel.pipeline * parallel.context > 1:
        text = f"{scheme} works with data processes alone"
        yield Problem(key, text, '"bf16" and "powersgd" work in any layout')
    if not recipe.compression.warmup(recipe.train.steps):
        text, fix = "the variance needs steps to form", "at least 1, usually 15 % of the run"
        yield Problem("compression.warmup_steps", text, fix)


def evaluation_rule(recipe: Recipe) -> Iterable[Problem]:
    """Tasks are scored at steps that have an evaluation, and a target is looked at by evaluations with its figure."""
    every, usual = recipe.evaluation.every_steps, recipe.train.eval_every_steps
    if recipe.evaluation.tasks and every and (not usual or every % usual):
        text = f"{every} is no multiple of train.eval_every_steps = {usual}"
        yield Problem("evaluation.every_steps", text, f"train.eval_every_steps = {every}")
    if recipe.target is None:
        return
    if not usual:
        text = "no evaluation would look at it"
        yield Problem("target.figure", text, f"train.eval_every_steps = {max(recipe.train.steps // 20, 1)}")
    family, figure = model_family(recipe), recipe.target.figure
    if (figure == "loss") != (family == "gpt"):
        fix = '"loss"' if family == "gpt" else '"mlm_accuracy" or "mlm_loss"'
        yield Problem("target.figure", f"a {family} has no {figure}", fix)


RULES = (
    batch_rule,
    ramp_rule,
    schedule_rule,
    family_rule,
    data_rule,
    model_rule,
    spread_rule,
    compression_rule,
    evaluation_rule,
)
