"""Caches, masks, first values and exportability of the models."""

import pytest
import torch
from throughline.core.backend import Span
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.models import attention_cuda
from throughline.models.attention import Documents, scaled_dot_product
from throughline.models.config import BERTConfig, preset
from throughline.models.init import build, empty_model, initial_values


def scattered(name, **overrides):
    torch.manual_seed(1)
    model = build(preset(name, **overrides), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gap(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", ["gpt-toy", "llama-toy"])
@torch.no_grad()
def test_decoding_through_the_cache_equals_the_full_forward(name):
    """Rows of three lengths, in pieces of several sizes, some of them idle: each gives what it gives alone."""
    model = scattered(name)
    backend = TorchCausal(model)
    texts = [torch.randint(0, 256, (length,)) for length in (20, 13, 7)]
    cache, past = backend.new_cache(3), [0, 0, 0]
    for counts in ((7, 2, 5), (1, 1, 1), (1, 0, 1), (5, 1, 0), (1, 9, 0), (5, 0, 0)):
        rows = [row for row, count in enumerate(counts) if count]
        spans = [
            Span(row, past[row], texts[row][past[row] : past[row] + counts[row]].numpy(), counts[row])
            for row in rows
        ]
        found = torch.from_numpy(backend.step(spans, cache)).split([counts[row] for row in rows])
        for row, logits in zip(rows, found, strict=True):
            whole = model(texts[row][None])[0, past[row] : past[row] + counts[row]]
            assert gap(logits, whole) < 1e-12
            past[row] += counts[row]
    assert past == [20, 13, 7]


@pytest.mark.parametrize("name", ["gpt-toy", "llama-toy"])
@torch.no_grad()
def test_documents_of_a_packed_row_do_not_see_each_other(name):
    model = scattered(name)
    ids = torch.randint(0, 256, (1, 16))
    documents = torch.tensor([[0] * 6 + [1] * 10])
    positions = torch.tensor([[*range(6), *range(10)]])
    packed = model(ids, positions=positions, document_ids=documents)
    apart = torch.cat([model(ids[:, :6]), model(ids[:, 6:])], dim=1)
    assert gap(packed, apart) < 1e-12
    assert gap(packed, model(ids)) > 1e-3


@torch.no_grad()
def test_padding_and_packing_of_bert():
    model = scattered("bert-toy")
    ids = torch.randint(0, 256, (1, 12))
    alone = model(ids[:, :7])
    mask = torch.arange(12)[None] < 7
    assert gap(model(ids, attention_mask=mask)[:, :7], alone) < 1e-12
    positions = torch.tensor([[*range(7), *range(5)]])
    documents = torch.tensor([[0] * 7 + [-1] * 5])
    packed = model(ids, positions=positions, document_ids=documents)
    assert gap(packed[:, :7], alone) < 1e-12
    assert torch.isfinite(packed).all()


@torch.no_grad()
def test_relative_positions_equal_t5():
    """Our bias table gives, for the same numbers, the bias that transformers' T5 computes, near and far."""
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    theirs = T5Attention(
        T5Config(num_heads=4, relative_attention_num_buckets=32), has_relative_attention_bias=True
    )
    model = build(
        BERTConfig(vocab_size=32, sequence_length=400, layers=1, width=16, heads=4, relative_buckets=32)
    )
    model.relative_bias.table.weight.copy_(theirs.relative_attention_bias.weight)
    ours = model.relative_bias(torch.arange(400))
    expected = theirs.compute_bias(400, 400, device="cpu")
    assert torch.equal(ours, expected)


@torch.no_grad()
def test_the_shape_of_the_481b_encoder_runs():
    model = scattered(
        "google-481b",
        vocab_size=64,
        layers=2,
        width=32,
        heads=4,
        head_width=16,
        mlp_width=96,
        relative_buckets=8,
    )
    ids = torch.randint(0, 64, (2, 10))
    mask = torch.arange(10)[None] < torch.tensor([[10], [6]])
    out = model(ids, attention_mask=mask)
    assert gap(out[1, :6], model(ids[1:, :6])[0]) < 1e-12
    assert model.nsp_head(model.hidden(ids)[:, 0]) is None


def test_first_values_depend_on_seed_and_name_only():
    config = preset("gpt-toy")
    whole = dict(build(config, seed=3).named_parameters())
    for name in reversed(whole):  # in another order, one at a time, as a stage or a shard would
        assert torch.equal(initial_values(name, whole[name].shape, config, seed=3), whole[name].detach())
    again = dict(build(preset("gpt-toy", layers=1), seed=3).named_parameters())
    assert torch.equal(again["blocks.0.attention.qkv.weight"], whole["blocks.0.attention.qkv.weight"])
    other = dict(build(config, seed=4).named_parameters())
    assert not torch.equal(other["token_table.weight"], whole["token_table.weight"])


def test_first_values_have_the_published_spread():
    model = build(preset("gpt-toy", width=256, layers=8))
    block = model.blocks["5"]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 x 8 layers)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.mlp.up.bias.abs().max() == 0
    assert torch.equal(block.mlp_norm.weight, torch.ones(256))
    assert build(preset("bert-toy")).blocks["0"].mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_attention_is_replaced_from_outside():
    """A layout gives every attention another `attend`; names of parameters stay."""
    model = scattered("gpt-toy")
    ids = torch.randint(0, 256, (1, 8))
    names, before = list(model.state_dict()), model(ids)
    seen = []

    def watched(q, k, v, **options):
        seen.append((tuple(q.shape), options["is_causal"]))
        return scaled_dot_product(q, k, v, **options)

    for block in model.blocks.values():
        block.attention.attend = watched
    assert torch.equal(model(ids), before)
    assert seen == [((1, 4, 8, 16), True)] * 2
    assert list(model.state_dict()) == names


def test_a_slice_of_the_projection_is_a_set_of_heads():
    """What tensor parallelism relies on: rows of qkv, columns of out, cut in two, give partial sums of the
    whole.
    """
    for name in ("gpt-toy", "llama-toy"):
        model = scattered(name, bias=False, kv_heads=2 if name == "llama-toy" else 0)
        attention = model.blocks["0"].attention
        x = torch.randn(1, 6, 64, dtype=torch.float64)
        whole, total = attention(x, is_causal=True), torch.zeros(1, 6, 64, dtype=torch.float64)
        for half in range(2):
            part = scattered(name, bias=False).blocks["0"].attention
            for linear in ("qkv",) if attention.fused else ("q", "kv"):
                getattr(part, linear).weight = torch.nn.Parameter(
                    getattr(attention, linear).weight.chunk(2)[half]
                )
            part.out.weight = torch.nn.Parameter(attention.out.weight.chunk(2, dim=1)[half])
            total += part(x, is_causal=True)
        assert gap(total, whole) < 1e-12


def test_dropout_only_in_training():
    model = scattered("gpt-toy", dropout=0.5)
    ids = torch.randint(0, 256, (1, 8))
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("name", ["gpt-toy", "llama-toy", "bert-toy"])
def test_models_export(name):
    """torch.export traces them with free batch and length, and the traced program computes the same."""
    model = scattered(name)
    ids = torch.randint(0, 256, (2, 12))
    free = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=32)}}
    program = torch.export.export(model, (ids,), dynamic_shapes=free)
    other = torch.randint(0, 256, (3, 17))
    assert gap(program.module()(other), model(other)) < 1e-12


def test_meta_models_take_no_memory():
    model = empty_model(preset("gpt-1t-megatron"))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["causal", "documents", "window", "rows of masks"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_capped_scores_by_flex_attention_are_plain_products(kind, monkeypatch):
    """What a GPU compiles, computed here piece by piece; both ways of grouping heads."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, 48, 16) for heads in (4, 2, 2))
    masks = {
        "documents": Documents(torch.tensor([0, 5, 40, 48, 90, 96], dtype=torch.int32), 42),
        "window": (torch.arange(48)[:, None] - torch.arange(48) < 9)
        & torch.ones(48, 48, dtype=torch.bool).tril(),
        "rows of masks": torch.rand(2, 1, 48, 48) < torch.eye(48) + 0.5,
    }
    how = {"mask": masks.get(kind), "is_causal": kind in ("causal", "documents"), "softcap": 1.5}
    expected = scaled_dot_product(q, k, v, **how)
    monkeypatch.setattr(attention_cuda, "has_flex", lambda q: True)
    torch.testing.assert_close(scaled_dot_product(q, k, v, **how), expected)
