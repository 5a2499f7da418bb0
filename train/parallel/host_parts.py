"""ZeRO-Offload in a layout: masters, optimizer state and update of this process's part of the model on the host.

Ren et al. 2021, section 4.2: the data processes reduce gradients on their devices, and each host updates the shard that its
process holds, so ZeRO shares out the host's memory and work too. Unlike `offload.HostOffload`, which serves one process, gradients
leave the device when the whole step's are there, reduced, and the next forward waits for the update. Gradients are of the
weights' 16 bits, and are summed over processes in them: one micro-batch a step (the recipe's rules say so), for added up
in 16 bits they would lose the small ones. With fp32 and fp64 nothing is rounded, and the numbers are those without offload.

Bytes per parameter that a process holds, with 16-bit weights: 2 + 2 on the device (both whole where the sharding keeps them so);
16 on the host: master, mean and square of AdamW, gradient, fp32 each.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from .engine import Engine


class HostParts:
    """The host's side of an engine's leaves: what an optimizer moves and a checkpoint saves."""

    def __init__(self, engine: Engine) -> None:
        self.config = engine.config
        self._held = engine.leaves
        self.leaves = [replace(leaf, value=nn.Parameter(_on_host(leaf.value))) for leaf in engine.leaves]
        cuda = engine.mesh.device.type == "cuda"
        self._gradients = [
            torch.empty(leaf.value.shape, dtype=leaf.value.dtype, pin_memory=cuda) for leaf in self.leaves
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and masters, fp32 (fp64 of an fp64 model) on the host, of the parts that hold anything."""
        return ((leaf.name, leaf.value) for leaf in self.leaves if leaf.value.numel())

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
        """Multiply the engine's gradients by `factor`, update the masters with them, and give the device its weights."""
        for leaf, master, gradient in zip(self._held, self.leaves, self._gradients):
            if leaf.value.grad is not None:
                master.value.grad = gradient.copy_(leaf.value.grad, non_blocking=True)
        if self._held[0].value.is_cuda:
            torch.cuda.synchronize(self._held[0].value.device)
        if factor != 1.0:
            torch._foreach_mul_(
                [master.value.grad for master in self.leaves if master.value.grad is not None], factor
            )
        optimizer.step()
        for master in self.leaves:
            master.value.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Send all masters to the device in its dtype."""
        for leaf, master in zip(self._held, self.leaves):
            leaf.value.copy_(master.value)

    def discard(self) -> None:
        """The step is skipped: its gradients never came here."""


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", torch.promote_types(value.dtype, torch.float32), copy=True)
