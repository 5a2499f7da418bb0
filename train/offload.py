"""ZeRO-Offload: master weights, optimizer state and update on the host; the device holds 16-bit weights and
activations only.

Ren et al. 2021 (ZeRO-Offload). During backward each gradient is copied to the host as soon as it is complete
and leaves the device; the host meanwhile adds up micro-batches and takes norms. Clipping and the rule that a
step with a non-finite number is skipped need the norm of all gradients before the first weight moves, so the
update starts when backward has ended: a worker updates the model front to back and sends each part's weights
to the device, while the next forward already runs in the parts before it. The numbers are those of the same
optimizer without offload, bit for bit on the same device and dtype.

    offload = HostOffload(model)                        # a model on its device in its dtype
    optimizer = build_optimizer(offload, recipe)        # over the masters: it only asks for named_parameters()
    loss.backward()                                     # every micro-batch; gradients leave as they come
    norm = offload.gradient_norm()
    offload.step(optimizer, factor)                     # or offload.discard(), which skips the step

Bytes per parameter with 16-bit weights: 2 on the device; 12 + 2 on the host (fp32 weight, mean and square of
AdamW; a 16-bit pinned buffer for the gradient on its way down and the weight on its way up), 4 more when
gradients of several micro-batches are added, and otherwise room for the fp32 gradients of one part of the
model. Without an accelerator the same code runs, and moves nothing anywhere.

In a layout (section 4.2) the data processes reduce gradients on their devices first, and each host updates
the shard that its process holds, so ZeRO shares out the host's memory and work too: gradients leave the device
when all of the step's are there (`fetch`), and the next forward waits for the update. They are of the weights'
16 bits, and are summed over processes in them: one micro-batch a step (the recipe's rules say so), for added
up in 16 bits they would lose the small ones.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ..models.bert import BERT
from ..models.gpt import GPT

IN_FLIGHT_BYTES = (
    2**30
)  # gradients of the device that wait for their copy: where the link is slower than backward, backward waits


class HostOffload:
    """The host's side of a model's weights. One worker thread does all work on host tensors; `wait` before
    reading them.

    Of a model, forward hooks wait for the weights and gradients leave as they come, over `micro_batches`
    backward passes a step; compile its blocks' forwards, not the model, or the hooks are traced. Of a layout's
    local parts, given by name, there are no hooks: `fetch` takes the gradients.
    """

    def __init__(
        self, source: GPT | BERT | Sequence[tuple[str, nn.Parameter]], micro_batches: int = 1
    ) -> None:
        model = source if isinstance(source, nn.Module) else None
        names, parameters = zip(*(source.named_parameters() if isinstance(source, nn.Module) else source))
        self._names: tuple[str, ...] = names
        self._parameters: tuple[nn.Parameter, ...] = parameters
        self._streams, self.micro_batches = model is not None, micro_batches
        self.device = parameters[0].device
        cuda = self.device.type == "cuda"
        self._down: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if cuda else None
        self._up: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if cuda else None
        self._masters = [nn.Parameter(p.detach().to("cpu", _master_dtype(p), copy=True)) for p in parameters]
        self._staging = [torch.empty(p.shape, dtype=p.dtype, pin_memory=cuda) for p in parameters]
        self._sums = [torch.zeros_like(m) for m in self._masters] if micro_batches > 1 else None
        self._norms: list[Tensor | None] = [None] * len(parameters)
        self._scratch: list[Tensor] = []
        self._received = [0] * len(parameters)  # gradients of this step that have come
        self._arrivals: list[Future[None] | None] = [None] * len(parameters)
        self._flying: deque[tuple[torch.cuda.Event, int]] = deque()
        self._worker = ThreadPoolExecutor(1, "offload")
        blocks = dict.fromkeys(block for name in names if (block := _block_of(name)))
        unit_of = {block: unit for unit, block in enumerate(("", *blocks))}
        self._unit_of = [unit_of[_block_of(name)] for name in names]
        self._units = [[i for i, unit in enumerate(self._unit_of) if unit == u] for u in unit_of.values()]
        if self._sums is None and any(m.dtype != p.dtype for m, p in zip(self._masters, parameters)):
            self._scratch = self._make_scratch()
        self._updates: list[Future[None] | None] = [None] * len(self._units)
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._units)
        if model is not None:
            self._watch(model, unit_of)

    def _watch(self, model: GPT | BERT, unit_of: dict[str, int]) -> None:
        """Hooks so that gradients leave when they are complete, and no forward runs ahead of its weights.

        A unit is updated in one go. Each block is one; unit 0 is everything outside the blocks: some of it is
        used without calling its module, but never before the token table, which is a module of this unit.
        """
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._leave(index, p))
        for name, module in model.named_modules():
            if name in unit_of and name:
                module.register_forward_pre_hook(lambda *_, unit=unit_of[name]: self._await(unit))
            elif not _block_of(name) and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(lambda *_: self._await(0))

    def _make_scratch(self) -> list[Tensor]:
        """For each parameter room for its gradient in the master's dtype, shared by the units, which are
        updated one by one.

        Kept, because fresh memory of this size costs more time (page faults) than the update itself.
        """
        largest = max(sum(self._masters[index].numel() for index in unit) for unit in self._units)
        room = torch.empty(largest, dtype=self._masters[0].dtype)
        views: list[Tensor] = [room] * len(self._masters)
        for unit in self._units:
            sizes = [self._masters[index].numel() for index in unit]
            for index, part in zip(unit, room[: sum(sizes)].split(sizes)):
                views[index] = part.view_as(self._masters[index])
        return views

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and masters: fp32 (fp64 of an fp64 model) on the host. What an optimizer moves and a
        checkpoint saves.
        """
        self.wait()
        return iter(zip(self._names, self._masters, strict=True))

    def _leave(self, index: int, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._send_down(index, gradient)

    def fetch(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of a whole step, in the order of the parameters."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._send_down(index, gradient)

    def _send_down(self, index: int, gradient: Tensor) -> None:
        """A gradient is complete: start its copy to the host."""
        arrival = self._arrivals[index]
        if self._received[index] == self.micro_batches:
            raise RuntimeError(f"more than {self.micro_batches} backward passes before step() or discard()")
        if arrival is not None:
            arrival.result()  # the gradient of the micro-batch before has left the buffer
        self._received[index] += 1
        copied = None
        if self._down is None:
            self._staging[index].copy_(gradient)
        else:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
            if (
                sent := self._sent[self._unit_of[index]]
            ) is not None:  # the buffer's weights are still on their way up
                self._down.wait_event(sent)
            with torch.cuda.stream(self._down):
                self._staging[index].copy_(gradient, non_blocking=True)
                gradient.record_stream(self._down)
                copied = self._down.record_event()
            self._limit_flying(copied, gradient.nbytes)
        self._arrivals[index] = self._worker.submit(self._receive, index, copied, self._received[index])

    def _limit_flying(self, copied: torch.cuda.Event, size: int) -> None:
        self._flying.append((copied, size))
        while len(self._flying) > 1 and sum(nbytes for _, nbytes in self._flying) > IN_FLIGHT_BYTES:
            self._flying.popleft()[0].synchronize()

    @torch.no_grad()
    def _receive(self, index: int, copied: torch.cuda.Event | None, count: int) -> None:
        """Worker: add the gradient to those of the micro-batches before; after the last one take the norm."""
        if copied is not None:
            copied.synchronize()
        if self._sums is not None:
            total, gradient = self._sums[index], self._staging[index]
            total.copy_(gradient) if count == 1 else total.add_(gradient)
        if count == self.micro_batches and self._streams:
            self._norms[index] = self._norm(index)

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients of the step (a host scalar), once backward has ended."""
        self._wait_for_gradients()
        for index in self._moved():
            if self._norms[index] is None:  # not every micro-batch had a gradient for it
                self._norms[index] = self._norm(index)
        return torch.linalg.vector_norm(torch.stack([norm for norm in self._norms if norm is not None]))

    def _norm(self, index: int) -> Tensor:
        gradient = self._staging[index] if self._sums is None else self._sums[index]
        return torch.linalg.vector_norm(gradient, dtype=self._masters[index].dtype)

    def _moved(self) -> list[int]:
        """The parameters that have a gradient in this step."""
        return [index for index, count in enumerate(self._received) if count]

    def _wait_for_gradients(self) -> None:
        for arrival in self._arrivals:
            if arrival is not None:
                arrival.result()

    def discard(self) -> None:
        """Forget the gradients: the step is skipped."""
        self._wait_for_gradients()
        self._flying.clear()
        self._arrivals = [None] * len(self._arrivals)
        self._received = [0] * len(self._received)
        self._norms = [None] * len(self._norms)

    def step(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
        """Multiply the gradients by `factor` and update; returns at once. `optimizer` is over the masters."""
        self._wait_for_gradients()
        moved = set(self._moved())
        for unit, indices in enumerate(self._units):
            present = [index for index in indices if index in moved]
            self._updates[unit] = self._worker.submit(self._update, unit, present, optimizer, factor)
        self.discard()

    @torch.no_grad()
    def _update(self, unit: int, indices: list[int], optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Worker: one unit's update, and its weights on their way to the device."""
        for index in indices:
            master = self._masters[index]
            gradient = self._staging[index] if self._sums is None else self._sums[index]
            if self._scratch:
                gradient = self._scratch[index].copy_(gradient)
            master.grad = gradient.mul_(factor) if factor != 1.0 else gradient
        optimizer.step()
        for index in indices:
            self._masters[index].grad = None
        self._send_up(unit, indices)

    @torch.no_grad()
    def _send_up(self, unit: int, indices: list[int]) -> None:
        """Copy a unit's masters to the device in its dtype. No forward or backward that uses these weights
        may be running.
        """
        for index in indices:
            parameter, staging = self._parameters[index], self._staging[index]
            staging.copy_(self._masters[index])
            if self._up is None:
                parameter.copy_(staging)
            else:
                with torch.cuda.stream(self._up):
                    parameter.copy_(staging, non_blocking=True)
        if self._up is not None:
            self._sent[unit] = self._up.record_event()

    def _await(self, unit: int) -> None:
        """Before a unit's forward: its weights are on the device, or will be before the device gets there."""
        update, self._updates[unit] = self._updates[unit], None
        if update is None:
            return
        update.result()
        if (sent := self._sent[unit]) is not None:
            torch.cuda.current_stream(self.device).wait_event(sent)

    def wait(self) -> None:
        """Wait until every update is done: before masters or optimizer state are read, and before the end."""
        for unit in range(len(self._units)):
            self._await(unit)

    def publish(self) -> None:
        """Send all masters to the device, after they were filled from a checkpoint."""
        self.wait()
        self._synchronize()  # buffers and weights are read until then
        for unit, indices in enumerate(self._units):
            self._send_up(unit, indices)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def bytes_held(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
        """Bytes of the tensors that exist now, by the terms of the planner's `host_terms`."""
        self.wait()
        states = (
            value
            for slots in optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        )
        host = {
            "master weights": sum(master.nbytes for master in self._masters),
            "optimizer": sum(value.nbytes for value in states if value.dim()),  # step counts left out
            "transfer buffers": sum(buffer.nbytes for buffer in self._staging),
        }
        if self._sums is not None:
            host["gradient sums"] = sum(total.nbytes for total in self._sums)
        if self._scratch:
            host["update scratch"] = self._scratch[0].untyped_storage().nbytes()
        return {"device": {"weights": sum(parameter.nbytes for parameter in self._parameters)}, "host": host}

    def close(self) -> None:
        """Finish what is under way and end the worker."""
        self.wait()
        self._worker.shutdown(wait=True)


def _block_of(name: str) -> str:
    """The block of a parameter or module, "" outside the blocks."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" and len(parts) > 1 else ""


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
