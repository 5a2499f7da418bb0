"""Backends for graphs in a GPU's memory, on a CPU: the session treats inputs as ONNX Runtime does on CUDA."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.core.backend import BackendOptions, Span, on_host
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.onnx_cuda import CudaCausal, CudaEncoder
from throughline.inference.runtimes.source import Loaded

ON_CPU = BackendOptions(device="cpu", threads=1)


class CopiesWhenBound:
    """An ONNX Runtime session that reads integer inputs while they are bound. With CUDA it does so for every input that
    a node on the host consumes: `past_length`, of which the lengths of shapes are computed.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> "Binding":
        return Binding(self._session.io_binding())

    def run_with_iobinding(self, binding: "Binding") -> None:
        self._session.run_with_iobinding(binding.inner)


class Binding:
    def __init__(self, inner: Any) -> None:
        self.inner, self._copies = inner, dict[str, np.ndarray]()

    def bind_input(
        self, name: str, device: str, number: int, element: Any, shape: tuple[int, ...], at: int
    ) -> None:
        if element is np.int64:
            copy = np.empty(shape, np.int64)
            ctypes.memmove(copy.ctypes.data, at, copy.nbytes)
            self._copies[name], at = copy, copy.ctypes.data
        self.inner.bind_input(name, device, number, element, shape, at)

    def bind_output(self, *words: Any) -> None:
        self.inner.bind_output(*words)


@pytest.fixture
def gpt(gpt_onnx: Path) -> Loaded:
    return open_backend(gpt_onnx, ON_CPU)


def test_a_gpt_reads_the_past_of_each_call(gpt: Loaded) -> None:
    """Parts of prompts and repeated decode steps of the same shape, whose pasts differ, give the CPU's logits."""
    assert gpt.causal is not None
    session = CopiesWhenBound(gpt.causal.session)  # type: ignore[attr-defined]
    on_cuda = CudaCausal(session, gpt.config, "fp32", "cpu")  # type: ignore[arg-type]
    ids = np.random.default_rng(0).integers(0, 300, 30)
    sizes, found = [12, 6, 1, 1, 1, 9], []
    for backend in (gpt.causal, on_cuda):
        cache, past, logits = backend.new_cache(2), 0, []
        for size in sizes:
            logits.append(on_host(backend.step([Span(1, past, ids[past : past + size], 1)], cache)).copy())
            past += size
        found.append(np.concatenate(logits))
    np.testing.assert_array_equal(found[1], found[0])


def test_a_bert_reads_the_inputs_of_each_call(bert_onnx: Path) -> None:
    """Two calls of one shape with other ids and masks, on the memory that the first call left."""
    loaded = open_backend(bert_onnx, ON_CPU)
    assert loaded.encoder is not None
    session = CopiesWhenBound(loaded.encoder.session)  # type: ignore[attr-defined]
    on_cuda = CudaEncoder(session, loaded.config, "fp32", "cpu")  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    for lengths in ((16, 5), (9, 16)):
        ids, types = rng.integers(5, 60, (2, 16)), rng.integers(0, 2, (2, 16))
        inputs = ids, types, np.arange(16) < np.array(lengths)[:, None], rng.integers(0, 2, (2, 3))
        expected, found = (backend.forward(*inputs) for backend in (loaded.encoder, on_cuda))
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, name)
