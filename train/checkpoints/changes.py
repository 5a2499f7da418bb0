"""Recipe changes of a resumed run, and their effect on its learning rate."""

from pathlib import Path
from typing import Any

from ...core.errors import WrongUse
from ...core.files import leaves, read_json
from ..optimizers.build import learning_rate_factor
from ..recipes.recipe import Recipe
from ..step import Trainer
from .run_directory import earlier_lengths, free_directory, train_command

# the fields of `run_directory.MAY_CHANGE` that change what is trained: the run's events name them
RECORDED = ("train.steps", "train.clip_norm", "optimizer.learning_rate", "optimizer.matrix_learning_rate")


def recorded_changes(before: Recipe, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the training fields that a resume changed: key -> (old value, new value)."""
    old, new = (dict(leaves(each.model_dump(mode="json"))) for each in (before, recipe))
    return {key: (old[key], new[key]) for key in RECORDED if old[key] != new[key]}


def rates_around(before: Recipe, recipe: Recipe, trainer: Trainer) -> tuple[float, float, float]:
    """The learning rate of the last step before a resume, of the first step after it, and of the run's last step."""
    step, lengths = trainer.step, trainer.earlier_lengths
    old_peak, peak = before.optimizer.learning_rate, recipe.optimizer.learning_rate
    return (
        old_peak * learning_rate_factor(step - 1, recipe, lengths),
        peak * learning_rate_factor(step, recipe, lengths),
        peak * learning_rate_factor(recipe.train.steps - 1, recipe, lengths),
    )


def check_rate(recipe: Recipe, before: Recipe | None, run: Path, checkpoint: Path) -> None:
    """Raise WrongUse when a resume adds steps to a schedule that has ended at a rate of 0: they would learn nothing."""
    state = read_json(checkpoint / "state.json")
    step, lengths = (
        state["step"],
        earlier_lengths(state, recipe.train.steps, before.train.steps if before else None),
    )
    if not lengths or lengths[-1][0] != step or step >= recipe.train.steps:
        return
    if learning_rate_factor(step, recipe, lengths) > 0:
        return
    peak, more = recipe.optimizer.learning_rate, recipe.train.steps - step
    last = peak * learning_rate_factor(step - 1, recipe, lengths)
    again = peak * learning_rate_factor(step, recipe)
    what = f"the schedule has ended at a learning rate of 0, so {more:,} more steps would learn nothing"
    why = f"the rate was {last:.4g} at step {step:,}; a schedule of {recipe.train.steps:,} steps would throw it back "
    why += f"up to {again:.4g} at step {step + 1:,}"
    steps = [f"train.steps={recipe.train.steps}"]  # the recipe that is there still has the old number
    fix = f"begin a new schedule from its weights: {train_command(recipe, run, free_directory(run), steps, run)}"
    raise WrongUse(what, where=run, why=why, fix=fix)
