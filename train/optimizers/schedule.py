"""The learning rate as a share of its peak: one pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate that step `step` (from 0) uses, in (0, 1].

    Warm-up is linear and its first step is not zero: (step + 1) / warmup_steps. The decay would reach
    `final_fraction` one step after its last, so that a decay to 0 wastes no step. wsd (warm-up, stable,
    decay: Hu et al. 2024, MiniCPM, section 4) stays at the peak and falls linearly at the end. inverse-sqrt is
    sqrt(warmup_steps / step) after the warm-up (Vaswani et al. 2017, section 5.3). With
    `decay_from_start` the decay is that of the step's share of the whole run, as in NVIDIA's and MLPerf's BERT.
    While the batch grows all is counted in whole batches, so that the rate is a function of the rows read.
    """
    schedule, train = recipe.schedule, recipe.train
    done, after, steps = (train.rows_before(s) / train.rows_per_step for s in (step, step + 1, train.steps))
    before = -schedule.warmup_start_step
    if done < schedule.warmup_steps - before:
        return min((after + before) / schedule.warmup_steps, 1.0)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse-sqrt":
        return min(math.sqrt(max(schedule.warmup_steps, 1) / (after + before)), 1.0)
    if schedule.kind == "wsd":
        length = schedule.decay_steps or max(min(steps // 5, steps - schedule.warmup_steps), 1)
        start = steps - length
    else:
        start = 0 if schedule.decay_from_start else schedule.warmup_steps - before
        length = schedule.decay_steps or steps - start
    share = min(max(done - start, 0) / length, 1.0)
    if schedule.kind == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * share))
    else:
        left = (1 - share) ** (schedule.power if schedule.kind == "polynomial" else 1.0)
    return schedule.final_fraction + (1 - schedule.final_fraction) * left
