"""What of a Hugging Face directory cannot be read, and which shapes cannot be written, is said by name."""

import json

import pytest
import torch
from safetensors.torch import save_file
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.models.config import preset
from throughline.models.huggingface import load_huggingface, to_huggingface
from throughline.models.init import build


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(WrongUse, match=r"no config\.json"):
        load_huggingface(tmp_path)
    model = build(preset("gpt-toy", layers=3, width=48, heads=4))
    fields, state = to_huggingface(model)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WrongUse, match="only pickled weights"):
        load_huggingface(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    for change, error, text in (
        ({"model_type": "mamba"}, Refused, "'mamba' cannot be read"),
        ({"activation_function": "mish"}, Refused, "activation_function = 'mish'"),
        ({"residual_multiplier": 0.2}, Refused, "residual_multiplier = 0.2, a field that may change"),
        ({"n_embd": 96}, Failed, "does not fit"),
        ({"n_layer": 4}, Failed, "tensors are missing"),
        ({"n_layer": 2}, Refused, "parts that ours do not"),
        ({"n_layer": "3"}, Failed, "cannot be built"),
        ({"n_embd": None}, Failed, "value of the wrong kind"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(error, match=text):
            load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Failed, match="no table of fields"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    half = (tmp_path / "model.safetensors").read_bytes()[:2000]
    (tmp_path / "model.safetensors").write_bytes(half)
    with pytest.raises(Failed, match="cannot be read"):
        load_huggingface(tmp_path)


def test_shapes_without_a_layout_are_refused():
    for config in (
        preset("bert-toy", norm_first=True, gated=True),
        preset("gpt-toy", gated=True),
        preset("gpt-toy", positions="rotary", norm="rmsnorm"),
    ):
        with pytest.raises(Refused, match="no Hugging Face layout"):
            to_huggingface(build(config))


def test_weights_of_mxfp4_are_refused_with_the_way_that_opens_them(tmp_path):
    """As gpt-oss is published: what the refusal says to run writes a directory that is read here."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "sequence_length": 32, "layers": 2, "width": 64, "heads": 2, "kv_heads": 1}
    shape |= {"mlp_width": 64, "experts": 4, "rope_original_length": 16, "attention_window": 8}
    fields, state = to_huggingface(build(preset("gpt-oss-20b", **shape), dtype=torch.bfloat16))
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 120, dtype=torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match="quantised") as refused:
        load_huggingface(tmp_path)
    assert "quantization_config=Mxfp4Config(dequantize=True)" in refused.value.fix
    how = {"dtype": "bfloat16", "quantization_config": transformers.Mxfp4Config(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    theirs.save_pretrained(tmp_path / "new", save_original_format=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = theirs.float()(ids).logits
        assert (load_huggingface(tmp_path / "new")(ids) - expected).abs().max() < 1e-3 * expected.abs().max()
