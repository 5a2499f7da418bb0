"""Triton's model repositories: its configurations by its own schema, the tokenizer's step run as its Python back end
would, against stand-ins with the signatures of triton_python_backend_utils. The server itself is not here.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import fake
from throughline.core.artifact import verify_artifact
from throughline.core.backend import BackendOptions
from throughline.core.errors import WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.inference.exports import export_engine
from throughline.inference.exports.export import Judging
from throughline.inference.exports.handover import export_triton
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.runtimes import tensorrt_backend
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.tensorrt_backend import EngineSession
from throughline.inference.serving.encoding import Reader, embed
from triton_schema import model_config

QUIET = Judging(bench=False)


def configs(folder: Path) -> dict[str, Any]:
    """Every config.pbtxt of a repository, parsed; each in a folder of its model's name with a version in it."""
    from google.protobuf import text_format

    found = {}
    for file in folder.glob("*/config.pbtxt"):
        found[file.parent.name] = config = text_format.Parse(file.read_text(), model_config()())
        assert config.name == file.parent.name and any((file.parent / "1").iterdir())
    return found


def named(tensors: Any) -> dict[str, tuple[int, list[int]]]:
    return {one.name: (one.data_type, list(one.dims)) for one in tensors}


class Tensor:
    def __init__(self, name: str, numpy_array: np.ndarray) -> None:
        self._name, self._values = name, numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class Request:
    """Of pb_utils.InferenceRequest what a step is given."""

    def __init__(self, *texts: bytes) -> None:
        self._inputs = [Tensor("TEXT", np.array([[text] for text in texts], np.object_))]

    def inputs(self) -> list[Tensor]:
        return self._inputs


class TritonError:
    def __init__(self, msg: str) -> None:
        self._msg = msg

    def message(self) -> str:
        return self._msg


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        assert type(output_tensors) is list
        self._tensors, self._error = output_tensors, error

    def error(self) -> TritonError | None:
        return self._error

    def arrays(self) -> dict[str, np.ndarray]:
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


