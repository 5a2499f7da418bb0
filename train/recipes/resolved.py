"""What follows from a recipe, without torch: the model, the precision here, everything written out, the prediction."""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.artifact import is_artifact
from ...core.console import cell, duration, warn
from ...core.files import read_json
from ...core.hardware import computes_in, machine
from ...models.config import FAMILIES, ModelConfig, family_of, preset, preset_names
from ...planner import memory, report, traffic
from ...planner.cost import kernel_totals, step_seconds
from ...planner.hardware import Cluster, this_machine
from ...planner.layout import ZERO_BUBBLE, default_micro_rows
from ...planner.work import LARGE_VOCABULARY, Layouts, Software, Work, find_software, prepared_places
from .recipe import ObjectiveSection, Recipe

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA's driver, AMD's, and Windows'
# a CPU has its activations in cache at 4096 (15 % faster than 16384)
EVALUATED_TOKENS = {"cpu": 4096, "cuda": 65536}
EVALUATED_LOGITS = {"cpu": 2**26, "cuda": 2**29}  # numbers on one process: 2**26 are 256 MB in fp32
MOST_EPOCHS = 4  # passes over a text that are worth nearly as much as new text: Muennighoff et al. 2023


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


def is_text(path: str) -> bool:
    """Whether this is text, a file or a directory of files, and neither a recipe nor an artifact nor a token store."""
    place = Path(path)
    return (
        place.exists() and place.suffix != ".toml" and not is_artifact(path) and not list(place.glob("*.idx"))
    )


def shape_beside(recipe: Recipe) -> ModelConfig | None:
    """The shape that lies beside the weights to begin with, where the recipe names no preset."""
    return None if recipe.model.preset or not recipe.model.init_from else shape_of(recipe.model.init_from)


def shape_of(path: Path | str) -> ModelConfig | None:
    """The shape beside the weights at `path`, which are not read; None without. Raises Refused for unknown kinds."""
    path = Path(path)
    if (path / "config.json").is_file():
        from ...models.huggingface import read_config, read_directory  # by those alone who begin with weights

        return read_config(*read_directory(path), str(path / "config.json"))
    latest = path / "checkpoints" / "latest"
    file = (latest.parent / latest.read_text().strip() if latest.is_file() else path) / "model.json"
    if not file.is_file():
        return None
    described = read_json(file)
    return FAMILIES[described["family"]].from_dict(described["config"])


def model_config(recipe: Recipe, vocab_size: int | None = None) -> ModelConfig:
    """Preset or shape of the weights to begin with, overrides, the tokens' vocabulary unless set. Raises WrongUse."""
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
    usual, fields = type(shape)().to_dict(), shape.to_dict()
    given = {name for name, value in fields.items() if value != usual[name] and name != "dropout"}
    return {name: fields[name] for name in fields if name in given | {"vocab_size"}} | recipe.model.overrides


def usual_precision(device: str) -> str:
    """What `auto` means here: bf16 or fp16 on a GPU that computes in it, else fp32, on a CPU as fast and exact."""
    found = _capabilities() if device != "cpu" else []
    able = [name for name in ("bf16", "fp16") if found and all(computes_in(name, each) for each in found)]
    return able[0] if able else "fp32"


def _capabilities() -> list[str]:
    """Of the GPUs that torch, if it is there, computes on; else of those that the driver names."""
    named = [gpu.capability for gpu in machine().gpus]
    if not (named or "torch" in sys.modules or any(map(os.path.exists, GPU_FILES))):
        return []
    try:
        import torch

        from ...models.attention_cuda import capability
    except ImportError:
        return named
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return ["{}.{}".format(*capability(device)) for device in devices]


def absolute(path: str) -> str:
    """A path from the root; what is no path stays."""
    return str(Path(path).resolve()) if path and not path.startswith("datasets:") else path


