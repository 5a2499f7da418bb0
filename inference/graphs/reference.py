"""The torch side of a parity report, and what brings exports with other names or poolings onto its terms."""

import dataclasses
from typing import Any

import numpy as np

from ...core.artifact import Input
from ...core.backend import EncoderBackend, OneCall
from ...models.config import GPTConfig
from ..runtimes.backends import Loaded, torch_backend
from ..runtimes.spans import StepsByForward
from .graph_options import Pooling


def reference_of(model: Any, tokenizer: Any, source: Input, pooling: Pooling = "mean") -> Loaded:
    """The torch model in float32 behind the protocol of its family; embeddings are pooled as the export's."""
    loaded = torch_backend(model.float(), tokenizer, source)
    if loaded.encoder is None or pooling == "mean":
        return loaded
    return dataclasses.replace(loaded, encoder=Pooled(loaded.encoder, pooling))


class Pooled(OneCall):
    """An encoder whose `sentence_embedding` is made in another way."""

    def __init__(self, encoder: EncoderBackend, pooling: Pooling) -> None:
        self.name, self.vocab_size, self.context = encoder.name, encoder.vocab_size, encoder.context
        self.device, self.dtype = "cpu", "fp32"
        self._encoder, self._pooling = encoder, pooling

    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`."""
        outputs = self._encoder.forward(ids_BS, types_BS, mask_BS, ask_BN)
        vector = outputs["sentence_embedding"]
        if self._pooling.startswith("cls"):
            vector = outputs["last_hidden_state"][:, 0]
        if self._pooling.endswith("normalised"):
            vector = vector / np.linalg.norm(vector, axis=-1, keepdims=True)
        return outputs | {"sentence_embedding": vector}


class OptimumCausal(StepsByForward):
    """A GPT graph under optimum's names behind `core.backend.CausalBackend`, one row at a time: enough to
    compare it.
    """

    name, device, dtype = "onnxruntime", "cpu", "fp32"

    def __init__(self, session: Any, config: GPTConfig) -> None:
        self.session = session
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        pasts = [given for given in session.get_inputs() if given.name.startswith("past_key_values.")]
        kind = np.float16 if "16" in pasts[0].type else np.float32
        self._empty = {
            given.name: np.zeros((1, config.key_value_heads, 0, config.head_size), kind) for given in pasts
        }

    def new_cache(self, rows: int) -> list[dict[str, np.ndarray]]:
        """What each row has read."""
        return [dict(self._empty) for _ in range(rows)]

    def copy_row(self, cache: Any, source: int, target: int, tokens: int) -> None:
        """See `core.backend.CausalBackend.copy_row`."""
        cache[target] = {name: value[:, :, :tokens] for name, value in cache[source].items()}

    def forward(  # type: ignore[override]
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: Any, first_row: int = 0
    ) -> np.ndarray:
        """See `core.backend.CausalBackend.forward`."""
        found = []
        names = [output.name for output in self.session.get_outputs()]
        for line, (ids, past, ask) in enumerate(zip(ids_BS, past_B, ask_BN)):
            kept = cache[first_row + line]
            feeds = {name: value[:, :, :past] for name, value in kept.items()}
            feeds["input_ids"] = ids[None]
            feeds["position_ids"] = (past + np.arange(len(ids)))[None]
            feeds["attention_mask"] = np.ones((1, past + len(ids)), np.int64)
            values = dict(zip(names, self.session.run(names, feeds)))
            found.append(values["logits"][0, ask])
            kept |= {name: values[name.replace("past_key_values", "present")] for name in kept}
        return np.stack(found)


class OptimumEncoder(OneCall):
    """A pretraining BERT graph under optimum's names: its logits are of every position."""

    def __init__(self, encoder: Any) -> None:
        self.name, self.vocab_size, self.context = encoder.name, encoder.vocab_size, encoder.context
        self.device, self.dtype = "cpu", "fp32"
        self._encoder = encoder

    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`."""
        outputs = dict(self._encoder.forward(ids_BS, types_BS, mask_BS, ask_BN))
        outputs["mlm_logits"] = np.take_along_axis(outputs.pop("logits"), ask_BN[..., None], 1)
        return outputs
