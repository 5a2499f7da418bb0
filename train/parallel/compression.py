"""Gradients over slow networks: sums over the data-parallel processes in fewer bytes, with what was lost
given back later.

| scheme | bytes against fp32 | what is sent |
|---|---|---|
| `Bf16Sum` | 1/2 | every number rounded to 16 bits |
| `PowerSum` | (rows + columns) x rank / (rows x columns) of each matrix | two thin factors (Vogels et al. 2019) |
| `onebit.OneBitAdam` | 1/32 after its warm-up | signs of Adam's momentum (Tang et al. 2021) |

Error feedback: every process adds to what it compresses now what its last compression lost, so that
everything is sent in the end (Karimireddy et al. 2019). The errors are this process's own; a run continued
without them goes on from zero errors.

Gradients here are parts that sum to the gradient of the whole batch, as losses are divided by the global
count. Bytes are counted where they are sent, as the usual algorithms send them (a ring all-reduce of x bytes
over n processes: 2 (n-1)/n x); tests compare the count with what the kernel says went through gloo's sockets.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ...planner.tables import SIGNS_PER_SCALE, low_rank_pays
from .mesh import Axis
from .sharding import buckets


class Communicator:
    """The collectives of an axis, and the bytes that this process has sent through them (headers of messages
    left out).
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.bytes_sent = axis, 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in place."""
        if self.axis.group is not None:
            dist.all_reduce(x, group=self.axis.group)
            self.count_all_reduce(x.nbytes)
        return x

    def count_all_reduce(self, nbytes: int) -> None:
        """Count a sum of so many bytes over the axis, done here or elsewhere."""
        self.bytes_sent += 2 * nbytes * (self.axis.size - 1) / self.axis.size

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Row r goes to process r; row r of the result comes from it."""
        if self.axis.group is None:
            return parts
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.axis.group)
        self.bytes_sent += parts.nbytes * (self.axis.size - 1) / self.axis.size
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """(...) of each process -> (n, ...) on all."""
        if self.axis.group is None:
            return part[None]
        parts = part.new_empty(self.axis.size, *part.shape)
        dist.all_gather(list(parts.unbind()), part, group=self.axis.group)
        self.bytes_sent += part.nbytes * (self.axis.size - 1)
        return parts


class Bf16:
    """Numbers (..., L) as bytes (..., 2 L): rounded to bfloat16."""

    unit = 1

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        return data.view(torch.bfloat16).to(dtype)


class Signs:
    """Numbers (..., L) as bytes (..., L/8 + L/512): a bit each, and per block its mean magnitude, the best
    factor for signs.

    L is a multiple of the block. The scales stand after the bits, fp32.
    """

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


class CompressedSum:
    """The sum of vectors over an axis in the bytes of a codec: each process sums one part of it and sends
    that to all.

    Two compressions, each with its error: of what this process contributes, and of the part that it sums. The
    sum itself is in full precision, so it does not matter how many processes there are. Everyone decodes the
    same bytes: the result is the same on all to the bit.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: Bf16 | Signs,
        numel: int,
        like: Tensor,
        error_feedback: bool = True,
    ) -> None:
        self.communicator, self.codec, self.numel, self.error_feedback = (
            communicator,
            codec,
            numel,
            error_feedback,
        )
        processes = communicator.axis.size
        part = -(-numel // (processes * codec.unit)) * codec.unit
        self.own_error = like.new_zeros(processes, part)
        self.sum_error = like.new_zeros(part)

    def __call__(self, x: Tensor) -> Tensor:
        """(numel,) -> (numel,), about the sum of every process's `x`."""
        if self.communicator.axis.group is None:
            return x
        missing = self.own_error.numel() - self.numel
        parts = F.pad(x, (0, missing)).view_as(self.own_error)
        received = self.communicator.all_to_all(self._encode(parts, self.own_error))
        total = self.codec.decode(received, x.dtype).sum(0)
        everything = self.communicator.all_gather(self._encode(total, self.sum_error))
        return self.codec.decode(everything, x.dtype).flatten()[: self.numel]

    def _encode(self, x: Tensor, error: Tensor) -> Tensor:
        """The bytes of x and the error so far; `error` becomes what they miss. A number that is not finite
        leaves no error.
        """
        wanted = x + error
        data = self.codec.encode(wanted)
        if self.error_feedback:
            torch.sub(wanted, self.codec.decode(data, x.dtype), out=error)
            error.nan_to_num_(0.0, 0.0, 0.0)
        return data