def resolve(recipe: Recipe) -> Recipe:
    """The recipe, itself valid input, with what follows from it written out: absolute paths, rows, the objective."""
    data, train, family = recipe.data, recipe.train, model_family(recipe)
    sources = [source.model_copy(update={"path": absolute(source.path)}) for source in data.sources()]
    precision: str = train.precision
    if precision == "auto":
        precision = usual_precision(train.device) if train.matmul == "same" else "bf16"
    tasks = [absolute(task) if task.endswith(".toml") else task for task in recipe.evaluation.tasks]
    rows = {"batch_rows": train.rows_per_step, "batch_tokens": None, "micro_batch_rows": micro_rows(recipe)}
    model = {"init_from": absolute(recipe.model.init_from), "overrides": _own_fields(recipe)}
    changes: dict[str, dict[str, Any]] = {
        "data": {key: absolute(getattr(data, key)) for key in ("validation", "tokenizer")}
        | {"train": sources},
        "train": rows | {"precision": precision},
        "evaluation": {"tasks": tasks, "data_dir": absolute(recipe.evaluation.data_dir)},
        "model": {"family": family} | model,
    }
    update = {name: getattr(recipe, name).model_copy(update=fields) for name, fields in changes.items()}
    if family == "bert" and recipe.objective is None:
        update["objective"] = ObjectiveSection()
    return recipe.model_copy(update=update)


