"""A layout in words and numbers, as `train --show-layout` prints it: who holds what, and what is sent in a step."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..core.console import amount, table
from ..models.config import ModelConfig, family_of
from .actions import pipeline_actions
from .layout import Layout
from .tables import (
    Coordinates,
    optimizer_numbers,
    parameter_shapes,
    shard_specs,
    stage_holds,
    tensor_placement,
)
from .traffic import StepShape, held, traffic


def places(layout: Layout) -> Iterator[Coordinates]:
    """The processes that hold different parts, in order: pipeline rank, then tensor rank, then shard."""
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            for shard in range(layout.shards):
                yield Coordinates(pipeline, tensor, 0, shard)


def layout_report(
    config: ModelConfig, layout: Layout, batch: StepShape, optimizer: str
) -> tuple[dict[str, Any], list[str]]:
    """A layout for a script and for a person: what each process holds and sends in a step."""
    kept, number = batch.numbers.weight, batch.numbers.gradient
    held_names = ("weights", "gradients", "host" if batch.halves else "optimizer")
    processes = []
    for place in places(layout):
        count = held(config, layout, place)
        whole = held(config, dataclasses.replace(layout, sharding="replicated"), place)
        gradients = whole if layout.sharding in ("replicated", "zero1") or layout.pipeline > 1 else count
        weights = count if layout.sharding == "full" and layout.pipeline == 1 else whole
        sizes = {"weights": weights * kept, "gradients": gradients * batch.summed}
        # with offload: master and gradient beside the optimizer's numbers, on the host
        slots = _optimizer_numbers(optimizer, config, layout, place)
        masters = 0 if number == kept else count  # with offload a gradient lies beside them
        sizes[held_names[-1]] = number * (slots + (2 * count if batch.halves else masters))
        processes.append(dataclasses.asdict(place) | {"parameters": count} | sizes)
    sent = {rank: traffic(config, layout, batch, rank) for rank in range(layout.pipeline)}
    facts: dict[str, Any] = {
        "layout": layout.facts(),
        "family": family_of(config),
        "parameters": config.parameter_count(),
        "processes": processes,
        "placements": dict(placements(config, layout)),
        "traffic": [
            {"pipeline": rank} | dataclasses.asdict(entry)
            for rank, entries in sent.items()
            for entry in entries
        ],
    }
    if layout.pipeline > 1:
        order = pipeline_actions(layout, batch.micro_batches)
        facts["actions"] = [[str(action) for action in rank] for rank in order]
    lines = [f"{layout.product()}: {layout.describe()}", f"{config.parameter_count():,} parameters", ""]
    lines += table(("parameter", "shape", "over tensor", "stage"), _placement_rows(config, layout))
    lines += ["", "held in a step by one process of each place; its copies hold the same"]
    header = ("pipeline", "tensor", "shard", "parameters", *held_names)
    lines += table(
        header,
        [
            [row[name] if name in header[:4] else amount(row[name], "B") for name in header]
            for row in processes
        ],
    )
    lines += [
        "",
        "sent by one process in a step"
        + ("" if batch.scheme == "none" else ", after the warm-up of compression"),
    ]
    rows = [
        (rank, entry.axis, entry.kind, entry.what, entry.calls, amount(entry.bytes, "B"))
        for rank, entries in sent.items()
        for entry in entries
    ]
    lines += table(("pipeline", "axis", "collective", "of", "calls", "bytes"), rows) if rows else ["nothing"]
    if layout.pipeline > 1:
        lines += ["", "order of work: stage, forward or backward (I of inputs, W of weights), micro-batch"]
        lines += [f"{rank}: {shortened(actions)}" for rank, actions in enumerate(facts["actions"])]
    return facts, lines


def _optimizer_numbers(optimizer: str, config: ModelConfig, layout: Layout, place: Coordinates) -> int:
    mine = shard_specs(config, layout, place)
    return sum(optimizer_numbers(optimizer, spec.name, spec.box.size) for spec in mine)


def shortened(words: list[str], most: int = 24) -> str:
    """The first and last of a long list."""
    return " ".join(words if len(words) <= most else [*words[: most // 2], "...", *words[-most // 2 :]])


def placements(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Parameter -> how it lies over the tensor axis."""
    for name in parameter_shapes(config):
        yield name, _over_tensor(name, config, layout)


def _over_tensor(name: str, config: ModelConfig, layout: Layout) -> str:
    if layout.tensor == 1:
        return "whole"
    placement = tensor_placement(name, config)
    return f"cut on dim {placement}" if isinstance(placement, int) else f"whole, gradient {placement}"


def _placement_rows(config: ModelConfig, layout: Layout) -> list[tuple[str, str, str, str]]:
    """One row for each parameter, those of the blocks once for all layers."""
    rows = []
    for name, shape in parameter_shapes(config).items():
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        if name.startswith("blocks."):
            shown, where = name.replace("blocks.0.", "blocks.*."), "its layer's"
        else:
            stages = [stage for stage in range(layout.stages) if stage_holds(name, stage, config, layout)]
            shown, where = name, ", ".join(map(str, stages))
        rows.append((shown, " x ".join(map(str, shape)), _over_tensor(name, config, layout), where))
    return rows
