"""The ONNX graphs compute what the modules compute, in every shape and for every switch of the configs."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_models import (
    BERT,
    BLOOM,
    GEMMA,
    GPT,
    LATENT,
    LLAMA,
    MODERNBERT,
    NOWHERE,
    SINKS,
    exported,
    opinionated_model,
    read,
)
from throughline.core.backend import BackendOptions, Span
from throughline.core.errors import Refused
from throughline.inference.exports.export import write_graph
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.onnx_gpt import gpt_graph
from throughline.inference.graphs.parity import BOUNDS, compare, require, with_experts
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.torch_backend import run_module
from throughline.models.config import ModelConfig
from throughline.models.init import build

YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "rope_high": 32.0}
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_width": 40}
DOTS = EXPERTS | {"qk_norm": "head", "router_scores": "sigmoid", "balance_bias": True, "router_scale": 2.5}
DOTS |= {"shared_experts": 2, "dense_layers": 1, "layers": 3}
QWEN3 = {"qk_norm": "head", "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 16}


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tied": False, "activation": "gelu", "bias": False},
        {"kv_heads": 2, "head_width": 12, "mlp_width": 40},
        LLAMA,
        {**LLAMA, "kv_heads": 1, "rope_theta": 500.0},
        {**LLAMA, **QWEN3, "kv_heads": 2, "layer_pattern": "gn", "linear_bias": "qkv"},
        {**LLAMA, "qk_norm": "whole", "norm_place": "after", "kv_heads": 2, "norm_from_one": True},
        {"positions": "rotary", "rope_width": 4, "residual": "parallel", "activation": "relu"},
        {"positions": "rotary", "rope_width": 4, "residual": "shared", "linear_bias": "mlp"}
        | {"output_bias": True, "tied": False, "kv_heads": 2},
        {"position_offset": 2, "activation": "relu2", "qk_norm": "head"},
        {"attention_window": 9, "embedding_norm": True},
        GEMMA,
        BLOOM,
        LATENT,
        {**LATENT, **YARN, "q_latent": 0, "rope_magnitude_all": 0.7, "rope_magnitude_part": 0.9},
        SINKS,
        {**SINKS, "attention_window": 9, "layer_pattern": "lg", "gate_limit": 0.4},
    ],
    ids=[
        "gpt2",
        "untied",
        "grouped",
        "llama",
        "multi-query",
        "qwen3",
        "olmo2",
        "neox",
        "gptj",
        "opt",
        "window",
        "gemma",
        "bloom",
        "latent",
        "latent yarn",
        "sinks",
        "sinks window",
    ],
)
def test_gpt_graph_equals_the_module(switches: dict, tmp_path: Path) -> None:
    model = opinionated_model(dataclasses.replace(GPT, **switches))
    report = compare(run_module(model, None, NOWHERE), exported(model, tmp_path))
    require(report, "the graph")
    assert report["outputs"].keys() == {"logits at once", "logits in pieces", "logits of ragged decode"}
    assert report["greedy_tokens"] == {"equal": 76, "asked": 76}


@pytest.mark.parametrize("variant", ["portable", "onnxruntime"])
@pytest.mark.parametrize(
    "switches",
    [
        LLAMA | EXPERTS | {"kv_heads": 2},
        LLAMA | EXPERTS | {"qk_norm": "head", "expert_every": 2, "experts_per_token": 3},
        LLAMA | EXPERTS | {"qk_norm": "whole", "router_normalised": False},
        LLAMA | DOTS,
        LATENT | DOTS | {"qk_norm": "none", "router_groups": 3, "router_groups_per_token": 2},
        SINKS | EXPERTS | {"bias": True, "gate_limit": 0.4, "experts_per_token": 3},
    ],
    ids=["mixtral", "qwen3-moe", "olmoe", "dots1", "deepseek-v3", "gpt-oss"],
)
def test_experts_equal_the_module(switches: dict, variant: str, tmp_path: Path) -> None:
    """By standard operators, and by ONNX Runtime's own that computes the chosen experts alone."""
    model = opinionated_model(dataclasses.replace(GPT, **switches))
    for layer in model.blocks.values():  # chosen by more than their scores
        if getattr(layer.mlp, "balance_bias", None) is not None:
            layer.mlp.balance_bias.data.normal_(generator=torch.Generator().manual_seed(3))
    found = exported(model, tmp_path, GraphOptions(variant))
    report = compare(run_module(model, None, NOWHERE), found)
    require(report, "the graph")
    assert report["greedy_tokens"] == {"equal": 76, "asked": 76}
    operators = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert ("MoE" in operators) == (variant == "onnxruntime")


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_that_round_are_judged_by_the_divergence(wrong: bool, tmp_path: Path) -> None:
    """A near tie of a router falls the other way in fp16 and is far from torch; so is an expert with a wrong matrix, in
    every text.
    """
    model = opinionated_model(dataclasses.replace(GPT, **LLAMA, **EXPERTS))
    graph = build(model.config).eval()
    graph.load_state_dict(model.state_dict())
    if wrong:
        graph.blocks["1"].mlp.experts.down.data[3].neg_()
    found = exported(graph, tmp_path, GraphOptions("cuda", "fp16"))
    bounds = with_experts(BOUNDS["fp16"], model.config)
    assert (bounds.error, bounds.sweep_kl) == (1.0, 1e-2) and with_experts(BOUNDS["fp16"], GPT) == BOUNDS[
        "fp16"
    ]
    assert compare(run_module(model, None, NOWHERE), found, bounds)["passed"] != wrong


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm_first": True, "nsp": False, "token_types": 0, "activation": "gelu_tanh"},
        {"relative_buckets": 8, "relative_distance": 20, "mlm_transform": False, "bias": False},
        {"kv_heads": 2, "gated": True, "norm": "rmsnorm", "activation": "silu"},
        {"token_types": 1, "position_offset": 2, "nsp": False},
        {"token_types": 0, "nsp": False},
        {"embedding_width": 16, "nsp": False},
        MODERNBERT,
    ],
    ids=["bert", "pre-norm", "relative", "modern", "roberta", "distilbert", "electra", "modernbert"],
)
def test_bert_graph_equals_the_module(switches: dict, tmp_path: Path) -> None:
    model = opinionated_model(dataclasses.replace(BERT, **switches))
    report = compare(run_module(model, None, NOWHERE), exported(model, tmp_path))
    require(report, "the graph")
    assert ("nsp_logits" in report["outputs"]) == model.config.nsp
    assert {"last_hidden_state", "mlm_logits", "sentence_embedding"} <= report["outputs"].keys()


