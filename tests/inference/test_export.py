"""Exports: complete artifacts that other programs load, or nothing at all."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Refused, WrongUse
from throughline.inference.exports.export import Judging, export_onnx
from throughline.inference.exports.handover import export_huggingface
from throughline.inference.graphs.parity import Bounds
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.source import open_model


def test_onnx_artifact_is_complete(gpt_dir: Path, gpt_onnx: Path) -> None:
    manifest = verify_artifact(gpt_onnx)
    assert manifest.kind == "onnx" and manifest.inputs[0].kind == "foreign"
    assert {"model.onnx", "model.json", "tokenizer.json", "parity.json"} <= {
        file.name for file in manifest.files
    }
    assert manifest.facts["parity_max_abs"] < manifest.facts["parity_bound"]
    report = json.loads((gpt_onnx / "parity.json").read_text())
    assert report["passed"] and report["greedy_tokens"] == {"equal": 128, "asked": 128}
    cases = {row["case"] for row in report["cases"]}
    assert {"1 x 1", "1 x 7", "3 x 33 ragged", "1 x 160"} <= cases
    for row in report["latency"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    assert {row["backend"] for row in report["latency"]} == {"torch", "onnxruntime"}
    assert (gpt_onnx / "tokenizer.json").read_bytes() == (gpt_dir / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("export", [export_onnx, export_huggingface])
def test_above_the_bound_nothing_is_left(
    export, gpt_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("throughline.inference.graphs.parity.greedy_agreement", lambda *_: (0, 0))
    with pytest.raises(Refused) as caught:
        export(gpt_dir, tmp_path / "out", judging=Judging(bench=False, bounds=Bounds(-1.0, 0, 0, 0, 0)))
    assert caught.value.exit_code == 3 and "largest error" in caught.value.why
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
from importlib import import_module
from throughline.core.errors import Failed
from throughline.inference.exports.export import Judging
module, name, limit, *rest = sys.argv[1:]
export = getattr(import_module("throughline.inference.exports." + module), name)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    export(*rest, judging=Judging(bench=False))
except Failed as error:
    print(error.why)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("module", "name", "limit", "needs"),
    [
        ("export", "export_onnx", 100_000, ""),
        ("handover", "export_huggingface", 100_000, ""),
        ("handover", "export_triton", 100_000, ""),
        ("gguf_export", "export_gguf", 100_000, "gguf"),
        ("export_engine", "export_engine", 100_000, "tensorrt_rtx"),  # ends with the graph
        ("export_engine", "export_engine", 400_000, "tensorrt_rtx"),  # the graph fits, the engine does not
    ],
    ids=["onnx", "huggingface", "triton", "gguf", "engine-graph", "engine"],
)
def test_a_full_disk_leaves_nothing(
    module, name, limit: int, needs: str, bert_dir: Path, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs)
    words = [sys.executable, "-c", FULL, module, name, str(limit), bert_dir, tmp_path / "out"]
    words += ["tensorrt_rtx"] * (module == "export_engine")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "file-size limit" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--opset", "16"), 2, "17"),
        (("--precision", "int4", "--variant", "onnxruntime", "--text", "TEXT"), 2, "int4 is for a GPT"),
        (("--precision", "int8"), 2, "judged on real text"),
        (("--precision", "int8", "--text", "TEXT", "--calibration", "absent"), 2, "absent"),
        (("--precision", "int8", "--text", "TEXT", "--variant", "tensorrt", "--opset", "18"), 2, "opset 18"),
        (("--device", "cuda"), 2, "no CUDA device here"),
    ],
    ids=["opset", "int4", "no-text", "no-calibration", "opset-int8", "no-gpu"],
)
def test_what_cannot_be_exported_leaves_nothing(
    words, code: int, message: str, bert_dir: Path, tmp_path: Path
) -> None:
    """From the command line: one clear error and its exit code, and no directory begun."""
    text = tmp_path / "text.txt"
    text.write_text("A model reads text and says which word is likely to come next. " * 200)
    given = [str(text) if word == "TEXT" else word for word in words]
    done = CliRunner().invoke(
        main, ["export", str(bert_dir), "--to", "onnx", "--out", str(tmp_path / "out"), *given]
    )
    assert done.exit_code == code and message in done.output and "Traceback" not in done.output, done.output
    assert list(tmp_path.iterdir()) == [text]


def test_taken_and_wrong_paths_are_refused(gpt_dir: Path, gpt_onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="already exists"):
        export_onnx(gpt_dir, gpt_onnx)
    with pytest.raises(WrongUse, match="no such model"):
        export_onnx(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(WrongUse, match="a torch model is needed"):
        export_huggingface(gpt_onnx, tmp_path / "out")
    with pytest.raises(WrongUse):
        open_model(tmp_path)  # an empty directory


def test_damaged_artifact_is_refused(bert_dir: Path, tmp_path: Path) -> None:
    export_onnx(bert_dir, tmp_path / "out")
    graph = tmp_path / "out" / "model.onnx"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    with pytest.raises(Refused, match="damaged"):
        open_backend(tmp_path / "out")


def test_cut_files_are_refused(bert_onnx: Path, tmp_path: Path) -> None:
    """A copy that ended early: by the manifest, and by ONNX Runtime where there is none."""
    from throughline.inference.runtimes.onnx_session import open_session

    (tmp_path / "out").mkdir()
    for file in bert_onnx.iterdir():
        (tmp_path / "out" / file.name).write_bytes(file.read_bytes())
    graph = tmp_path / "out" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:5_000])
    with pytest.raises(Refused, match="wrong size"):
        open_backend(tmp_path / "out")
    with pytest.raises(Refused, match="cannot load this graph"):
        open_session(graph)


def test_transformers_loads_the_exported_gpt(gpt_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_huggingface(gpt_dir, tmp_path / "out")
    assert read_manifest(tmp_path / "out").kind == "model"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = open_model(tmp_path / "out").model
    ids = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=1e-4, rtol=0)
        generated = theirs.generate(ids[:1, :10], max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 10:]
    from throughline.inference.serving.generation import Job
    from throughline.inference.serving.slots import SlotBatch, answer

    backend = open_backend(tmp_path / "out").causal
    job = Job(ids[0, :10].numpy(), 30)
    batch = SlotBatch(backend, lambda ids: "", 1, end_ids=(0,))
    made = [piece.token.id for _, _, piece in answer(batch, [job])]
    assert generated.tolist() == made
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.model_max_length == 160
    assert tokenizer.decode(tokenizer.encode("A model reads text")) == "A model reads text"


def test_transformers_loads_the_exported_bert(bert_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertForPreTraining

    export_huggingface(bert_dir, tmp_path / "out")
    theirs = BertForPreTraining.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.mask_token == "[MASK]" and tokenizer.pad_token_id == 0
    encoder = open_backend(tmp_path / "out").encoder
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(5, encoder.vocab_size, (3, 30)), np.arange(30) < np.array([[30], [11], [1]])
    outputs = encoder.forward(ids, np.zeros_like(ids), mask, np.tile(np.arange(30), (3, 1)))
    with torch.no_grad():
        found = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask).long())
    np.testing.assert_allclose(outputs["mlm_logits"][mask], found.prediction_logits.numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(outputs["nsp_logits"], found.seq_relationship_logits.numpy(), atol=1e-4)