def evaluated_rows(device: str, vocab_size: int, length: int) -> int:
    """Rows that one process evaluates at once."""
    return max(min(EVALUATED_TOKENS[device], EVALUATED_LOGITS[device] // vocab_size) // length, 1)


def described(config: ModelConfig, recipe: Recipe, device: str = "cuda") -> tuple[Work, Layouts, Software]:
    """A resolved recipe as the planner takes it; on a processor with the memory of the host."""
    train, moves = recipe.train, recipe.optimizer
    places = train.rows_per_micro_batch * train.sequence_length // recipe.parallel.context
    predicted = predicted_places(recipe) / places if recipe.objective else 1.0
    work = Work(config, train.rows_per_step, train.sequence_length, predicted)
    layout, software = recipe.parallel.layout(), find_software("throughline", train.precision)
    software = software.with_optimizer(moves.name, config, moves.ema_decay > 0)
    splits = layout.schedule in ZERO_BUBBLE and layout.pipeline > 1
    if splits or (train.compile == "off" and device != "cpu"):
        software = software.uncompiled()
    if splits:  # priced by its own lists
        stages = tuple(len(layout.layers_of(stage, config.layers)) for stage in range(layout.stages))
        layout = dataclasses.replace(layout, layers_per_stage=stages)
    layouts = Layouts.of(layout, train.rows_per_micro_batch, train.recompute, train.offload)
    evaluated = train.sequence_length * evaluated_rows(device, config.vocab_size, train.sequence_length)
    software = dataclasses.replace(
        software,
        loss_bytes=12 if config.vocab_size < LARGE_VOCABULARY else software.loss_bytes,
        dropout=config.dropout > 0,
        forwards_first=recipe.parallel.schedule == "gpipe",
        evaluated_tokens=evaluated if recipe.data.validation_fraction or recipe.data.validation else 0,
        scores_tasks=bool(recipe.evaluation.tasks),
        saves_between=recipe.checkpoint.save_every_steps > 0,
    )
    if (compression := recipe.compression).scheme != "none":
        software = traffic.with_compression(software, config, compression.scheme, compression.rank)
    if device == "cpu":
        software = software.on_processor()
    return work, layouts, software


def predicted_memory(
    config: ModelConfig, recipe: Recipe, device: str = "cpu", moments: Sequence[str] = tuple(memory.MOMENTS)
) -> dict[str, int]:
    """Bytes by term of the process that needs most, at the worst of these moments; their sum is the prediction."""
    return memory.worst_terms(*described(config, recipe, device), moments)


def predicted_step_seconds(config: ModelConfig, recipe: Recipe, cluster: Cluster | None = None) -> float:
    """Seconds of one step here, or on another cluster; by the datasheet until `study` has measured this machine."""
    cluster = cluster or this_machine(recipe.parallel.layout().world)
    work, layouts, software = described(config, recipe, cluster.device)
    return step_seconds(work, layouts, cluster, software)


def predicted_kernels(config: ModelConfig, recipe: Recipe) -> dict[str, dict[str, float]]:
    """What the planner's kernels come to in one step on the first process, by kind: what a profile should show."""
    cluster = this_machine(recipe.parallel.layout().world)
    work, layouts, software = described(config, recipe, cluster.device)
    return kernel_totals(work, layouts, cluster, software)


def predicted_places(recipe: Recipe) -> int:
    """Positions with masked-token logits in a micro-batch, as prepared; of a GPT none."""
    fraction, length = recipe.mask_fraction, recipe.train.sequence_length // recipe.parallel.context
    return prepared_places(recipe.train.rows_per_micro_batch, length, fraction)[1] if fraction else 0


def step_shape(recipe: Recipe) -> traffic.StepShape:
    """The shape of a resolved recipe's step."""
    train, micro = recipe.train, recipe.train.rows_per_micro_batch
    return traffic.StepShape(
        train.rows_per_step // (recipe.parallel.data * micro),
        micro,
        train.sequence_length,
        predicted_places(recipe),
        train.precision,
        train.recompute,
        halves=train.offload,
        scheme=recipe.compression.scheme,
        rank=recipe.compression.rank,
        averages=recipe.optimizer.ema_decay > 0,
    )


def layout_facts(recipe: Recipe, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The layout of a resolved recipe for a script and for a person: what each process holds and sends."""
    return report.layout_report(config, recipe.parallel.layout(), step_shape(recipe), recipe.optimizer.name)


def stated_weights(recipe: Recipe) -> list[float] | None:
    """The weights of a mixture's stores; None for one store, or for stores without weights."""
    weights = [source.weight for source in recipe.data.sources() if source.weight is not None]
    return weights if len(weights) > 1 else None


@dataclass(frozen=True)
class SourcePasses:
    """Share, tokens and passes that a run reads of one training store."""

    path: str
    tokens: float  # in the training part of the store
    share: float  # of the tokens of the run
    passes: float  # over the training part of the store

    @property
    def name(self) -> str:
        return Path(self.path).name


def source_passes(recipe: Recipe, sizes: Sequence[float]) -> list[SourcePasses]:
    """Return the tokens and passes that the run reads of each training store ([]: not known)."""
    weights = stated_weights(recipe) or sizes
    rows = zip(recipe.data.sources(), sizes, weights)
    shares = [(source.path, size, weight / sum(weights)) for source, size, weight in rows if size]
    return [
        SourcePasses(path, size, share, share * recipe.train.tokens / size) for path, size, share in shares
    ]


def outlook(
    recipe: Recipe, config: ModelConfig, cluster: Cluster | None, sizes: Sequence[float]
) -> tuple[dict[str, Any], list[str]]:
    """Facts and lines: passes over the training stores of these `sizes` in tokens ([]: not known), time and cost; by
    default of this machine.
    """
    tokens, learnt = recipe.train.tokens, sum(sizes)
    seconds = recipe.train.steps * predicted_step_seconds(config, recipe, cluster)
    price = cluster.price_per_chip_hour * recipe.parallel.layout().world if cluster else 0.0
    cost, epochs = price * seconds / 3600 or None, tokens / learnt if learnt else None
    sources = source_passes(recipe, sizes)
    facts = {
        "tokens_to_train": tokens,
        "seconds": seconds,
        "cost": cost,
        "epochs": epochs,
        "sources": [dataclasses.asdict(source) for source in sources],
    }
    lines = [f"about {duration(seconds)} in all"]
    if cluster and cost:
        lines[0] += f", {cost:,.0f} {cluster.currency} ({cluster.priced})"
    elif cluster:
        lines[0] += "; a cluster that is rented by the hour has a price (--machine aws-p4d.24xlarge)"
    if len(sources) == 1:
        lines.append(f"{cell(sources[0].passes)} passes over the training part of the store")
    elif sources:
        lines += [
            f"{source.path}: {source.share:.2%} of the tokens, {cell(source.passes)} passes over its training part"
            for source in sources
        ]
    return facts, lines


def check_passes(recipe: Recipe, sizes: Sequence[float]) -> None:
    """Warn of each store that is read more often than is worth it, by the tokens in the training parts."""
    sources = source_passes(recipe, sizes)
    for source in sources:
        if source.passes > MOST_EPOCHS:
            text = "its text" if len(sources) == 1 else source.path
            why = f"from {MOST_EPOCHS} on a pass teaches little (Muennighoff et al. 2023): more text, or fewer steps"
            warn(f"the run reads {text} {cell(source.passes)} times; {why}")
