"""Building with TensorRT, against a fake of its module: no GPU, no libnvinfer here. What is shown is which calls
are made and what is refused; that TensorRT itself takes them is not.
"""

import ctypes
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from throughline.core.artifact import Input, read_manifest, verify_artifact
from throughline.core.errors import Failed, MissingExtra, Refused, WrongUse
from throughline.inference.exports import export_engine as module
from throughline.inference.exports.engine_report import kernels_of_inspector
from throughline.inference.exports.export import Judging, write_graph
from throughline.inference.exports.export_engine import export_engine
from throughline.inference.exports.tensorrt_build import Profile, buckets
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.parity import BOUNDS, compare, require
from throughline.inference.graphs.reference import reference_of
from throughline.inference.runtimes import tensorrt_backend as backend_module
from throughline.inference.runtimes.backends import on_session, open_backend
from throughline.inference.runtimes.loaded import Loaded
from throughline.inference.runtimes.source import open_model
from throughline.inference.runtimes.tensorrt_backend import EngineSession
from throughline.inference.runtimes.tensorrt_library import check_engine, load_library
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

QUIET = Judging(bench=False)
T4 = {"gpu": "Tesla T4", "compute_capability": "7.5", "driver": "580.1", "cuda": "13.0"}


def fake(
    version: str, products: str = "Half", mha: str = "_gemm_mha_v2", gpu: bool = True
) -> types.ModuleType:
    """A module with the names that TensorRT of this version has; flags that 11 removed raise when touched."""
    made = types.ModuleType("tensorrt")
    made.__version__ = version
    made.calls = {"profiles": [], "cache": None}

    class Severity:
        ERROR, INTERNAL_ERROR, VERBOSE = "error", "internal", "verbose"

    class ILogger:
        Severity_ = Severity

        def __init__(self) -> None:
            pass

    ILogger.Severity = Severity

    class Builder:
        def __init__(self, logger) -> None:
            made.calls["profiles"] = []
            if not gpu:
                logger.log(Severity.ERROR, "CUDA initialization failure with error: 35")
                raise TypeError("pybind11::init(): factory function returned nullptr")

        def create_network(self, flags: int):
            made.calls["network_flags"] = flags
            return types.SimpleNamespace(inputs=[])

        def create_builder_config(self):
            return Config()

        def create_optimization_profile(self):
            profile = {}
            made.calls["profiles"].append(profile)
            return types.SimpleNamespace(set_shape=lambda name, *shapes: profile.__setitem__(name, shapes))

        def build_serialized_network(self, network, config):
            return memoryview(b"a plan") if network.inputs else None

    class Config:
        def set_flag(self, flag) -> None:
            raise AssertionError("no flag of the builder is needed")

        def add_optimization_profile(self, profile) -> None:
            pass

        def create_timing_cache(self, data: bytes):
            made.calls["cache"] = data
            return object()

        def set_timing_cache(self, cache, ignore_mismatch: bool) -> None:
            assert ignore_mismatch is False

        def get_timing_cache(self):
            return types.SimpleNamespace(serialize=lambda: b"timings")

    class OnnxParser:
        def __init__(self, network, logger) -> None:
            self.network, self.num_errors = network, 0

        def parse_from_file(self, path: str) -> bool:
            graph = onnx.load(path).graph
            self.network.inputs = list(graph.input)
            self.network.num_inputs = len(graph.input)
            self.network.get_input = lambda i: graph.input[i]
            return True

    class Runtime:
        def __init__(self, logger) -> None:
            pass

        def deserialize_cuda_engine(self, engine: bytes):
            layers = []
            for layer in [0, 1] * len(made.calls["profiles"]):  # every profile has kernels of its own
                for name, kind, of in (
                    (f"MatMul_{layer}", "gemm", products),
                    (f"{mha}_{layer}", "kgen", "Half"),
                ):
                    given = [{"Name": "x", "Format/Datatype": f"{of} Row major"}]
                    where = f"[ONNX Layer: blocks.{layer}/MatMul_1]"
                    layers.append({"Name": name, "LayerType": kind, "Inputs": given, "Metadata": where})
            text = json.dumps({"Layers": layers})
            inspector = types.SimpleNamespace(get_engine_information=lambda how: text)
            return types.SimpleNamespace(create_engine_inspector=lambda: inspector)

    flags = types.SimpleNamespace(STRONGLY_TYPED=1) if version.startswith("10") else types.SimpleNamespace()
    made.Logger = lambda level: None
    made.Logger.ERROR = "error"
    made.ILogger, made.Builder, made.OnnxParser, made.Runtime = ILogger, Builder, OnnxParser, Runtime
    made.NetworkDefinitionCreationFlag = flags
    made.ProfilingVerbosity = types.SimpleNamespace(DETAILED="detailed")
    made.LayerInformationFormat = types.SimpleNamespace(JSON="json")
    return made


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def install(*given, **named) -> types.ModuleType:
        made = fake(*given, **named)
        monkeypatch.setitem(sys.modules, "tensorrt", made)
        monkeypatch.setattr(module, "gpu_facts", lambda: T4)
        monkeypatch.setattr(backend_module, "gpu_facts", lambda: T4)
        return made

    return install


