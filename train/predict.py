"""What the planner says of a recipe on this machine: the step time that a run logs beside the measured one. No torch."""

import dataclasses

from ..models.config import ModelConfig
from ..planner.constants import Constants, constants_here
from ..planner.cost import Layouts, Work, layouts_of, step_seconds
from ..planner.hardware import Cluster, read_calibration, this_machine
from ..planner.software import Software, find_software
from .recipe import Recipe


def described(config: ModelConfig, recipe: Recipe) -> tuple[Work, Layouts, Software]:
    """A resolved recipe as the planner takes it."""
    train = recipe.train
    predicted = recipe.objective.mask_fraction if recipe.objective else 1.0
    work = Work(config, train.rows_per_step, train.sequence_length, predicted)
    layouts = layouts_of(recipe.parallel.layout(), train.rows_per_micro_batch, train.recompute, train.offload)
    software = find_software("throughline", train.precision)
    return work, layouts, dataclasses.replace(software, dropout=config.dropout > 0)


def predicted_step_seconds(
    config: ModelConfig, recipe: Recipe, cluster: Cluster | None = None, constants: Constants | None = None
) -> float:
    """Seconds of one step here, or on another cluster; by the datasheet until `study` has measured this machine."""
    work, layouts, software = described(config, recipe)
    cluster = cluster or this_machine(layouts.world)
    return step_seconds(work, layouts, cluster, software, constants or constants_here(read_calibration()))
