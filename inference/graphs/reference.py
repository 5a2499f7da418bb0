"""The torch side of a parity report, and what brings exports with other names or poolings onto its terms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.artifact import Input
from ...core.backend import ALL, EncoderBackend, Ids, OneCall, Span, Want
from ...models.config import GPTConfig
from ..runtimes.backends import Loaded, torch_backend
from .graph_options import Pooling

Outputs = dict[str, np.ndarray]


def reference_of(model: Any, tokenizer: Any, source: Input, pooling: Pooling = "mean") -> Loaded:
    """The torch model in float32 behind the protocol of its family; embeddings are pooled as the export's."""
    loaded = torch_backend(model.float(), tokenizer, source)
    if loaded.encoder is None or pooling == "mean":
        return loaded

    def pooled(outputs: Outputs, ask_BN: np.ndarray) -> Outputs:
        cls = pooling.startswith("cls")
        vector = outputs["last_hidden_state"][:, 0] if cls else outputs["sentence_embedding"]
        if pooling.endswith("normalised"):
            vector = vector / np.linalg.norm(vector, axis=-1, keepdims=True)
        return outputs | {"sentence_embedding": vector}

    return dataclasses.replace(loaded, backend=Adapted(loaded.encoder, pooled))


def at_asked_positions(outputs: Outputs, ask_BN: np.ndarray) -> Outputs:
    """What a pretraining BERT's graph under optimum's names gives, whose logits are of every position."""
    outputs = dict(outputs)
    return outputs | {"mlm_logits": np.take_along_axis(outputs.pop("logits"), ask_BN[..., None], 1)}


class Adapted(OneCall):
    """An encoder whose outputs are brought onto other terms; `adapt` is given them and the positions asked for.
    `one_type`: all tokens are of the first type.
    """

    def __init__(
        self,
        encoder: EncoderBackend,
        adapt: Callable[[Outputs, np.ndarray], Outputs],
        one_type: bool = False,
    ) -> None:
        self.name, self.vocab_size, self.context = encoder.name, encoder.vocab_size, encoder.context
        self.device, self.dtype = encoder.device, encoder.dtype
        self._encoder, self._adapt, self._one_type = encoder, adapt, one_type

    def forward(self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None) -> Outputs:
        types_BS = np.zeros_like(types_BS) if self._one_type else types_BS
        return self._adapt(self._encoder.forward(ids_BS, types_BS, mask_BS, ask_BN), ask_BN)


class OptimumCausal:
    """A GPT graph under optimum's names, row by row: of `core.backend.CausalBackend` enough to compare it."""

    name, device, dtype, limits = "onnxruntime", "cpu", "fp32", ALL

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

    def step(self, spans: Sequence[Span], cache: list[dict[str, np.ndarray]]) -> np.ndarray:
        found = []
        names = [output.name for output in self.session.get_outputs()]
        for span in spans:
            kept, new = cache[span.row], len(span.ids)
            feeds = {name: value[:, :, : span.past] for name, value in kept.items()}
            feeds["input_ids"] = span.ids[None]
            feeds["position_ids"] = (span.past + np.arange(new))[None]
            feeds["attention_mask"] = np.ones((1, span.past + new), np.int64)
            values = dict(zip(names, self.session.run(names, feeds)))
            found.append(values["logits"][0, new - span.asked :])
            kept |= {name: values[name.replace("past_key_values", "present")] for name in kept}
        return np.concatenate(found)
