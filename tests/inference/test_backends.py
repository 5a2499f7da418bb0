"""Opening a model: the device, dtype and runtime that were asked for, or an error; never silently another."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.core.backend import BackendOptions
from throughline.core.errors import Refused, WrongUse
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.onnx_session import TENSORRT, open_session, profile_of, providers_of
from throughline.inference.runtimes.source import pick_device, pick_dtype


@pytest.mark.parametrize("fixture", ["gpt_dir", "gpt_onnx", "bert_dir", "bert_onnx"])
def test_a_gpu_that_is_not_here_is_an_error(fixture: str, request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    path: Path = request.getfixturevalue(fixture)
    with pytest.raises(WrongUse, match="no CUDA device here"):
        open_backend(path, BackendOptions(device="cuda"))
    assert open_backend(path).backend.device == "cpu"


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda:0",
        "cpu",
        "cuda:0",
        "cuda:1",
    ]
    for wrong in ("cuda:2", "gpu", "cuda:x"):
        with pytest.raises(WrongUse):
            pick_device(wrong)


@pytest.mark.parametrize(
    ("capability", "stored", "wanted", "expected"),
    [
        ((7, 5), "bf16", "auto", torch.float16),  # a T4 has no bf16
        ((7, 5), "fp16", "auto", torch.float16),
        ((8, 0), "bf16", "auto", torch.bfloat16),
        ((8, 0), "fp32", "auto", torch.float32),
        ((7, 5), "fp32", "fp16", torch.float16),
        ((6, 1), "fp16", "auto", torch.float32),
    ],
)
def test_dtypes_a_gpu_computes_in(monkeypatch, capability, stored, wanted, expected) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a card")
    assert pick_dtype(wanted, stored, "cuda:0") == expected
    if capability < (8, 0):
        with pytest.raises(Refused, match="cannot compute in bf16"):
            pick_dtype("bf16", stored, "cuda:0")


def test_a_provider_that_falls_back_is_refused(gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime runs on the CPU with a log line when CUDA's libraries are missing."""
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(Refused, match="could not start CUDAExecutionProvider"):
        open_session(gpt_onnx / "model.onnx", 1, "cuda:0")


def test_runtimes_that_do_not_suit_a_file(gpt_dir: Path, gpt_onnx: Path) -> None:
    for path, runtime, message in (
        (gpt_dir, "onnxruntime", "does not run a torch model"),
        (gpt_dir, "torch-compiled", "only a BERT"),
        (gpt_onnx, "openvino", "does not run a GPT's graph"),
        (gpt_onnx, "nothing", "nothing does not run an ONNX artifact"),
    ):
        with pytest.raises(WrongUse, match=message):
            open_backend(path, BackendOptions(device="cpu", runtime=runtime))


def test_openvino_answers_what_onnx_runtime_answers(bert_onnx: Path) -> None:
    pytest.importorskip("openvino")
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 90, (3, 17)), np.arange(17) < np.array([[17], [5], [1]])
    outputs = []
    for runtime in ("onnxruntime", "openvino"):
        loaded = open_backend(bert_onnx, BackendOptions(device="cpu", runtime=runtime, threads=1))
        assert loaded.encoder is not None and loaded.encoder.name == runtime
        outputs.append(loaded.encoder.forward(ids, np.zeros_like(ids), mask, np.zeros((3, 2), np.int64)))
    assert set(outputs[0]) == set(outputs[1])
    for name, value in outputs[0].items():
        real = mask if name == "last_hidden_state" else ...
        # fp32 sums in another order, see parity.BOUNDS
        np.testing.assert_allclose(outputs[1][name][real], value[real], atol=1e-4 * np.abs(value).max())


