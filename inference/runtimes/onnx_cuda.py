"""Graphs on a CUDA device, by ONNX Runtime or as an engine: caches, inputs and outputs are memory of torch's, and what
crosses the bus are ids and what was asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.backend import Ids, Want
from ...models.config import BERTConfig, GPTConfig, ModelConfig
from .onnx_causal import BINDINGS, OnnxCausal
from .onnx_session import OnnxEncoder

BUCKET = 16  # lengths are padded to a multiple: each shape has memory and a captured graph of its own
OF_TOKENS = ("last_hidden_state", "start_logits", "end_logits")


def wait(device: str) -> None:
    """Until what torch was given to do on the device is done: ONNX Runtime and engines have streams of their own."""
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


class CudaCausal(OnnxCausal):
    """A GPT graph in a GPU's memory (`core.backend.CausalBackend`). ONNX Runtime computes shapes, and what of them
    depends on `past_length`, on the host: it copies such an input while it is bound.
    """

    copied_when_bound = True

    def __init__(self, session: Any, config: GPTConfig, dtype: str, device: str) -> None:
        super().__init__(session, config, dtype)
        self.device = device
        self._spare = torch.zeros(1, device=device)  # empty tensors have no address, and one is asked for

    def zeros(self, shape: tuple[int, ...], kind: Any) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, np.dtype(kind).name), device=self.device)

    def address(self, array: Any) -> int:
        return int(array.data_ptr() or self._spare.data_ptr())

    def written(self) -> None:
        wait(self.device)


def on_gpu(session: Any, config: ModelConfig, precision: str, device: str) -> Any:
    """A session of ONNX Runtime's or an engine's behind the protocol of its family, on memory of the device."""
    kind: Any = CudaCausal if isinstance(config, GPTConfig) else CudaEncoder
    return kind(session, config, precision, device)


@dataclass
class Resident:
    """Memory of calls of one shape: on the device by name, and pinned memory of the host for what comes and goes."""

    binding: Any
    inside: dict[str, torch.Tensor]
    pinned: dict[str, torch.Tensor]


class CudaEncoder(OnnxEncoder):
    """A BERT graph in a GPU's memory (`core.backend.EncoderBackend`)."""

    def __init__(self, session: Any, config: BERTConfig, dtype: str, device: str) -> None:
        super().__init__(session, config, dtype, device)
        self._resident: dict[tuple[Any, ...], Resident] = {}
        self._spare = torch.zeros(1, device=device)

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        length = ids_BS.shape[1]
        more = ((0, 0), (0, min(-length % BUCKET, self.context - length)))
        ids, types, mask = (np.pad(given, more) for given in (ids_BS, types_BS, mask_BS))
        found = super().forward(ids, types, mask, ask_BN, want)
        for name, value in found.items():
            if name in OF_TOKENS or (name == "logits" and value.ndim == 3):
                found[name] = value[:, :length]
        return found

    def run(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """See `OnnxEncoder.run`: ids go and `names` come through pinned memory, the rest stays where it is."""
        key = tuple(value.shape for value in feeds.values())
        if key not in self._resident:
            if len(self._resident) == BINDINGS:
                del self._resident[next(iter(self._resident))]
            self._resident[key] = self._bound(feeds)
        call = self._resident[key]
        for name in (*feeds, *names):
            if name not in call.pinned:
                pinned = torch.empty_like(call.inside[name], device="cpu", pin_memory=self.device != "cpu")
                call.pinned[name] = pinned
        for name, value in feeds.items():
            call.pinned[name].numpy()[...] = value
            call.inside[name].copy_(call.pinned[name], non_blocking=True)
        wait(self.device)
        self._bind(call, feeds, call.binding.bind_input, np.int64)
        self.session.run_with_iobinding(call.binding)
        for name in names:
            call.pinned[name].copy_(call.inside[name], non_blocking=True)
        wait(self.device)
        return [call.pinned[name].numpy().copy() for name in names]

    def _bound(self, feeds: dict[str, np.ndarray]) -> Resident:
        """Memory for calls of this shape. Outputs are bound once; inputs in `run`, as `CudaCausal` says."""
        rows, tokens = feeds["input_ids"].shape
        asked = feeds["logit_positions"].shape[1] if "logit_positions" in feeds else 0
        call = Resident(self.session.io_binding(), {}, {})
        for name, value in feeds.items():
            call.inside[name] = torch.empty(value.shape, dtype=torch.int64, device=self.device)
        outputs = [given.name for given in self.session.get_outputs()]
        for given in self.session.get_outputs():
            free = (rows, asked if given.name == "mlm_logits" else tokens)
            shape = tuple(dim if isinstance(dim, int) else free[i] for i, dim in enumerate(given.shape))
            call.inside[given.name] = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._bind(call, outputs, call.binding.bind_output, np.float32)
        return call

    def _bind(self, call: Resident, names: Iterable[str], bind: Callable[..., None], element: type) -> None:
        """Give the session the addresses of these tensors."""
        kind, _, number = self.device.partition(":")
        for name in names:
            tensor = call.inside[name]
            address = tensor.data_ptr() or self._spare.data_ptr()
            bind(name, kind, int(number or 0), element, tuple(tensor.shape), address)
