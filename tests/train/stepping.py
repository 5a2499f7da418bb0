"""A trainer with its first batch, and its weights as one tensor, for the tests of optimizer steps."""

from collections.abc import Callable

import torch
from throughline.train.build import RunPlan, StepBatches, build_trainer, training_rows
from throughline.train.objective import StepBatch
from throughline.train.step import Trainer


def setting(
    make_plan: Callable[..., RunPlan], family: str = "gpt", **sections: dict
) -> tuple[Trainer, StepBatch]:
    plan = make_plan(family, **sections)
    return build_trainer(plan), StepBatches(plan, training_rows(plan)).batch(0, 4)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten().clone() for parameter in trainer.engine.stages[0].model.parameters()]
    )