class CompressedSums:
    """A compressed sum for each of a list of vectors that comes again every step."""

    def __init__(self, communicator: Communicator, codec: Bf16 | Signs, error_feedback: bool = True) -> None:
        self.communicator, self.codec, self.error_feedback = communicator, codec, error_feedback
        self._sums: list[CompressedSum] = []
        self._restored: dict[str, Tensor] = {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """About the sum over the axis of the vector of that index."""
        if index == len(self._sums):
            made = CompressedSum(self.communicator, self.codec, x.numel(), x, self.error_feedback)
            for kind, error in (("own", made.own_error), ("sum", made.sum_error)):
                saved = self._restored.get(f"{kind}.{index}")
                if (
                    saved is not None and saved.shape == error.shape
                ):  # else of another layout: errors start at zero
                    error.copy_(saved)
            self._sums.append(made)
        return self._sums[index](x)

    def errors(self) -> dict[str, Tensor]:
        """This process's errors by name, for a checkpoint; not copies."""
        sums = enumerate(self._sums)
        return {
            f"{kind}.{i}": error
            for i, x in sums
            for kind, error in (("own", x.own_error), ("sum", x.sum_error))
        }

    def load_errors(self, errors: dict[str, Tensor]) -> None:
        """Go on with the errors of a checkpoint, before the first sum."""
        self._restored = errors

    def rescale(self, factor: float) -> None:
        """Multiply the errors, since what comes next is that much larger."""
        for error in self.errors().values():
            error.mul_(factor)


class CommunicationHook:
    """How the gradients of the copies of a model become one: what a layout's engine asks of a scheme."""

    communicator: Communicator

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place over the axis. The same gradients in the same order every time."""
        raise NotImplementedError

    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The squared norm of the sum over the axis where `sum_gradients` left the parts; None where it did
        sum.
        """
        return None

    def errors(self) -> dict[str, Tensor]:
        """What this process alone knows, for a checkpoint; not copies."""
        return {}

    def load_errors(self, errors: dict[str, Tensor]) -> None:
        """Go on with what `errors` gave, before the first sum."""

    def rescale(self, factor: float) -> None:
        """fp16's loss scale, and with it every gradient to come, has become `factor` times as large: so do
        the errors.
        """


class DenseSum(CommunicationHook):
    """Gradients summed as they are: what the other schemes are compared with."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        for bucket in buckets(gradients):
            unpack(self.communicator.all_reduce(pack(bucket)), bucket)


class Bf16Sum(CommunicationHook):
    """Gradients summed in bfloat16, rounded twice whatever the number of processes."""

    def __init__(self, communicator: Communicator, error_feedback: bool = True) -> None:
        self.communicator, self.sums = communicator, CompressedSums(communicator, Bf16(), error_feedback)

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        for index, bucket in enumerate(buckets(gradients)):
            unpack(self.sums(index, pack(bucket)), bucket)

    def errors(self) -> dict[str, Tensor]:
        return self.sums.errors()

    def load_errors(self, errors: dict[str, Tensor]) -> None:
        self.sums.load_errors(errors)

    def rescale(self, factor: float) -> None:
        self.sums.rescale(factor)


class PowerSum(CommunicationHook):
    """Gradients of matrices summed as a product of thin factors (Vogels et al. 2019, algorithm 1), the others
    as they are.

    The factor of columns starts where it ended the step before, so one power iteration a step follows the
    largest directions. `dense_steps` at the start are summed as they are: gradients change fastest there.
    Every process orthogonalises the same numbers; on unlike machines the results could differ in the last
    bit.
    """

    def __init__(
        self, communicator: Communicator, rank: int = 4, dense_steps: int = 10, error_feedback: bool = True
    ) -> None:
        self.communicator, self.rank, self.dense_steps, self.error_feedback = (
            communicator,
            rank,
            dense_steps,
            error_feedback,
        )
        self.steps = 0
        self.dense = DenseSum(communicator)
        self.factors: dict[int, Tensor] = {}  # by the place of the gradient: (columns, rank)
        self.lost: dict[int, Tensor] = {}  # by the place of the gradient: (rows, columns)

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        if self.communicator.axis.group is None:
            return
        pays = [
            self.steps > self.dense_steps and low_rank_pays(gradient.shape, self.rank)
            for gradient in gradients
        ]
        thin = [index for index, thinned in enumerate(pays) if thinned]
        self.dense.sum_gradients([gradient for gradient, thinned in zip(gradients, pays) if not thinned])
        if thin:
            # at least fp32: of 16-bit gradients too, which no library factorises, and whose errors 16 bits
            # would lose
            self._sum_thin({index: _at_least_fp32(gradients[index].flatten(1)) for index in thin}, gradients)

    def _sum_thin(self, matrices: dict[int, Tensor], gradients: Sequence[Tensor]) -> None:
        wanted = {}
        for index, matrix in matrices.items():
            if (
                index not in self.lost or self.lost[index].shape != matrix.shape
            ):  # the first time, or saved by another layout
                generator = torch.Generator().manual_seed(index)
                self.factors[index] = torch.randn(matrix.shape[1], self.rank, generator=generator)
                self.lost[index] = torch.zeros_like(matrix)
            self.factors[index], self.lost[index] = (
                self.factors[index].to(matrix),
                self.lost[index].to(matrix),
            )
            wanted[index] = matrix + self.lost[index]
        left = [wanted[index] @ self.factors[index] for index in matrices]  # (rows, rank)
        self.dense.sum_gradients(left)
        left = [torch.linalg.qr(factor).Q for factor in left]
        right = [wanted[index].T @ factor for index, factor in zip(matrices, left)]  # (columns, rank)
        self.dense.sum_gradients(right)
        for index, rows, columns in zip(matrices, left, right):
            total = rows @ columns.T
            self.factors[index] = torch.where(columns.isfinite().all(), columns, self.factors[index])
            if self.error_feedback:  # each process's share of what the product misses of the sum
                torch.sub(wanted[index], total, alpha=1 / self.communicator.axis.size, out=self.lost[index])
                self.lost[index].nan_to_num_(0.0, 0.0, 0.0)
            gradients[index].copy_(total.view_as(gradients[index]))

    def errors(self) -> dict[str, Tensor]:
        """This process's errors and factors, and its count of steps."""
        found = {f"lost.{i}": x for i, x in self.lost.items()} | {
            f"factor.{i}": x for i, x in self.factors.items()
        }
        return found | {"steps": torch.tensor(self.steps)}

    def load_errors(self, errors: dict[str, Tensor]) -> None:
        self.steps = int(errors.get("steps", 0))
        for name, x in errors.items():
            kind, _, index = name.partition(".")
            if index:
                (self.lost if kind == "lost" else self.factors)[int(index)] = x

    def rescale(self, factor: float) -> None:
        for error in self.lost.values():
            error.mul_(factor)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The numbers back where `pack` took them."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))
