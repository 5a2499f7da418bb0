"""The fine-tuning recipe: a trained model, labelled records, and a few epochs over them. No torch here."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from ...core.recipe import Problem, Section
from ..recipes.recipe import Fraction, ParallelSection, Recipe
from ..recipes.resolved import absolute, usual_precision
from ..recipes.rules import spread_rule


class RecordsSection(Section):
    """What is learnt from."""

    train: str = ""
    """Records: a .jsonl, .tsv, .csv or .parquet file; for question-answering in SQuAD's format or the hub's rows."""
    validation: str = ""
    """Records to measure on; "" holds out a part of `train` by the hash of each text (paragraph, query)."""
    validation_fraction: Fraction = 0.2
    """Share of the records held out when `validation` is not given."""
    text_field: str = "text"
    """Field of the text: a word list for token-classification, a query for retrieval, a prompt for instruction."""
    pair_field: str = ""
    """Field of a second text: of a sentence pair, or the passage that answers a query in retrieval."""
    label_field: str = "label"
    """Field of the label; a list, one for each word, for token-classification; the response for instruction."""
    class_names: list[str] = []
    """Names of labels that are numbers, from that of 0 on (default: those stored in a parquet file of the hub)."""


class StartSection(Section):
    """What is fine-tuned."""

    init_from: str = ""
    """Trained model to begin with: a run, a checkpoint, a model artifact or a Hugging Face directory."""


class AdamWSection(Section):
    """How the weights move."""

    learning_rate: float = Field(default=3e-5, gt=0)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices."""


class WarmupSection(Section):
    """How the learning rate moves: a linear warm-up, then a linear decay to 0."""

    warmup_fraction: Fraction = 0.1
    """Share of the steps in which the learning rate rises."""


class FinetuneTrainSection(Section):
    """How long, how much at a time, in which arithmetic."""

    epochs: int = Field(default=3, gt=0)
    """Passes over the records."""
    batch_rows: int = Field(default=32, gt=0)
    """Records in one step."""
    sequence_length: int = Field(default=128, gt=2)
    """Most tokens of a record; longer ones are cut, contexts of questions become several windows."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0 = not clipped."""
    micro_batch_rows: int | None = Field(default=None, gt=0)
    """Records that a process computes at once, accumulating others (default: all); retrieval compares these alone."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations recomputed in backward: none, every layer, or the attention core alone."""
    offload: bool = False
    """fp32 weights, optimizer state and update on the host."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: auto uses it where a compiler answers and the run is long enough to pay."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of the model; 16-bit weights have fp32 masters, which are saved; auto: the GPU's, fp32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained."""
    seed: int = Field(default=0, ge=0)
    """Order of the records, dropout, and the new head's first values."""


class FinetuneRecipe(Section):
    """Everything that decides a fine-tuning."""

    version: Literal[1] = 1
    """Version of the recipe format."""
    task: Literal["classification", "token-classification", "question-answering", "retrieval", "instruction"]
    """What is learnt: labels of texts or words, spans that answer questions, embeddings, or a GPT's responses."""
    model: StartSection = StartSection()
    data: RecordsSection = RecordsSection()
    train: FinetuneTrainSection = FinetuneTrainSection()
    optimizer: AdamWSection = AdamWSection()
    schedule: WarmupSection = WarmupSection()
    parallel: ParallelSection = ParallelSection()
    problem_type: Literal[
        "auto", "single_label_classification", "multi_label_classification", "regression"
    ] = "auto"
    """classification: what a label is, by transformers' names; auto: lists are several classes, fractions numbers."""
    window_stride: int = Field(default=64, gt=0)
    """question-answering: tokens that consecutive windows of a context share, half of a window if that is shorter."""
    max_answer_tokens: int = Field(default=30, gt=0)
    """question-answering: longest answer."""
    temperature: float = Field(default=0.05, gt=0)
    """retrieval: divides the cosines before the softmax over the different passages of the batch."""


def inputs_rule(recipe: FinetuneRecipe) -> Iterable[Problem]:
    """There is a model and there are records."""
    if not recipe.model.init_from:
        yield Problem("model.init_from", "no model to begin with", "--init-from runs/my-bert")
    if not recipe.data.train:
        yield Problem("data.train", "no records", "--set data.train=my/records.jsonl")
    if not recipe.data.validation and not recipe.data.validation_fraction:
        yield Problem("data.validation_fraction", "nothing is held out to measure on", "for example 0.2")
    if recipe.task == "retrieval" and not recipe.data.pair_field:
        yield Problem("data.pair_field", "retrieval needs each query's passage", 'for example "positive"')


def layout_rule(recipe: FinetuneRecipe) -> Iterable[Problem]:
    """Data processes share the records, and may share the weights; a task's head is not cut."""
    parallel, train = recipe.parallel, recipe.train
    for axis in ("tensor", "pipeline", "context"):
        if getattr(parallel, axis) > 1:
            fix = f'parallel.{axis} = 1; with sharding = "full" data processes share the weights as well'
            yield Problem(f"parallel.{axis}", "a model with a new head is not cut", fix)
    micro = train.micro_batch_rows or train.batch_rows // parallel.data
    if not micro or train.batch_rows % (micro * parallel.data):
        text = f"{micro} does not divide the batch of {train.batch_rows} records on {parallel.data} processes"
        yield Problem("train.micro_batch_rows", text, "a divisor of the records of each process")
    else:
        yield from spread_rule(training_recipe(recipe, 1))


RULES = (inputs_rule, layout_rule)


def training_recipe(recipe: FinetuneRecipe, records: int) -> Recipe:
    """The run over so many records, measured and saved at the end of each epoch, which has whole batches."""
    given = recipe.train
    epoch = math.ceil(records / given.batch_rows)
    steps = given.epochs * epoch
    warmup = max(round(steps * recipe.schedule.warmup_fraction), 1)
    run = {
        "steps": steps,
        "micro_batch_rows": given.micro_batch_rows or given.batch_rows // recipe.parallel.data,
        "eval_every_steps": epoch,
        # fp16 finds its scale by steps that are skipped; a loss that is not finite, no scale mends
        "stop_after_skipped": 20 if given.precision == "fp16" else 1,
    }
    family = "gpt" if recipe.task == "instruction" else "bert"
    tree: dict[str, Any] = {
        "data": {"train": [{"path": recipe.data.train}], "validation": recipe.data.validation},
        "model": {"family": family, "init_from": recipe.model.init_from},
        "train": given.model_dump(exclude={"epochs"}) | run,
        "optimizer": {"beta2": 0.999} | recipe.optimizer.model_dump(),
        "schedule": {"kind": "linear", "warmup_steps": warmup, "final_fraction": 0.0},
        "checkpoint": {"save_every_steps": epoch, "keep": 1},
        "parallel": recipe.parallel.model_dump(),
    }
    if recipe.task != "instruction":
        # what memory and FLOPs are predicted by
        tree["objective"] = {"sentences": "none", "mask_fraction": 0.01}
    return Recipe.model_validate(tree)


def resolve(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The recipe with absolute paths, and the precision that `auto` means here."""
    paths = {name: absolute(getattr(recipe.data, name)) for name in ("train", "validation")}
    data, train = recipe.data.model_copy(update=paths), recipe.train
    if train.precision == "auto":
        train = train.model_copy(update={"precision": usual_precision(train.device)})
    model = StartSection(init_from=absolute(recipe.model.init_from))
    return recipe.model_copy(update={"model": model, "data": data, "train": train})
