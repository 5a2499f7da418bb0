"""A run that diverges: steps whose loss is not finite leave no checkpoint, and the error says how to go on."""

from pathlib import Path

from ..core.errors import Failed
from .checkpoints.run_directory import checkpoints, free_directory, train_command
from .recipes.recipe import OptimizerSection, Recipe
from .step import StepResult, Trainer


class Divergence:
    """Whether the newest step can be trusted, and which checkpoint was written before the loss was lost.

    A checkpoint is good when a later step had a finite loss: the step that diverges may be the one that was saved.
    A scaled fp16 gradient that overflows while the loss is finite is no divergence: the scale is halved.
    """

    def __init__(self, trainer: Trainer, run: Path) -> None:
        self.trainer, self.run = trainer, run
        self.last_good_step = trainer.step  # of this start: the last one whose loss and gradient were finite
        self.diverged = False  # since the last good step

    def add(self, result: StepResult) -> None:
        """Take note of a step that has been read."""
        if not result.skipped:
            self.last_good_step = result.step
        self.diverged = result.skipped and not result.overflowed

    def confirms(self, saved_step: int) -> bool:
        """Whether a step after the checkpoint of `saved_step` was good."""
        return saved_step < self.last_good_step

    def error(self, result: StepResult, recipe: Recipe) -> Failed:
        """The error that ends the run, with the last good checkpoint and a command that goes on from it."""
        trainer = self.trainer
        what = f"{trainer.skipped_in_row} steps in a row had a loss or gradient that is not finite"
        why = f"loss {result.loss}, gradient norm {result.grad_norm}, loss scale {trainer.scaler.scale:g}"
        complete = checkpoints(self.run / "checkpoints")
        good = next((path for path in complete if self.confirms(step_of(path))), None)
        lower = lower_rates(recipe)
        if not complete:
            why += "\nthe run has no checkpoint"
            fix = train_command(recipe, self.run, self.run, lower)
        elif good is None:
            why += "\nthe run has no checkpoint that is followed by a finite step"
            fix = train_command(recipe, self.run, free_directory(self.run), lower)
        elif good == complete[0]:
            why += f"\nthe last good checkpoint is {good}"
            fix = train_command(recipe, self.run, self.run, lower)
        else:
            why += f"\nthe last good checkpoint is {good}; no step after {complete[0].name} was finite"
            fix = train_command(recipe, self.run, free_directory(self.run), lower, good)
        if recipe.train.precision == "fp16":
            fix += f"\nor: {train_command(recipe, self.run, free_directory(self.run), ['train.precision=fp32'], good)}"
        return Failed(what, where=f"{self.run}, step {result.step:,}", why=why, fix=fix)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))


def lower_rates(recipe: Recipe) -> list[str]:
    """Settings of a tenth of the learning rate, and of no more than the default."""
    usual, optimizer = OptimizerSection(), recipe.optimizer
    rate = min(optimizer.learning_rate / 10, usual.learning_rate)
    settings = [f"optimizer.learning_rate={rate:.3g}"]
    if optimizer.name == "muon":
        matrix_rate = min(optimizer.matrix_learning_rate / 10, usual.matrix_learning_rate)
        settings.append(f"optimizer.matrix_learning_rate={matrix_rate:.3g}")
    return settings
