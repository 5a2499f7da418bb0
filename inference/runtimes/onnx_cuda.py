"""A GPT graph on a CUDA device, by ONNX Runtime or as an engine: cache, inputs and logits are memory of torch's."""

from typing import Any

import numpy as np

from ...core.errors import WrongUse
from ...models.config import GPTConfig
from .onnx_causal import OnnxCausal


class CudaCausal(OnnxCausal):
    """A GPT graph in a GPU's memory (`core.backend.CausalBackend`). Raises WrongUse where torch has no CUDA."""

    def __init__(self, session: Any, config: GPTConfig, dtype: str, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise WrongUse("torch has no CUDA device here", where=f"--device {device}", fix="--device cpu")
        super().__init__(session, config, dtype)
        self.device = device
        self._spare = torch.zeros(1, device=device)  # empty tensors have no address, and one is asked for

    def zeros(self, shape: tuple[int, ...], kind: Any) -> Any:
        """See `OnnxCausal.zeros`."""
        import torch

        return torch.zeros(shape, dtype=getattr(torch, np.dtype(kind).name), device=self.device)

    def address(self, array: Any) -> int:
        """See `OnnxCausal.address`."""
        return int(array.data_ptr() or self._spare.data_ptr())

    def written(self) -> None:
        """ONNX Runtime runs on a stream of its own."""
        import torch

        torch.cuda.current_stream().synchronize()

    def on_host(self, array: Any) -> np.ndarray:
        """See `OnnxCausal.on_host`."""
        return array.cpu().numpy()
