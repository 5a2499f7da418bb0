"""From a resolved recipe to the things that train: stores, datasets, config, trainer. Nothing is written here."""

import importlib.util
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.artifact import input_record
from ..core.console import amount, duration
from ..core.errors import MissingExtra, WrongUse
from ..data.dataset import DatasetOptions
from ..data.samples import Dataset, open_dataset
from ..models.config import ModelConfig, family_of
from ..models.init import RESIDUAL, initial_values
from ..planner.layout import ZERO_BUBBLE, Layout
from ..planner.tables import Box
from .checkpoints.weights_in import adopt, check_tokens, open_weights, start_from
from .corpus import Corpus, open_corpus
from .engine import Engine
from .memory import check_memory
from .objective import Objective, StepBatch, prepare, pretraining
from .optimizers.build import build_optimizer, width_factor
from .parallel.mesh import ALONE, Axis, Mesh, own_device, running_processes
from .parallelize import to_compile
from .precision import check_products, pick_device, use_deterministic_kernels
from .recipes.recipe import ObjectiveSection, Recipe
from .recipes.resolved import SourcePasses, check_passes, model_config, outlook, source_passes, stated_weights
from .recipes.rules import wrong_processes
from .step import LossScaler, Trainer


@dataclass(frozen=True)
class RunPlan:
    """A checked run before anything of it is allocated or written."""

    recipe: Recipe
    config: ModelConfig
    device: torch.device
    corpus: Corpus
    memory: dict[str, int] = field(default_factory=dict)  # predicted bytes by term

    @property
    def family(self) -> str:
        return family_of(self.config)

    def objective(self) -> Objective:
        section = self.recipe.objective
        smoothing = section.label_smoothing if section else 0.0
        return pretraining(self.config, smoothing, self.recipe.train.z_loss)

    def fill(self, engine: Engine) -> None:
        if where := self.recipe.model.init_from:
            start_from(adopt(open_weights(where)[0], self.config, where), engine)
        else:
            engine.fill(partial(self._first_value, engine))

    def _first_value(self, engine: Engine, name: str, box: Box) -> torch.Tensor:
        shape, seed = torch.Size(engine.shapes[name]), self.recipe.train.seed
        if self.recipe.model.zero_projections and name.endswith(RESIDUAL):
            return torch.zeros(box.size)
        share = width_factor(name, len(shape), self.recipe, engine)
        values = initial_values(name, shape, self.config, seed, box.slices())
        return values * (share if name == "output.weight" else math.sqrt(share))

    def batches(self, mesh: Mesh, cache: Path | None = None) -> Any:
        """What gives this process its batches, ready for a step, by the rows that have been read before."""
        return StepBatches(self, training_rows(self, cache), mesh.data, mesh.context)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.train.rows_per_step * self.recipe.train.sequence_length

    def source_passes(self) -> list[SourcePasses]:
        return source_passes(self.recipe, self.corpus.train_tokens)

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """What is planned and predicted, for a script and for a person."""
        train, corpus = self.recipe.train, self.corpus
        sizes = corpus.train_tokens
        learnt, held_out = sum(sizes), sum(corpus.validation_tokens)
        ahead, words = outlook(self.recipe, self.config, None, sizes)
        facts = {
            "family": self.family,
            "parameters": self.config.parameter_count(),
            "device": str(self.device),
            "train_tokens_in_store": learnt,
            "text_bytes": self.corpus.text_bytes,
            "validation_tokens": held_out,
            "flops": train.tokens * self.config.flops_per_token(train.sequence_length),
            "memory_bytes": sum(self.memory.values()),
            "memory": self.memory,
            "step_seconds": ahead["seconds"] / train.steps,
            **ahead,
        }
        split = f"training split {learnt:,} tokens, validation {held_out:,} tokens"
        if corpus.text_bytes:
            of_text = f"of {amount(corpus.text_bytes, 'B')} of text, tokenised before the first step"
            estimates = f"about {amount(learnt, 'tokens')}, validation about {amount(held_out, 'tokens')}"
            split = f"training split {of_text}: {estimates}"
        most = "at most " if train.batch_ramp else ""
        memory = ", ".join(f"{name} {amount(size, 'B')}" for name, size in self.memory.items())
        return facts, [
            f"{self.family} of {facts['parameters']:,} parameters on {facts['device']}",
            f"{train.steps:,} steps of {most}{self.tokens_per_step:,} tokens: "
            f"{train.tokens:,} tokens, {facts['flops']:.3g} FLOPs",
            split,
            f"memory about {amount(facts['memory_bytes'], 'B')}: {memory}",
            f"a step of about {duration(facts['step_seconds'])} (throughline study makes this surer)",
            *words,
        ]


