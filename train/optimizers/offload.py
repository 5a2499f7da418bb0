"""ZeRO-Offload (Ren et al. 2021): master weights, optimizer state and update on the host; the device holds 16-bit
weights and activations only.

During backward each gradient is copied to the host as soon as it is complete and leaves the device. Clipping and the
rule that a step with a non-finite number is skipped need the norm of all gradients, so the update starts when backward
has ended: a worker updates the model front to back and sends each part's weights to the device, while the next forward
already runs in the parts before it. The numbers are those of the same optimizer without offload, bit for bit.

Bytes per parameter with 16-bit weights: 2 on the device; 12 + 2 on the host (fp32 weight, mean and square of
AdamW; a 16-bit pinned buffer for the gradient on its way down and the weight on its way up), 4 more when
gradients of several micro-batches are added, and otherwise room for the fp32 gradients of one part of the model.

In a layout (section 4.2) each host updates the shard that its process holds. A gradient leaves when its sum over
processes is there: of a shard when `fully_shard` has reduced it, still during backward; what is summed afterwards
(copies, the tensor axis) when that is done (`fetch`). It has the weights' 16 bits there: one micro-batch a step.

Not torchao's CPUOffloadOptimizer, which cannot clip gradients that have left, nor FSDP's CPUOffloadPolicy, which
sends fp32 shards up in every forward and backward.
"""

import re
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..stage import LocalShard, local_part, make_master
from .averages import follow

# gradients of the device that wait for their copy: where the link is slower than backward, backward waits
IN_FLIGHT_BYTES = 2**30


@dataclass(eq=False)
class Unit:
    """What is updated in one go: a block, or everything outside the blocks."""

    sides: list["HostSide"] = field(default_factory=list)
    update: Future[None] | None = None  # under way, or done and not yet waited for
    sent: torch.cuda.Event | None = None  # its weights are on the device


@dataclass(eq=False)
class HostSide:
    """The host's side of one parameter."""

    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    staging: Tensor  # its gradient on the way down, its weight on the way up
    unit: Unit
    primary: bool  # the copy that counts in the norm
    total: Tensor | None = None  # the gradients of several micro-batches
    scratch: Tensor | None = None  # room for the gradient in the master's dtype, shared by the units
    received: int = 0  # gradients of this step that have come
    arrival: Future[None] | None = None  # of the last of them
    norm: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        return self.staging if self.total is None else self.total

    def take_norm(self) -> Tensor:
        if self.norm is None:
            self.norm = torch.linalg.vector_norm(self.gradient, dtype=self.master.dtype)
        return self.norm


