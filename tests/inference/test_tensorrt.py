"""Building with TensorRT and running its engines, against a fake of the recorded interface (`fake_tensorrt`): no GPU,
no libnvinfer here. What is shown is which calls are made and what is refused; that TensorRT itself takes them is not.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import fake
from throughline.core.artifact import Input, read_manifest, verify_artifact
from throughline.core.backend import Span
from throughline.core.errors import Failed, MissingExtra, Refused, WrongUse
from throughline.inference.exports import export_engine as module
from throughline.inference.exports.export import Judging, write_graph
from throughline.inference.exports.export_engine import (
    Profile,
    buckets,
    build_engine,
    export_engine,
    kernels_of_inspector,
    type_of_layer,
)
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.parity import BOUNDS, compare, reference_of, require, sweep
from throughline.inference.runtimes import tensorrt_backend as backend_module
from throughline.inference.runtimes.backends import on_engine, open_backend
from throughline.inference.runtimes.source import Loaded, open_model
from throughline.inference.runtimes.tensorrt_backend import EngineSession, check_engine, load_library
from throughline.inference.serving.encoding import Encoding, embed
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

QUIET = Judging(bench=False)
T4 = {"gpu": "Tesla T4", "compute_capability": "7.5", "driver": "580.1", "cuda": "13.0"}
DYNAMIC = {"Inputs": [{"Name": "x", "Format/Datatype": "N/A due to dynamic shapes"}]}


def on_cpu(library: Any, plan: bytes, where: Path | str = "", device: str = "") -> EngineSession:
    return EngineSession(library, plan, where, "cpu")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def install(version: str = "11.4.0.106", **named) -> types.ModuleType:
        made = fake(**named)
        made.__version__ = version
        monkeypatch.setitem(sys.modules, "tensorrt", made)
        for one in (module, backend_module):
            monkeypatch.setattr(one, "gpu_facts", lambda device: T4)
        monkeypatch.setattr(module, "EngineSession", on_cpu)
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
    assert library.calls["network_flags"] == 1  # 1 << STRONGLY_TYPED, as its package numbers it
    assert [profile["input_ids"] for profile in library.calls["profiles"][:4]] == [
        ((1, 1), (1, 16), (1, 16)),
        ((1, 17), (1, 64), (1, 64)),
        ((2, 1), (4, 16), (4, 16)),
        ((2, 17), (4, 64), (4, 64)),
    ]
    facts = verify_artifact(tmp_path / "one").facts
    assert facts["library_version"] == version and facts["standing"] == "built and run by tensorrt"
    assert facts["compared"] == "the engine"
    assert {name: facts[name] for name in T4} == T4 and facts["product_types"] == {"Half": 8}
    report = json.loads((tmp_path / "one" / "parity.json").read_text())
    assert report["graph"]["passed"] and {row["case"] for row in report["cases"]} >= {
        "1 x 64",
        "4 x 64 ragged",
    }


def test_an_engine_in_another_precision_is_refused(installed, bert_dir: Path, tmp_path: Path) -> None:
    """An fp16 engine that fell back to fp32, as far as it says so; nothing is left."""
    installed(product={"Inputs": [{"Format/Datatype": "Row major linear FP32"}]})
    with pytest.raises(Refused, match="does not multiply in the precision of the graph"):
        export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ({"Inputs": [{"Datatype": "Half", "Format": "(Linear)"}]}, "Half"),
        ({"Inputs": [{"Format/Datatype": "Row major linear FP16 format"}]}, "Half"),
        (DYNAMIC | {"Weights": {"Type": "Int8", "Count": 9}}, "Int8"),
        (
            DYNAMIC | {"Weights": {}, "TacticName": "sm75_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize128"},
            "Half",
        ),
        ({"Inputs": [{"Format/Datatype": "BFloat16"}], "TacticName": "ampere_h16816gemm"}, "BFloat16"),
        (DYNAMIC, ""),
        ({}, ""),
    ],
)
def test_what_a_layer_says_of_its_type(layer: dict[str, Any], kind: str) -> None:
    """The forms of TensorRT 8.6 to 11: a field of its own, one with the format, weights alone, the tactic alone."""
    assert type_of_layer(layer) == kind


def test_what_an_engine_does_not_say_is_no_reason_to_refuse(
    installed, capsys, bert_dir: Path, tmp_path: Path
) -> None:
    """Ranges of shapes hide types: the build stands, compared with torch by running it, and says what is not known."""
    library = installed(product=DYNAMIC, mha="__myl_fc")
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    facts = verify_artifact(tmp_path / "out").facts
    assert (
        facts["product_types"] == facts["fused_attention"] == "not known"
        and facts["compared"] == "the engine"
    )
    assert "does not say" in capsys.readouterr().err
    assert library.calls["contexts"][0]._shapes["input_ids"] == (1, 64)  # of which the inspector was told


def test_timings_of_another_gpu_are_made_anew(installed, capsys, bert_dir: Path, tmp_path: Path) -> None:
    installed().calls["cache_fits"] = False
    (cache := tmp_path / "timings").write_bytes(b"of an A100")
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET, timing_cache=cache)
    assert cache.read_bytes() == b"timings" and "is written anew" in capsys.readouterr().err


def test_without_a_gpu_one_sentence_says_so(installed, bert_dir: Path, tmp_path: Path) -> None:
    installed(gpu=False)
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
    library.Builder.build_serialized_network = lambda *_: None  # its only sign that it failed
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
    decode = buckets(GPTConfig(), (4,), (256,))[0]
    assert decode.tokens == (1, 1, 1)
    assert decode.shapes("past.0.key", GPTConfig())[1] == (4, 12, 1024, 64)
    # the end of a prompt: asks nothing
    assert decode.shapes("logit_positions", GPTConfig()) == [(1, 0), (4, 1), (4, 1)]
    assert Profile((1, 1, 2), (1, 8, 9)).shapes("logit_positions", config) == [(1, 0), (1, 1), (2, 9)]


def test_inspector_layers_without_details_are_left_out() -> None:
    """Without detailed profiling TensorRT lists names alone: then nothing is counted, and the build is refused."""
    assert kernels_of_inspector(json.dumps({"Layers": ["a", "b"]})) == []


def session_of(
    config: Any, path: Path, batches: Any, lengths: Any, capture: Any = None
) -> tuple[Any, EngineSession]:
    """A model and an engine of it, built and opened."""
    model, library = build(config, 1).eval(), fake()
    write_graph(model, path / "m.onnx", {}, GraphOptions("tensorrt", "fp16"))
    plan, _ = build_engine(library, path / "m.onnx", config, buckets(config, batches, lengths))
    session = EngineSession(library, plan, device="cpu")
    session._capture = capture
    session.calls = library.calls  # type: ignore[attr-defined]
    return model, session


GPT = GPTConfig(vocab_size=97, sequence_length=80, layers=2, width=32, heads=4)
BERT = BERTConfig(vocab_size=97, sequence_length=48, layers=2, width=32, heads=4)


@pytest.mark.parametrize("config", [GPT, BERT], ids=["gpt", "bert"])
def test_a_session_computes_what_the_graph_computes(config: Any, tmp_path: Path) -> None:
    """Shapes, addresses, profiles and captured calls; the arithmetic is ONNX Runtime's."""
    replays = []

    def capture(run, stream):
        replays.append(0)
        number = len(replays) - 1

        def replay() -> None:
            replays[number] += 1
            run()

        return replay

    model, session = session_of(config, tmp_path, (2, 5), (16, 48), capture)
    source = Input("test", "foreign", "0")
    candidate = Loaded(config, None, source, on_engine(session, config, "fp16"))
    cases = sweep(97, config.sequence_length, session.limits)
    require(compare(reference_of(model, None, source), candidate, BOUNDS["fp16"], cases), "the engine")
    assert (session.limits.rows, session.limits.tokens) == (5, 48)
    # each shape in the first that it fits
    assert len({profile for profile, _ in session.calls["executed"]}) > 2
    captured = [one for one in session.calls["contexts"] if one not in session._contexts.values()]
    assert len(captured) == len(replays)  # a context for each captured shape
    if config is GPT:  # decode steps of the same rows were captured once and then replayed
        assert replays and max(replays) > 50
    with pytest.raises(WrongUse, match="no profile for these shapes"):
        session._profile({"input_ids": (9, 16)})