@pytest.mark.parametrize("version", ["10.15.1.29", "11.4.0.106"])
def test_a_build_is_strongly_typed_and_described(
    installed, version: str, bert_dir: Path, tmp_path: Path
) -> None:
    library = installed(version)
    cache = tmp_path / "timings"
    for name in ("one", "two"):
        export_engine(
            bert_dir,
            tmp_path / name,
            "tensorrt",
            judging=QUIET,
            batches=(1, 4),
            lengths=(16, 64),
            timing_cache=cache,
        )
        expected = b"" if name == "one" else b"timings"
        assert library.calls["cache"] == expected  # the second build reads what the first has measured
    assert library.calls["network_flags"] == (2 if version.startswith("10") else 0)
    assert [profile["input_ids"] for profile in library.calls["profiles"][:4]] == [
        ((1, 1), (1, 16), (1, 16)),
        ((1, 17), (1, 64), (1, 64)),
        ((2, 1), (4, 16), (4, 16)),
        ((2, 17), (4, 64), (4, 64)),
    ]
    facts = verify_artifact(tmp_path / "one").facts
    assert facts["library_version"] == version and facts["standing"] == "built and read back by TensorRT"
    assert {name: facts[name] for name in T4} == T4 and facts["product_types"] == {"Half": 8}
    assert (tmp_path / "one" / "engine.plan").read_bytes() == b"a plan"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"products": "Float"}, "does not multiply in the precision of the graph"),
        ({"mha": "softmax"}, "attention was not fused"),
    ],
)
def test_what_the_engine_says_of_itself_is_asserted(
    installed, named, words, bert_dir: Path, tmp_path: Path
) -> None:
    """An fp16 engine that fell back to fp32 is refused, and nothing is left."""
    installed("11.4.0", **named)
    with pytest.raises(Refused, match=words):
        export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_one_sentence_says_so(installed, bert_dir: Path, tmp_path: Path) -> None:
    installed("11.4.0", gpu=False)
    with pytest.raises(WrongUse, match="TensorRT found no GPU") as caught:
        export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    assert "error: 35" in caught.value.why and list(tmp_path.iterdir()) == []


