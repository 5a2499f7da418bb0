"""The optimizers of a recipe: AdamW (torch's fused one), Muon for the matrices of the blocks with AdamW for
the rest, LAMB (`lamb.py`) and Adafactor (`adafactor.py`).

Every parameter group carries `base_lr`, the peak that the schedule scales. Weight decay is decoupled and only
on matrices: a norm scale, a bias, or the row of a rare token would shrink between its gradients for no
reason.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.tables import Box, is_decayed, is_hidden_matrix
from ..engine import Engine
from ..recipes.recipe import Recipe
from .adafactor import Adafactor
from .lamb import Lamb
from .whole_sums import WholeParameters

ITERATIONS = 5
# The quintic of Jordan et al. 2024 ("Muon"): singular values go fast to about 1 (0.7 to 1.2), and need not
# get nearer
QUINTIC = (3.4445, -4.7750, 2.0315)


def build_optimizer(
    model: nn.Module | Engine,
    recipe: Recipe,
    adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's parameters, in groups by weight decay and kind. `adam` stands
    in for AdamW.
    """
    section, bf16 = recipe.optimizer, recipe.train.precision == "bf16"
    lamb = section.name == "lamb"
    decay, rate, matrix_rate = section.weight_decay, section.learning_rate, section.matrix_learning_rate
    kinds: dict[Any, dict[str, Any]] = {
        "decayed": {"params": [], "weight_decay": decay, "base_lr": rate},
        "plain": {"params": [], "weight_decay": 0.0, "base_lr": rate},
    }
    if lamb:  # matrices and tables decay and have a ratio, vectors have neither
        kinds["decayed"]["adapted"], kinds["plain"]["adapted"] = True, False
    muon = {"weight_decay": decay, "base_lr": matrix_rate, "bf16": bf16}
    for name, parameter in model.named_parameters():
        decayed = parameter.dim() > 1 if lamb else is_decayed(name, parameter.dim())
        kind: Any = "decayed" if decayed else "plain"
        if section.name == "muon" and kind == "decayed" and is_hidden_matrix(name, parameter.dim()):
            kind = _interleaved(name, model)
            kinds.setdefault(kind, muon | {"params": [], "interleaved": kind})
        kinds[kind]["params"].append(parameter)
    groups = [group for group in kinds.values() if group["params"]]
    if section.name == "adafactor":
        return Adafactor(groups, WholeParameters.of(model), lr=rate)
    if section.name == "muon":
        adam = partial(MuonAdamW, whole=WholeParameters.of(model))
    usual: dict[str, Any] = {"lr": rate, "betas": (section.beta1, section.beta2), "eps": section.epsilon}
    if lamb:
        whole, interleaved = WholeParameters.of(model), partial(_interleaved, model=model)
        return Lamb(groups, whole, interleaved, **usual, max_trust_ratio=section.max_trust_ratio)
    return adam(groups, **usual, fused=True)


def _interleaved(name: str, model: Any) -> tuple[int, int]:
    """How many matrices a weight holds, and in pieces of how many rows they alternate (see
    `models.layers.Attention`).
    """
    count = 3 if name.endswith(".qkv.weight") else 2 if name.endswith(".kv.weight") else 1
    return count, model.config.head_size if count > 1 else 0


class MuonAdamW(torch.optim.AdamW):
    """Groups with `interleaved` move by Muon (Jordan et al. 2024), the others by AdamW.

    Muon replaces the momentum M = U S V' of a matrix by about U V', so that every direction moves alike: a
    mean of gradients with decay beta1 and Nesterov's look ahead, Newton-Schulz iterations, a step of
    sqrt(max(1, rows / columns)) x lr. Query, key and value are three matrices although they are stored as
    one. All matrices of one shape are orthogonalised together.

    A matrix of which a process holds a part is put together from the parts' momenta by a sum over the axes that
    cut it; every holder orthogonalises the whole and moves its own part.
    """

    def __init__(self, params: Any, whole: WholeParameters, **options: Any) -> None:
        super().__init__(params, **options)
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        batches: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}
        dtype, aheads, moves = torch.float32, self._aheads(), []
        for group in self.param_groups:
            for parameter in group["params"] if "interleaved" in group else ():
                dtype = torch.bfloat16 if group["bf16"] else parameter.dtype
                if parameter not in aheads:
                    continue
                ahead, box = aheads[parameter]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                moved: Tensor = parameter
                if parameter.shape != ahead.shape:
                    moved = torch.zeros_like(ahead)
                    moves.append((parameter, moved[box.slices()]))
                for target, update in zip(
                    _parts(moved, *group["interleaved"]), _parts(ahead, *group["interleaved"])
                ):
                    matrix = update.flatten(0, 1)
                    step = group["lr"] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
                    batches.setdefault(wide.shape, []).append((target, wide, step))
        for batch in batches.values():
            directions = orthogonalise(torch.stack([wide for _, wide, _ in batch]), dtype)
            for (target, _, step), wide in zip(batch, directions):
                tall = target.shape[0] * target.shape[1] > target.shape[2]
                target.sub_((wide.t() if tall else wide).reshape(target.shape), alpha=step)
        for parameter, part in moves:
            parameter.add_(part)
        super().step()

    def _aheads(self) -> dict[Tensor, tuple[Tensor, Box]]:
        """Of every matrix that moves, the whole momentum's look ahead and the box of this process. Collective
        where matrices are cut: a process that holds nothing of one takes part in its sum.
        """
        groups = [group for group in self.param_groups if "interleaved" in group]
        decays = {p: group["betas"][0] for group in groups for p in group["params"]}
        found: dict[Tensor, tuple[Tensor, Box]] = {}
        for part in self.whole.parts:
            parameter = part.value
            own = None
            if parameter in decays and parameter.grad is not None:
                own = self._momentum(parameter, decays[parameter])
                parameter.grad = None  # so that AdamW passes it by
            axes = [self.whole.shard] + ([self.whole.tensor] if part.cut is not None else [])
            if is_hidden_matrix(part.name, len(part.spec.shape)) and any(
                axis.group is not None for axis in axes
            ):
                whole = parameter.new_zeros(part.spec.shape)
                if own is not None:
                    whole[part.spec.box.slices()] = own
                for axis in axes:
                    axis.all_reduce(whole)
                own = None if own is None else whole
            if own is not None:
                found[parameter] = own, part.spec.box
        return found

    def _momentum(self, parameter: Tensor, decay: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # AdamW expects one in every state that it loads
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        state["momentum"].lerp_(gradient, 1 - decay)
        return gradient.lerp(state["momentum"], decay)


def _parts(weight: Tensor, count: int, rows: int) -> list[Tensor]:
    """The matrices in a weight (out, in), each as a view (pieces, rows, in)."""
    return [weight[None]] if count == 1 else list(weight.view(-1, count, rows, weight.shape[-1]).unbind(1))


def orthogonalise(
    matrices_NRC: Tensor, dtype: torch.dtype = torch.float32, iterations: int = ITERATIONS
) -> Tensor:
    """About U V' for each matrix U S V' of a batch (N, R, C) with R <= C, computed in `dtype`.

    bf16 is exact enough, since the quintic leaves singular values between 0.7 and 1.2 anyway, and five times
    as fast where it is computed natively.
    """
    a, b, c = QUINTIC
    x = (matrices_NRC / (matrices_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices_NRC.dtype)
