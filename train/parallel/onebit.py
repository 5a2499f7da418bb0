"""1-bit Adam: after a warm-up with plain AdamW the variance is frozen and processes exchange signs of the momentum.

Tang et al. 2021 (1-bit Adam, algorithm 1). With the variance frozen the update is linear in the momentum, so
errors of compressing it are made good later, as they are not for Adam as a whole. What differs from the
paper: a scale per block of 2048 signs instead of one per tensor, the frozen variance keeps its bias
correction, and its root has a floor (`FLOOR`).

A step of the training loop keeps its order. Only the sum of gradients is replaced:

    optimizer = OneBitAdam(groups, communicator=Communicator(mesh.gradient), warmup_steps=75, lr=…)
    loss.backward()
    optimizer.sum_gradients(gradients)          # in place during the warm-up; then gradients stay each process's own
    squares = optimizer.squared_norm(gradients) # of the sum, once gradients stay apart; the same on every
    process
    …clip by one factor, or skip the step when the norm is not finite…
    optimizer.step()
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...planner.tables import SKETCH
from .compression import CommunicationHook, Communicator, CompressedSums, DenseSum, Signs, pack, unpack
from .sharding import buckets

FLOOR = (
    0.1  # of a tensor's root mean square: rows of unseen tokens would otherwise move without bound when met
)


class OneBitAdam(torch.optim.AdamW, CommunicationHook):
    """AdamW over the processes of an axis whose momentum travels as signs after `warmup_steps` steps.

    Its state per parameter is AdamW's, the same on every process; `errors` are this process's own.
    """

    def __init__(self, params: Any, communicator: Communicator, warmup_steps: int, **options: Any) -> None:
        super().__init__(params, **options)
        self.communicator, self.warmup_steps = communicator, warmup_steps
        self.dense = DenseSum(communicator)
        self.sums = CompressedSums(communicator, Signs())
        self._steps: int | None = None  # taken so far; None: not read from the state yet
        self._frozen = False  # by a state whose warm-up was over, whatever this run's would be

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over."""
        if self._steps is None:
            self._steps = max((int(slots["step"]) for slots in self.state.values() if slots), default=0)
            self._frozen = any("frozen_at" in slots for slots in self.state.values())
        return self._frozen or self._steps >= self.warmup_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's; the phase follows the steps in the state."""
        super().load_state_dict(state_dict)
        self._steps = None

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place over the axis during the warm-up; nothing afterwards."""
        if not self.frozen:
            self.dense.sum_gradients(gradients)

    @torch.no_grad()
    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """After the warm-up, the squared norm of the sum over processes, estimated without sending the
        gradients.

        Every number is given a random sign and added to one of SKETCH buckets; the sum over processes of the
        buckets has the squared norm of the sum of gradients on average (Alon, Matias and Szegedy 1999). Not
        finite when any gradient is not.
        """
        if not self.frozen:
            return None
        sketch = gradients[0].new_zeros(SKETCH)
        for index, gradient in enumerate(gradients):
            generator = torch.Generator(gradient.device).manual_seed(index)  # the same signs on every process
            signs = torch.randint(
                2, gradient.shape, generator=generator, device=gradient.device, dtype=torch.int8
            )
            flat = (gradient * signs.mul_(2).sub_(1)).flatten()
            whole = flat.numel() // SKETCH * SKETCH
            sketch += flat[:whole].view(-1, SKETCH).sum(0)
            sketch[: flat.numel() - whole] += flat[whole:]
        return self.communicator.all_reduce(sketch).square().sum()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update: AdamW's while warming up; then momentum exchanged in signs and divided by the frozen
        variance's root.
        """
        warming_up = not self.frozen
        self._steps = (self._steps or 0) + 1
        if warming_up:
            super().step(closure)
            return
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        groups = {id(p): group for p, group in moved}
        for index, bucket in enumerate(buckets([p for p, _ in moved])):
            flat = pack([self._contribution(p, groups[id(p)]["betas"][0]) for p in bucket])
            unpack(self.sums(index, flat), [self.state[p]["exp_avg"] for p in bucket])
            for p in bucket:
                self._move(p, groups[id(p)])

    def _contribution(self, p: Tensor, beta1: float) -> Tensor:
        """What this process adds to the new momentum: its gradient's part, and an equal share of the old
        momentum.
        """
        assert p.grad is not None
        return self.state[p]["exp_avg"] * (beta1 / self.communicator.axis.size) + p.grad * (1 - beta1)

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        slots, (beta1, beta2) = self.state[p], group["betas"]
        # the steps that made the variance are its own: a run continued with another length has another warm-up
        frozen_at = slots.setdefault("frozen_at", int(slots["step"]))
        slots["step"] += 1
        root = (slots["exp_avg_sq"] / (1 - beta2**frozen_at)).sqrt_()
        root = torch.maximum(root, FLOOR * root.square().mean().sqrt()) + group["eps"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(slots["exp_avg"], root, value=-group["lr"] / (1 - beta1 ** float(slots["step"])))

    def errors(self) -> dict[str, Tensor]:
        return self.sums.errors()

    def load_errors(self, errors: dict[str, Tensor]) -> None:
        self.sums.load_errors(errors)