def plan_run(recipe: Recipe, cache: Path | None = None) -> RunPlan:
    """Open and check all that a resolved recipe names, then tokenise its text into `cache`, without which a plan of
    text has nothing to train on. Raises WrongUse for what is missing or does not fit together, Refused for a damaged
    store, a precision that the device lacks and a model larger than memory.
    """
    leads, init_from = running_processes()[0] == 0, recipe.model.init_from
    for sink in recipe.log.sinks if leads else ():
        if importlib.util.find_spec(sink) is None:
            raise MissingExtra(sink, f"the sink {sink}", sink)
    device = own_device(pick_device(recipe.train.device, recipe.train.precision))
    if recipe.train.deterministic and device.type == "cuda":
        use_deterministic_kernels()
    check_products(recipe.train.matmul, device)
    plan = validation_plan(recipe, device)
    if (running := running_processes()[1]) != recipe.parallel.layout().world:
        raise wrong_processes(recipe, plan.config, running)
    memory = check_memory(plan.config, recipe, device)
    if plan.corpus.text_bytes and cache is not None:
        plan = validation_plan(recipe, device, cache)
    corpus, length = plan.corpus, recipe.train.sequence_length
    paths = (
        [recipe.data.validation] if recipe.data.validation else [item.path for item in recipe.data.sources()]
    )
    for path, store in zip(paths, corpus.validation):
        if plan.family == "gpt" and recipe.data.packing == "windows" and store.tokens <= length:
            why = f"{store.tokens:,} tokens are held out, a row has {length:,} (+ 1 for the last target)"
            fix = "a larger data.validation_fraction, data.validation, or data.validation_fraction=0 for none"
            raise WrongUse("the validation split is less than a row", where=path, why=why, fix=fix)
    if init_from and leads:  # before a directory is claimed for the run
        model, tokenizer = open_weights(init_from)
        adopt(model, plan.config, init_from)
        if corpus.tokenizer is not None:
            check_tokens(corpus.tokenizer, tokenizer, init_from)
        corpus = replace(corpus, inputs=[*corpus.inputs, input_record(init_from)])
    if init_from:
        corpus = replace(corpus, beside=Path(init_from))
    plan = replace(plan, memory=memory, corpus=corpus)
    if leads:
        check_passes(recipe, corpus.train_tokens)
    return plan


def validation_plan(recipe: Recipe, device: torch.device, cache: Path | None = None) -> RunPlan:
    """The same for measuring a trained model in any layout on any machine: nothing about memory."""
    corpus = open_corpus(recipe, cache)
    return RunPlan(recipe, model_config(recipe, corpus.vocab_size), device, corpus)


def dataset_options(plan: RunPlan) -> DatasetOptions:
    """The recipe's rows, in the terms of the data stage."""
    recipe, data = plan.recipe, plan.recipe.data
    length, seed = recipe.train.sequence_length, recipe.train.seed
    if plan.family == "gpt":
        offsets = data.random_offsets and data.packing == "windows"
        kept: Any = {"packing": data.packing, "separate_documents": data.separate_documents}
        return DatasetOptions("gpt", length, seed, random_offsets=offsets, **kept)
    objective, tokenizer = recipe.objective or ObjectiveSection(), plan.corpus.tokenizer
    where = data.sources()[0].path
    if tokenizer is None:
        fix = "put its tokenizer.json beside them"
        raise WrongUse("a BERT needs the tokenizer of its tokens", where=where, fix=fix)
    if missing := [name for name in ("cls", "sep", "mask") if getattr(tokenizer, f"{name}_id") is None]:
        fix = "throughline data tokenizer TEXT --type wordpiece --out tok\n"
        fix += "throughline data tokenize TEXT --tokenizer tok --sentences --out tokens"
        tokens = ", ".join(f"[{name.upper()}]" for name in missing)
        why = f"it has no {tokens}: it is of type {tokenizer.type}"
        raise WrongUse("a BERT cannot be trained with this tokenizer", where=where, why=why, fix=fix)
    return DatasetOptions(
        "bert",
        length,
        seed,
        packing="packed" if objective.packing else "windows",
        nsp=objective.sentences,
        pair_copies=objective.pair_copies,
        short_fraction=objective.short_fraction,
        mask_rate=objective.mask_fraction,
        whole_word=objective.whole_word,
        continuation_ids=tuple(sorted(i for word, i in tokenizer.vocab.items() if word.startswith("##"))),
        vocab_size=tokenizer.vocab_size,
        special_ids=tuple(sorted(tokenizer.special_ids)),
        pad_id=tokenizer.pad_id or 0,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        mask_id=tokenizer.mask_id,
    )