def test_bert_graph_equals_what_torch_exports(tmp_path: Path) -> None:
    """Torch's own exporter as a witness: two ways to ONNX, one answer."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = opinionated_model(BERT)
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 97, (2, 20)), np.arange(20) < np.array([[20], [13]])

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model.hidden(ids, attention_mask=mask)

    given = (torch.tensor(ids), torch.tensor(mask))
    torch.onnx.export(Hidden().eval(), given, tmp_path / "theirs.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "theirs.onnx")
    (theirs,) = session.run(None, {"ids": ids, "mask": mask})
    encoder = exported(model, tmp_path).encoder
    ours = encoder.forward(ids, np.zeros_like(ids), mask, np.zeros((2, 0), np.int64))["last_hidden_state"]
    # fp32 sums in another order, see parity.BOUND
    np.testing.assert_allclose(ours[mask], theirs[mask], atol=1e-4)


def test_weights_beside_the_graph_give_the_same_answers(tmp_path: Path) -> None:
    """The form that models above protobuf's 2 GiB take."""
    model = opinionated_model(GPT)
    loaded = exported(model, tmp_path, external_bytes=0)
    size = (tmp_path / "model.onnx.data").stat().st_size
    assert size > 0.8 * 4 * model.config.parameter_count() > 2 * (tmp_path / "model.onnx").stat().st_size
    require(compare(run_module(model, None, NOWHERE), loaded), "the graph with external weights")


