"""The training recipe: one tree of frozen sections, the rules that span fields, and what follows from them.

No torch here: a recipe is checked, shown and planned on a machine that cannot train it. Sizes carry their unit in the
name; a batch is counted in rows (of `sequence_length` tokens) or in tokens, and every loss is divided by the count of
targets of the whole batch, so `micro_batch_rows` changes memory and speed and not the result.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.errors import WrongUse
from ..core.recipe import Problem, Section
from ..models.config import FAMILIES, BERTConfig, ModelConfig, family_of
from ..models.presets import preset, preset_names
from .parallel.layout import Layout, default_micro_rows, layout_problems

Fraction = Annotated[float, Field(ge=0, le=1)]


class Source(Section):
    """One token store of a mixture."""

    path: str
    """Directory of the token store."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples that come from it, relative to the other stores."""


class DataSection(Section):
    """What is read."""

    train: str | list[str | Source] = []
    """Token store to train on, or a list of stores, or of { path, weight }."""
    validation: str = ""
    """Token store to validate on; "" holds out the end of the training store instead."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training store held out when `validation` is not given; 0 = no validation."""
    packing: Literal["windows", "best_fit"] = "windows"
    """GPT rows: the stream cut every sequence_length tokens, or whole documents fitted together and kept apart."""
    separate_documents: bool = False
    """GPT windows: attention, positions and targets end at document boundaries."""
    random_offsets: bool = True
    """GPT windows: every epoch cuts the stream at another place."""

    def sources(self) -> list[Source]:
        """The training stores, each with its weight."""
        given = [self.train] if isinstance(self.train, str) else self.train
        return [item if isinstance(item, Source) else Source(path=item) for item in given]


class ModelSection(Section):
    """What is trained."""

    family: Literal["gpt", "bert"] | None = None
    """Decoder trained on next tokens, or encoder trained on masked ones; by default the preset's, else gpt."""
    preset: str = ""
    """A named shape of models/presets.toml; "" starts from the family's defaults."""
    overrides: dict[str, Any] = {}
    """Fields of the model's config to set: layers, heads, width, dropout... The vocabulary is that of the token store."""


class OptimizerSection(Section):
    """How the weights move."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the hidden matrices with AdamW for the rest."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate of AdamW."""
    matrix_learning_rate: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon's matrices; follows the same schedule."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of its square."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; biases and norms have none."""


class ScheduleSection(Section):
    """How the learning rate moves."""

    kind: Literal["cosine", "linear", "polynomial", "constant", "wsd"] = "cosine"
    """Shape of the decay; wsd is stable at the peak and falls linearly over the last decay_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Length of the decay in steps; by default it ends with the last step (wsd: a fifth of the run)."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    power: float = Field(default=1.0, gt=0)
    """Exponent of the polynomial decay."""


class TrainSection(Section):
    """How long, how much at a time, in which arithmetic."""

    steps: int = Field(gt=0)
    """Optimizer steps."""
    sequence_length: int = Field(gt=1)
    """Tokens in a row."""
    batch_rows: int | None = Field(default=None, gt=0)
    """Rows in one optimizer step (or give batch_tokens)."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens in one optimizer step (or give batch_rows)."""
    micro_batch_rows: int | None = Field(default=None, gt=0)
    """Rows that a process computes at once, its others are accumulated; by default all, in a pipeline four turns of it."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the matrix products; weights and optimizer stay in fp32 (fp64: everything, for proofs)."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations recomputed in backward: none, every layer, or the attention core alone."""
    offload: bool = False
    """fp32 weights, optimizer state and update on the host; the device holds weights in the precision of the products."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: auto uses it where a compiler answers and the run is long enough to pay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPU when there is one."""
    seed: int = Field(default=0, ge=0)
    """Of initial weights, sample order, masks and dropout."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the global gradient norm; 0 = none."""
    stop_after_skipped: int = Field(default=10, gt=0)
    """Steps in a row with a non-finite loss or gradient (each is skipped and counted) after which the run stops."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 = only at the end."""
    eval_rows: int | None = Field(default=None, gt=0)
    """Rows of each evaluation inside the run; by default the whole validation split, which the last one always uses."""

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, however the batch was given."""
        return self.batch_rows or (self.batch_tokens or 0) // self.sequence_length

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of one forward and backward."""
        return self.micro_batch_rows or self.rows_per_step


