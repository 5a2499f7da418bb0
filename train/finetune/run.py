"""Fine-tuning: an objective of the one training loop, in a run that stands beside its model artifact till the end."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.artifact import check_free, create_artifact, input_record
from ...core.console import cell, say, warn
from ...core.errors import WrongUse
from ...core.recipe import dump_toml, recipe_hash
from ...data.model_settings import write_beside
from ...data.tokenizer import Tokenizer
from ...models import huggingface, huggingface_config, sentence
from ...models.bert import BERT, BERTWithHead
from ...models.gpt import GPT, in_use
from .. import evaluate, loop, memory, precision
from ..build import RunPlan
from ..checkpoints import checkpoint, run_directory, weights_in
from ..corpus import Corpus
from ..engine import Engine
from ..logs.metrics import FILE as METRICS
from ..objective import Objective, StepBatch, on_device
from ..parallel.mesh import Mesh, own_device, running_processes
from ..recipes.rules import wrong_processes
from .recipe import FinetuneRecipe, training_recipe
from .records import Record, Row, class_names, fields_of, held_out, read_records
from .task import Task
from .tasks import TASKS

LEARNING_CHECK = "a part of the same records, held out by hash: a learning check, no benchmark score"


def finetune(recipe: FinetuneRecipe, out: Path | str, overwrite: bool = False) -> dict[str, Any] | None:
    """Train and write the model artifact at `out`; its facts, on the first process. Raises WrongUse for records or a
    model that do not fit the task, Refused for one without a Hugging Face layout, Failed for a loss that is not finite.
    """
    check_free(out, overwrite)
    plan, digest = plan_task(recipe), recipe_hash(recipe)
    home = Path(f"{out}.{digest[-8:]}.run")
    validation = loop.train(plan, home, evaluators=[plan.measure])["validation"]
    if running_processes()[0] > 0:
        return None
    facts: dict[str, Any] = {
        "family": plan.family,
        "task": recipe.task,
        "records": {"train": len(plan.groups), "validation": len(plan.measured)},
        "validation": validation,
        "measured_on": "the validation records given" if recipe.data.validation else LEARNING_CHECK,
    }
    data = plan.corpus
    assert data.tokenizer is not None and data.tokenizer_json is not None
    with create_artifact(out, "model", inputs=data.inputs, recipe_hash=digest, overwrite=overwrite) as draft:
        write_model(plan.saved(home), data.tokenizer, data.tokenizer_json, draft.path, data.beside)
        if recipe.task == "retrieval":
            plan.task.sentence.write(draft.path, plan.config.width, plan.config.sequence_length)
        (draft.path / "recipe.toml").write_text(dump_toml(recipe))
        shutil.copyfile(home / METRICS, draft.path / METRICS)
        draft.facts |= facts
    shutil.rmtree(home)
    return facts


@dataclass(frozen=True, kw_only=True)
class TaskPlan(RunPlan):
    """A run whose objective, batches, first values and figures are those of a task."""

    task: Task
    base: GPT | BERT
    groups: Sequence[list[Row]]  # the rows of each record to learn from
    measured: Sequence[Record]

    def objective(self) -> Objective:
        return self.task.objective(self.config)

    def fill(self, engine: Engine) -> None:
        weights_in.start_from(dict(self.base.named_parameters()), engine)

    def batches(self, mesh: Mesh, cache: Path | None = None) -> Any:
        return TaskBatches(self, mesh.data.size)

    @torch.no_grad()
    def measure(self, engine: Engine, step: int) -> dict[str, Any]:
        if (model := evaluate.whole_model(engine)) is None:
            return {}
        figures = self.task.measure(model, self.measured, engine.device)
        say(f"epoch {step // self.recipe.train.eval_every_steps}: " + figures_text(figures))
        return figures

    def saved(self, run: Path) -> nn.Module:
        model: nn.Module = self.objective().empty(torch.float32).to_empty(device="cpu")
        checkpoint.load_weights(run_directory.locate(run), model)
        return model


@dataclass(frozen=True)
class TaskBatches:
    """The records of each epoch in an order of its own; its last batch is filled up by its first records."""

    plan: TaskPlan
    processes: int  # that share a batch

    def batch(self, position: int, count: int) -> StepBatch:
        plan, train, task = self.plan, self.plan.recipe.train, self.plan.task
        epoch, first = divmod(position, train.eval_every_steps * train.rows_per_step)
        order = np.random.default_rng((train.seed, epoch)).permutation(len(plan.groups))
        groups = [plan.groups[order[place % len(order)]] for place in range(first, first + count)]
        micro = train.rows_per_micro_batch
        parts = [
            task.collated([row for group in groups[start : start + micro] for row in group])
            for start in range(0, count, micro)
        ]
        targets = sum(task.count(part) for part in parts)
        tokens = sum(int(part["attention_mask"].sum()) for part in parts) * self.processes
        there = [{name: on_device(x, plan.device) for name, x in part.items()} for part in parts]
        counts = on_device(np.array([targets], np.float64), plan.device)
        return StepBatch(there, (targets,), counts, tokens, count * self.processes)


def plan_task(recipe: FinetuneRecipe) -> TaskPlan:
    """Open and check everything that a recipe names."""
    device = own_device(precision.pick_device(recipe.train.device, recipe.train.precision))
    opened, tokenizer_file = weights_in.open_weights(recipe.model.init_from)
    if tokenizer_file is None:
        fix = "put one beside the weights"
        raise WrongUse("this model has no tokenizer.json", where=recipe.model.init_from, fix=fix)
    tokenizer = Tokenizer.load(tokenizer_file)
    task, base = _task(recipe, in_use(opened), tokenizer), weights_in.plain(opened)
    task.class_names = class_names(recipe.data.train, recipe.data.label_field)
    training, measured = _split(recipe)
    learnt = task.prepare(training, measured)
    rows, each = task.rows(learnt), task.rows_per_record
    task.inspect(rows)
    if running_processes()[0] == 0:
        _say_notes(task, len(rows), base.config.sequence_length)
    content, beside = tokenizer_file.read_bytes(), tokenizer_file.parent
    groups = [rows[start : start + each] for start in range(0, len(rows), each)]
    run, config = training_recipe(recipe, len(groups)), base.config
    if (running := running_processes()[1]) != run.parallel.layout().world:
        raise wrong_processes(run, config, running)
    named = (recipe.model.init_from, recipe.data.train, recipe.data.validation)
    inputs = [input_record(path) for path in named if path]
    return TaskPlan(
        recipe=run,
        config=config,
        device=device,
        corpus=Corpus((), (), tokenizer.vocab_size, tokenizer, content, inputs, 0, beside),
        memory=memory.check_memory(config, run, device),
        task=task,
        base=base,
        groups=groups,
        measured=measured,
    )


def _say_notes(task: Task, rows: int, longest: int) -> None:
    """What the user should know of the records before a run; `longest`: tokens that the model reads at once."""
    for is_warning, text in task.notes:
        (warn if is_warning else say)(text)
    if task.cut_rows:
        kept = "the end of a prompt is kept" if task.family == "gpt" else "the beginning is kept"
        what = "prompts with their responses" if task.family == "gpt" else "texts"
        text = f"{task.cut_rows:,} of {rows:,} {what} are longer than a row of {task.length} tokens: {kept}"
        fix = (
            f"--set train.sequence_length={longest}"
            if longest > task.length
            else "the model reads no longer ones"
        )
        warn(f"{text}; {fix}")


def _task(recipe: FinetuneRecipe, base: nn.Module, tokenizer: Tokenizer) -> Task:
    task = TASKS[recipe.task](recipe, tokenizer)
    if recipe.task == "retrieval":
        task.sentence = sentence.read_sentence(Path(recipe.model.init_from))
        if isinstance(base, BERTWithHead) and not base.head.labels:
            task.head = base.head
    config: Any = base.config
    if (task.family == "gpt") != isinstance(base, GPT):
        raise WrongUse(f"{recipe.task} needs a {task.family.upper()}", where=recipe.model.init_from)
    if recipe.train.sequence_length > (longest := config.sequence_length):
        why = f"{recipe.train.sequence_length} is more than the model's {longest} positions"
        fix = f"--set train.sequence_length={longest}"
        raise WrongUse("the rows are too long for the model", where="train.sequence_length", why=why, fix=fix)
    if task.family == "bert" and (tokenizer.cls_id is None or tokenizer.sep_id is None):
        raise WrongUse("the tokenizer has no [CLS] and [SEP]", where=recipe.model.init_from)
    huggingface_config.describe(weights_in.plain(base).config)  # Refused for a shape that could not be saved
    return task


ROLES = {  # fields that every record of a task has
    "classification": ("text_field", "label_field"),
    "token-classification": ("text_field", "label_field"),
    "retrieval": ("text_field", "pair_field"),
    "instruction": ("text_field", "label_field"),
}


def _split(recipe: FinetuneRecipe) -> tuple[list[Record], list[Record]]:
    data, squad = recipe.data, recipe.task == "question-answering"
    records = read_records(data.train, squad)
    if data.validation:
        learnt, measured = records, read_records(data.validation, squad)
    else:
        # a paragraph's questions and a query's passages stay together; elsewhere equal texts do, whatever their labels
        fields = [data.text_field] if recipe.task == "retrieval" else [data.text_field, data.pair_field]
        if squad:
            fields = ["context"]
        else:
            pair = ["pair_field"] if recipe.task == "classification" and data.pair_field else []
            list(fields_of(records, data, *ROLES[recipe.task], *pair))  # which every record must have
        learnt, measured = [], []
        for record in records:
            (measured if held_out(record, fields, data.validation_fraction) else learnt).append(record)
    if not learnt or not measured:
        why = f"{len(learnt)} to learn from, {len(measured)} to measure on"
        raise WrongUse("too few records", where=data.train, why=why, fix="give more, or data.validation")
    return learnt, measured


def write_model(
    model: nn.Module, tokenizer: Tokenizer, tokenizer_json: bytes, target: Path, beside: Path | None = None
) -> None:
    """A Hugging Face directory of a model with its head, the tokenizer, and what stands beside that in `beside`."""
    from safetensors.torch import save_file

    assert isinstance(model, GPT | BERT | BERTWithHead)
    fields, state = huggingface.to_huggingface(model)
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    ids = {f"{role}_token_id": i for role, i in tokenizer.special.items() if role in ("bos", "eos", "pad")}
    (target / "config.json").write_text(json.dumps(fields | ids, indent=1) + "\n")
    (target / "tokenizer.json").write_bytes(tokenizer_json)
    write_beside(target, tokenizer, beside, model.config.sequence_length)


def figures_text(figures: dict[str, float]) -> str:
    """Figures for a person, in one line."""
    return "  ".join(f"{name.replace('_', ' ')} {cell(value)}" for name, value in figures.items())
