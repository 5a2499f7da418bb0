"""What is handed over: directories for transformers, vLLM and TEI, onnxruntime-genai."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from small_models import LLAMA, opinionated_model
from throughline.inference.exports.export import Judging
from throughline.inference.exports.handover import export_huggingface
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.runtimes.source import open_model
from throughline.models.config import GPTConfig
from throughline.models.huggingface import to_huggingface

QUIET = Judging(bench=False)


def test_a_gpt_meets_vllms_conditions(gpt_dir: Path, tmp_path: Path) -> None:
    """The fields and files that vLLM's model files read; *not run*: vLLM needs a GPU."""
    report = export_huggingface(gpt_dir, tmp_path / "out", judging=QUIET)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    # GPT-2 begins with the token that ends a text
    assert fields["bos_token_id"] == fields["eos_token_id"] == 0
    assert fields["architectures"] == ["GPT2LMHeadModel"] and fields["activation_function"] == "gelu_new"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 0, "bos_token_id": 0}
    # the fixture's output matrix is its own, which is the one condition that it does not meet
    assert report["conditions"]["vllm"] == ["the output matrix is not tied to the token table"]


@pytest.mark.parametrize("pooling", ["mean", "cls-normalised"])
def test_a_bert_meets_teis_conditions(pooling, bert_dir: Path, tmp_path: Path) -> None:
    report = export_huggingface(bert_dir, tmp_path / "out", judging=QUIET, pooling=pooling)
    assert report["conditions"] == {"vllm": [], "tei": []}
    modes = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert modes["pooling_mode_mean_tokens"] == (pooling == "mean") != modes["pooling_mode_cls_token"]
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [entry["path"] for entry in modules][2:] == (["2_Normalize"] if "normalised" in pooling else [])
    assert open_model(tmp_path / "out").model.config.layers == 2


def test_a_fine_tuned_bert_is_loaded_by_its_class(bert_dir: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from throughline.models.bert import Head
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build_with_head
    from transformers import AutoModelForSequenceClassification

    model = build_with_head(open_model(bert_dir).model, Head("sequence-classification", ("no", "yes")))
    (tmp_path / "tuned").mkdir()
    fields, state = to_huggingface(model)
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "tuned" / "model.safetensors")
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tuned" / "tokenizer.json").write_bytes((bert_dir / "tokenizer.json").read_bytes())
    export_huggingface(tmp_path / "tuned", tmp_path / "out", judging=QUIET)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model.eval()(ids), atol=1e-4, rtol=0)
    assert theirs.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize("shape", ["growing", "one buffer", "one buffer, rotary"])
def test_onnxruntime_genai_generates_what_torch_generates(shape: str, gpt_dir: Path, tmp_path: Path) -> None:
    """Its own loop on a graph under optimum's names: the same greedy tokens until the end of the text."""
    import torch
    from throughline.inference.exports.export import export_onnx

    genai = pytest.importorskip("onnxruntime_genai")
    path = gpt_dir  # whose heads are of 12
    if shape != "growing":
        more = LLAMA | {"kv_heads": 2, "mlp_width": 96} if "rotary" in shape else {"tied": False}
        config = GPTConfig(vocab_size=304, sequence_length=160, layers=2, width=64, heads=4, **more)
        fields, state = to_huggingface(opinionated_model(config))
        (path := tmp_path / "model").mkdir()
        save_file({key: value.contiguous() for key, value in state.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(fields))
        (path / "tokenizer.json").write_bytes((gpt_dir / "tokenizer.json").read_bytes())
    variant = "portable" if shape == "growing" else "onnxruntime"
    export_onnx(path, tmp_path / "out", GraphOptions(variant, names="optimum", opset=21), judging=QUIET)
    settings = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert settings["search"]["past_present_share_buffer"] == (shape != "growing")
    model = open_model(path).model
    settings = genai.GeneratorParams(loaded := genai.Model(str(tmp_path / "out")))
    settings.set_search_options(max_length=60, do_sample=False)
    generator = genai.Generator(loaded, settings)
    generator.append_tokens(np.array([5, 6, 7, 8], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    theirs = [int(i) for i in generator.get_sequence(0)]
    ours = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        while ours.shape[1] < len(theirs):
            ours = torch.cat((ours, model(ours)[:, -1].argmax(-1, keepdim=True)), 1)
    assert len(theirs) > 20 and ours[0].tolist() == theirs