def test_nine_texts_on_an_engine_of_eight_rows(tmp_path: Path) -> None:
    """What profiles take is kept by every reader: vectors of texts, steps of many rows, prompts beyond its length."""
    model, session = session_of(BERT, tmp_path, (1, 8), (16, 48))
    encoder = on_engine(session, BERT, "fp16")
    texts = [Encoding(np.arange(3, 4 + number), want=("sentence_embedding",)) for number in range(9)]
    source = Input("test", "foreign", "0")
    theirs = embed(reference_of(model, None, source).encoder, texts, pad_id=0)
    np.testing.assert_allclose(embed(encoder, texts, pad_id=0), theirs, atol=3e-2)
    shapes = {shape for _, shape in session.calls["executed"]}
    assert max(rows for rows, _ in shapes) <= 8 and {tokens % 16 for _, tokens in shapes} == {0}

    model, session = session_of(GPT, tmp_path, (1, 4), (16, 48))
    rng, backends = (
        np.random.default_rng(0),
        [reference_of(model, None, source).causal, on_engine(session, GPT, "fp16")],
    )
    spans = [
        Span(row, 0, rng.integers(0, 97, length), asked)
        for row, length, asked in ((0, 70, 60), (8, 3, 1), (5, 49, 0))
    ]
    more = [Span(row, len(span.ids), np.array([7])) for row, span in ((span.row, span) for span in spans)]
    found = []
    for backend in backends:
        cache = backend.new_cache(9)
        found.append([np.asarray(backend.step(step, cache)).copy() for step in (spans, more)])
    for ours, others in zip(*found):
        np.testing.assert_allclose(others, ours, atol=3e-2 * max(1, np.abs(ours).max()))
    assert max(rows for _, (rows, _) in session.calls["executed"]) <= 4