class ObjectiveSection(Section):
    """What a BERT is trained to predict."""

    sentences: Literal["nsp", "sop", "none"] = "nsp"
    """Pair task: next sentence, sentence order, or no pairs."""
    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Share of tokens predicted: 80 % masked, 10 % replaced, 10 % left."""
    whole_word: bool = False
    """Mask all pieces of a word together."""
    packing: bool = False
    """Several pairs in one row, kept apart in attention, instead of padding."""
    pair_copies: int = Field(default=1, gt=0)
    """Differently drawn passes over the text that make one epoch."""
    short_fraction: Fraction = 0.1
    """Share of documents whose pairs aim at a shorter length."""


class CheckpointSection(Section):
    """When the run is saved."""

    save_every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 = only at the end and when stopped."""
    keep: int = Field(default=2, ge=0)
    """Checkpoints kept, the newest; 0 = all."""


class ParallelSection(Section):
    """How the run is spread over processes: the product of the degrees is their number."""

    data: int = Field(default=1, gt=0)
    """Processes that each compute their part of the batch's rows."""
    tensor: int = Field(default=1, gt=0)
    """Processes that share each matrix, and the row between matrices."""
    pipeline: int = Field(default=1, gt=0)
    """Processes in a row, each with stages of consecutive layers."""
    context: int = Field(default=1, gt=0)
    """Processes that share each row in attention too."""
    sharding: Literal["replicated", "zero1", "zero2", "full"] = "replicated"
    """What the data processes share out: nothing, optimizer states, those and gradients, or those and weights."""
    replicas: int = Field(default=1, gt=0)
    """Hybrid sharding: groups of data processes that each hold a whole copy."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble-v", "interleaved-zero-bubble"] = "1f1b"
    """Order of the micro-batches in a pipeline."""
    stages_per_process: int = Field(default=1, gt=0)
    """Pipeline stages on each process: 2 or more for interleaved schedules, 2 for zero-bubble-v."""
    layers_per_stage: list[int] = []
    """Layers of each stage; by default as even as possible."""

    def layout(self) -> Layout:
        """The layout that these fields describe."""
        return Layout(**self.model_dump() | {"layers_per_stage": tuple(self.layers_per_stage)})


class CompressionSection(Section):
    """Gradients of data processes over a slow network: fewer bytes, and what was lost is sent later."""

    scheme: Literal["none", "bf16", "powersgd", "one-bit-adam"] = "none"
    """Half the bytes; thin factors of each matrix; or, after a warm-up, signs of the momentum (1/32, variance frozen)."""
    rank: int = Field(default=4, gt=0)
    """Columns of PowerSGD's factors."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps with whole gradients at the start; by default 10 for PowerSGD and 15 % of the run for 1-bit Adam."""

    def warmup(self, steps: int) -> int:
        """The warm-up of a run of so many steps."""
        usual = steps * 15 // 100 if self.scheme == "one-bit-adam" else 10
        return usual if self.warmup_steps is None else self.warmup_steps


class LogSection(Section):
    """What is written down; metrics.jsonl is always written."""

    every_steps: int = Field(default=1, gt=0)
    """Steps between records in metrics.jsonl."""
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Dashboards that receive the same records."""


class Recipe(Section):
    """Everything that decides a training run."""

    version: Literal[1] = 1
    """Version of the recipe format."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    objective: ObjectiveSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    parallel: ParallelSection = ParallelSection()
    compression: CompressionSection = CompressionSection()
    log: LogSection = LogSection()


