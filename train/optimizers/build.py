"""The optimizers of a recipe: AdamW (torch's fused one), Muon for the matrices of the blocks with AdamW for
the rest (`muon.py`), LAMB (`lamb.py`) and Adafactor (`adafactor.py`).

Every parameter group carries `base_lr`, the peak that the schedule scales. Weight decay is decoupled and only
on matrices: a norm scale, a bias, or the row of a rare token would shrink between its gradients for no
reason.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...planner.tables import is_decayed, is_hidden_matrix
from ..engine import Engine
from ..recipes.recipe import Recipe
from ..shards import WholeParameters
from .adafactor import Adafactor
from .lamb import Lamb
from .muon import MuonAdamW


def build_optimizer(
    model: nn.Module | Engine,
    recipe: Recipe,
    adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's parameters, in groups by weight decay and kind. `adam` stands
    in for AdamW.
    """
    section = recipe.optimizer
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
        kinds[kind]["params"].append(parameter)
    groups = [group for group in kinds.values() if group["params"]]
    if section.name == "adafactor":
        return Adafactor(groups, WholeParameters.of(model), lr=rate)
    if section.name == "muon":
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else None
        adam = partial(MuonAdamW, whole=WholeParameters.of(model), interleaved=interleaved, dtype=dtype)
    usual: dict[str, Any] = {"lr": rate, "betas": (section.beta1, section.beta2), "eps": section.epsilon}
    if lamb:
        return Lamb(
            groups, WholeParameters.of(model), interleaved, **usual, max_trust_ratio=section.max_trust_ratio
        )
    return adam(groups, **usual, fused=True)


def _interleaved(name: str, model: Any) -> tuple[int, int]:
    """How many matrices a weight holds, and in pieces of how many rows they alternate (see
    `models.layers.Attention`).
    """
    count = 3 if name.endswith(".qkv.weight") else 2 if name.endswith(".kv.weight") else 1
    return count, model.config.head_size if count > 1 else 0