def test_only_what_is_wanted_comes_to_the_host(tmp_path: Path) -> None:
    """The other outputs of an engine stay on the device; all calls of a shape have one memory."""
    _, session = session_of(BERT, tmp_path, (1, 8), (16, 48))
    encoder = on_engine(session, BERT, "fp16")
    ids = np.full((3, 20), 5)
    given = (ids, np.zeros_like(ids), ids > 0, np.zeros((3, 2), np.int64))
    vector = encoder.forward(*given, {"sentence_embedding"})
    (resident,) = encoder._resident.values()
    crossed = resident.pinned.keys() - {"input_ids", "token_type_ids", "attention_mask", "logit_positions"}
    assert crossed == vector.keys() == {"sentence_embedding"}
    everything = encoder.forward(*given)
    for want in ({"sentence_embedding"}, {"mlm_logits"}, {"cls_embedding"}, {"last_hidden_state"}):
        found = encoder.forward(*given, want)
        assert found.keys() == want
        for name, value in found.items():
            np.testing.assert_array_equal(value, everything[name])
    assert len(encoder._resident) == 1
    assert everything["last_hidden_state"].shape == (3, 20, 32)


def test_a_capture_that_fails_is_launched_and_counted(capsys, tmp_path: Path) -> None:
    def capture(run, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    _, session = session_of(GPT, tmp_path, (1,), (16,), capture)
    backend = on_engine(session, GPT, "fp16")
    cache = backend.new_cache(1)
    backend.step([Span(0, 0, np.arange(5))], cache)
    for step in range(4):
        assert np.isfinite(np.asarray(backend.step([Span(0, 5 + step, np.array([1]))], cache))).all()
    assert session.capture_failures == 1 and capsys.readouterr().err.count("CUDA graphs are left out") == 1


def test_what_tensorrt_answers_is_read(tmp_path: Path) -> None:
    _, session = session_of(BERT, tmp_path, (1,), (16,))
    session._engine = types.SimpleNamespace(create_execution_context=lambda how: None)  # out of memory
    with pytest.raises(Refused, match="could not make an execution context"):
        session._new_context(0)
    with pytest.raises(Refused, match="could not load this engine"):
        library = fake()
        library.Runtime.deserialize_cuda_engine = lambda self, plan: None
        EngineSession(library, b"", device="cpu")


def test_the_devices_of_an_engine(
    installed, monkeypatch: pytest.MonkeyPatch, bert_dir: Path, tmp_path: Path
) -> None:
    """`--device cuda:1` reaches the session, and a CPU is told that it is none."""
    from throughline.core.backend import BackendOptions

    installed()
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    seen: list[str] = []

    def session(library: Any, plan: bytes, where: Path, device: str) -> EngineSession:
        seen.append(device)
        return on_cpu(library, plan)

    monkeypatch.setattr(backend_module, "pick_device", lambda wanted: "cpu" if wanted == "auto" else wanted)
    monkeypatch.setattr(backend_module, "EngineSession", session)
    assert open_backend(tmp_path / "out", BackendOptions("cuda:1")).encoder is not None and seen == ["cuda:1"]
    with pytest.raises(WrongUse, match="an engine needs a GPU"):
        open_backend(tmp_path / "out", BackendOptions("cpu"))


def test_an_engine_is_served(
    installed, gpt_dir: Path, gpt_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`throughline serve ENGINE` against the fake, whose arithmetic is ONNX Runtime's: an answer of four at once
    is the ONNX artifact's.
    """
    installed()
    export_engine(gpt_dir, tmp_path / "engine", "tensorrt", judging=QUIET)
    model, library = open_model(gpt_dir).model, fake()
    write_graph(model, tmp_path / "m.onnx", {}, GraphOptions("tensorrt", "fp32"))
    plan, _ = build_engine(library, tmp_path / "m.onnx", model.config, buckets(model.config, (2,), (16,)))
    session = on_cpu(library, plan)
    monkeypatch.setattr(backend_module, "open_engine", lambda *_: session)

    async def body(found) -> None:
        listed = (await found.client.get("/v1/models/engine")).json()
        assert listed["backend"] == "tensorrt" and listed["endpoints"][0] == "/v1/completions"
        asked = {"prompt": ["The quick", "Wörter", "a", "model reads"], "max_tokens": 16}
        ours, theirs = [await found.complete(model=name, **asked) for name in ("engine", "graph")]
        assert [c["token_ids"] for c in ours["choices"]] == [c["token_ids"] for c in theirs["choices"]]

    in_thread.run_with(monkeypatch, [f"engine={tmp_path / 'engine'}", f"graph={gpt_onnx}"], body)
    assert max(rows for _, (rows, _) in library.calls["executed"]) == 2


def test_the_record_is_the_packages() -> None:
    """Where the bindings are installed, what was recorded of them is what they have."""
    library = pytest.importorskip(
        "tensorrt_bindings", reason="tensorrt_cu13_bindings is in the rehearsal's environment"
    )
    import tensorrt_api

    if library.__version__ == json.loads(tensorrt_api.RECORD.read_text())["version"]:
        assert tensorrt_api.record(library) == json.loads(tensorrt_api.RECORD.read_text())


def test_opening_checks_the_manifest_first(installed, bert_dir: Path, tmp_path: Path) -> None:
    installed("11.4.0")
    export_engine(bert_dir, tmp_path / "out", "tensorrt", judging=QUIET)
    installed("10.15.0")
    with pytest.raises(Refused, match="another version"):
        open_backend(tmp_path / "out")
    (tmp_path / "out" / "engine.plan").write_bytes(b"a p")
    with pytest.raises(Refused, match="wrong size"):
        open_backend(tmp_path / "out")
