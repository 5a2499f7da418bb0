"""The optimizer of a recipe: AdamW (torch's fused one), Muon with AdamW, LAMB or Adafactor; and its learning rate.

Every parameter group carries `base_lr`, the peak that the schedule scales. Weight decay is decoupled and only
on matrices: a norm scale, a bias, or the row of a rare token would shrink between its gradients for no reason.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...planner.tables import is_decayed, is_hidden_matrix
from ..engine import Engine
from ..recipes.recipe import Recipe
from ..stage import WholeParameters
from .adafactor import Adafactor
from .lamb import Lamb
from .muon import MuonAdamW


def build_optimizer(
    model: nn.Module | Engine, recipe: Recipe, adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's parameters, in groups by weight decay and kind; `adam` for AdamW."""
    section, whole = recipe.optimizer, WholeParameters.of(model)
    lamb = section.name == "lamb"
    decay, rate, matrix_rate = section.weight_decay, section.learning_rate, section.matrix_learning_rate
    kinds: dict[Any, dict[str, Any]] = {
        "decayed": {"params": [], "weight_decay": decay, "base_lr": rate},
        "plain": {"params": [], "weight_decay": 0.0, "base_lr": rate},
    }
    if lamb:  # matrices and tables decay and have a ratio, vectors have neither
        kinds["decayed"]["adapted"], kinds["plain"]["adapted"] = True, False
    interleaved = partial(_interleaved, model=model)
    muon = {"weight_decay": decay, "base_lr": matrix_rate}
    for name, parameter in model.named_parameters():
        decayed = parameter.dim() > 1 if lamb else is_decayed(name, parameter.dim())
        kind: Any = "decayed" if decayed else "plain"
        if section.name == "muon" and kind == "decayed" and is_hidden_matrix(name, parameter.dim()):
            kind = interleaved(name)
            kinds.setdefault(kind, muon | {"params": [], "interleaved": kind})
        elif (share := width_factor(name, parameter.dim(), recipe, model)) != 1:
            scaled = {"params": [], "weight_decay": decay / share, "base_lr": rate * share}
            kinds.setdefault(kind := "scaled", scaled)
        kinds[kind]["params"].append(parameter)
    groups = [group | {"ema_decay": section.ema_decay} for group in kinds.values() if group["params"]]
    if section.name == "adafactor":
        return Adafactor(groups, whole, lr=rate)
    if section.name == "muon":
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else None
        adam = partial(MuonAdamW, whole=whole, interleaved=interleaved, dtype=dtype)
    usual: dict[str, Any] = {"lr": rate, "betas": (section.beta1, section.beta2), "eps": section.epsilon}
    if lamb:
        return Lamb(groups, whole, interleaved, **usual, max_trust_ratio=section.max_trust_ratio)
    return adam(groups, **usual, fused=True)


def width_factor(name: str, dims: int, recipe: Recipe, model: Any) -> float:
    """What muP multiplies AdamW's rate of a hidden or output matrix by, and its variance, the output's twice: base
    width over width (Yang et al. 2022, "Tensor Programs V", table 3; decay, times the rate, stays). 1 for all else.
    """
    scaled = recipe.model.base_width and (is_hidden_matrix(name, dims) or name == "output.weight")
    return recipe.model.base_width / model.config.width if scaled else 1.0


def _interleaved(name: str, model: Any) -> tuple[int, int]:
    """How many matrices a weight holds, and in pieces of how many rows they alternate (`models.layers.Attention`)."""
    count = 3 if name.endswith(".qkv.weight") else 2 if name.endswith(".kv.weight") else 1
    return count, model.config.head_size if count > 1 else 0


def learning_rate_factor(step: int, recipe: Recipe, earlier_lengths: Sequence[tuple[int, int]] = ()) -> float:
    """Share of the peak learning rate that step `step` (from 0) uses, in (0, 1].

    Warm-up is linear and its first step is not zero: (step + 1) / warmup_steps. The decay would reach
    `final_fraction` one step after its last, so that a decay to 0 wastes no step. wsd (warm-up, stable,
    decay: Hu et al. 2024, MiniCPM, section 4) stays at the peak and falls linearly at the end. inverse-sqrt is
    sqrt(warmup_steps / step) after the warm-up (Vaswani et al. 2017, section 5.3). With
    `decay_from_start` the decay is that of the step's share of the whole run, as in NVIDIA's and MLPerf's BERT.
    While the batch grows all is counted in whole batches, so that the rate is a function of the rows read.

    `earlier_lengths` are those of `Trainer`: where a resume changed `train.steps`, the decay goes on from where it
    stood and ends with the new last step. A decay that has ended stays at `final_fraction`.
    """
    schedule = recipe.schedule
    done, after = _whole_batches(step, recipe), _whole_batches(step + 1, recipe)
    before = -schedule.warmup_start_step
    if done < schedule.warmup_steps - before:
        return min((after + before) / schedule.warmup_steps, 1.0)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse-sqrt":
        return min(math.sqrt(max(schedule.warmup_steps, 1) / (after + before)), 1.0)
    share = _decay_share(step, recipe, recipe.train.steps, earlier_lengths)
    if schedule.kind == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * share))
    else:
        left = (1 - share) ** (schedule.power if schedule.kind == "polynomial" else 1.0)
    return schedule.final_fraction + (1 - schedule.final_fraction) * left


def _whole_batches(step: int, recipe: Recipe) -> float:
    """Rows read before a step, in batches of `train.batch_rows`: the number of the step unless the batch grows."""
    return recipe.train.rows_before(step) / recipe.train.rows_per_step


def _decay_share(step: int, recipe: Recipe, planned: int, earlier: Sequence[tuple[int, int]]) -> float:
    """Share of the decay that is over when a step begins, in a run of `planned` steps that had `earlier` lengths."""
    schedule, done, steps = recipe.schedule, _whole_batches(step, recipe), _whole_batches(planned, recipe)
    warmup = schedule.warmup_steps + schedule.warmup_start_step
    if schedule.kind == "wsd":
        length = schedule.decay_steps or max(min(steps // 5, steps - schedule.warmup_steps), 1)
        start = steps - length
    else:
        start = 0 if schedule.decay_from_start else warmup
        length = schedule.decay_steps or steps - start
    by_length = (
        schedule.kind == "wsd" or schedule.decay_steps is None
    )  # whether the run's length moves the decay
    if earlier and by_length:
        (changed_at, planned_before), before = earlier[-1], earlier[:-1]
        share_then = _decay_share(changed_at, recipe, planned_before, before)
        changed = _whole_batches(changed_at, recipe)
        # a stable rate whose decay would have begun before the change begins to decay with it
        if changed >= warmup and (share_then or start < changed):
            start = changed
            if done < start:
                return _decay_share(step, recipe, planned_before, before)
            return share_then + (1 - share_then) * min((done - start) / max(steps - start, 1), 1.0)
    return min(max(done - start, 0) / length, 1.0)
