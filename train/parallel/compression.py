"""Gradients over slow networks: sums over data processes in fewer bytes, with what was lost given back later.

| scheme | bytes against fp32 | what is sent |
|---|---|---|
| `Bf16Sum` | 1/2 | every number rounded to 16 bits |
| `PowerSum` | (rows + columns) x rank / (rows x columns) of each matrix | two thin factors (Vogels et al. 2019) |
| `OneBitAdam` | 1/32 after its warm-up | signs of Adam's momentum (Tang et al. 2021) |

Error feedback: every process adds to what it compresses now what its last compression lost, so that everything is sent
in the end (Karimireddy et al. 2019). Gradients are parts that sum to that of the whole batch.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...planner.tables import SIGNS_PER_SCALE, SKETCH, low_rank_pays
from .data import Communicator, buckets, pack, unpack

ERRORS = ("own.", "sum.", "lost.")  # what names of `kept` that are errors begin with
# Of a tensor's root mean square: rows of unseen tokens would otherwise move without bound when met.
FLOOR = 0.1


class Bf16:
    """Numbers (..., L) as bytes (..., 2 L): rounded to bfloat16."""

    unit = 1

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        return data.view(torch.bfloat16).to(dtype)


class Signs:
    """Numbers (..., L) as bytes (..., L/8 + L/512): a bit each, then per block of L its mean magnitude, fp32."""

    unit = SIGNS_PER_SCALE

    def encode(self, x: Tensor) -> Tensor:
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
        bits = ((x >= 0).unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
        scales = x.unflatten(-1, (-1, self.unit)).abs().mean(-1, dtype=torch.float32)
        return torch.cat((bits, scales.view(torch.uint8)), dim=-1)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        blocks = data.shape[-1] // (self.unit // 8 + 4)
        bits, scales = data.split((blocks * self.unit // 8, blocks * 4), dim=-1)
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        signs = ((bits[..., None] >> shifts) & 1).flatten(-2).to(dtype).mul_(2).sub_(1)
        scales = scales.contiguous().view(torch.float32).to(dtype)
        return (signs.unflatten(-1, (-1, self.unit)) * scales[..., None]).flatten(-2)


class CommunicationHook:
    """How gradients of copies become one, here as they are. A checkpoint has `kept`: what this process alone knows."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.kept: dict[str, Tensor] = {}

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place over the axis. The same gradients in the same order every time."""
        self.communicator.sum(gradients)

    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The squared norm of the sum where `sum_gradients` left the parts; None where it did sum."""
        return None

    def rescale(self, factor: float) -> None:
        """fp16's loss scale and all coming gradients are `factor` times as large: so are the errors."""
        for name, error in self.kept.items():
            if name.startswith(ERRORS):
                error.mul_(factor)

    def error(self, name: str, like: Tensor) -> Tensor:
        """What was lost under that name so far: zeros the first time, or where another layout saved it."""
        known = self.kept.get(name, like.new_empty(0))
        self.kept[name] = known.to(like) if known.shape == like.shape else torch.zeros_like(like)
        return self.kept[name]

    def compressed_sum(self, codec: Bf16 | Signs, index: int, x: Tensor) -> Tensor:
        """(numel,) -> (numel,), about the sum over the axis of the vector of that index, in the bytes of a codec: each
        process sums one part of it, in full precision, and sends that to all. What it contributes and the part that it
        sums each have an error. All decode the same bytes: the result is the same to the bit.
        """
        axis = self.communicator.axis
        if axis.group is None:
            return x
        part = -(-x.numel() // (axis.size * codec.unit)) * codec.unit
        parts = F.pad(x, (0, axis.size * part - x.numel())).view(axis.size, part)
        received = self.communicator.all_to_all(self._encode(codec, parts, f"own.{index}"))
        total = codec.decode(received, x.dtype).sum(0)
        everything = self.communicator.all_gather(self._encode(codec, total, f"sum.{index}"))
        return codec.decode(everything, x.dtype).flatten()[: x.numel()]

    def _encode(self, codec: Bf16 | Signs, x: Tensor, name: str) -> Tensor:
        """The bytes of x and the error so far, which becomes what they miss; of infinite numbers nothing."""
        error = self.error(name, x)
        wanted = x + error
        data = codec.encode(wanted)
        torch.sub(wanted, codec.decode(data, x.dtype), out=error)
        error.nan_to_num_(0.0, 0.0, 0.0)
        return data


class Bf16Sum(CommunicationHook):
    """Gradients summed in bfloat16, rounded twice whatever the number of processes."""

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        for index, bucket in enumerate(buckets(gradients)):
            unpack(self.compressed_sum(Bf16(), index, pack(bucket)), bucket)


class PowerSum(CommunicationHook):
    """Gradients of matrices summed as a product of thin factors (Vogels et al. 2019, algorithm 1), the others and all
    in the first `dense_steps` as they are. Every process orthogonalises the same numbers.

    Not torch's powerSGD_hook: it takes the buckets of DistributedDataParallel, and keeps a NaN for ever.
    """

    def __init__(self, communicator: Communicator, rank: int = 4, dense_steps: int = 10) -> None:
        super().__init__(communicator)
        self.rank, self.dense_steps = rank, dense_steps

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        steps = int(self.kept.get("steps", 0)) + 1
        self.kept["steps"] = torch.tensor(steps)  # on the host
        if self.communicator.axis.group is None:
            return
        warm = steps > self.dense_steps
        thin = [i for i, x in enumerate(gradients) if warm and low_rank_pays(x.shape, self.rank)]
        self.communicator.sum([x for i, x in enumerate(gradients) if i not in thin])
        # at least fp32: of 16-bit gradients too, which no library factorises, and whose errors 16 bits would lose
        dtypes = {index: torch.promote_types(gradients[index].dtype, torch.float32) for index in thin}
        matrices = {index: gradients[index].flatten(1).to(dtypes[index]) for index in thin}
        wanted = {index: x + self.error(f"lost.{index}", x) for index, x in matrices.items()}
        left = [x @ self._factor(index, x) for index, x in wanted.items()]  # (rows, rank)
        self.communicator.sum(left)
        left = orthonormal(left)
        right = [x.T @ factor for x, factor in zip(wanted.values(), left)]  # (columns, rank)
        self.communicator.sum(right)
        for (index, x), rows, columns in zip(wanted.items(), left, right):
            total, lost, factor = rows @ columns.T, self.kept[f"lost.{index}"], self.kept[f"factor.{index}"]
            self.kept[f"factor.{index}"] = torch.where(columns.isfinite().all(), columns, factor)
            # each process's share of what the product misses of the sum
            torch.sub(x, total, alpha=1 / self.communicator.axis.size, out=lost)
            lost.nan_to_num_(0.0, 0.0, 0.0)
            gradients[index].copy_(total.view_as(gradients[index]))

    def _factor(self, index: int, matrix: Tensor) -> Tensor:
        """(columns, rank): where it ended the step before, the same on every process."""
        name, shape = f"factor.{index}", (matrix.shape[1], self.rank)
        if name not in self.kept or self.kept[name].shape != shape:
            self.kept[name] = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        self.kept[name] = self.kept[name].to(matrix)
        return self.kept[name]


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """A basis of the columns of each matrix: those of one shape in one call, of which a GPU waits for each."""
    alike: dict[Any, list[int]] = {}
    for index, factor in enumerate(factors):
        alike.setdefault((factor.shape, factor.dtype), []).append(index)
    found = list(factors)
    for indices in alike.values():
        bases = torch.linalg.qr(torch.stack([factors[index] for index in indices])).Q
        for index, basis in zip(indices, bases):
            found[index] = basis
    return found


class OneBitAdam(torch.optim.AdamW, CommunicationHook):
    """AdamW with a warm-up of `warmup_steps`; then the variance is frozen and processes exchange signs of the momentum.

    Tang et al. 2021, algorithm 1. With the variance frozen the update is linear in the momentum, so errors of
    compressing it are made good later, as they are not for Adam as a whole. What differs from the paper: a scale per
    block of 2048 signs instead of one per tensor, the frozen variance keeps its bias correction, and its root has a
    floor. Only the sum of gradients is replaced: after the warm-up they stay each process's own, and `squared_norm`
    gives the norm by which all clip, or skip the step.
    """

    def __init__(self, params: Any, communicator: Communicator, warmup_steps: int, **options: Any) -> None:
        super().__init__(params, **options)
        CommunicationHook.__init__(self, communicator)
        self.warmup_steps = warmup_steps
        self._steps = 0  # taken so far
        self._signs: Tensor | None = None  # of the sketch, a megabyte or two
        self._frozen_at: int | None = None  # the steps that made the variance, once it is frozen

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over, or was in the state that was loaded, whatever this run's would be."""
        return self._frozen_at is not None or self._steps >= self.warmup_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        known = [slots for slots in self.state.values() if slots]
        self._steps = max((int(slots["step"]) for slots in known), default=0)
        self._frozen_at = max((slots["frozen_at"] for slots in known if "frozen_at" in slots), default=None)

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        if not self.frozen:
            self.communicator.sum(gradients)

    @torch.no_grad()
    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """After the warm-up an estimate: every number is given a random sign and added to one of SKETCH buckets, whose
        sum over processes has on average the squared norm of that of the gradients (Alon, Matias and Szegedy 1999).
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
        self.communicator.sum([sketch])
        return sketch.square().sum()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """AdamW's update while warming up; then momentum exchanged in signs over the frozen variance's root."""
        frozen = self.frozen
        self._steps += 1
        if not frozen:
            super().step(closure)
            return
        self._frozen_at = self._steps - 1 if self._frozen_at is None else self._frozen_at
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
