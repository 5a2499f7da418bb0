"""A BERT graph of `onnx_bert`, by ONNX Runtime on any device or as an engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.backend import Ids, Limits, Want
from ...models.config import BERTConfig


class OnnxEncoder:
    """A BERT graph (`core.backend.EncoderBackend`).

    `open_lane`: opens a session of one thread for `lane`, which then takes `lanes` calls at once where that is more
    than one.
    """

    name = "onnxruntime"
    limits = Limits()

    def __init__(
        self,
        session: Any,
        config: BERTConfig,
        dtype: str = "fp32",
        device: str = "cpu",
        lanes: int = 1,
        open_lane: Callable[[], Any] | None = None,
    ) -> None:
        self.session, self.dtype, self.device = session, dtype, device
        self.lanes, self._open_lane = lanes, open_lane
        self.config, self.vocab_size, self.context = config, config.vocab_size, config.sequence_length
        self._lane: OnnxEncoder | None = None
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = [value.name for value in session.get_outputs()]

    def lane(self) -> "OnnxEncoder":
        """See `core.backend.EncoderBackend.lane`: a session of one thread with weights of its own, from here on."""
        if self._lane is None:
            alone = self._open_lane if self.lanes > 1 else None
            self._lane = self if alone is None else OnnxEncoder(alone(), self.config, self.dtype)
        return self._lane

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        names = wanted(self._outputs, want)
        return dict(
            zip(names, self.run(names, encoder_feeds(ids_BS, types_BS, mask_BS, ask_BN, self._inputs)))
        )

    def run(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Those outputs, float32 on the host."""
        return self.session.run(names, feeds)


def wanted(outputs: Sequence[str], want: Want) -> list[str]:
    """Those of the outputs that are wanted (None: all); hidden states where [CLS] has no output of its own."""
    if want is None:
        return list(outputs)
    instead = {"last_hidden_state"} if "cls_embedding" in want and "cls_embedding" not in outputs else set()
    return [name for name in outputs if name in instead.union(want)]


def encoder_feeds(
    ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray, names: set[str]
) -> dict[str, np.ndarray]:
    """The inputs of a BERT graph of our writer, those of them that it has."""
    feeds = {"input_ids": ids_BS, "attention_mask": mask_BS, "token_type_ids": types_BS}
    feeds["logit_positions"] = ask_BN
    return {name: np.ascontiguousarray(value, np.int64) for name, value in feeds.items() if name in names}
