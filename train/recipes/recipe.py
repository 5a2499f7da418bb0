"""The training recipe: one tree of frozen sections, the rules that span fields, and what follows from them.

No torch here: a recipe is checked, shown and planned on a machine that cannot train it.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any, Literal

from ...core.files import read_json
from ...core.hardware import computes_in, machine
from ...core.recipe import Section
from ...models.config import FAMILIES, ModelConfig, family_of
from ...models.presets import preset, preset_names
from ...planner.layout import default_micro_rows
from .sections import (
    CheckpointSection,
    CompressionSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    ParallelSection,
    ScheduleSection,
    TargetSection,
    TrainSection,
)

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA's driver, AMD's, and Windows'


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
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    parallel: ParallelSection = ParallelSection()
    compression: CompressionSection = CompressionSection()
    target: TargetSection | None = None
    log: LogSection = LogSection()

    @property
    def mask_fraction(self) -> float:
        """Share of the tokens that a BERT predicts; 0 for a GPT."""
        return self.objective.mask_fraction if self.objective else 0.0


def micro_rows(recipe: Recipe) -> int:
    """Rows of one forward and backward on one process: as given, else what suits the layout and every batch."""
    train, ramp = recipe.train, recipe.train.batch_ramp
    rows = math.gcd(ramp.start_rows, ramp.step_rows) if ramp else train.rows_per_step
    return train.micro_batch_rows or default_micro_rows(recipe.parallel.layout(), rows)


def model_family(recipe: Recipe) -> str:
    """`gpt` or `bert`: as given, else the preset's or that of the weights to begin with, else gpt."""
    if recipe.model.family or not recipe.model.preset:
        shape = None if recipe.model.family else shape_beside(recipe)
        return recipe.model.family or (family_of(shape) if shape else "gpt")
    return family_of(preset(recipe.model.preset)) if recipe.model.preset in preset_names() else "gpt"


def shape_beside(recipe: Recipe) -> ModelConfig | None:
    """The shape that lies beside the weights to begin with, where the recipe names no preset."""
    return None if recipe.model.preset or not recipe.model.init_from else shape_of(recipe.model.init_from)


def shape_of(path: Path | str) -> ModelConfig | None:
    """The shape that lies beside the weights at `path`, which are not read: a directory of Hugging Face's, a run, a
    checkpoint. None where none does. Raises Refused for a model that ours cannot express.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        from ...models.huggingface import read_config, read_directory  # by those alone who begin with weights

        fields, state = read_directory(path)
        return read_config(fields, state, str(path / "config.json"))
    latest = path / "checkpoints" / "latest"
    file = (latest.parent / latest.read_text().strip() if latest.is_file() else path) / "model.json"
    if not file.is_file():
        return None
    described = read_json(file)
    return FAMILIES[described["family"]].from_dict(described["config"])


def model_config(recipe: Recipe, vocab_size: int | None = None) -> ModelConfig:
    """The model's config: preset or the shape of the weights to begin with, overrides, and the vocabulary of the tokens
    unless the recipe or the weights set one.

    Raises WrongUse for an unknown preset or field and for a shape that cannot be built.
    """
    fields = _own_fields(recipe)
    if vocab_size is not None:
        fields.setdefault("vocab_size", vocab_size)
    family = model_family(recipe)
    if family == "bert" and recipe.objective is not None and recipe.objective.sentences == "none":
        fields.setdefault("nsp", False)
    if recipe.model.preset:
        return preset(recipe.model.preset, **fields)
    fields.setdefault("sequence_length", recipe.train.sequence_length)
    return FAMILIES[family].from_dict(fields)


def _own_fields(recipe: Recipe) -> dict[str, Any]:
    """The overrides, over the fields in which the shape of the weights is not the family's usual one."""
    shape = shape_beside(recipe)
    if shape is None:
        return dict(recipe.model.overrides)
    usual = type(shape)().to_dict()
    given = {
        name: value for name, value in shape.to_dict().items() if value != usual[name] and name != "dropout"
    }
    return given | {"vocab_size": shape.vocab_size} | recipe.model.overrides


def usual_precision(device: str) -> str:
    """What `auto` means on this machine: bf16 on a GPU that computes in it, fp16 on one with such tensor cores
    (T4, V100), else fp32. Small models on a CPU are as fast in fp32, and exact.
    """
    found = _capabilities() if device != "cpu" else []
    able = [name for name in ("bf16", "fp16") if found and all(computes_in(name, each) for each in found)]
    return able[0] if able else "fp32"


def _capabilities() -> list[str]:
    """Of the GPUs that torch computes on; without torch, of those that the driver names. torch, which takes seconds,
    is imported where there may be any.
    """
    named = [gpu.capability for gpu in machine().gpus]
    if not (named or "torch" in sys.modules or any(map(os.path.exists, GPU_FILES))):
        return []
    try:
        import torch

        from ...models.capability import capability
    except ImportError:
        return named
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return ["{}.{}".format(*capability(device)) for device in devices]


def resolve(recipe: Recipe, base: Path | str = ".") -> Recipe:
    """The recipe with everything that follows from it written out: absolute paths, rows, the objective. Valid
    input.

    Relative paths are taken from `base`.
    """

    def absolute(path: str) -> str:
        return str((Path(base) / path).resolve()) if path and not path.startswith("datasets:") else path

    sources = [source.model_copy(update={"path": absolute(source.path)}) for source in recipe.data.sources()]
    train = recipe.train
    precision: str = train.precision
    if precision == "auto":
        precision = usual_precision(train.device) if train.matmul == "same" else "bf16"
    family = model_family(recipe)
    tasks = [absolute(task) if task.endswith(".toml") else task for task in recipe.evaluation.tasks]
    changes: dict[str, dict[str, Any]] = {
        "data": {"train": sources}
        | {key: absolute(getattr(recipe.data, key)) for key in ("validation", "tokenizer")},
        "train": {
            "batch_rows": train.rows_per_step,
            "batch_tokens": None,
            "micro_batch_rows": micro_rows(recipe),
            "precision": precision,
        },
        "evaluation": {"tasks": tasks, "data_dir": absolute(recipe.evaluation.data_dir)},
        "model": {
            "family": family,
            "init_from": absolute(recipe.model.init_from),
            "overrides": _own_fields(recipe),
        },
    }
    update: dict[str, Any] = {
        name: getattr(recipe, name).model_copy(update=fields) for name, fields in changes.items()
    }
    if family == "bert" and recipe.objective is None:
        update["objective"] = ObjectiveSection()
    return recipe.model_copy(update=update)
