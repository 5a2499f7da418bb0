"""The ONNX Runtime backends on the CPU: graphs written by `onnx_gpt` and `onnx_bert` behind the protocols.

- Threads do not spin: on a shared or small machine spinning threads burn several times the CPU that the work needs.
- The GPT's cache is memory of ours, bound as past and present at once, so new tokens are written in place and any run
  of adjacent rows is a view. ONNX Runtime attends over the whole capacity, so that follows the longest row in steps.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import Refused
from ..models.config import BERTConfig, GPTConfig

CAPACITY_STEP = 128  # tokens by which a cache grows; each growth copies it once


def open_session(path: Path | str, threads: int | None = None) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU. Raises Refused when the file is not a graph that it can run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # its warnings are about choices made here on purpose
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise Refused(
            "ONNX Runtime cannot load this graph", where=path, why=str(error).splitlines()[0][:300],
            fix="export it again; `throughline verify` says whether the file is damaged",
        ) from error  # fmt: skip


class OnnxCache:
    """Keys and values of `rows` sequences: one array (rows, kv heads, capacity, head) for each cache of the graph."""

    def __init__(self, names: list[str], rows: int, heads: int, head_size: int, capacity: int) -> None:
        self.capacity = capacity
        self.arrays = {name: np.zeros((rows, heads, capacity, head_size), np.float32) for name in names}

    def grow(self, capacity: int) -> None:
        """Make room for longer rows; everything in them is kept."""
        for name, old in self.arrays.items():
            new = np.zeros((*old.shape[:2], capacity, old.shape[3]), np.float32)
            new[:, :, : self.capacity] = old
            self.arrays[name] = new
        self.capacity = capacity


class OnnxCausal:
    """A GPT graph (`core.backend.CausalBackend`)."""

    name = "onnxruntime"

    def __init__(self, path: Path | str, config: GPTConfig, threads: int | None = None) -> None:
        self.session = open_session(path, threads)
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        self._heads = (config.key_value_heads, config.head_size)
        layers = range(config.layers)
        self._caches = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]

    def new_cache(self, rows: int) -> OnnxCache:
        """An empty cache that grows with its longest row."""
        return OnnxCache(self._caches, rows, *self._heads, capacity=min(CAPACITY_STEP, self.context))

    def forward(
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: OnnxCache, first_row: int = 0
    ) -> np.ndarray:
        """See `core.backend.CausalBackend.forward`."""
        needed = int(past_B.max()) + ids_BS.shape[1]
        assert needed <= self.context, (needed, self.context)
        if needed > cache.capacity:
            stepped = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
            cache.grow(min(max(stepped, cache.capacity * 5 // 4), self.context))
        logits = np.empty((*ask_BN.shape, self.vocab_size), np.float32)
        binding = self.session.io_binding()
        for name, value in (("input_ids", ids_BS), ("past_length", past_B), ("logit_positions", ask_BN)):
            binding.bind_cpu_input(name, np.ascontiguousarray(value, np.int64))
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for name, store in cache.arrays.items():
            rows = store[first_row : first_row + len(ids_BS)]
            binding.bind_input(f"past.{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            binding.bind_output(f"present.{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
        self.session.run_with_iobinding(binding)
        return logits

    def copy_row(self, cache: OnnxCache, source: int, target: int, tokens: int) -> None:
        """See `core.backend.CausalBackend.copy_row`."""
        for store in cache.arrays.values():
            store[target, :, :tokens] = store[source, :, :tokens]


class OnnxEncoder:
    """A BERT graph (`core.backend.EncoderBackend`)."""

    name = "onnxruntime"

    def __init__(self, path: Path | str, config: BERTConfig, threads: int | None = None) -> None:
        self.session = open_session(path, threads)
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        self._inputs = {value.name for value in self.session.get_inputs()}
        self._outputs = [value.name for value in self.session.get_outputs()]

    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`."""
        feeds = {
            "input_ids": ids_BS,
            "attention_mask": mask_BS,
            "logit_positions": ask_BN,
            "token_type_ids": types_BS,
        }
        given = {
            name: np.ascontiguousarray(value, np.int64)
            for name, value in feeds.items()
            if name in self._inputs
        }
        return dict(zip(self._outputs, self.session.run(None, given)))
