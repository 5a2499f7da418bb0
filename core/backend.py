"""What runs a model, whatever library does it: the protocols that `inference` implements and `eval` uses.

Everything is numpy in, numpy out, so that torch, ONNX Runtime and later engines are exchangeable and comparable.
Shapes: B rows, S tokens given, N positions asked for, V vocabulary, H width.
"""

from typing import Any, Protocol

import numpy as np

Cache = Any  # what a backend keeps between calls; only that backend looks inside


class CausalBackend(Protocol):
    """A GPT with a slot cache: every cache row is one sequence with its own past length."""

    name: str  # "torch" or "onnxruntime"
    vocab_size: int
    context: int  # tokens of the longest sequence, prompt and answer together

    def new_cache(self, rows: int) -> Cache:
        """An empty cache for `rows` sequences; it grows as they do."""

    def forward(
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: Cache, first_row: int = 0
    ) -> np.ndarray:
        """Append `ids` (int64) to cache rows `first_row` … `first_row + B` and return float32 logits (B, N, V).

        Row b already holds `past[b]` tokens; its logits are those after the tokens `ids[b, ask[b]]`. Prefill is S > 1,
        decode S = 1, both with ragged `past`. A row with fewer than S tokens is filled up with any id on the right:
        what lies behind its real length is never attended to by its real tokens and overwritten by its next call.
        """

    def copy_row(self, cache: Cache, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of one cache row over another row."""


class EncoderBackend(Protocol):
    """A BERT: all inputs (B, S); `mask` is bool with True for real tokens, at least one in every row."""

    name: str
    vocab_size: int
    context: int

    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """float32 outputs: `last_hidden_state` (B, S, H); `mlm_logits` (B, N, V) at the positions `ask`;
        `sentence_embedding` (B, H), the mean over real tokens; with an NSP head `pooler_output` (B, H) and
        `nsp_logits` (B, 2).
        """