@pytest.mark.slow
def test_a_model_above_two_gibibytes(tmp_path: Path) -> None:
    """3.1 GB of weights, beyond what one protobuf file can hold, written and run without being asked to."""
    config = dataclasses.replace(GPT, vocab_size=190_000, width=2048, heads=16, layers=1, tied=False)
    model = build(config).eval()
    loaded = exported(model, tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_size > 2**31
    ids, ask = np.array([[5, 189_999, 7]]), np.array([[0, 1, 2]])
    backends = (run_module(model, None, NOWHERE).causal, loaded.causal)
    ours, theirs = (
        read(backend, ids, np.zeros(1, np.int64), ask, backend.new_cache(1)) for backend in backends
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)  # fp32 sums of 2,048 terms, see parity.BOUND


def test_tied_table_is_stored_once_and_metadata_is_inside(tmp_path: Path) -> None:
    model = opinionated_model(GPT)
    write_graph(model, tmp_path / "model.onnx", {"throughline": "here"})
    written = onnx.load(tmp_path / "model.onnx")
    assert {entry.key: entry.value for entry in written.metadata_props} == {"throughline": "here"}
    weights = sum(np.prod(tensor.dims) for tensor in written.graph.initializer)
    assert weights == pytest.approx(model.config.parameter_count(), abs=100)  # and a few shape constants
    assert {node.domain for node in written.graph.node} == {""}  # nothing but standard operators


def test_cache_is_written_in_place_and_grows(tmp_path: Path) -> None:
    config = dataclasses.replace(GPT, sequence_length=300)
    backend = exported(opinionated_model(config), tmp_path).causal
    cache = backend.new_cache(3)
    before = {name: store.ctypes.data for name, store in cache.stores.items()}
    ids, one = np.arange(40)[None] % 97, np.zeros(1, np.int64)
    read(backend, ids, one, np.zeros((1, 1), np.int64), cache, first_row=1)
    assert {name: store.ctypes.data for name, store in cache.stores.items()} == before
    for store in cache.stores.values():
        assert (
            store[1, :, :40].any()
            and not store[1, :, 40:].any()
            and not store[0].any()
            and not store[2].any()
        )
    kept = {name: store[1, :, :40].copy() for name, store in cache.stores.items()}
    read(backend, np.arange(200)[None] % 97, one + 40, np.zeros((1, 0), np.int64), cache, first_row=1)
    assert cache.capacity == 256
    for name, store in cache.stores.items():
        np.testing.assert_array_equal(store[1, :, :40], kept[name])


def test_a_long_row_does_not_slow_the_short_ones(tmp_path: Path) -> None:
    """In the graph for ONNX Runtime each row costs what it holds. The standard operator of a portable one reads seven
    short rows at the capacity of a long one, which takes about eight times the long one's time; here it is not even
    twice.
    """
    config = dataclasses.replace(GPT, sequence_length=4096, width=256, vocab_size=32)
    write_graph(opinionated_model(config), tmp_path / "model.onnx", {}, GraphOptions("onnxruntime"))
    backend = run_graph(tmp_path / "model.onnx", config, BackendOptions("cpu", threads=1))

    def milliseconds(pasts: list[int]) -> float:
        cache, ids = backend.new_cache(len(pasts)), np.ones((1, max(pasts)), np.int64)
        for row, past in enumerate(pasts):
            backend.step([Span(row, 0, ids[0, :past], 0)], cache)
        spans, times = [Span(row, past, ids[0, :1], 1) for row, past in enumerate(pasts)], []
        for _ in range(9):
            start = time.process_time()
            backend.step(spans, cache)
            times.append(time.process_time() - start)
        return 1e3 * float(np.median(times))

    alone = milliseconds([4000]) + milliseconds([10] * 7)
    together = milliseconds([10] * 7 + [4000])
    assert together < 2 * alone, (together, alone)


@pytest.mark.parametrize("config", [GPT, BERT], ids=["gpt", "bert"])
def test_a_wrong_weight_is_refused(config, tmp_path: Path) -> None:
    """The report is worth something only if it sees one bias in one layer that is off by a thousandth."""
    model = opinionated_model(config)
    candidate = exported(model, tmp_path)
    with torch.no_grad():
        model.blocks["1"].mlp.down.bias[3] += 0.001
    report = compare(run_module(model, None, NOWHERE), candidate)
    assert not report["passed"]
    with pytest.raises(Refused, match="does not compute what the torch model computes"):
        require(report, "the graph")


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    model = opinionated_model(GPT)
    with torch.no_grad():
        model.norm.bias[0] = float("nan")
    candidate = exported(model, tmp_path)
    with torch.no_grad():
        model.norm.bias[0] = 0.0
    assert not compare(run_module(model, None, NOWHERE), candidate)["passed"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_torch_model_without_finite_outputs_is_told_apart(value: str, tmp_path: Path) -> None:
    """The export is not to blame, and an infinite scale must not make every error small."""
    model = opinionated_model(BERT)
    candidate = exported(model, tmp_path)
    with torch.no_grad():
        model.mlm_bias[0] = float(value)
    with pytest.raises(Refused, match="the torch model itself"):
        require(compare(run_module(model, None, NOWHERE), candidate), "the graph")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dataclasses.replace(GPT, experts=4), "gated experts"),
        (dataclasses.replace(GPT, attention_window=16, attention_global_blocks=1), "beyond a sliding window"),
    ],
    ids=["plain experts", "global blocks"],
)
def test_what_a_graph_lacks_is_refused_by_name(config: ModelConfig, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=said):
        write_graph(build(config).eval(), tmp_path / "model.onnx", {}, GraphOptions())
    assert not list(tmp_path.iterdir())


