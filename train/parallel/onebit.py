"""1-bit Adam: after a warm-up with plain AdamW the variance is frozen and processes exchange signs of the momentum.

Tang et al. 2021 (1-bit Adam, algorithm 1). With the variance frozen the update is linear in the momentum, so
errors of compressing it are made good later, as they are not for Adam as a whole. What differs from the
paper: a scale per block of 2048 signs instead of one per tensor, the frozen variance keeps its bias
correction, and its root has a floor (`FLOOR`).

The loop keeps its order: only the sum of gradients is replaced. After the warm-up they stay each process's own, and
`squared_norm` gives the norm by which all clip, or skip the step.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...planner.tables import SKETCH
from .compression import CommunicationHook, Communicator, Signs
from .sharding import buckets, pack, unpack

# of a tensor's root mean square: rows of unseen tokens would otherwise move without bound when met
FLOOR = 0.1


class OneBitAdam(torch.optim.AdamW, CommunicationHook):
    """AdamW over the processes of an axis whose momentum travels as signs after `warmup_steps` steps.

    Its state per parameter is AdamW's, the same on every process; `errors` are this process's own. Steps are counted
    on the host: nothing of the device is read.
    """

    def __init__(self, params: Any, communicator: Communicator, warmup_steps: int, **options: Any) -> None:
        super().__init__(params, **options)
        CommunicationHook.__init__(self, communicator)
        self.warmup_steps = warmup_steps
        self._steps: int | None = None  # taken so far; None: not read from the state yet
        self._signs: Tensor | None = None  # of the sketch, a megabyte or two
        self._frozen_at: int | None = None  # the steps that made the variance, once it is frozen

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over, or was in the state that was loaded, whatever this run's would be."""
        if self._steps is None:
            known = [slots for slots in self.state.values() if slots]
            self._steps = max((int(slots["step"]) for slots in known), default=0)
            frozen = [slots["frozen_at"] for slots in known if "frozen_at" in slots]
            self._frozen_at = max(frozen, default=None)
        return self._frozen_at is not None or self._steps >= self.warmup_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's; the phase follows the steps in the state."""
        super().load_state_dict(state_dict)
        self._steps = None

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place over the axis during the warm-up; nothing afterwards."""
        if not self.frozen:
            self.communicator.sum(gradients)

    @torch.no_grad()
    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """After the warm-up, an estimate of the squared norm of the sum over processes, from a sketch of it.

        Every number is given a random sign and added to one of SKETCH buckets; the sum over processes of the
        buckets has the squared norm of the sum of gradients on average (Alon, Matias and Szegedy 1999). Not
        finite when any gradient is not.
        """
        if not self.frozen:
            return None
        sketch = gradients[0].new_zeros(SKETCH)
        if self._signs is None:  # once: drawing one for each number takes as long as a step of a small model
            generator = torch.Generator().manual_seed(0)  # the same on every process
            signs = torch.randint(2, (2 * SKETCH, SKETCH), generator=generator, dtype=torch.int8)
            self._signs = signs.mul_(2).sub_(1).to(sketch.device)
        draw = random.Random(0)
        for gradient in gradients:
            rows = F.pad(gradient.flatten(), (0, -gradient.numel() % SKETCH)).view(-1, SKETCH)
            for block in rows.split(SKETCH):
                first, way = draw.randrange(SKETCH), self._signs[draw.randrange(2 * SKETCH)]
                sketch += (block * self._signs[first : first + len(block)]).sum(0) * way
        return self.communicator.all_reduce(sketch).square().sum()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """AdamW's update while warming up; then momentum exchanged in signs over the frozen variance's root."""
        frozen, before = self.frozen, self._steps or 0
        self._steps = before + 1
        if not frozen:
            super().step(closure)
            return
        self._frozen_at = before if self._frozen_at is None else self._frozen_at
        groups = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        for index, bucket in enumerate(buckets(list(groups))):
            flat = pack([self._contribution(p, groups[p]["betas"][0]) for p in bucket])
            unpack(self.compressed_sum(Signs(), index, flat), [self.state[p]["exp_avg"] for p in bucket])
            for p in bucket:
                self._move(p, groups[p], self._steps, self._frozen_at)

    def _contribution(self, p: Tensor, beta1: float) -> Tensor:
        """What this process adds to the new momentum: of its gradient, and an equal share of the old momentum."""
        assert p.grad is not None
        return self.state[p]["exp_avg"] * (beta1 / self.communicator.axis.size) + p.grad * (1 - beta1)

    def _move(self, p: Tensor, group: dict[str, Any], steps: int, frozen_at: int) -> None:
        slots, (beta1, beta2) = self.state[p], group["betas"]
        # a run continued with another length has another warm-up: the variance keeps the correction of its own steps
        slots["frozen_at"] = frozen_at
        slots["step"] += 1
        root = (slots["exp_avg_sq"] / (1 - beta2**frozen_at)).sqrt_()
        root = torch.maximum(root, FLOOR * root.square().mean().sqrt()) + group["eps"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(slots["exp_avg"], root, value=-group["lr"] / (1 - beta1**steps))