def test_versions(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("10.9.0")
    with pytest.raises(WrongUse, match=r"10\.9\.0 is too old"):
        load_library("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtra, match="building an engine needs the package tensorrt"):
        load_library("tensorrt")


def test_an_engine_for_something_else_is_refused(installed, bert_dir: Path, tmp_path: Path) -> None:
    """The manifest says before anything is loaded, and names the command that builds it again."""
    library = installed("10.15.1.29")
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    manifest = read_manifest(tmp_path / "out", "engine")
    check_engine(manifest, tmp_path / "out", library, lambda: "7.5")
    with pytest.raises(Refused, match="another compute capability") as caught:
        check_engine(manifest, tmp_path / "out", library, lambda: "8.9")
    assert "built for 7.5, here is 8.9" in caught.value.why and manifest.command in caught.value.fix
    with pytest.raises(Refused, match="another version"):
        check_engine(manifest, tmp_path / "out", installed("11.4.0"), lambda: "7.5")


def test_a_graph_that_cannot_be_built_is_told(installed, bert_dir: Path, tmp_path: Path) -> None:
    library = installed("11.4.0")
    library.Builder.build_serialized_network = lambda *_: None
    with pytest.raises(Failed, match="could not be built"):
        export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_buckets_cover_every_shape_once() -> None:
    config = BERTConfig()
    profiles = buckets(config, (1, 8), (128, 512))
    for batch, tokens in ((1, 1), (1, 128), (1, 129), (5, 128), (8, 512)):
        fitting = [
            p for p in profiles if p.batch[0] <= batch <= p.batch[2] and p.tokens[0] <= tokens <= p.tokens[2]
        ]
        assert len(fitting) == 1
    with pytest.raises(WrongUse, match="a bucket of 600 tokens"):
        buckets(config, (1,), (600,))
    decode = buckets(GPTConfig(), (4,), (256,))[0]
    assert decode.tokens == (1, 1, 1)
    assert decode.shapes("past.0.key", GPTConfig())[1] == (4, 12, 1024, 64)
    assert Profile((1, 1, 2), (1, 8, 9)).shapes("logit_positions", config) == [(1, 0), (1, 1), (2, 9)]


def test_inspector_layers_without_details_are_left_out() -> None:
    """Without detailed profiling TensorRT lists names alone: then nothing is counted, and the build is refused."""
    assert kernels_of_inspector(json.dumps({"Layers": ["a", "b"]})) == []


class Computing:
    """An engine and its execution context, which computes with ONNX Runtime on the memory it is given."""

    num_optimization_profiles = 2

    def __init__(self, graph: Path, ends: list[int]) -> None:
        self.session = onnxruntime.InferenceSession(graph)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.values = {value.name: value for value in (*inputs, *outputs)}
        self.read = {value.name for value in inputs}
        self.num_io_tensors, self.ends = len(self.values), ends
        self.shapes, self.addresses, self.used = {}, {}, []

    def get_tensor_name(self, i: int) -> str:
        return list(self.values)[i]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in self.read else "out"

    def get_tensor_dtype(self, name: str):
        kinds = {"tensor(float16)": "HALF", "tensor(float)": "FLOAT", "tensor(int64)": "INT64"}
        return types.SimpleNamespace(name=kinds[self.values[name].type])

    def get_tensor_shape(self, name: str) -> list[int]:
        given = [dim if isinstance(dim, int) else -1 for dim in self.values[name].shape]
        sizes = {"batch": "input_ids", "sequence": "input_ids", "asked": "logit_positions"}
        places = {"batch": 0, "sequence": 1, "asked": 1}
        if "input_ids" not in self.shapes:
            return given
        return [
            d if isinstance(d, int) else self.shapes[sizes[d]][places[d]] for d in self.values[name].shape
        ]

    def get_tensor_profile_shape(self, name: str, profile: int):
        rank = len(self.values[name].shape)
        least, most = ([0] * rank, [self.ends[profile]] * rank)
        if name == "input_ids":
            least = [1, self.ends[profile - 1] + 1 if profile else 1]
        return [tuple(least), tuple(most), tuple(most)] if rank < 4 else [(0,) * 4, (1,) * 4, (999,) * 4]

    def create_execution_context(self) -> "Computing":
        return self

    def set_optimization_profile_async(self, profile: int, stream: int) -> None:
        self.used.append(profile)

    def set_input_shape(self, name: str, shape) -> None:
        self.shapes[name] = tuple(shape)

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        def at(name: str, shape) -> np.ndarray:
            kind = np.dtype(backend_module.TYPES[self.get_tensor_dtype(name).name])
            size = max(1, int(np.prod(shape))) * kind.itemsize
            memory = (ctypes.c_char * size).from_address(self.addresses[name])
            return np.frombuffer(memory, kind, int(np.prod(shape))).reshape(shape)

        feeds = {name: at(name, self.shapes[name]) for name in self.read}
        names = [name for name in self.values if name not in self.read]
        for name, value in zip(names, self.session.run(names, feeds)):
            at(name, value.shape)[...] = value
        return True


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_session_computes_what_the_graph_computes(family: str, tmp_path: Path) -> None:
    """Shapes, addresses, profiles and captured calls; the arithmetic is ONNX Runtime's."""
    config: Any = (
        GPTConfig(vocab_size=97, sequence_length=80, layers=2, width=32, heads=4)
        if family == "gpt"
        else BERTConfig(vocab_size=97, sequence_length=48, layers=2, width=32, heads=4)
    )
    model = build(config, 1).eval()
    write_graph(model, tmp_path / "m.onnx", {}, GraphOptions("tensorrt", "fp16"))
    engine = Computing(tmp_path / "m.onnx", [16, 999])
    library = fake("11.4.0")
    library.TensorIOMode = types.SimpleNamespace(INPUT="in")
    library.Runtime = lambda logger: types.SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    replays = []

    def capture(run):
        replays.append(0)

        def replay() -> None:
            replays[-1] += 1
            run()

        return replay

    session = EngineSession(library, b"", device="cpu", capture=capture)
    source = Input("test", "foreign", "0")
    candidate = Loaded(config, None, source, on_session(session, config, "fp16"))
    require(compare(reference_of(model, None, source), candidate, BOUNDS["fp16"]), "the engine")
    assert (session.rows, session.tokens) == (999, 999)
    assert set(engine.used) == {0, 1}  # short calls in the first profile, long ones in the second
    if family == "gpt":  # decode steps of the same rows were captured once and then replayed
        assert replays and max(replays) > 50
    with pytest.raises(WrongUse, match="no profile for these shapes"):
        engine.ends = [4, 5]
        session.run(None, {"input_ids": np.zeros((1, 9), np.int64)})


def test_an_engine_is_served(
    installed, gpt_dir: Path, gpt_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`throughline serve ENGINE` against the fake, whose arithmetic is ONNX Runtime's: an answer of four at once
    is the ONNX artifact's.
    """
    installed("11.4.0")
    export_engine(gpt_dir, tmp_path / "engine", "tensorrt", judging=QUIET)
    model = open_model(gpt_dir).model
    write_graph(model, tmp_path / "m.onnx", {}, GraphOptions("tensorrt", "fp32"))
    library = fake("11.4.0")
    library.TensorIOMode = types.SimpleNamespace(INPUT="in")
    engine = Computing(tmp_path / "m.onnx", [16, 999])
    library.Runtime = lambda logger: types.SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    session = EngineSession(library, b"", device="cpu", capture=None)
    monkeypatch.setattr(backend_module, "open_engine", lambda path, manifest: session)

    async def body(found) -> None:
        listed = (await found.client.get("/v1/models/engine")).json()
        assert listed["backend"] == "tensorrt" and listed["endpoints"] == ["/v1/completions"]
        asked = {"prompt": ["The quick", "Wörter", "a", "model reads"], "max_tokens": 16}
        ours, theirs = [await found.complete(model=name, **asked) for name in ("engine", "graph")]
        assert [c["token_ids"] for c in ours["choices"]] == [c["token_ids"] for c in theirs["choices"]]

    in_thread.run_with(monkeypatch, [f"engine={tmp_path / 'engine'}", f"graph={gpt_onnx}"], body)


def test_opening_checks_the_manifest_first(installed, bert_dir: Path, tmp_path: Path) -> None:
    installed("11.4.0")
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    installed("10.15.0")
    with pytest.raises(Refused, match="another version"):
        open_backend(tmp_path / "out")
    (tmp_path / "out" / "engine.plan").write_bytes(b"a p")
    with pytest.raises(Refused, match="wrong size"):
        open_backend(tmp_path / "out")
