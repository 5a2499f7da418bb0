"""The models compute what transformers' models compute: loss and every gradient in float64, and weights
through files.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.huggingface import from_huggingface, to_huggingface
from throughline.models.huggingface_names import pairs
from throughline.models.init import build
from throughline.models.presets import preset
from torch.nn import functional as F

GPT2 = GPTConfig(vocab_size=96, sequence_length=24, layers=3, width=48, heads=4)
LLAMA = preset("llama-toy", vocab_size=96)
MHA_LLAMA = preset("llama-toy", vocab_size=96, kv_heads=0, head_width=24, tied=True)
BERT_ = BERTConfig(vocab_size=96, sequence_length=24, layers=3, width=48, heads=4)
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama-mha": MHA_LLAMA,
    "bert": BERT_,
    "bert-mlm": BERTConfig(vocab_size=96, sequence_length=24, layers=2, width=48, heads=4, nsp=False),
}


def scattered(config, dtype=torch.float64):
    """A model whose every parameter is random, biases and norms too: with zeros and ones a wrong one could
    hide.
    """
    torch.manual_seed(1)
    model = build(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(model, directory):
    fields, state = to_huggingface(model)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def theirs(model, directory):
    """The transformers model that loads what we wrote, in the same dtype, with nothing missing and nothing
    left over.
    """
    import transformers

    write(model, directory)
    kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    loaded, report = kind.from_pretrained(
        directory, dtype=model.token_table.weight.dtype, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


def gradients_in_our_layout(their_model, config, directory):
    """Their gradients, carried into our names and shapes by the importer."""
    named = dict(their_model.named_parameters())
    state = {name: named[name].grad for pair in pairs(config) for name in pair.theirs}
    save_file({name: value.contiguous() for name, value in state.items()}, directory / "model.safetensors")
    return dict(from_huggingface(directory, dtype=torch.float64).named_parameters())


def assert_same_gradients(model, reference):
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - reference[name]).abs().max()
        # float64 rounding is 1e-16 per operation: 1e-10 leaves room for long sums and none for a wrong
        # formula
        assert difference <= 1e-10 * max(1.0, reference[name].abs().max()), (name, difference)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-mha"])
def test_gpt_loss_and_gradients(name, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm_in_full(self, x):  # theirs rounds to float32 on the way, which hides everything below 1e-8
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_full)
    config = FAMILIES[name]
    model = scattered(config)
    reference = theirs(model, tmp_path)
    ids = torch.randint(0, config.vocab_size, (3, 24))
    labels = ids.clone()
    labels[0, 5:9] = -100
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected = reference(input_ids=ids, labels=labels).loss
    # transformers computes cross-entropy in float32; the same logits are therefore scored in float64 as well
    expected_64 = F.cross_entropy(
        reference(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    assert abs(loss.item() - expected.item()) < 1e-5
    assert abs(loss.item() - expected_64.item()) < 1e-10
    loss.backward()
    expected_64.backward()
    assert_same_gradients(model, gradients_in_our_layout(reference, config, tmp_path))


def test_bert_loss_and_gradients(tmp_path):
    model = scattered(BERT_)
    reference = theirs(model, tmp_path)
    ids = torch.randint(0, 96, (3, 24))
    types = (torch.arange(24) >= 11).long().expand(3, 24)
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[1, 17:] = False
    targets = torch.where((torch.rand(3, 24) < 0.3) & mask, ids, -100)
    nsp_targets = torch.tensor([0, 1, 1])

    hidden = model.hidden(ids, token_types=types, attention_mask=mask)
    selected = targets != -100
    loss = F.cross_entropy(model.mlm_head(hidden[selected]), targets[selected])
    loss = loss + F.cross_entropy(model.nsp_head(hidden[:, 0]), nsp_targets)
    output = reference(input_ids=ids, token_type_ids=types, attention_mask=mask.long())
    expected = F.cross_entropy(output.prediction_logits.flatten(0, 1), targets.flatten())
    expected = expected + F.cross_entropy(output.seq_relationship_logits, nsp_targets)
    assert abs(loss.item() - expected.item()) < 1e-10
    loss.backward()
    expected.backward()
    assert_same_gradients(model, gradients_in_our_layout(reference, BERT_, tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_exact(name, tmp_path):
    model = scattered(FAMILIES[name], dtype=torch.float32)
    again = from_huggingface(write(model, tmp_path))
    assert again.config == model.config
    for (name, ours), (_, read) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, read), name


def test_a_bias_free_gpt_is_the_same_function_there(tmp_path):
    """GPT-2 always has biases there: ours without are written as zeros. fp32 logits agree within the
    exporter's bound.
    """
    model = scattered(preset("gpt-shakespeare"), dtype=torch.float32)
    reference = theirs(model, tmp_path)
    ids = torch.randint(0, 65, (2, 64))
    with torch.no_grad():
        assert (model(ids) - reference(input_ids=ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "llama"])
def test_logits_in_float32(name, tmp_path):
    model = scattered(FAMILIES[name], dtype=torch.float32)
    ids = torch.randint(0, 96, (2, 24))
    with torch.no_grad():
        assert (model(ids) - theirs(model, tmp_path)(input_ids=ids).logits).abs().max() < 1e-4


def test_old_names_are_understood(tmp_path):
    """Files of the first releases: no prefix in GPT-2, gamma and beta in BERT, buffers among the weights."""
    model = scattered(BERT_, dtype=torch.float32)
    fields, state = to_huggingface(model)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(old, tmp_path / "model.safetensors")
    assert torch.equal(from_huggingface(tmp_path).mlm_norm.weight, model.mlm_norm.weight)

    gpt = scattered(GPT2, dtype=torch.float32)
    fields, state = to_huggingface(gpt)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(
        {name.removeprefix("transformer."): value for name, value in state.items()},
        tmp_path / "model.safetensors",
    )
    assert torch.equal(from_huggingface(tmp_path).norm.bias, gpt.norm.bias)


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(WrongUse, match=r"no config\.json"):
        from_huggingface(tmp_path)
    model = scattered(GPT2, dtype=torch.float32)
    fields, state = to_huggingface(model)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WrongUse, match="only pickled weights"):
        from_huggingface(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    for change, error, text in (
        ({"model_type": "mamba"}, Refused, "'mamba' cannot be read"),
        ({"activation_function": "relu"}, Refused, "activation_function = 'relu'"),
        ({"n_embd": 96}, Failed, "does not fit"),
        ({"n_layer": 4}, Failed, "tensors are missing"),
        ({"n_layer": 2}, Refused, "parts that ours do not"),
        ({"n_layer": "3"}, Failed, "cannot be built"),
        ({"n_embd": None}, Failed, "value of the wrong kind"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(error, match=text):
            from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Failed, match="no table of fields"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    half = (tmp_path / "model.safetensors").read_bytes()[:2000]
    (tmp_path / "model.safetensors").write_bytes(half)
    with pytest.raises(Failed, match="cannot be read"):
        from_huggingface(tmp_path)


def test_shapes_without_a_layout_are_refused():
    for config in (
        preset("bert-toy", norm_first=True),
        preset("gpt-toy", gated=True),
        preset("gpt-toy", positions="rotary"),
    ):
        with pytest.raises(Refused, match="no Hugging Face layout"):
            to_huggingface(build(config))
