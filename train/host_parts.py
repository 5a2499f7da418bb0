"""ZeRO-Offload in a layout: masters, optimizer state and update of this process's part of the model on the
host.

Ren et al. 2021, section 4.2: the data processes reduce gradients on their devices, and each host updates the
shard that its process holds, so ZeRO shares out the host's memory and work too. Unlike `offload.HostOffload`,
which serves one process, gradients leave the device when the whole step's are there, reduced, and the next
forward waits for the update. Gradients are of the weights' 16 bits, and are summed over processes in them:
one micro-batch a step (the recipe's rules say so), for added up in 16 bits they would lose the small ones.
With fp32 and fp64 nothing is rounded, and the numbers are those without offload.

Bytes per parameter that a process holds, with 16-bit weights: 2 + 2 on the device (both whole where the
sharding keeps them so); 16 on the host: master, mean and square of AdamW, gradient, fp32 each.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .engine import LocalShard


class HostUpdate:
    """The host's side of an engine's local shards: masters, fp32 (fp64 of an fp64 model), and gradients."""

    def __init__(self, local_shards: Sequence[LocalShard], device: torch.device) -> None:
        self.local_shards, self.device = local_shards, device
        self._gradients = []
        for local in local_shards:
            wide = torch.promote_types(local.computed.dtype, torch.float32)
            local.value = nn.Parameter(local.computed.detach().to("cpu", wide, copy=True))
            self._gradients.append(
                torch.empty(local.value.shape, dtype=wide, pin_memory=device.type == "cuda")
            )

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
        """Fetch the gradients, multiply them by `factor` and update the masters."""
        masters = []
        for local, gradient in zip(self.local_shards, self._gradients):
            if local.computed.grad is not None:
                local.value.grad = gradient.copy_(local.computed.grad, non_blocking=True)
                masters.append(gradient)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if factor != 1.0:
            torch._foreach_mul_(masters, factor)
        optimizer.step()