class HostOffload:
    """The host's side of a model's weights, whose masters become the values of the shards.

    One worker thread does all work on host tensors; `wait` before reading them. Forward hooks wait for the weights.
    Gradients leave in `micro_batches` backward passes of a step, in all while `leaving`; those of the names in `late`
    by `fetch`. Then `step`, or `discard`, which skips it. Compile the blocks' forwards, not the model with its hooks.
    """

    def __init__(
        self, model: nn.Module, micro_batches: int, shards: Sequence[LocalShard], late: Collection[str] = ()
    ) -> None:
        self.leaving, self.micro_batches = True, micro_batches
        self.device = shards[0].computed.device
        cuda = self.device.type == "cuda"
        self._down: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if cuda else None
        self._up: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if cuda else None
        self._flying: deque[tuple[torch.cuda.Event, int]] = deque()
        self._worker = ThreadPoolExecutor(1, "offload")
        self._units = {"": Unit()}
        self.sides: list[HostSide] = []
        for shard in shards:
            unit, parameter = self._units.setdefault(_block_of(shard.name), Unit()), shard.computed
            shard.value = make_master(parameter, "cpu")
            staging = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=cuda)
            total = torch.zeros_like(shard.value) if micro_batches > 1 else None
            side = HostSide(shard.name, parameter, shard.value, staging, unit, shard.spec.primary, total)
            unit.sides.append(side)
            self.sides.append(side)
            if shard.parameter.requires_grad and shard.name not in late:
                shard.parameter.register_post_accumulate_grad_hook(lambda p, side=side: self._leave(side, p))
        if micro_batches == 1 and any(side.master.dtype != side.staging.dtype for side in self.sides):
            self._make_scratch()
        # No forward runs ahead of its weights, nor a gathering of shards, whose hooks come after these. Some of what is
        # outside the blocks is used without calling its module, but never before a table or the whole model.
        for name, module in model.named_modules():
            block = _block_of(name)
            if name.endswith(block) if block else not name or name.endswith("_table"):
                hook = lambda *_, unit=self._units[block]: self._await(unit)  # noqa: E731
                module.register_forward_pre_hook(hook, prepend=True)

    def _make_scratch(self) -> None:
        """Room for gradients in the masters' dtype, shared by units; kept: fresh memory costs more than an update."""
        sizes = [[side.master.numel() for side in unit.sides] for unit in self._units.values()]
        room = torch.empty(max(map(sum, sizes)), dtype=self.sides[0].master.dtype)
        for unit, numbers in zip(self._units.values(), sizes):
            for side, part in zip(unit.sides, room[: sum(numbers)].split(numbers)):
                side.scratch = part.view_as(side.master)

    def _leave(self, side: HostSide, parameter: nn.Parameter) -> None:
        if self.leaving:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._send_down(side, local_part(gradient)[: len(side.parameter)])

    def fetch(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of a whole step that have not left, in the order of the parameters."""
        for side, gradient in zip(self.sides, gradients):
            if gradient is not None:
                self._send_down(side, gradient)

    def _send_down(self, side: HostSide, gradient: Tensor) -> None:
        """A gradient is complete: start its copy to the host."""
        if side.received == self.micro_batches:
            raise RuntimeError(f"more than {self.micro_batches} backward passes before step() or discard()")
        if side.arrival is not None:
            side.arrival.result()  # the gradient of the micro-batch before has left the buffer
        side.received += 1
        copied = None
        if self._down is None:
            side.staging.copy_(gradient)
        else:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
            if side.unit.sent is not None:  # the buffer's weights are still on their way up
                self._down.wait_event(side.unit.sent)
            with torch.cuda.stream(self._down):
                side.staging.copy_(gradient, non_blocking=True)
                gradient.record_stream(self._down)
                copied = self._down.record_event()
            self._flying.append((copied, gradient.nbytes))
            while len(self._flying) > 1 and sum(nbytes for _, nbytes in self._flying) > IN_FLIGHT_BYTES:
                self._flying.popleft()[0].synchronize()
        side.arrival = self._worker.submit(self._receive, side, copied, side.received)

    @torch.no_grad()
    def _receive(self, side: HostSide, copied: torch.cuda.Event | None, count: int) -> None:
        """Worker: add the gradient to those of the micro-batches before; after the last one take the norm."""
        if copied is not None:
            copied.synchronize()
        if side.total is not None:
            side.total.copy_(side.staging) if count == 1 else side.total.add_(side.staging)
        if count == self.micro_batches and side.primary:
            side.take_norm()

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients of the step (a host scalar), once backward has ended."""
        # of some not every micro-batch had a gradient: their norms are still to take
        norms = [side.take_norm() for side in self._moved() if side.primary]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _moved(self) -> list[HostSide]:
        """What has a gradient in this step, all of which have come."""
        for side in self.sides:
            if side.arrival is not None:
                side.arrival.result()
        return [side for side in self.sides if side.received]

    def discard(self) -> None:
        for side in self._moved():
            side.received, side.arrival, side.norm = 0, None, None
        self._flying.clear()

    def step(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
        """Multiply the gradients by `factor` and update. `optimizer` is over the masters. Returns at once."""
        moved = set(self._moved())
        for unit in self._units.values():
            present = [side for side in unit.sides if side in moved]
            unit.update = self._worker.submit(self._update, unit, present, optimizer, factor)
        self.discard()

    @torch.no_grad()
    def _update(
        self, unit: Unit, present: Sequence[HostSide], optimizer: torch.optim.Optimizer, factor: float
    ) -> None:
        """Worker: one unit's update, and its weights on their way to the device."""
        for side in present:
            gradient = side.gradient if side.scratch is None else side.scratch.copy_(side.gradient)
            side.master.grad = gradient.mul_(factor) if factor != 1.0 else gradient
        optimizer.step()
        follow(optimizer, [side.master for side in unit.sides])
        for side in present:
            side.master.grad = None
        self._send_up(unit)

    @torch.no_grad()
    def _send_up(self, unit: Unit) -> None:
        """Copy a unit's masters to the device in its dtype, while no forward or backward uses these weights."""
        for side in unit.sides:
            side.staging.copy_(side.master)
            if self._up is None:
                side.parameter.copy_(side.staging)
            else:
                with torch.cuda.stream(self._up):
                    side.parameter.copy_(side.staging, non_blocking=True)
        if self._up is not None:
            unit.sent = self._up.record_event()

    def _await(self, unit: Unit) -> None:
        """Before a unit's forward: its weights are there for every stream (`fully_shard` has its own)."""
        update, unit.update = unit.update, None
        if update is None:
            return
        update.result()
        if unit.sent is not None:
            unit.sent.synchronize()

    def wait(self) -> None:
        """Wait until every update is done: before masters or optimizer state are read, and before the end."""
        for unit in self._units.values():
            self._await(unit)

    def publish(self) -> None:
        self.wait()
        if self._up is not None:  # buffers and weights are read until then
            torch.cuda.synchronize(self.device)
        for unit in self._units.values():
            self._send_up(unit)
        if self._up is not None:
            torch.cuda.synchronize(self.device)


def _block_of(name: str) -> str:
    found = re.search(r"\bblocks\.\d+", name)
    return found[0] if found else ""
