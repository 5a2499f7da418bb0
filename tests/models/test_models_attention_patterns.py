"""Patterned attention equals dense attention under the pattern's mask, in float64 with gradients, and
computes no other block.
"""

import dataclasses
import functools

import pytest
import torch
from throughline.core.backend import Span
from throughline.core.errors import Refused, WrongUse
from throughline.inference.exports.export import write_graph
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.models import attention_patterns
from throughline.models.attention_patterns import apply_pattern, block_table, make_attend
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.gpt import GPT
from throughline.models.huggingface import to_huggingface
from throughline.models.init import initialise
from throughline.models.transformer import AttentionPattern
from throughline.planner.layout import Layout, layout_problems
from torch.nn import functional as F

# rounding of float64 through one softmax or two layers: about 1e-15 of numbers of size 1
EXACT = 1e-12
LENGTH = 61  # no multiple of any block here

PATTERNS = {
    "window smaller than a block": AttentionPattern(window=3, block=8),
    "window of blocks": AttentionPattern(window=16, block=8),
    "window across blocks": AttentionPattern(window=13, block=4),
    "window of one": AttentionPattern(window=1, block=4),
    "window and global": AttentionPattern(window=9, block=4, global_blocks=2),
    "fixed": AttentionPattern("fixed", window=16, block=4, global_blocks=1),
    "fixed without summary": AttentionPattern("fixed", window=8, block=8),
    "wider than the sequence": AttentionPattern(window=64, block=16),
    "random": AttentionPattern(window=1, block=4, random_blocks=2),
    "window, global and random": AttentionPattern(window=6, block=4, global_blocks=1, random_blocks=3),
}
LAYER = 1  # whose draws the tests of one attention use


@functools.cache
def drawn_blocks(
    pattern: AttentionPattern, row: int, causal: bool, length: int = LENGTH, layer: int = LAYER
) -> set[int]:
    """The blocks that a block of queries draws in a layer, read off one token of each block."""
    without = dataclasses.replace(pattern, random_blocks=0)
    at = row * pattern.block
    starts = range(0, length, pattern.block)
    return {
        j // pattern.block
        for j in starts
        if pattern.sees(at, j, causal, length, layer) and not without.sees(at, j, causal)
    }


