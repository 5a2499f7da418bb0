"""The gradients of whole copies of a model: one flat tensor in buckets, summed while backward still runs.

Every parameter's `.grad` is a view of the flat tensor, so micro-batches add up where the sum over processes
reads and nothing is packed or copied. Parameters of 16 bits have fp32 gradients here (`grad_dtype`): a small
gradient is not lost beside a large sum. The parameters lie in the order in which backward usually completes
them, the last layer first; a bucket starts its all-reduce when the last micro-batch has completed it and
every bucket before it, so that all processes issue the same collectives in the same order, and `finish`
starts what is left.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from ...planner.tables import bucket_slices
from .mesh import ALONE, Axis


class GradientBuffer:
    """Gradients of `parameters` in `dtype`, summed over `axis` (nothing is sent where it is alone)."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, axis: Axis = ALONE) -> None:
        self.axis, self.parameters = axis, list(reversed(parameters))
        sizes = [parameter.numel() for parameter in self.parameters]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(self.parameters, self.flat.split(sizes))
        self.views = [part.view(parameter.shape) for parameter, part in parts]
        slices = bucket_slices([size * dtype.itemsize for size in sizes])
        starts = [0, *accumulate(sizes)]
        self.buckets = [self.flat[starts[part.start] : starts[part.stop]] for part in slices]
        self._bucket_of = [bucket for bucket, part in enumerate(slices) for _ in range(part.start, part.stop)]
        self._missing = [-1] * len(self.buckets)  # gradients still to come; below 0: sums wait for `finish`
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.dtype != dtype:
                parameter.grad_dtype = dtype
            parameter.grad = self.views[index]
            if axis.group is not None:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def expect(self, passes: int) -> None:
        """So many backward passes give every parameter its gradient; the last one may start the sums."""
        self._missing = [passes * self._bucket_of.count(bucket) for bucket in range(len(self.buckets))]

    def _arrived(self, index: int) -> None:
        self._missing[self._bucket_of[index]] -= 1
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start()

    def _start(self) -> None:
        bucket = self.buckets[len(self._works)]
        self._works.append(dist.all_reduce(bucket, group=self.axis.group, async_op=True))

    def finish(self) -> None:
        """Sum what has not been started, and wait for everything."""
        if self.axis.group is not None:
            while len(self._works) < len(self.buckets):
                self._start()
        for work in self._works:
            work.wait()
        self._works, self._missing = [], [-1] * len(self.buckets)

    def zero(self) -> None:
        """Forget the gradients; whoever took a view away gives it back."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view
