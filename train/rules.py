"""The rules of a training recipe that span fields: each returns its problems, and all are shown at once.

The planner and `recipe check` use the same list.
"""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from ..core.errors import WrongUse
from ..core.recipe import Problem
from ..models.config import BERTConfig, family_of
from ..planner.layout import AXES, ZERO_BUBBLE, Layout, layout_problems
from ..planner.nearest import nearest_layouts, set_options
from .recipe import Recipe, micro_rows, model_config, model_family
from .sections import ObjectiveSection

FP8_TILE = 16  # what the sides of a factor are multiples of: torch's _scaled_mm, cuBLAS


def batch_rule(recipe: Recipe) -> Iterable[Problem]:
    """The batch is given once, in whole rows, and the micro-batch divides it."""
    train = recipe.train
    if train.batch_rows is None and train.batch_tokens is None:
        yield Problem(
            "train.batch_rows", "the batch is not given", "set train.batch_rows or train.batch_tokens"
        )
        return
    if train.batch_tokens is not None and train.batch_tokens % train.sequence_length:
        near = max(train.batch_tokens // train.sequence_length, 1) * train.sequence_length
        yield Problem(
            "train.batch_tokens",
            f"{train.batch_tokens} tokens are no whole number of rows of {train.sequence_length}",
            f"for example {near}",
        )
        return
    if train.batch_rows is not None and train.batch_tokens not in (
        None,
        train.batch_rows * train.sequence_length,
    ):
        yield Problem(
            "train.batch_tokens",
            f"{train.batch_tokens} tokens contradict {train.batch_rows} rows of {train.sequence_length}",
            "give one of train.batch_rows and train.batch_tokens",
        )
        return
    rows, micro = train.rows_per_step, train.rows_per_micro_batch
    if rows % micro:
        legal = [n for n in range(1, rows + 1) if rows % n == 0]
        near = min(legal, key=lambda n: abs(n - micro))
        yield Problem(
            "train.micro_batch_rows",
            f"{micro} does not divide the batch of {rows} rows",
            f"for example {near}",
        )


def ramp_rule(recipe: Recipe) -> Iterable[Problem]:
    """A batch that grows has whole micro-batches on every data process at every size, enough for its pipeline."""
    ramp, layout, train = recipe.train.batch_ramp, recipe.parallel.layout(), recipe.train
    if ramp is None:
        return
    if ramp.start_rows >= train.rows_per_step or (train.rows_per_step - ramp.start_rows) % ramp.step_rows:
        text = (
            f"from {ramp.start_rows} rows in steps of {ramp.step_rows} does not come to {train.rows_per_step}"
        )
        yield Problem(
            "train.batch_ramp.step_rows", text, f"a divisor of {train.rows_per_step - ramp.start_rows}"
        )
        return
    unit = layout.data * micro_rows(recipe)
    for name, rows in (("start_rows", ramp.start_rows), ("step_rows", ramp.step_rows)):
        if rows % unit:
            text = f"{rows} rows are no whole micro-batches on each of {layout.data} data processes"
            yield Problem(f"train.batch_ramp.{name}", text, f"a multiple of {unit}")
    if (
        layout.pipeline > 1
        and layout.schedule not in ("gpipe", "1f1b")
        and ramp.start_rows < unit * layout.stages
    ):
        text = f"{ramp.start_rows // unit} micro-batches at first for {layout.stages} stages of {layout.schedule}"
        yield Problem("train.batch_ramp.start_rows", text, 'parallel.schedule = "1f1b", which takes fewer')


def schedule_rule(recipe: Recipe) -> Iterable[Problem]:
    """Warm-up ends before the run does, and warm-up and decay fit in it."""
    warmup, decay, steps = recipe.schedule.warmup_steps, recipe.schedule.decay_steps or 0, recipe.train.steps
    if warmup >= steps:
        yield Problem(
            "schedule.warmup_steps",
            f"{warmup} is not below train.steps = {steps}",
            f"for example {steps // 20}",
        )
    elif warmup + decay > steps:
        yield Problem(
            "schedule.decay_steps",
            f"{warmup} of warm-up and {decay} of decay are more than train.steps = {steps}",
            f"at most {steps - warmup}",
        )


def family_rule(recipe: Recipe) -> Iterable[Problem]:
    """Fields that belong to one family stay with it."""
    family = model_family(recipe)
    if family == "gpt" and recipe.objective is not None:
        yield Problem(
            "objective", "belongs to BERT; a GPT predicts the next token", "leave it out or set model.family"
        )
    if family == "bert" and (recipe.data.separate_documents or recipe.data.packing != "windows"):
        key = "data.separate_documents" if recipe.data.separate_documents else "data.packing"
        yield Problem(
            key, "belongs to GPT", "for BERT, objective.packing fits pairs together and keeps them apart"
        )


def data_rule(recipe: Recipe) -> Iterable[Problem]:
    """There is something to train on, and to validate on when evaluation is asked for."""
    if not recipe.data.sources() or not all(source.path for source in recipe.data.sources()):
        fix = "--set data.train=DIRECTORY; make one with: throughline data tokenize; "
        fix += "or name text, and set data.tokenizer"
        yield Problem("data.train", "no token store", fix)
    if not recipe.data.tokenizer and (recipe.data.documents, recipe.data.field) != ("block", "text"):
        yield Problem(
            "data.documents",
            "documents and field are of text, and these are token stores",
            "set data.tokenizer",
        )
    measured = recipe.data.validation or recipe.data.validation_fraction or recipe.evaluation.tasks
    if recipe.train.eval_every_steps and not measured:
        yield Problem(
            "train.eval_every_steps",
            "there is no validation split",
            "set data.validation_fraction or data.validation",
        )


def model_rule(recipe: Recipe) -> Iterable[Problem]:
    """The preset exists, its fields can be set, the shape can be built and holds a row."""
    try:
        config = model_config(recipe)
    except WrongUse as error:
        key = "model.preset" if error.where.endswith("presets.toml") else error.where or "model"
        yield Problem(
            key.replace("model.", "model.overrides.") if "has no field" in error.what else key,
            ": ".join(part for part in (error.what, error.why.replace("\n", "; ")) if part),
            error.fix,
        )
        return
    if recipe.model.family and recipe.model.family != family_of(config):
        yield Problem(
            "model.family", f"preset {recipe.model.preset} is a {family_of(config)}", "leave model.family out"
        )
    if config.sequence_length < recipe.train.sequence_length:
        yield Problem(
            "train.sequence_length",
            f"{recipe.train.sequence_length} is more than the model's {config.sequence_length} positions",
            f"at most {config.sequence_length}, or set model.overrides.sequence_length",
        )
    if isinstance(config, BERTConfig):
        sentences = (recipe.objective or ObjectiveSection()).sentences
        if sentences != "none" and not (config.nsp and config.token_types >= 2):
            yield Problem(
                "objective.sentences",
                f"{sentences} needs a model with nsp and two token types",
                'set it to "none"',
            )


def parallel_rule(recipe: Recipe) -> Iterable[Problem]:
    """The degrees fit the model and the batch, and one another."""
    layout = recipe.parallel.layout()
    try:
        config = model_config(recipe)
    except WrongUse:
        return  # model_rule says so
    rows, micro = recipe.train.rows_per_step, micro_rows(recipe)
    batch = recipe.train.sequence_length, rows, micro
    problems = layout_problems(layout, config, *batch)
    last = next((found for found in reversed(problems) if found.field in AXES), None)
    for found in problems:
        key, fix = found.field if "." in found.field else f"parallel.{found.field}", found.fix
        if found is last:  # the degrees are judged together
            others = nearest_layouts(layout, layout.world, config, *batch, partial(can_be_had, recipe))
            near = [set_options(layout, other) for other in others]
            fix = "; ".join(
                filter(None, (fix, f"{layout.product()}, nearest that fit: {' or '.join(near) or 'none'}"))
            )
        yield Problem(key, found.text, fix)


def spread_rule(recipe: Recipe) -> Iterable[Problem]:
    """What else the recipe asks for can be had in its layout, and nothing of it is known to be wrong there."""
    layout, rows, micro = recipe.parallel.layout(), recipe.train.rows_per_step, micro_rows(recipe)
    if layout.schedule in ZERO_BUBBLE and recipe.train.compile == "on":
        text = f"{layout.schedule} takes the gradients of inputs and weights apart, a compiled backward has them in one"
        yield Problem("train.compile", text, 'leave it at "auto", or parallel.schedule = "1f1b"')
    if recipe.train.offload and layout.pipeline > 1:
        text = "the gradients of a pipeline's micro-batches would be added in 16 bits"
        yield Problem(
            "train.offload",
            text,
            'parallel.pipeline = 1: with sharding = "full" data processes share a model as well',
        )
    elif (
        recipe.train.offload
        and layout.world > 1
        and micro * layout.data != rows
        and recipe.train.precision in ("bf16", "fp16")
    ):
        text = f"gradients of {rows // (micro * layout.data)} micro-batches would be added in 16 bits"
        yield Problem(
            "train.offload",
            text,
            f"train.micro_batch_rows = {rows // layout.data}; train.recompute makes room for it",
        )
    if recipe.optimizer.name == "muon" and recipe.train.offload and (layout.tensor > 1 or layout.shards > 1):
        yield Problem(
            "optimizer.name",
            "muon puts cut matrices together on the devices, and offload has them on the host",
            'name = "adamw"',
        )
    if recipe.optimizer.name in ("lamb", "adafactor") and recipe.train.offload:
        text = f"{recipe.optimizer.name} needs norms of whole tensors, and offload updates them one by one"
        yield Problem("train.offload", text, 'optimizer.name = "adamw"')


def products_rule(recipe: Recipe) -> Iterable[Problem]:
    """fp8 products have bf16 weights, and matrices of whole tiles on each tensor process."""
    train = recipe.train
    if train.matmul == "same":
        return
    if train.precision not in ("auto", "bf16"):
        text = f"fp8 products are made of bf16 weights, and train.precision is {train.precision}"
        yield Problem("train.matmul", text, 'train.precision = "bf16"')
    try:
        config = model_config(recipe)
    except WrongUse:
        return  # model_rule says so
    parts = recipe.parallel.tensor
    sizes = {
        "width": (config.width, 1),
        "mlp_width": (config.feed_forward_size, parts),
        "heads": (config.heads * config.head_size, parts),
        "kv_heads": (
            config.key_value_heads * 2 * config.head_size,
            parts if config.key_value_heads > 1 else 1,
        ),
    }
    for name, (size, parts) in sizes.items():
        tile = FP8_TILE * parts
        if size % tile:
            cut = f" for {parts} tensor processes" if parts > 1 else ""
            text = f"fp8 products are of multiples of {FP8_TILE}, and {name} makes a matrix of {size}{cut}"
            near = max(round(size / tile), 1) * tile
            yield Problem(f"model.overrides.{name}", text, f'{near} fits, or train.matmul = "same"')


def can_be_had(recipe: Recipe, layout: Layout, micro: int) -> bool:
    """Whether the optimizer, offload and compression of a recipe can be had in another layout."""
    parallel = recipe.parallel.model_copy(
        update=asdict(layout) | {"layers_per_stage": list(layout.layers_per_stage)}
    )
    train = recipe.train.model_copy(update={"micro_batch_rows": micro, "compile": "auto"})
    other = recipe.model_copy(update={"parallel": parallel, "train": train})
    return not any(list(rule(other)) for rule in (spread_rule, compression_rule))


def compression_rule(recipe: Recipe) -> Iterable[Problem]:
    """Compression is for whole copies of a model; 1-bit Adam replaces the optimizer and its norm, over data
    processes alone.
    """
    scheme, parallel = recipe.compression.scheme, recipe.parallel
    one_bit = scheme == "one-bit-adam"
    split = parallel.tensor * parallel.pipeline * parallel.context > 1
    problems = (
        (parallel.data == 1, "one data process sends no gradients", 'set it to "none", or parallel.data'),
        (
            parallel.sharding != "replicated",
            f"{parallel.sharding} sums gradients by itself",
            'parallel.sharding = "replicated"',
        ),
        (
            one_bit and recipe.optimizer.name != "adamw",
            f"{scheme} is AdamW, not {recipe.optimizer.name}",
            'optimizer.name = "adamw"',
        ),
        (
            one_bit and recipe.train.offload,
            f"{scheme} updates where its sums are",
            '"bf16" and "powersgd" work with offload',
        ),
        (
            one_bit and split,
            f"{scheme} works with data processes alone",
            '"bf16" and "powersgd" work in any layout',
        ),
    )
    for wrong, text, fix in problems:
        if scheme != "none" and wrong:
            yield Problem("compression.scheme", text, fix)
    if one_bit and not recipe.compression.warmup(recipe.train.steps):
        text, fix = "the variance needs steps to form", "at least 1, usually 15 % of the run"
        yield Problem("compression.warmup_steps", text, fix)


def evaluation_rule(recipe: Recipe) -> Iterable[Problem]:
    """Tasks are scored at steps that have an evaluation."""
    every, usual = recipe.evaluation.every_steps, recipe.train.eval_every_steps
    if not recipe.evaluation.tasks:
        return
    if every and (not usual or every % usual):
        text = f"{every} is no multiple of train.eval_every_steps = {usual}"
        yield Problem("evaluation.every_steps", text, f"train.eval_every_steps = {every}")


def target_rule(recipe: Recipe) -> Iterable[Problem]:
    """A target is looked at by evaluations that give its figure."""
    if recipe.target is None:
        return
    if not recipe.train.eval_every_steps:
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
    parallel_rule,
    spread_rule,
    products_rule,
    compression_rule,
    evaluation_rule,
    target_rule,
)