def reference_rule(pattern: AttentionPattern, i: int, j: int, causal: bool) -> bool:
    """The table of the module, once more, a token at a time."""
    wide = pattern.global_blocks * pattern.block
    if causal and j > i:
        return False
    if pattern.kind == "sliding":
        drawn = drawn_blocks(pattern, i // pattern.block, causal) if pattern.random_blocks else ()
        return abs(i - j) < pattern.window or i < wide or j < wide or j // pattern.block in drawn
    return i // pattern.window == j // pattern.window or j % pattern.window >= pattern.window - wide


def dense_mask(pattern: AttentionPattern, causal: bool, length: int = LENGTH) -> torch.Tensor:
    return torch.tensor(
        [[reference_rule(pattern, i, j, causal) for j in range(length)] for i in range(length)]
    )


def documents(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Document ids (B, S): boundaries that differ by row and do not fall on blocks."""
    cuts = torch.tensor([[7, 30], [22, 23]])[:rows]
    return (torch.arange(length) >= cuts[:, :, None]).sum(1)


def extra_mask(kind: str, causal: bool) -> torch.Tensor | None:
    """The masks that the models make: none, packed documents (B, 1, S, S), padding (B, 1, 1, S), a bias (B,
    A, S, S).
    """
    if kind == "none":
        return None
    ids = documents()
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    if kind == "documents":
        return same.tril() if causal else same
    padded = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]]))[:, None, None]
    if kind == "padding":
        return padded
    bias = torch.randn(2, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return bias.masked_fill(~padded, float("-inf"))


def dense(q, k, v, pattern, causal, mask):
    """Masked softmax attention by the textbook; a query that sees nothing sees itself."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    allowed = dense_mask(pattern, causal)[None, None]
    bias = torch.zeros(1, dtype=torch.float64)
    if mask is not None:
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > float("-inf"))
        bias = bias if mask.dtype == torch.bool else mask.masked_fill(mask == float("-inf"), 0)
    allowed = allowed | (torch.eye(LENGTH, dtype=torch.bool) & ~allowed.any(-1, keepdim=True))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


MASKS = [
    (True, "none"),
    (True, "documents"),
    *((False, kind) for kind in ("none", "documents", "padding", "bias")),
]


@pytest.mark.parametrize(("causal", "mask_kind"), MASKS)
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_dense_masked_attention(name: str, causal: bool, mask_kind: str) -> None:
    """Values, and gradients of queries, keys and values; grouped key heads in the causal case."""
    pattern, mask = PATTERNS[name], extra_mask(mask_kind, causal)
    generator = torch.Generator().manual_seed(1)
    heads = (4, 2 if causal else 4, 2 if causal else 4)
    inputs = [
        torch.randn(2, n, LENGTH, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in heads
    ]
    weight = torch.randn(2, 4, LENGTH, 8, generator=generator, dtype=torch.float64)
    expected = dense(*inputs, pattern, causal, mask)
    found = make_attend(pattern, causal, LAYER)(*inputs, mask=mask, is_causal=causal and mask is None)
    assert (found - expected).abs().max() < EXACT
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    assert all((ours - theirs).abs().max() < EXACT for ours, theirs in zip(*gradients))


def masked_model(model, pattern: AttentionPattern, causal: bool):
    """The same model with the dense kernel under the pattern's mask."""
    allowed = dense_mask(pattern, causal)

    def attend(q, k, v, *, mask=None, is_causal=False, dropout=0.0):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed if mask is None else allowed & mask)

    for block in model.blocks.values():
        block.attention.attend = attend
    return model


def small_model(family: str, **asked):
    shape = {"vocab_size": 50, "sequence_length": LENGTH, "layers": 2, "width": 32, "heads": 4} | asked
    model = GPT(GPTConfig(**shape)) if family == "gpt" else BERT(BERTConfig(**shape))
    initialise(model, 3)
    return model.double().eval()


@pytest.mark.parametrize("packed", ["no", "numbers", "bounds"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("name", ["window across blocks", "window and global", "fixed"])
def test_models_equal_their_dense_twins(name: str, family: str, packed: str) -> None:
    """Two layers of GPT and BERT: hidden states and every parameter's gradient."""
    pattern, inputs = PATTERNS[name], {} if packed == "no" else {"document_ids": documents()}
    bounds = [*documents().flatten().diff(prepend=torch.tensor([-1])).nonzero()[:, 0].tolist(), 2 * LENGTH]
    given = {"document_bounds": torch.tensor(bounds, dtype=torch.int32)} if packed == "bounds" else inputs
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    patterned, twin = small_model(family), masked_model(small_model(family), pattern, family == "gpt")
    apply_pattern(patterned.blocks, pattern, causal=isinstance(patterned.config, GPTConfig))
    ours, theirs = patterned.hidden(ids, **given), twin.hidden(ids, **inputs)
    assert (ours - theirs).abs().max() < EXACT
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for (name, a), b in zip(patterned.named_parameters(), twin.parameters()):
        if a.grad is not None:
            assert (a.grad - b.grad).abs().max() < EXACT * b.grad.abs().max().clamp(min=1), name


def test_padded_places_stay_finite_and_unseen() -> None:
    """Padding beyond the window of every real token: no NaN, and real tokens' states do not depend on it."""
    model = small_model("bert")
    apply_pattern(model.blocks, AttentionPattern(window=4, block=4), causal=False)
    ids = torch.randint(1, 50, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    real = (torch.arange(LENGTH) < 20)[None]
    hidden = model.hidden(ids, attention_mask=real)
    hidden.sum().backward()
    assert hidden.isfinite().all() and all(
        p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
    )
    other = model.hidden(torch.where(real, ids, 0), attention_mask=real)
    assert torch.equal(hidden[:, :20], other[:, :20])


@pytest.mark.parametrize(
    "name", ["window across blocks", "window and global", "fixed", "window, global and random"]
)
def test_generation_with_a_cache_sees_the_same(name: str) -> None:
    """Token by token through the key-value cache after a prompt: the logits of the whole row at once."""
    asked = {f"attention_{field}": value for field, value in vars(PATTERNS[name]).items()}
    model = small_model("gpt", **asked)
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(ids)
    backend, parts = TorchCausal(model), []
    cache = backend.new_cache(2)
    for start, stop in ((0, 25), (25, 30), *((i, i + 1) for i in range(30, LENGTH))):
        spans = [Span(row, start, ids[row, start:stop].numpy(), stop - start) for row in range(2)]
        parts.append(torch.from_numpy(backend.step(spans, cache)).unflatten(0, (2, -1)))
    assert (torch.cat(parts, 1) - whole).abs().max() < EXACT * whole.abs().max()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "wider than the sequence"])
def test_only_needed_blocks_are_computed(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are gathered, the kernel gets exactly the pairs with a visible token in them, counted a token
    at a time.
    """
    pattern, computed = PATTERNS[name], 0

    def counting(q, k, v, **options):
        nonlocal computed
        computed += q.shape[0] * (q.shape[2] // pattern.block) * (k.shape[2] // pattern.block)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=options["mask"])

    monkeypatch.setattr(attention_patterns, "scaled_dot_product", counting)
    monkeypatch.setattr(attention_patterns, "knows_windows", lambda *_: False)
    x = torch.zeros(1, 1, LENGTH, 4)
    make_attend(pattern, causal, LAYER)(x, x, x)
    pad, cut = -LENGTH % pattern.block, (-1, pattern.block)
    blocks = F.pad(dense_mask(pattern, causal).int(), (0, pad, 0, pad)).unflatten(1, cut).unflatten(0, cut)
    needed = int((blocks.amax((1, 3)) > 0).sum())
    assert computed == needed
    assert computed == block_table(pattern, LENGTH, causal, LAYER).sum()


def test_wrong_patterns_are_told() -> None:
    assert not any(pattern.validate() for pattern in PATTERNS.values())
    for wrong in (
        AttentionPattern(window=0),
        AttentionPattern(block=0),
        AttentionPattern(global_blocks=-1),
        AttentionPattern("fixed", window=100, block=16),
        AttentionPattern("fixed", window=32, block=16, global_blocks=3),
        AttentionPattern(random_blocks=-1),
        AttentionPattern("fixed", window=32, block=16, random_blocks=1),
    ):
        assert len(wrong.validate()) == 1


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_random_blocks_are_drawn_beyond_window_and_global_ones(causal: bool) -> None:
    """Exactly `random_blocks` where there are as many, none twice, others in every layer, all parts of the
    text reached.
    """
    pattern, length, block = AttentionPattern(window=64, block=16, global_blocks=2, random_blocks=3), 1600, 16
    reach, blocks = 4, 100
    drawn = {
        (layer, row): drawn_blocks(pattern, row, causal, length, layer)
        for layer in range(4)
        for row in range(2, blocks)
    }
    reached: set[int] = set()
    for (_, row), found in drawn.items():
        free = {j for j in range(2, blocks) if abs(row - j) > reach and (j < row or not causal)}
        assert found <= free and len(found) == min(3, len(free))
        reached |= found
    assert sum(drawn[0, row] == drawn[1, row] for row in range(20, blocks)) < 5
    assert len(reached) > 0.9 * (blocks - 2 - (reach if causal else 0))
    if causal:  # a growing text keeps its draws
        assert all(
            drawn_blocks(pattern, row, True, block * (row + 1), 2) == drawn[2, row]
            for row in range(2, blocks)
        )


@pytest.mark.parametrize("name", ["window across blocks", "window and global", "wider than the sequence"])
def test_dropout_has_its_rate(name: str) -> None:
    """Over values of one, a query's result is the share of its weight that was kept, over 1 - rate."""
    shape = (4, 4, LENGTH, 8)
    q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    attend, rate = make_attend(PATTERNS[name], causal=False), 0.25
    ones = torch.ones(shape)
    assert torch.allclose(attend(q, k, ones), ones)
    torch.manual_seed(4)
    found = attend(q, k, ones, dropout=rate)
    assert found.mean().item() == pytest.approx(1.0, abs=0.05)
    assert 0.05 < found.std() < 1 and found[..., 0].unique().numel() > LENGTH


def test_every_layer_draws_its_own_blocks() -> None:
    """A model's layers attend as layers of these numbers do."""
    model, pattern = small_model("gpt"), PATTERNS["random"]
    apply_pattern(model.blocks, pattern, causal=True)
    q, k, v = (torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    found = [block.attention.attend(q, k, v, is_causal=True) for block in model.blocks.values()]
    for layer, ours in enumerate(found):
        assert torch.equal(ours, make_attend(pattern, True, layer)(q, k, v, is_causal=True))
    assert not torch.equal(*found[:2])


def test_compiles_without_a_break() -> None:
    """The pattern's tables are constants of the graph: one graph, the same numbers."""
    model = small_model("gpt")
    apply_pattern(model.blocks, PATTERNS["window and global"], causal=True)
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids), model(ids))


@pytest.mark.parametrize("family", [GPTConfig, BERTConfig])
def test_a_config_carries_its_pattern(family: type) -> None:
    """Written to a checkpoint's JSON and read back, the model attends by it; its FLOPs count the band and not
    the square.
    """
    shape = {"vocab_size": 50, "sequence_length": LENGTH, "layers": 2, "width": 32, "heads": 4}
    config = family.from_dict(
        shape | {"attention_window": 9, "attention_block": 4, "attention_global_blocks": 2}
    )
    again = family.from_dict(config.to_dict())
    assert again.attention_pattern == PATTERNS["window and global"]
    model, plain = ((GPT if family is GPTConfig else BERT)(c) for c in (again, family(**shape)))
    for one in (model, plain):
        initialise(one, 3)
        one.double().eval()
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    assert (model.hidden(ids) - plain.hidden(ids)).abs().max() > 1e-6
    apply_pattern(plain.blocks, PATTERNS["window and global"], causal=family is GPTConfig)
    assert torch.equal(model.hidden(ids), plain.hidden(ids))
    saved = family(**shape).flops_per_token(LENGTH) - config.flops_per_token(LENGTH)
    places = torch.arange(LENGTH)
    band = ((places[:, None] - places).abs() < 9).sum().item() / LENGTH
    assert saved == 3 * 2 * (2 * 2 * LENGTH - round(2 * 2 * (band + 8))) * 32


def test_a_config_with_a_wrong_pattern_cannot_be_built() -> None:
    with pytest.raises(WrongUse) as caught:
        GPTConfig.from_dict({"attention_window": 100, "attention_kind": "fixed", "attention_block": 16})
    assert "no whole number of blocks" in caught.value.why
    for fields in ({"attention_kind": "fixed"}, {"attention_global_blocks": 1}, {"attention_block": 64}):
        with pytest.raises(
            WrongUse, match="this GPTConfig cannot be built"
        ) as caught:  # it would have trained dense attention
            GPTConfig.from_dict(fields)
        assert "attention_window is 0" in caught.value.why


def test_what_knows_no_pattern_refuses_it(tmp_path) -> None:
    """Exports would write a model that attends to everything, context parallelism would gather parts without
    it.
    """
    config = GPTConfig(vocab_size=50, sequence_length=64, layers=1, width=32, heads=4, attention_window=8)
    with pytest.raises(Refused, match="no Hugging Face layout") as caught:
        to_huggingface(GPT(config))
    assert caught.value.why.endswith("has another attention_window")
    with pytest.raises(Refused, match="attention pattern"):
        write_graph(GPT(dataclasses.replace(config, attention_global_blocks=1)), tmp_path / "model.onnx", {})
    assert not layout_problems(Layout(context=2), config, 64, 4, 4)  # a plain window
    for other in (dataclasses.replace(config, attention_global_blocks=1), BERTConfig(attention_window=8)):
        (problem,) = layout_problems(Layout(context=2), other, 64, 4, 4)
        assert "pattern" in problem.text