def test_the_fastest_is_chosen_and_said(bert_onnx: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from throughline.inference.runtimes import bench

    monkeypatch.setattr(bench, "CHOICE_SECONDS", 0.1)
    loaded = open_backend(bert_onnx, BackendOptions(device="cpu", runtime="auto", threads=1))
    said = capsys.readouterr().err
    assert f"backend: {loaded.backend.name}" in said and "ms" in said
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(WrongUse, match="openvino"):
        open_backend(bert_onnx, BackendOptions(device="cpu", runtime="openvino"))


@pytest.mark.slow
def test_a_compiled_bert_answers_what_an_eager_one_answers(bert_dir: Path) -> None:
    """torch.compile with shapes that change between calls; half a minute of compiler."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    eager, compiled = (
        open_backend(bert_dir, BackendOptions(device="cpu", runtime=name)).encoder
        for name in ("torch", "torch-compiled")
    )
    assert compiled.name == "torch-compiled"
    rng = np.random.default_rng(0)
    for rows, length in ((1, 7), (3, 17), (2, 33)):
        ids, mask = (
            rng.integers(0, 90, (rows, length)),
            np.arange(length) < rng.integers(1, length + 1, (rows, 1)),
        )
        outputs = [
            encoder.forward(ids, np.zeros_like(ids), mask, np.zeros((rows, 2), np.int64))
            for encoder in (eager, compiled)
        ]
        for name, value in outputs[0].items():
            real = mask if name == "last_hidden_state" else ...
            # fp32 sums in another order, see parity.BOUNDS
            np.testing.assert_allclose(outputs[1][name][real], value[real], atol=1e-4 * np.abs(value).max())


def test_a_graph_for_a_newer_onnxruntime(gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its causal triangle stands at another end in older versions: refused, where before it gave another text."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.24.0")
    with pytest.raises(Refused, match="newer ONNX Runtime"):
        open_backend(gpt_onnx)


@pytest.mark.parametrize(
    ("facts", "device", "where"),
    [
        ({"variant": "onnxruntime", "precision": "int8"}, "auto", "cpu"),
        ({"variant": "onnxruntime", "precision": "int8"}, "cuda:0", "cuda:0"),
        ({"variant": "onnxruntime", "precision": "fp16"}, "auto", "auto"),
        ({"variant": "cuda", "precision": "int8"}, "auto", "auto"),
    ],
)
def test_a_graph_for_the_cpu_stays_there(facts, device, where, gpt_onnx: Path, monkeypatch, capsys) -> None:
    """`auto` takes a GPU only for a graph whose work has CUDA kernels; who asks for one is told what happens."""
    import dataclasses

    from throughline.core.artifact import read_manifest
    from throughline.inference.runtimes import backends

    manifest, opened = read_manifest(gpt_onnx), []
    manifest = dataclasses.replace(manifest, facts=manifest.facts | facts)
    monkeypatch.setattr(backends, "verify_artifact", lambda path: manifest)
    monkeypatch.setattr(backends, "pick_onnx_device", lambda wanted: wanted if wanted == "cpu" else "cuda:0")
    monkeypatch.setattr(backends, "run_graph", lambda *given: opened.append(given[2].device))
    open_backend(gpt_onnx, BackendOptions(device))
    assert opened == [where] and ("--for cuda" in capsys.readouterr().err) == (
        facts["variant"] != "cuda" and facts["precision"] != "fp16"
    )


def test_a_candidate_that_dies_is_left_out(gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Out of memory in one runtime is a reason to take the other, whatever kind of exception says it."""
    from throughline.inference.runtimes import bench

    monkeypatch.setattr(bench, "CHOICE_SECONDS", 0.02)

    def dies():
        raise RuntimeError("CUDA out of memory")

    opened = bench.fastest({"first": dies, "second": lambda: open_backend(gpt_onnx, BackendOptions("cpu"))})
    assert opened.causal is not None and "first: CUDA out of memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.fastest({"first": dies})


def test_tensorrts_provider_is_told_all_shapes(bert_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine is built once, for every text up to the context, and kept."""
    inputs = [each.name for each in open_session(bert_onnx / "model.onnx").get_inputs()]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [TENSORRT, "CUDAExecutionProvider"])
    (name, settings), (second, _) = providers_of("cuda:1", profile_of(bert_onnx / "model.onnx", 48))
    assert (name, second) == (TENSORRT, "CUDAExecutionProvider") and settings["device_id"] == "1"
    most = dict(each.split(":") for each in settings["trt_profile_max_shapes"].split(","))
    assert most == dict.fromkeys(inputs, "64x48") and settings["trt_engine_cache_enable"] == "1"
    assert not any("profile" in key for key in providers_of("cuda:0", {})[0][1])
