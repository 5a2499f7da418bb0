"""A layout in words and numbers, as `train --show-layout` prints it: who holds what, and what is sent in a step."""

import dataclasses
import itertools
from typing import Any

from ..core.console import amount, table
from ..models.config import ModelConfig, family_of
from .layout import Layout
from .memory import host_terms, state_terms
from .schedule import pipeline_actions
from .tables import (
    Coordinates,
    optimizer_numbers,
    parameter_shapes,
    shard_specs,
    stage_holds,
    tensor_placement,
)
from .traffic import StepShape, held, traffic
from .work import Work, layouts_of


def layout_report(
    config: ModelConfig, layout: Layout, batch: StepShape, optimizer: str
) -> tuple[dict[str, Any], list[str]]:
    """A layout for a script and for a person: what each process holds and sends in a step."""
    degrees = range(layout.pipeline), range(layout.tensor), range(1), range(layout.shards)
    places = [Coordinates(*ranks) for ranks in itertools.product(*degrees)]  # those that hold different parts
    processes = [vars(place) | held_bytes(config, layout, batch, optimizer, place) for place in places]
    sent = {rank: traffic(config, layout, batch, rank) for rank in range(layout.pipeline)}
    facts: dict[str, Any] = {
        "layout": layout.facts(),
        "family": family_of(config),
        "parameters": config.parameter_count(),
        "processes": processes,
        "placements": {name: _over_tensor(name, config, layout) for name in parameter_shapes(config)},
        "traffic": [{"pipeline": rank} | vars(entry) for rank, entries in sent.items() for entry in entries],
    }
    if layout.pipeline > 1:
        order = pipeline_actions(layout, batch.micro_batches)
        facts["actions"] = [[str(action) for action in rank] for rank in order]
    lines = [f"{layout.product()}: {layout.describe()}", f"{config.parameter_count():,} parameters", ""]
    lines += table(("parameter", "shape", "over tensor", "stage"), _placement_rows(config, layout))
    lines += ["", "held in a step by one process of each place; its copies hold as much"]
    counted, sized = ("pipeline", "tensor", "shard", "parameters"), list(processes[0])[-3:]
    cells = [
        [row[name] for name in counted] + [amount(row[name], "B") for name in sized] for row in processes
    ]
    lines += table((*counted, *sized), cells)
    warm = "" if batch.scheme == "none" else ", after the warm-up of compression"
    lines += ["", f"sent by one process in a step{warm}"]
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


def held_bytes(
    config: ModelConfig, layout: Layout, batch: StepShape, optimizer: str, place: Coordinates
) -> dict[str, int]:
    """Parameters of a process, counted, and the bytes that the planner's memory has for so many."""
    owned = [(spec.name, spec.box.size, spec.box.numel) for spec in shard_specs(config, layout, place)]
    count, number = sum(numel for *_, numel in owned), batch.numbers.gradient
    slots = sum(optimizer_numbers(optimizer, name, size) for name, size, _ in owned)
    numbers = dataclasses.replace(batch.numbers, moments=number * slots / max(count, 1))
    software = dataclasses.replace(batch.software, precision=numbers)
    whole = held(config, dataclasses.replace(layout, sharding="replicated"), place)
    layouts = layouts_of(layout, batch.rows, batch.recompute, batch.halves)
    work = Work(config, batch.micro_batches * batch.rows * layout.data, batch.length)
    terms = state_terms(config, layouts, numbers, whole, count)
    terms["host"] = sum(host_terms(work, layouts, software, count).values())
    names = ("weights", "gradients", "host" if batch.halves else "optimizer")
    return {"parameters": count} | {name: round(float(terms[name])) for name in names}


def shortened(words: list[str], most: int = 24) -> str:
    """The first and last of a long list."""
    return " ".join(words if len(words) <= most else [*words[: most // 2], "...", *words[-most // 2 :]])


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
        shown, where = name.replace("blocks.0.", "blocks.*."), "its layer's"
        if shown == name:
            stages = [stage for stage in range(layout.stages) if stage_holds(name, stage, config, layout)]
            where = ", ".join(map(str, stages))
        rows.append((shown, " x ".join(map(str, shape)), _over_tensor(name, config, layout), where))
    return rows