def get_input_tensor_by_name(inference_request: Request, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def step_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tokenizer's step as the back end loads it: its file alone, under its name."""
    stub: Any = types.ModuleType("triton_python_backend_utils")
    for one in (Tensor, TritonError, InferenceResponse, get_input_tensor_by_name):
        setattr(stub, one.__name__, one)
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    spec = importlib.util.spec_from_file_location("model", folder / "tokenizer" / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    step = module.TritonPythonModel()
    step.initialize({"model_repository": str(folder / "tokenizer"), "model_version": "1"})
    return step


def test_text_goes_through_the_whole_repository(
    bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text to ids to vectors, wired as the ensemble says, are the vectors of `embed`; errors are a request's own."""
    import onnxruntime

    export_triton(bert_dir, tmp_path / "out", judging=QUIET)
    verify_artifact(tmp_path / "out")
    found, step = configs(tmp_path / "out"), step_of(tmp_path / "out", monkeypatch)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "bert" / "1" / "model.onnx")
    texts = ["the quick brown fox", "a [SEP] model", "reads text and says which word is likely " * 2]
    asked = [Request(*(text.encode() for text in texts[:2])), Request(texts[2].encode())]
    wrong = [Request(b""), Request(b"\xff"), Request(b"word " * 80)]
    answers = step.execute([*asked, *wrong])
    said = [answer.error().message() for answer in answers[2:]]
    assert said[0] == "the text is empty" and "utf-8" in said[1] and "the model reads 64" in said[2]
    ours = open_backend(bert_dir, BackendOptions("cpu"))
    reader = Reader(Tokenizer.load(bert_dir), 64, ours.config.vocab_size)
    expected = embed(ours.encoder, [reader.frame({"input": text}) for text in texts], 0)
    pool: dict[str, np.ndarray] = {}
    vectors = []
    first, second = found["text"].ensemble_scheduling.step
    assert (first.model_name, second.model_name) == ("tokenizer", "bert")
    for answer in answers[:2]:
        made = answer.arrays()
        assert made["input_ids"].shape[1] in (16, 32) and made["input_ids"].dtype == np.int64
        pool |= {pair.value: made[pair.key] for pair in first.output_map}
        feeds = {pair.key: pool[pair.value] for pair in second.input_map}
        vectors += [*session.run([second.output_map[-1].key], feeds)[0]]
    assert second.output_map[-1].value == "sentence_embedding"
    vectors = [vector / np.linalg.norm(vector) for vector in vectors]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_the_configurations_are_those_of_the_graph(bert_dir: Path, tmp_path: Path) -> None:
    """Types and shapes without the batch's dim; the steps before and behind have the same."""
    import onnxruntime

    options = GraphOptions(opset=20, names="optimum", outputs="all")
    export_triton(bert_dir, tmp_path / "out", options, judging=QUIET)
    found = configs(tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "bert" / "1" / "model.onnx")
    kinds = {"tensor(int64)": 9, "tensor(float)": 11}
    for ours, theirs in (("input", session.get_inputs()), ("output", session.get_outputs())):
        shapes = {one.name: [dim if isinstance(dim, int) else -1 for dim in one.shape[1:]] for one in theirs}
        expected = {one.name: (kinds[one.type], shapes[one.name]) for one in theirs}
        assert named(getattr(found["bert"], ours)) == expected
    assert {"logits", "sentence_embedding"} <= named(found["bert"].output).keys()
    assert named(found["tokenizer"].output) == named(found["bert"].input)
    assert named(found["text"].output) == named(found["bert"].output)
    assert named(found["text"].input) == named(found["tokenizer"].input) == {"TEXT": (13, [1])}
    batching, warm = found["bert"].dynamic_batching, found["bert"].model_warmup[0]
    assert batching.default_queue_policy.max_queue_size == 256 and list(batching.preferred_batch_size) == [
        8,
        32,
    ]
    assert {pair.key for pair in warm.inputs} == named(found["bert"].input).keys() and not found[
        "text"
    ].model_warmup
    assert found["bert"].platform == "onnxruntime_onnx" and found["tokenizer"].backend == "python"
    assert "opset 20" in (tmp_path / "out" / "README.md").read_text()


def test_an_embedding_service_has_no_logits(bert_dir: Path, tmp_path: Path) -> None:
    """A pretrained BERT's repository gives vectors alone unless asked."""
    export_triton(bert_dir, tmp_path / "out", judging=QUIET)
    outputs = named(configs(tmp_path / "out")["text"].output)
    assert outputs.keys() == {"last_hidden_state", "cls_embedding", "sentence_embedding"}


def test_a_plan_stands_in_the_graphs_place(
    bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built and judged as an engine is, against the fake of TensorRT; all of its profiles are named."""
    monkeypatch.setitem(sys.modules, "tensorrt", library := fake())
    library.__version__ = "11.4.0.106"
    card = {"gpu": "Tesla T4", "compute_capability": "7.5", "driver": "580.1", "cuda": "13.0"}
    for one in (export_engine, tensorrt_backend):
        monkeypatch.setattr(one, "gpu_facts", lambda device: card)
    on_cpu = lambda library, plan, where="", device="": EngineSession(library, plan, where, "cpu")  # noqa: E731
    monkeypatch.setattr(export_engine, "EngineSession", on_cpu)
    options = GraphOptions("tensorrt", "fp16", names="optimum")
    report = export_triton(
        bert_dir, tmp_path / "out", options, judging=QUIET, batches=(1, 4), lengths=(16, 64)
    )
    config = configs(tmp_path / "out")["bert"]
    assert config.platform == "tensorrt_plan" and config.max_batch_size == 4
    assert list(config.instance_group[0].profile) == ["0", "1", "2", "3"]
    assert [file.name for file in (tmp_path / "out" / "bert" / "1").iterdir()] == ["model.plan"]
    assert report["engine"]["compared"] == "the engine"
    assert "compute capability 7.5" in (tmp_path / "out" / "README.md").read_text()


def test_what_makes_no_repository(gpt_dir: Path, bert_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no Triton repository"):
        export_triton(gpt_dir, tmp_path / "out")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((bert_dir / name).read_bytes())
    with pytest.raises(WrongUse, match="takes text"):
        export_triton(bare, tmp_path / "out")


def test_the_step_reads_as_the_directory_says(
    bert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt, lower case and length of a sentence-transformers directory."""
    from throughline.models.sentence import Sentence

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bert_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    Sentence(longest=20, lowercase=True, prompt="query: ").write(copy, 48, 64)
    export_triton(copy, tmp_path / "out", judging=QUIET)
    settings = json.loads((tmp_path / "out" / "tokenizer" / "1" / "settings.json").read_text())
    assert (settings["context"], settings["prompt"], settings["lowercase"]) == (20, "query: ", True)
    made = step_of(tmp_path / "out", monkeypatch).execute([Request(b"THE fox")])[0].arrays()["input_ids"][0]
    ids = Tokenizer.load(bert_dir).encode("query: the fox")
    assert made.tolist()[1 : 1 + len(ids)] == ids.tolist()
