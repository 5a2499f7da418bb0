"""Fine-tuning: one process, a few epochs, and a model artifact at the end that exports and serves like any other."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.artifact import check_free, create_artifact, input_record
from ...core.console import progress, say
from ...core.errors import Failed, WrongUse
from ...core.recipe import dump_toml, recipe_hash
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT
from ...models.gpt import GPT
from ...models.heads import BERTWithHead
from ...models.huggingface import to_huggingface
from ...models.huggingface_config import describe
from ...models.huggingface_heads import head_to_huggingface
from ...planner.tables import is_decayed
from ..objective import StepBatch
from ..precision import LossScaler, pick_device
from ..single_engine import SingleEngine
from ..step import Trainer, train_step
from ..weights_in import open_weights
from .recipe import FinetuneRecipe
from .records import Record, Row, field_of, held_out, read_records
from .tasks import TASKS, Task

MOST_SKIPPED = 20  # steps in a row: fp16's first scale has been halved to 1 by then
LEARNING_CHECK = "a part of the same records, held out by hash: a learning check, no benchmark score"


def finetune(recipe: FinetuneRecipe, out: Path | str, overwrite: bool = False) -> dict[str, Any]:
    """Train and write the model artifact at `out`; returns its facts.

    Raises WrongUse for records or a model that do not fit the task, Refused for a model that has no Hugging
    Face layout (before anything is trained), Failed for a loss that is not finite.
    """
    check_free(out, overwrite)
    device = pick_device(recipe.train.device, recipe.train.precision)
    base, tokenizer_file = open_weights(recipe.model)
    if tokenizer_file is None:
        raise WrongUse(
            "this model has no tokenizer.json", where=recipe.model, fix="put one beside the weights"
        )
    tokenizer = Tokenizer.load(tokenizer_file)
    task = _task(recipe, base, tokenizer)
    learnt, measured = _split(recipe)
    task.prepare([*learnt, *measured])
    torch.manual_seed(recipe.train.seed)
    model = task.build(_plain(base)).to(device)
    engine = SingleEngine(model, recipe.train.precision, device, loss=task.mean_loss)
    curve = _train(recipe, task, engine, learnt, measured)
    facts: dict[str, Any] = {
        "family": task.family,
        "task": recipe.task,
        "records": {"train": len(learnt), "validation": len(measured)},
        "validation": curve[-1]["validation"],
        "measured_on": "the validation records given" if recipe.data.validation else LEARNING_CHECK,
    }
    inputs = [input_record(recipe.model), input_record(recipe.data.train)]
    inputs += [input_record(recipe.data.validation)] if recipe.data.validation else []
    with create_artifact(
        out, "model", inputs=inputs, recipe_hash=recipe_hash(recipe), overwrite=overwrite
    ) as draft:
        with engine.exact_model() as exact:
            write_model(exact, tokenizer, tokenizer_file, draft.path)
        (draft.path / "recipe.toml").write_text(dump_toml(recipe))
        (draft.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in curve))
        draft.facts |= facts
    return facts


def _task(recipe: FinetuneRecipe, base: nn.Module, tokenizer: Tokenizer) -> Task:
    task = TASKS[recipe.task](recipe, tokenizer)
    config: Any = base.config
    if (task.family == "gpt") != isinstance(base, GPT):
        raise WrongUse(f"{recipe.task} needs a {task.family.upper()}", where=recipe.model)
    if recipe.train.sequence_length > config.sequence_length:
        why = f"{recipe.train.sequence_length} is more than the model's {config.sequence_length} positions"
        raise WrongUse("the rows are too long for the model", where="train.sequence_length", why=why)
    if task.family == "bert" and (tokenizer.cls_id is None or tokenizer.sep_id is None):
        raise WrongUse("the tokenizer has no [CLS] and [SEP]", where=recipe.model)
    describe(_plain(base).config)  # Refused for a shape that could not be saved
    return task


def _plain(base: nn.Module) -> GPT | BERT:
    """The pretrained model; of one that was fine-tuned before, its encoder."""
    if isinstance(base, BERTWithHead):
        return base.encoder
    assert isinstance(base, (GPT, BERT))
    return base


def _split(recipe: FinetuneRecipe) -> tuple[list[Record], list[Record]]:
    data, squad = recipe.data, recipe.task == "question-answering"
    records = read_records(data.train, squad)
    if data.validation:
        learnt, measured = records, read_records(data.validation, squad)
    else:
        # a paragraph's questions stay together; elsewhere equal texts do, whatever their labels
        fields = ["context"] if squad else [data.text_field, data.pair_field]
        if not squad:
            for number, record in enumerate(records, 1):
                field_of(record, data.text_field, number)
        flags = [held_out(record, fields, data.validation_fraction) for record in records]
        learnt = [record for record, flag in zip(records, flags) if not flag]
        measured = [record for record, flag in zip(records, flags) if flag]
    if not learnt or not measured:
        why = f"{len(learnt)} to learn from, {len(measured)} to measure on"
        raise WrongUse("too few records", where=data.train, why=why, fix="give more, or data.validation")
    return learnt, measured


def _train(
    recipe: FinetuneRecipe,
    task: Task,
    engine: SingleEngine,
    learnt: Sequence[Record],
    measured: Sequence[Record],
) -> list[dict[str, Any]]:
    """The epochs; one record each with the mean loss and the validation figures, which are those of the weights that
    are saved.
    """
    train, model = recipe.train, engine.model
    rows = task.rows(learnt)
    twice = 2 if recipe.task == "retrieval" else 1  # rows to a record
    groups = [rows[start : start + twice] for start in range(0, len(rows), twice)]
    steps = train.epochs * math.ceil(len(groups) / train.batch_rows)
    trainer = Trainer(
        engine, _optimizer(task, engine), LossScaler.of(train.precision), train.precision, train.clip_norm
    )
    warmup = max(round(steps * train.warmup_fraction), 1)
    curve = []
    with progress("finetune", steps, "steps") as bar:
        for epoch in range(train.epochs):
            model.train()
            losses = []
            for batch in _shuffled(task, groups, epoch, engine.device):
                step = trainer.step
                factor = min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1), 1.0)
                result = train_step(trainer, batch, factor)
                # fp16 finds its scale by steps that are skipped; a loss that is not finite, no scale mends
                if result.skipped and (not trainer.scaler.active or trainer.skipped_in_row > MOST_SKIPPED):
                    fix = 'lower train.learning_rate, or set train.precision = "fp32"'
                    raise Failed("the loss or a gradient is not finite", where=f"epoch {epoch + 1}", fix=fix)
                losses.append(result.loss)
                bar.advance(1, f"loss {losses[-1]:.4f}")
            model.eval()
            with torch.no_grad(), engine.exact_model() as exact:
                figures = task.measure(exact, measured, engine.device)
            curve.append({"epoch": epoch + 1, "loss": sum(losses) / len(losses), "validation": figures})
            say(f"epoch {epoch + 1}: loss {curve[-1]['loss']:.4f}  " + figures_text(figures))
    return curve


def _shuffled(
    task: Task, groups: Sequence[list[Row]], epoch: int, device: torch.device
) -> Iterator[StepBatch]:
    one = torch.ones(1, device=device)  # a task divides its loss by its own count
    order = np.random.default_rng((task.recipe.train.seed, epoch)).permutation(len(groups))
    size = task.recipe.train.batch_rows
    for start in range(0, len(order), size):
        rows = [row for index in order[start : start + size] for row in groups[index]]
        yield StepBatch([task.batch(rows, device)], (1,), one, one, 0, len(rows))


def _optimizer(task: Task, engine: SingleEngine) -> torch.optim.Optimizer:
    train = task.recipe.train
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, value in engine.named_parameters():
        if not name.startswith(task.untrained):
            groups[is_decayed(name, value.dim())].append(value)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": train.weight_decay, "base_lr": train.learning_rate},
            {"params": groups[False], "weight_decay": 0.0, "base_lr": train.learning_rate},
        ],
        lr=train.learning_rate,
        fused=True,
    )


def write_model(model: nn.Module, tokenizer: Tokenizer, tokenizer_file: Path, target: Path) -> None:
    """A Hugging Face directory of a model with its head, and the tokenizer beside it."""
    from safetensors.torch import save_file

    if isinstance(model, BERTWithHead):
        fields, state = head_to_huggingface(model)
    else:
        assert isinstance(model, (GPT, BERT))
        fields, state = to_huggingface(model)
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    ids = {f"{role}_token_id": i for role, i in tokenizer.special.items() if role in ("bos", "eos", "pad")}
    (target / "config.json").write_text(json.dumps(fields | ids, indent=1) + "\n")
    (target / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    texts = {i: text for text, i in tokenizer.vocab.items()}
    described = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        f"{role}_token": texts[i] for role, i in tokenizer.special.items()
    }
    (target / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")


def figures_text(figures: dict[str, float]) -> str:
    """Figures for a person, in one line."""
    return "  ".join(
        f"{name.replace('_', ' ')} {value:.4g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in figures.items()
    )