def batch_rule(recipe: Recipe) -> Iterable[Problem]:
    """The batch is given once, in whole rows, and the micro-batch divides it."""
    train = recipe.train
    if train.batch_rows is None and train.batch_tokens is None:
        yield Problem("train.batch_rows", "the batch is not given", "set train.batch_rows or train.batch_tokens")
        return
    if train.batch_tokens is not None and train.batch_tokens % train.sequence_length:
        near = max(train.batch_tokens // train.sequence_length, 1) * train.sequence_length
        yield Problem(
            "train.batch_tokens",
            f"{train.batch_tokens} tokens are no whole number of rows of {train.sequence_length}",
            f"for example {near}",
        )
        return
    if train.batch_rows is not None and train.batch_tokens not in (None, train.batch_rows * train.sequence_length):
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
        yield Problem("train.micro_batch_rows", f"{micro} does not divide the batch of {rows} rows", f"for example {near}")


def schedule_rule(recipe: Recipe) -> Iterable[Problem]:
    """Warm-up ends before the run does, and warm-up and decay fit in it."""
    warmup, decay, steps = recipe.schedule.warmup_steps, recipe.schedule.decay_steps or 0, recipe.train.steps
    if warmup >= steps:
        yield Problem("schedule.warmup_steps", f"{warmup} is not below train.steps = {steps}", f"for example {steps // 20}")
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
        yield Problem("objective", "belongs to BERT; a GPT predicts the next token", "leave it out or set model.family")
    if family == "bert" and (recipe.data.separate_documents or recipe.data.packing != "windows"):
        key = "data.separate_documents" if recipe.data.separate_documents else "data.packing"
        yield Problem(key, "belongs to GPT", "for BERT, objective.packing fits pairs together and keeps them apart")


def data_rule(recipe: Recipe) -> Iterable[Problem]:
    """There is something to train on, and to validate on when evaluation is asked for."""
    if not recipe.data.sources() or not all(source.path for source in recipe.data.sources()):
        yield Problem("data.train", "no token store", "--set data.train=DIRECTORY; make one with: throughline data tokenize")
    if recipe.train.eval_every_steps and not recipe.data.validation and not recipe.data.validation_fraction:
        yield Problem("train.eval_every_steps", "there is no validation split", "set data.validation_fraction or data.validation")


def model_rule(recipe: Recipe) -> Iterable[Problem]:
    """The preset exists, its fields can be set, the shape can be built and holds a row."""
    try:
        config = model_config(recipe)
    except WrongUse as error:
        key = "model.preset" if error.where.endswith("presets.toml") else error.where or "model"
        yield Problem(key.replace("model.", "model.overrides.") if "has no field" in error.what else key,
                      ": ".join(part for part in (error.what, error.why.replace("\n", "; ")) if part), error.fix)  # fmt: skip
        return
    if recipe.model.family and recipe.model.family != family_of(config):
        yield Problem("model.family", f"preset {recipe.model.preset} is a {family_of(config)}", "leave model.family out")
    if config.sequence_length < recipe.train.sequence_length:
        yield Problem(
            "train.sequence_length",
            f"{recipe.train.sequence_length} is more than the model's {config.sequence_length} positions",
            f"at most {config.sequence_length}, or set model.overrides.sequence_length",
        )
    if isinstance(config, BERTConfig):
        sentences = (recipe.objective or ObjectiveSection()).sentences
        if sentences != "none" and not (config.nsp and config.token_types >= 2):
            yield Problem("objective.sentences", f"{sentences} needs a model with nsp and two token types", 'set it to "none"')


def parallel_rule(recipe: Recipe) -> Iterable[Problem]:
    """The layout fits the model and the batch, and nothing in it is known to be wrong."""
    layout = recipe.parallel.layout()
    try:
        config = model_config(recipe)
    except WrongUse:
        return  # model_rule says so
    rows, micro = recipe.train.rows_per_step, micro_rows(recipe)
    for found in layout_problems(layout, config, recipe.train.sequence_length, rows, micro):
        key = found.field if "." in found.field else f"parallel.{found.field}"
        yield Problem(key, found.text, found.fix)
    if layout.world > 1 and recipe.train.compile == "on":
        yield Problem("train.compile", "layouts of several processes run without it", 'leave it at "auto"')
    if recipe.train.offload and layout.world > 1:
        text = f"works in one process, and the layout has {layout.world}"
        yield Problem("train.offload", text, 'parallel.sharding = "full" shares the states out instead')
    if recipe.train.offload and recipe.train.compile == "on":
        yield Problem("train.compile", "the weights of an offloaded model arrive while it runs", 'leave it at "auto"')
    if recipe.optimizer.name == "muon" and (layout.tensor > 1 or layout.shards > 1):
        yield Problem("optimizer.name", "muon needs whole matrices, and this layout cuts them", 'name = "adamw"')


def compression_rule(recipe: Recipe) -> Iterable[Problem]:
    """Compression is for whole copies of a model; 1-bit Adam replaces the optimizer and its norm, over data processes alone."""
    scheme, parallel = recipe.compression.scheme, recipe.parallel
    if scheme == "none":
        return
    if parallel.data == 1:
        yield Problem("compression.scheme", "one data process sends no gradients", 'set it to "none", or parallel.data')
    if parallel.sharding != "replicated":
        yield Problem("compression.scheme", f"{parallel.sharding} sums gradients by itself", 'parallel.sharding = "replicated"')
    if scheme == "one-bit-adam":
        if recipe.optimizer.name != "adamw":
            yield Problem("compression.scheme", f"{scheme} is AdamW, not {recipe.optimizer.name}", 'optimizer.name = "adamw"')
        if parallel.tensor * parallel.pipeline * parallel.context > 1:
            text = f"{scheme} works with data processes alone"
            yield Problem("compression.scheme", text, '"bf16" and "powersgd" work in any layout')
        if not recipe.compression.warmup(recipe.train.steps):
            yield Problem("compression.warmup_steps", "the variance needs steps to form", "at least 1, usually 15 % of the run")


def micro_rows(recipe: Recipe) -> int:
    """Rows of one forward and backward on one process: as given, else what suits the layout."""
    return recipe.train.micro_batch_rows or default_micro_rows(recipe.parallel.layout(), recipe.train.rows_per_step)


def model_family(recipe: Recipe) -> str:
    """`gpt` or `bert`: as given, else the preset's, else gpt."""
    if recipe.model.family or not recipe.model.preset:
        return recipe.model.family or "gpt"
    return family_of(preset(recipe.model.preset)) if recipe.model.preset in preset_names() else "gpt"


def model_config(recipe: Recipe, vocab_size: int | None = None) -> ModelConfig:
    """The model's config: preset, overrides, and the vocabulary of the tokens unless the recipe sets one.

    Raises WrongUse for an unknown preset or field and for a shape that cannot be built.
    """
    fields = dict(recipe.model.overrides)
    if vocab_size is not None:
        fields.setdefault("vocab_size", vocab_size)
    family = model_family(recipe)
    if family == "bert" and recipe.objective is not None and recipe.objective.sentences == "none":
        fields.setdefault("nsp", False)
    if recipe.model.preset:
        return preset(recipe.model.preset, **fields)
    fields.setdefault("sequence_length", recipe.train.sequence_length)
    return FAMILIES[family].from_dict(fields)


RULES = (batch_rule, schedule_rule, family_rule, data_rule, model_rule, parallel_rule, compression_rule)


def resolve(recipe: Recipe, base: Path | str = ".") -> Recipe:
    """The recipe with everything that follows from it written out: absolute paths, rows, the objective. Valid input.

    Relative paths are taken from `base`.
    """

    def absolute(path: str) -> str:
        return str((Path(base) / path).resolve()) if path else ""

    sources = [source.model_copy(update={"path": absolute(source.path)}) for source in recipe.data.sources()]
    train = recipe.train
    update: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"train": sources, "validation": absolute(recipe.data.validation)}),
        "train": train.model_copy(
            update={
                "batch_rows": train.rows_per_step,
                "batch_tokens": None,
                "micro_batch_rows": micro_rows(recipe),
            }
        ),
    }
    family = model_family(recipe)
    update["model"] = recipe.model.model_copy(update={"family": family})
    if family == "bert" and recipe.objective is None:
        update["objective"] = ObjectiveSection()
    return recipe.model_copy(update=update)