def training_rows(plan: RunPlan, cache: Path | None = None) -> Dataset:
    """The dataset that the run trains on."""
    weights = stated_weights(plan.recipe)
    return open_dataset(plan.corpus.train, dataset_options(plan), weights, cache)


def validation_rows(plan: RunPlan, cache: Path | None = None) -> list[Dataset]:
    """The validation split in order, every window or pair once, one dataset a store."""
    options = replace(dataset_options(plan), order="sequential", random_offsets=False, pair_copies=1)
    return [open_dataset(store, options, None, cache) for store in plan.corpus.validation]


@dataclass(frozen=True)
class StepBatches:
    """Batches ready for the step, this process's part of each row; the loader's thread makes them."""

    plan: RunPlan
    dataset: Dataset
    data: Axis = ALONE
    context: Axis = ALONE

    def batch(self, position: int, count: int) -> StepBatch:
        recipe, config = self.plan.recipe, self.plan.config
        # padding is left out but where processes share a row or the place in a row matters
        alone = recipe.parallel.pipeline == recipe.parallel.context == recipe.parallel.tensor == 1
        unpad = alone and not config.attention_window and not getattr(config, "relative_buckets", 0)
        how = recipe.train.rows_per_micro_batch, self.plan.device, recipe.mask_fraction, unpad
        rows = self.dataset.batch(position, count)
        more: Any = {"context": self.context, "processes": self.data.size, "ahead": config.blocks_ahead}
        return prepare(rows, self.plan.family, *how, **more)


def build_trainer(plan: RunPlan, mesh: Mesh | None = None, *, fill: bool = True) -> Trainer:
    """This process's engine and optimizer at step 0; `fill=False` leaves the weights to a checkpoint."""
    recipe, train = plan.recipe, plan.recipe.train
    # a zero-bubble schedule takes the gradients of inputs and weights apart, a compiled backward has them in one
    compiles = recipe.parallel.schedule not in ZERO_BUBBLE and to_compile(recipe, plan.config, plan.device)
    engine = Engine(
        plan.config,
        mesh or Mesh(Layout(), plan.device),
        train.precision,
        train.seed,
        train.recompute,
        offload=train.rows_per_step // train.rows_per_micro_batch if train.offload else 0,
        compiling=train.compile if compiles else "off",
        matmul=train.matmul,
        objective=plan.objective(),
        row_length=train.sequence_length,
    )
    if fill:
        plan.fill(engine)
    optimizer, scaler = _optimizer(recipe, engine), LossScaler.of(train.precision)
    return Trainer(engine, optimizer, scaler, train.precision, train.clip_norm, planned_steps=train.steps)


def _optimizer(recipe: Recipe, engine: Engine) -> torch.optim.Optimizer:
    """The recipe's optimizer. Where it compresses gradients, the engine sums them by its scheme from here on."""
    section = recipe.compression
    if section.scheme == "none" or engine.layout.data == 1:
        return build_optimizer(engine, recipe)
    from .parallel.compression import Bf16Sum, OneBitAdam, PowerSum

    communicator, warmup_steps = engine.communicator, section.warmup(recipe.train.steps)
    if section.scheme == "one-bit-adam":
        adam = partial(OneBitAdam, communicator=communicator, warmup_steps=warmup_steps)
        optimizer: Any = build_optimizer(engine, recipe, adam)
        engine.communication_hook = optimizer
        return optimizer
    if section.scheme == "bf16":
        engine.communication_hook = Bf16Sum(communicator)
    else:
        engine.communication_hook = PowerSum(communicator, section.rank, warmup_steps)
    return build_optimizer(engine, recipe)
