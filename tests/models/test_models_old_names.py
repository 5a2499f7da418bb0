"""Names in weights' files of earlier years."""

import json

import torch
from safetensors.torch import save_file
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.huggingface import load_huggingface, to_huggingface
from throughline.models.init import build

SHAPE = {"vocab_size": 96, "sequence_length": 24, "layers": 3, "width": 48, "heads": 4}


def drawn(config):
    """Random values in norms too, which begin as ones and zeros."""
    model = build(config, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def test_old_names_are_understood(tmp_path):
    """Files of the first releases: no prefix in GPT-2, gamma and beta in BERT, buffers among the weights."""
    model = drawn(BERTConfig(**SHAPE))
    fields, state = to_huggingface(model)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(old, tmp_path / "model.safetensors")
    assert torch.equal(load_huggingface(tmp_path).mlm_norm.weight, model.mlm_norm.weight)

    gpt = drawn(GPTConfig(**SHAPE))
    fields, state = to_huggingface(gpt)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(
        {name.removeprefix("transformer."): value for name, value in state.items()},
        tmp_path / "model.safetensors",
    )
    assert torch.equal(load_huggingface(tmp_path).norm.bias, gpt.norm.bias)
