"""FlashAttention 3 on a Hopper card: torch's own glue takes every call of ours, to a package that is pretended."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from cases import card, make, model
from test_decoding import backend_of, spans
from throughline.core.backend import Span
from throughline.models import attention_cuda
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

NAMES = ("k_new", "v_new", "qv", "out", "bounds_q", "bounds_k", "bounds_new", "used_q", "used_k")
MORE = ("pages", "rows", "left_pad", "cos", "sin", "lengths", "q_scale", "k_scale", "v_scale")
FORWARD = ", ".join(
    [
        "Tensor q, Tensor k, Tensor v",
        *(f"Tensor? {name}" for name in NAMES),
        "int? longest_q, int? longest_k",
        *(f"Tensor? {name}" for name in MORE),
        "float? scale, bool causal, int left, int right, int chunk, float softcap, bool interleaved",
        "Tensor? metadata, int splits, bool? pack, int margin",
    ]
)
BACKWARD = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dq, Tensor dk, Tensor dv, "
    "Tensor? bounds_q, Tensor? bounds_k, Tensor? used_q, Tensor? used_k, int? longest_q, int? longest_k, "
    "float? scale, bool causal, int left, int right, float softcap, bool deterministic, int margin"
)
calls: list[str] = []


def forward(q, k, v, *given):
    calls.append("forward")
    heads, rows = (q.shape[-2], q.shape[:-2])
    lse = torch.empty(*rows[:-1], heads, rows[-1], device=q.device)
    return torch.empty_like(q), lse, torch.empty(0, device=q.device), torch.empty(0, device=q.device)


@pytest.fixture(scope="module")
def package():
    """`flash_attn_interface` with operators of FlashAttention 3's signatures."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(f"fwd({FORWARD}) -> (Tensor, Tensor, Tensor, Tensor)")
    library.define(f"bwd({BACKWARD}) -> ()")
    library.impl("fwd", forward, "CUDA")
    library.impl("bwd", lambda *given: calls.append("backward"), "CUDA")
    module = sys.modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    yield
    del sys.modules["flash_attn_interface"]


@pytest.fixture(autouse=True)
def afterwards():
    calls.clear()
    yield
    if current_flash_attention_impl():
        restore_flash_attention_impl()


def test_it_is_taken_where_there_are_card_and_package(package):
    for capability, expected in ((80, None), (100, None), (90, "FA3")):
        attention_cuda.take_newest(card(capability))
        assert current_flash_attention_impl() == expected


def test_it_is_left_out_without_its_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    attention_cuda.take_newest(card(90))
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_packed_rows_train_by_it(package, family):
    make(model(family), "bf16", card(90), documents=True).step()
    assert calls.count("forward") == calls.count("backward") == 4  # two layers, two micro-batches


def test_a_ring_merges_its_parts(package):
    device = card(90)
    attention_cuda.take_newest(device)
    q, k = (torch.empty(64, heads, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    bounds = torch.tensor([0, 32, 64], dtype=torch.int32).to(device)
    out, lse = attention_cuda.forward(q, k, k, bounds, bounds, 32, True)
    found = attention_cuda.backward(out, q, k, k, out, lse, bounds, bounds, 32, True)
    assert lse.shape == (4, 64) and [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert calls == ["forward", "backward"]


def test_windows_and_caches_are_read_by_it(package):
    window = {"attention_window": 64, "attention_block": 32, "layer_pattern": "lg"}
    backend = backend_of("llama", "bf16", 90, **window)
    cache = backend.new_cache(4)
    backend.step(spans([70, 3, 128]), cache)
    backend.step([Span(row, 130, np.arange(1)) for row in range(3)], cache)
    assert calls.count("forward") >= 4 and not backend.graphs.failures


def test_dropout_keeps_the_other(package):
    make(model("gpt", dropout=0.1), "bf16", card(90)).step()
    assert current_flash_attention_impl() is None and not calls