def rows_of(session, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """A graph's outputs, whatever else it takes."""
    inputs = {}
    for each in session.get_inputs():
        if each.name == "attention_mask":
            inputs[each.name] = mask
        elif each.name == "input_ids":
            inputs[each.name] = ids
        elif each.name == "position_ids":
            inputs[each.name] = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
        elif each.name.startswith("past"):
            shape = [
                len(ids) if size == "batch" else 0 if isinstance(size, str) else size for size in each.shape
            ]
            inputs[each.name] = np.zeros(shape, np.float16 if "float16" in each.type else np.float32)
        else:  # segments, positions whose logits are asked for
            inputs[each.name] = np.zeros_like(ids)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "mean-normalised", "cls-normalised"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp16"},
        {"variant": "onnxruntime"},
        {"variant": "onnxruntime", "precision": "int8"},
        {"variant": "cuda", "precision": "fp16"},
        {"variant": "tensorrt"},
        {"names": "optimum"},
    ],
    ids=lambda options: "-".join(options.values()) or "portable",
)
def test_a_row_of_padding_has_zeros(pooling: str, options: dict, tmp_path: Path) -> None:
    """What Triton's warm-up sends: its vectors are zeros, no output is NaN, and the other row is what it is alone."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = opinionated_model(BERT)
    exported(model, tmp_path, GraphOptions(**options, pooling=pooling))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    ids = np.random.default_rng(1).integers(5, 97, (2, 8))
    mask = np.array([[0] * 8, [1] * 8])
    found = rows_of(session, ids, mask)
    assert all(np.isfinite(values).all() for values in found.values())
    assert not found["sentence_embedding"][0].any() and not found["cls_embedding"][0].any()
    if options.get("precision") != "int8":  # whose scale is that of the whole batch
        alone = rows_of(session, ids[1:], mask[1:])
        for name in ("sentence_embedding", "cls_embedding"):
            np.testing.assert_allclose(found[name][1], alone[name][0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("variant", ["portable", "onnxruntime", "cuda"])
@pytest.mark.parametrize(
    "switches", [{}, LLAMA | {"kv_heads": 2}, SINKS, BLOOM], ids=["gpt", "llama", "sinks", "alibi"]
)
def test_a_row_of_padding_in_a_decoder(switches: dict, variant: str, tmp_path: Path) -> None:
    """A graph under optimum's names runs with a row that is all padding; the other row is what it is alone."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = opinionated_model(dataclasses.replace(GPT, **switches))
    gpt_graph(model, GraphOptions(variant, names="optimum")).save(tmp_path / "model.onnx", {})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    ids = np.random.default_rng(1).integers(5, 97, (2, 8))
    mask = np.array([[0] * 8, [1] * 8])
    found, alone = rows_of(session, ids, mask), rows_of(session, ids[1:], mask[1:])
    assert all(np.isfinite(values).all() for values in found.values())
    np.testing.assert_allclose(found["logits"][1], alone["logits"][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("switches", [{}, MODERNBERT], ids=["bert", "modernbert"])
def test_a_row_of_padding_in_torch(switches: dict) -> None:
    """Zeros as vectors and no NaN, beside a text and alone."""
    model = opinionated_model(dataclasses.replace(BERT, **switches))
    backend = run_module(model, None, NOWHERE).encoder
    ids = np.random.default_rng(1).integers(5, 97, (2, 8))
    for second in (True, False):
        mask = np.array([[False] * 8, [second] * 8])
        asked = ids, np.zeros_like(ids), mask, np.zeros((2, 1), np.int64)
        found = backend.forward(*asked) | backend.forward(*asked, {"last_embedding"})
        assert all(np.isfinite(values).all() for values in found.values())
        for name in ("sentence_embedding", "cls_embedding", "last_embedding"):
            assert not found[name][0].any() and found[name][1].any() == second
