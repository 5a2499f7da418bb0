"""Attention of documents by their bounds equals the dense mask: results and gradients, kernels and whole models."""

import pytest
import torch
from throughline.models import attention_cpu, attention_cuda
from throughline.models.attention import Documents, attend_beside, scaled_dot_product
from throughline.models.attention_cpu import backward, band_bias, band_slices, forward
from throughline.models.attention_patterns import make_attend
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from torch.nn import functional as F

ROWS, LENGTH, HEADS, SIZE = 2, 40, 4, 8
BOUNDS = {
    "unequal": [0, 5, 9, 39, 40, 80],
    "empty ones and a single token": [0, 0, 7, 8, 40, 40, 64, 80, 80, 80],
    "equal neighbours": [0, 10, 20, 30, 40, 60, 80],
    "whole rows": [0, 40, 80],
}
# float64: a hundred times its noise; float32 and bf16: a few roundings of sums of at most 40 terms near 1
ERROR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def documents(name: str) -> Documents:
    return Documents(torch.tensor(BOUNDS[name], dtype=torch.int32), LENGTH)


def inputs(dtype: torch.dtype, kv_heads: int = HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, LENGTH, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for shape in shapes
    ]


def with_gradients(attend, inputs) -> list[torch.Tensor]:
    *qkv, grad = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_equal_the_dense_mask(
    name: str, causal: bool, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the mask in float64, whatever the kernel: the fused one, and products in pieces of 16 queries."""
    monkeypatch.setattr(attention_cpu, "QUERIES", 16)
    mask = documents(name).mask(ROWS, LENGTH, causal)
    given = inputs(dtype, kv_heads)
    found = with_gradients(lambda q, k, v: documents(name).attend(q, k, v, causal), given)
    expected = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=kv_heads < HEADS),
        [x.double() for x in given],
    )
    assert max(map(far, found, expected)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2, 7, 30])
@pytest.mark.parametrize("name", ["unequal", "whole rows"])
def test_documents_with_a_window_equal_the_dense_mask(
    name: str, window: int, causal: bool, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents shorter and longer than the window, in steps of 16 queries with a rest, on every road."""
    monkeypatch.setattr(attention_cpu, "QUERIES", 16)
    places = torch.arange(LENGTH)
    near = (places[:, None] - places).abs() < window
    mask = documents(name).mask(ROWS, LENGTH, causal) & near
    given = inputs(dtype, kv_heads)
    found = with_gradients(lambda q, k, v: documents(name).attend(q, k, v, causal, window=window), given)
    expected = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=kv_heads < HEADS),
        [x.double() for x in given],
    )
    assert max(map(far, found, expected)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("window", [2, 6, 30, 100])
@pytest.mark.parametrize("step", [16, 64])
def test_the_last_queries_of_a_run_see_its_window(
    step: int, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of fewer queries than keys, as a process of the context axis has: of 20 of 50, of all 14, of none."""
    monkeypatch.setattr(attention_cpu, "QUERIES", step)
    sizes = [(20, 50), (14, 14), (0, 9), (30, 40)]
    drawn = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(64, HEADS, SIZE, generator=drawn).to(dtype) for _ in range(2))
    k, v = (torch.randn(113, 2, SIZE, generator=drawn).to(dtype) for _ in range(2))
    bounds = torch.tensor([[0, 20, 34, 34, 64], [0, 50, 64, 73, 113]], dtype=torch.int32)
    runs = [torch.full((queries, keys), True) for queries, keys in sizes]
    near = [
        run.tril(run.shape[1] - run.shape[0]).triu(run.shape[1] - run.shape[0] - window + 1) for run in runs
    ]
    mask = torch.block_diag(*near).bool()
    found = with_gradients(lambda *qkv: attend_beside(*qkv, None, *bounds, 50, True, window), [q, k, v, grad])

    def dense(*qkv: torch.Tensor) -> torch.Tensor:
        first = [x.transpose(0, 1)[None] for x in qkv]
        return F.scaled_dot_product_attention(*first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    expected = with_gradients(dense, [x.double() for x in (q, k, v, grad)])
    assert max(map(far, found, expected)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", BOUNDS)
def test_sinks_beside_documents_equal_the_dense_mask(
    name: str, window: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged by the log-sum-exp, results and gradients, those of the sinks too, are a softmax with a column more."""
    monkeypatch.setattr(attention_cpu, "QUERIES", 16)
    places = torch.arange(LENGTH)
    mask = documents(name).mask(ROWS, LENGTH, True) & (places[:, None] - places < (window or LENGTH))
    pattern = GPTConfig(
        width=32, heads=4, attention_window=window or LENGTH, attention_block=16
    ).attention_pattern
    ways = [lambda *qkvs: make_attend(pattern, True)(*qkvs[:3], mask=documents(name), sinks=qkvs[3])]
    if not window:
        ways.append(
            lambda *qkvs: scaled_dot_product(*qkvs[:3], mask=documents(name), is_causal=True, sinks=qkvs[3])
        )
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    *qkv, grad = inputs(dtype, kv_heads)

    def dense(*qkvs: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in qkvs[:3])
        scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask, -torch.inf)
        column = qkvs[3].view(-1, 1, 1).expand(ROWS, -1, LENGTH, 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v

    expected = with_gradients(dense, [x.double() for x in (*qkv, sinks.to(dtype), grad)])
    for way in ways:
        found = with_gradients(way, [*qkv, sinks.to(dtype), grad])
        assert max(map(far, found, expected)) < 2 * ERROR[dtype]


@pytest.mark.parametrize("causal", [True, False])
def test_a_band_reads_the_keys_that_are_seen_and_few_more(causal: bool) -> None:
    """Every visible pair is in exactly one stretch; a stretch reads `window` - 1 keys beyond its own a side."""
    length, window, step = 100, 13, 16
    pairs: list[tuple[int, int]] = []
    for queries, keys in band_slices(length, length, window, causal, step):
        sides = 1 if causal else 2
        assert keys.stop - keys.start <= queries.stop - queries.start + sides * (window - 1)
        sizes = queries.stop - queries.start, keys.stop - keys.start, queries.start - keys.start
        seen = band_bias(*sizes, window, causal, torch.float32, torch.device("cpu")) == 0
        pairs += [(queries.start + i, keys.start + j) for i, j in seen.nonzero().tolist()]
    expected = {
        (i, j) for i in range(length) for j in range(length) if abs(i - j) < window and (j <= i or not causal)
    }
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_dropout_falls_back_to_the_mask(kv_heads: int) -> None:
    """The same random numbers as the dense kernel under the same seed."""
    q, k, v, _ = inputs(torch.float32, kv_heads)
    torch.manual_seed(3)
    found = documents("unequal").attend(q, k, v, True, 0.3)
    torch.manual_seed(3)
    mask, every = documents("unequal").mask(ROWS, LENGTH, True), HEADS // kv_heads
    k, v = (x.repeat_interleave(every, 1) for x in (k, v))
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.3))


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_without_torchs_private_operator_plain_products_compute_the_same(
    causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result, log-sum-exp and gradients to float64's noise, in pieces of 16 queries; a run without keys is 0."""
    q, k, v, grad = (x.transpose(1, 2).flatten(0, 1) for x in inputs(torch.float64, kv_heads))
    q_bounds, k_bounds = (BOUNDS["unequal"],) * 2 if causal else ([0, 5, 50, 80], [0, 30, 30, 80])
    results = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(attention_cpu, "aten", object())
            monkeypatch.setattr(attention_cpu, "QUERIES", 16)
        out, lse = forward(q, k, v, q_bounds, k_bounds, LENGTH, causal)
        parts = backward(grad, q, k, v, out, lse, q_bounds, k_bounds, LENGTH, causal)
        results.append((out, lse, *parts))
        if causal:
            banded = q, k, v, q_bounds, k_bounds, LENGTH, True, 11
            results[-1] += forward(*banded)
            results[-1] += backward(grad, *banded[:3], *results[-1][-2:], *banded[3:])
    if not causal:
        assert not results[0][0][5:50].any() and results[0][1][:, 5:50].eq(-torch.inf).all()
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_parts_merged_by_their_log_sum_exp_are_the_whole(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of the keys; backward of each half gets the merged result, and the queries' gradients add up."""
    if not fused:
        monkeypatch.setattr(attention_cpu, "aten", object())
    q, k, v, grad = (x.transpose(1, 2).flatten(0, 1) for x in inputs(torch.float64))
    every, bounds, half = len(q), [0, len(q)], len(q) // 2
    whole, lse = forward(q, k, v, bounds, bounds, every, False)
    expected = backward(grad, q, k, v, whole, lse, bounds, bounds, every, False)
    halves = [(k[cut], v[cut]) for cut in (slice(half), slice(half, every))]
    parts = [forward(q, *keys, bounds, [0, half], every, False) for keys in halves]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part * (one - merged).exp().t()[..., None] for part, one in parts)
    found = [backward(grad, q, *keys, out, merged, bounds, [0, half], every, False) for keys in halves]
    pairs = [(out, whole), (merged, lse), (found[0][0] + found[1][0], expected[0])]
    pairs += [(torch.cat((found[0][n], found[1][n])), expected[n]) for n in (1, 2)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


def test_plain_products_are_for_short_runs_and_windows_in_bf16() -> None:
    """Where the fused kernel's backward is the slower one, and no log-sum-exp is asked for."""

    def plain(length: int, window: int = 0, dtype: torch.dtype = torch.bfloat16, mergeable: bool = False):
        x = torch.zeros(1, 1, length, 8, dtype=dtype)
        return attention_cpu._is_plain(x, x, window, mergeable)

    assert plain(512) and plain(2048, window=64) and not plain(513) and not plain(513, window=513)
    assert not plain(64, dtype=torch.float32) and not plain(64, mergeable=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_of_a_softmax_needs_no_private_operator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain products give to a rounding what they give with it, of the same result."""
    q, k, v, grad = (x.flatten(0, 1) for x in inputs(dtype))
    bias = q.new_zeros(())
    out, _ = attention_cpu._plain_forward(q, k, v, bias, False)
    expected = attention_cpu._plain_backward(grad, q, k, v, out, None, bias)
    monkeypatch.setattr(attention_cpu, "aten", object())
    found = attention_cpu._plain_backward(grad, q, k, v, out, None, bias)
    for ours, theirs in zip(found, expected):
        assert far(ours, theirs) < ERROR[dtype]


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "relative"])
def test_models_equal_their_dense_twins(family: str) -> None:
    """Hidden states and every parameter's gradient, given numbers of documents or their bounds."""
    shape = {"vocab_size": 50, "sequence_length": LENGTH, "layers": 2, "width": 32, "heads": 4}
    llama = {"positions": "rotary", "norm": "rmsnorm", "kv_heads": 2, "gated": True, "bias": False}
    model: GPT | BERT
    if family in ("gpt", "llama"):
        model = GPT(GPTConfig(**shape, **(llama if family == "llama" else {})))
    else:
        model = BERT(BERTConfig(**shape, relative_buckets=8 if family == "relative" else 0))
    initialise(model, 3)
    model.double()
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(ROWS, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    results = []
    for given in (
        {"document_bounds": documents("unequal").bounds_N},
        {"document_ids": documents("unequal").ids(ROWS, LENGTH)},
    ):
        hidden = model.hidden(ids, **given)
        (hidden * weights).sum().backward()
        results.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


@pytest.mark.parametrize("window", [0, 7])
def test_compiles_without_a_break_or_a_second_graph(window: int) -> None:
    """The lengths of documents are data: other ones of the same count run the same graph, forward and backward."""
    shape = {"vocab_size": 50, "sequence_length": LENGTH, "layers": 1, "width": 32, "heads": 4}
    model = GPT(GPTConfig(**shape, attention_window=window))
    initialise(model, 3)
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model.hidden, backend=count, fullgraph=True, dynamic=False)
    for bounds in ([0, 5, 9, 39, 40, 80], [0, 10, 40, 41, 50, 80]):
        tensor = torch.tensor(bounds, dtype=torch.int32)
        ours = compiled(ids, document_bounds=tensor)
        assert torch.equal(ours, model.hidden(ids, document_bounds=tensor))
        ours.sum().backward()
    assert graphs == 1
    # what a compiler knows of the operators: shapes, strides and gradients, checked by torch's own tool
    q, k, v, _ = (x.transpose(1, 2).flatten(0, 1).detach() for x in inputs(torch.float32))
    operator = torch.ops.throughline.attend_documents.default
    torch.library.opcheck(operator, (q.requires_grad_(), k, v, documents("unequal").bounds_N, True, window))


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_kernels_equal_the_dense_mask(
    causal: bool, kv_heads: int, dtype: torch.dtype, dropout: float
) -> None:
    """varlen_attn and, in float32 or with dropout, the memory-efficient kernel, with no read by the host."""
    name = "empty ones and a single token"
    given = [x.cuda() for x in inputs(dtype, kv_heads)]
    bounds = Documents(documents(name).bounds_N.cuda(), LENGTH)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = with_gradients(lambda q, k, v: bounds.attend(q, k, v, causal, dropout), given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mask = documents(name).mask(ROWS, LENGTH, causal)
    expected = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=kv_heads < HEADS),
        [x.double().cpu() for x in given],
    )
    assert max(far(ours.cpu(), theirs) for ours, theirs in zip(found, expected)) < ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_log_sum_exp_and_merged_backward(causal: bool) -> None:
    """The variable-length kernel with runs without keys, against plain products in float64."""
    q, k, v, grad = (x.transpose(1, 2).flatten(0, 1) for x in inputs(torch.bfloat16))
    bounds = (BOUNDS["unequal"],) * 2 if causal else ([0, 5, 50, 80], [0, 30, 30, 80])
    wide = [x.double() for x in (q, k, v, grad)]
    out, lse = forward(*wide[:3], *bounds, LENGTH, causal)
    expected = (out, lse, *backward(wide[3], *wide[:3], out, lse, *bounds, LENGTH, causal))
    given = [x.cuda() for x in (q, k, v, grad)]
    cuda_bounds = [torch.tensor(x, dtype=torch.int32).cuda() for x in bounds]
    out, lse = attention_cuda.forward(*given[:3], *cuda_bounds, LENGTH, causal)
    found = (out, lse, *attention_cuda.backward(given[3], *given[:3], out, lse, *cuda_bounds, LENGTH, causal))
    assert torch.equal(found[1].cpu() == -torch.inf, expected[1] == -torch.inf)
    for ours, theirs in zip(found, expected):
        finite = theirs > -torch.inf
        assert far(ours.cpu()[finite], theirs[finite]) < ERROR[torch.bfloat16]
