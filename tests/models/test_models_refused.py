"""What of a Hugging Face directory cannot be read, and which shapes cannot be written, is said by name."""

import json

import pytest
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
