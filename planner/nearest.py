"""Legal layouts near one that does not fit the processes at hand, and the error that names them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ..core.errors import WrongUse
from ..models.config import ModelConfig
from .layout import AXES, Allowed, Layout, anything, default_micro_rows, divisors, layout_problems


def require_world(
    layout: Layout,
    world: int,
    config: ModelConfig,
    sequence_length: int,
    rows: int,
    micro_rows: int,
    allowed: Allowed = anything,
) -> None:
    """Raise WrongUse, with the nearest legal layouts, when the running processes are not those of the layout."""
    if layout.world == world:
        return
    near = nearest_layouts(layout, world, config, sequence_length, rows, micro_rows, allowed)
    launch = f"throughline launch --nproc {layout.world} -- ..."
    fixes = [f"{launch}, or one of the nearest layouts for {world}:"]
    fixes += [f"{found.product()}: {set_options(layout, found)}" for found in near]
    raise WrongUse(
        f"the layout needs {layout.world} process{'es' if layout.world != 1 else ''}, not {world}",
        where="parallel",
        why=layout.product(),
        fix="\n".join(fixes) if near else f"{launch}; no layout of this recipe fits {world}",
    )


def set_options(layout: Layout, other: Layout) -> str:
    """The options that turn one layout into another."""
    values = {field.name: getattr(other, field.name) for field in dataclasses.fields(Layout)}
    return " ".join(
        f"--set parallel.{name}={list(value) if isinstance(value, tuple) else value}"
        for name, value in values.items()
        if value != getattr(layout, name)
    )


def nearest_layouts(
    layout: Layout,
    world: int,
    config: ModelConfig,
    sequence_length: int,
    rows: int,
    micro_rows: int,
    allowed: Allowed = anything,
    count: int = 3,
) -> list[Layout]:
    """Legal layouts of `world` processes, those that change the degrees least first (a factor of two on one
    axis is one step).

    Rows of a micro-batch that are this layout's usual ones become the other layout's usual ones. `allowed`
    tells of a layout and its rows of a micro-batch whether the rest of the recipe, such as its optimizer, can
    be had in it.
    """
    found, usual = [], micro_rows == default_micro_rows(layout, rows)
    for tensor, context, pipeline in _three_factors(world):
        data = world // (tensor * context * pipeline)
        near = dataclasses.replace(layout, data=data, tensor=tensor, pipeline=pipeline, context=context)
        near = dataclasses.replace(
            near,
            replicas=layout.replicas if data % layout.replicas == 0 and data > layout.replicas else 1,
            expert=math.gcd(layout.expert, data),
            stages_per_process=layout.stages_per_process if pipeline > 1 else 1,
            layers_per_stage=layout.layers_per_stage if pipeline == layout.pipeline else (),
        )
        near_rows = default_micro_rows(near, rows) if usual else micro_rows
        if not layout_problems(near, config, sequence_length, rows, near_rows) and allowed(near, near_rows):
            distance = sum(abs(math.log2(getattr(near, axis) / getattr(layout, axis))) for axis in AXES)
            # between equally near layouts the cheaper axis grows first: data, then pipeline, tensor and context
            found.append((distance, abs(tensor - layout.tensor), context, tensor, pipeline, near))
    return [near for *_, near in sorted(found, key=lambda item: item[:-1])[:count]]


def _three_factors(world: int) -> Iterator[tuple[int, int, int]]:
    found = divisors(world)
    for first, second in itertools.product(found, repeat=2):
        rest, odd = divmod(world, first * second)
        yield from ((first, second, third) for third in found if not odd and rest % third == 0)
