"""Every variant, precision and opset of the graphs against the module, and what rounding does to weights."""

import dataclasses
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
    WINDOWS,
    exported,
    opinionated_model,
)
from throughline.core.errors import Refused, WrongUse
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.graph_probe import check_fusion, first_bad_node, probe
from throughline.inference.graphs.onnx_bert import bert_graph
from throughline.inference.graphs.onnx_gpt import gpt_graph
from throughline.inference.graphs.onnx_writer import BLOCK, Graph, int8_by_output, pack_blocks
from throughline.inference.graphs.parity import BOUNDS, OptimumCausal, compare, reference_of, require
from throughline.inference.runtimes.backends import Loaded
from throughline.inference.runtimes.onnx_session import open_session
from throughline.models.bert import Head
from throughline.models.config import GPTConfig
from throughline.models.init import build_with_head

RANGES = 8.0  # inputs of these models' layers stay below it


def options_for(model, *given, **named) -> GraphOptions:
    names = [*dict(getattr(model, "encoder", model).named_modules()), "output"]
    return GraphOptions(*given, ranges=dict.fromkeys(names, RANGES), **named)


FORMS = [
    ("portable", "fp32", 17),
    ("portable", "fp32", 20),
    ("portable", "fp32", 23),
    ("portable", "fp16", 24),
    ("portable", "fp16", 19),
    ("portable", "int8", 24),
    ("onnxruntime", "fp32", 24),
    ("onnxruntime", "fp16", 24),
    ("onnxruntime", "int8", 24),
    ("tensorrt", "fp16", 24),
    ("tensorrt", "int8", 24),
    ("cuda", "fp32", 24),
    ("cuda", "int8", 24),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
@pytest.mark.parametrize(
    "config",
    [
        GPT,
        dataclasses.replace(GPT, **LLAMA, kv_heads=2),
        dataclasses.replace(GPT, **WINDOWS),
        dataclasses.replace(GPT, **GEMMA),
        dataclasses.replace(GPT, **BLOOM),
        BERT,
        dataclasses.replace(BERT, **MODERNBERT),
    ],
    ids=["gpt2", "llama-grouped", "windows", "gemma", "bloom", "bert", "modernbert"],
)
def test_every_form_passes_the_sweep(config, form: tuple, tmp_path: Path) -> None:
    """Opsets with and without Attention, TensorScatter, Gelu; float16; int8 in both flavours."""
    model = opinionated_model(config)
    options = options_for(model, *form)
    options.check("gpt" if isinstance(config, GPTConfig) else "bert")
    report = compare(reference_of(model, None, NOWHERE), exported(model, tmp_path, options), BOUNDS[form[1]])
    require(report, "the graph")
    layers, operators = probe(model, tmp_path / "model.onnx", config)
    errors = [row["max_abs"] for row in layers]
    # per layer: fp32 sums in another order; fp16 rounds at 5e-4 of values up to about 10; int8 at a 255th
    assert len(errors) == 2 and max(errors) < {"fp32": 1e-4, "fp16": 0.05, "int8": 1.0}[form[1]]
    check_fusion(operators, config, options)


def test_int4_weights_for_a_gpt(tmp_path: Path) -> None:
    """Against the module with the same rounded weights, because small random models change a lot in 4 bits."""
    model = opinionated_model(dataclasses.replace(GPT, width=64, **LLAMA))
    candidate = exported(model, tmp_path, options_for(model, "onnxruntime", "int4"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            weight = parameter.numpy()
            if name == "token_table.weight":
                small, scale = int8_by_output(weight)
                parameter.copy_(torch.from_numpy((small * scale).T.copy()))
            else:
                parameter.copy_(
                    torch.from_numpy(unpack(*pack_blocks(weight, 8 if "output" in name else 4), weight))
                )
    report = compare(reference_of(model, None, NOWHERE), candidate, BOUNDS["int4"])
    # what is left: ONNX Runtime rounds the inputs of each product to int8 (accuracy level 4)
    assert report["passed"] and report["outputs"]["logits in pieces"]["mean_abs"] < 0.06
    _, operators = probe(model, tmp_path / "model.onnx", model.config)
    fused = check_fusion(operators, model.config, options_for(model, "onnxruntime", "int4"))
    assert fused["com.microsoft.MatMulNBits"]["found"] >= 8


def unpack(packed: np.ndarray, scales: np.ndarray, weight_OI: np.ndarray) -> np.ndarray:
    """The weights that the codes stand for, by the operator's documentation."""
    wide = packed.shape[-1] == BLOCK
    codes = packed if wide else np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:2], BLOCK)
    values = (codes.astype(np.float32) - (128 if wide else 8)) * scales.reshape(packed.shape[:2])[..., None]
    return values.reshape(len(weight_OI), -1)[:, : weight_OI.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_step(bits: int) -> None:
    # 80: the last block is half full
    weight = np.random.default_rng(0).normal(size=(7, 80)).astype(np.float32)
    packed, scales = pack_blocks(weight, bits)
    error = np.abs(unpack(packed, scales, weight) - weight)
    steps = np.abs(scales).reshape(7, 3).repeat(BLOCK, axis=1)[:, :80]
    # the end of the range that is one shorter costs a whole step, a smaller scale up to 15 % of the largest
    assert (error <= steps * (1.0 if bits == 8 else 1.9)).all() and (error <= steps * 0.501).mean() > 0.95
    small, scale = int8_by_output(weight)
    assert (np.abs(small.T * scale[:, None] - weight) <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(GPT, **more)
        for more in ({}, LLAMA | {"kv_heads": 2}, GEMMA, BLOOM, LATENT, SINKS | WINDOWS)
    ],
    ids=["gpt2", "llama", "gemma", "bloom", "latent", "sinks"],
)
def test_a_gpt_under_optimums_names(config, tmp_path: Path) -> None:
    import onnxruntime

    model = opinionated_model(config)
    gpt_graph(model, GraphOptions(names="optimum")).save(tmp_path / "model.onnx", {})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = {given.name for given in session.get_inputs()}
    assert {"input_ids", "attention_mask", "position_ids", "past_key_values.1.value"} <= names
    assert [given.name for given in session.get_outputs()][:2] == ["logits", "present.0.key"]
    candidate = Loaded(config, None, NOWHERE, OptimumCausal(session, config))
    require(compare(reference_of(model, None, NOWHERE), candidate), "the graph")
    layers, _ = probe(model, tmp_path / "model.onnx", config)
    assert max(row["max_abs"] for row in layers) < 1e-4  # fp32 sums in another order
    # padding on the left, as optimum's generation pads: the mask hides it and positions begin behind it
    ids = np.array([[5, 6, 7, 8]])
    feeds = {
        given.name: np.zeros((1, config.key_value_heads, 0, config.head_size), np.float32)
        for given in session.get_inputs()
        if given.name.startswith("past")
    }
    plain = {
        "input_ids": ids,
        "attention_mask": np.ones((1, 4), np.int64),
        "position_ids": np.arange(4)[None],
    }
    padded = {
        "input_ids": np.concatenate(([[1, 1]], ids), axis=1),
        "attention_mask": np.array([[0, 0, 1, 1, 1, 1]]),
        "position_ids": np.array([[0, 0, 0, 1, 2, 3]]),
    }
    (ours,), (theirs,) = (session.run(["logits"], feeds | given) for given in (plain, padded))
    np.testing.assert_allclose(ours, theirs[:, 2:], atol=1e-4)  # fp32, see parity.BOUNDS


@pytest.mark.parametrize("kind", ["sequence-classification", "token-classification", "question-answering"])
@pytest.mark.parametrize(
    "form", dict.fromkeys((variant, precision) for variant, precision, _ in FORMS), ids="-".join
)
@pytest.mark.parametrize("fields", [{}, MODERNBERT], ids=["bert", "modernbert"])
def test_every_head(fields: dict, kind, form: tuple, tmp_path: Path) -> None:
    labels = ("start", "end") if kind == "question-answering" else ("a", "b", "c")
    model = build_with_head(opinionated_model(dataclasses.replace(BERT, **fields)), Head(kind, labels)).eval()
    candidate = exported(model, tmp_path, options_for(model, *form))
    report = compare(reference_of(model, None, NOWHERE), candidate, BOUNDS[form[1]])
    require(report, "the graph")
    wanted = {"start_logits", "end_logits"} if kind == "question-answering" else {"logits"}
    assert report["outputs"].keys() == wanted | {"last_hidden_state", "cls_embedding", "sentence_embedding"}


@pytest.mark.parametrize("pooling", ["cls", "mean-normalised", "cls-normalised"])
def test_poolings(pooling, tmp_path: Path) -> None:
    model = opinionated_model(BERT)
    candidate = exported(model, tmp_path, GraphOptions(pooling=pooling))
    require(compare(reference_of(model, None, NOWHERE, pooling), candidate), "the graph")
    assert not compare(reference_of(model, None, NOWHERE), candidate)["passed"]  # the mean is something else


def test_the_first_bad_node_is_named(tmp_path: Path) -> None:
    """A bias near float16's end overflows where it is added, in the second block."""
    model = opinionated_model(BERT)
    with torch.no_grad():
        model.blocks["1"].mlp.up.bias.fill_(60_000.0)
        model.blocks["1"].mlp.up.weight.mul_(1e5)
    exported(model, tmp_path, GraphOptions("portable", "fp16"))
    message = first_bad_node(tmp_path / "model.onnx", model.config)
    assert message.startswith("the first of them is")
    graph = onnx.load(tmp_path / "model.onnx").graph
    node = next(node for node in graph.node if f"node {node.name} " in message)
    names = [name for name in node.input if name.startswith("blocks.1.mlp.up")]
    assert (
        names
        or any(name in " ".join(graph.node[-1].input) for name in node.output)
        or node.op_type in ("MatMul", "Add")
    )
    assert first_bad_node_of_a_good_one(tmp_path) == ""


def first_bad_node_of_a_good_one(path: Path) -> str:
    model = opinionated_model(GPT)
    exported(model, path, GraphOptions("portable", "fp16"))
    return first_bad_node(path / "model.onnx", model.config)


def test_a_weight_beyond_float16_is_refused() -> None:
    model = opinionated_model(BERT)
    with torch.no_grad():
        model.blocks["0"].mlp.down.weight[0, 0] = 1e5
    with pytest.raises(Refused, match="does not fit float16"):
        bert_graph(model, GraphOptions("portable", "fp16"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GraphOptions(opset=16), "opset 16 is not supported"),
        (GraphOptions(opset=25), "opset 25 is not supported"),
        (GraphOptions("tensorrt", "int8", 18, ranges={"x": 1.0}), "opset 18 is not supported"),
        (GraphOptions("portable", "int4"), "int4 is for a GPT and ONNX Runtime"),
    ],
)
def test_what_cannot_be_written_is_refused(options: GraphOptions, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        options.check("gpt")


def test_a_calibration_of_another_shape_is_refused() -> None:
    options = GraphOptions("portable", "int8", ranges={"blocks.0.attention.qkv": 1.0})
    with pytest.raises(Refused, match="does not know this layer"):
        bert_graph(opinionated_model(BERT), options)


def test_a_missing_fusion_is_refused(tmp_path: Path) -> None:
    """The check reads the optimised graph: one written without fused operators does not pass for one with."""
    model = opinionated_model(BERT)
    exported(model, tmp_path, GraphOptions(opset=20))
    _, operators = probe(model, tmp_path / "model.onnx", model.config)
    with pytest.raises(Refused, match="does not run this graph fused"):
        check_fusion(operators, model.config, GraphOptions(opset=24))


def test_nodes_may_have_several_outputs() -> None:
    graph = Graph()
    assert graph.node("Split", "x", out="y", outputs=3) == "y"
    assert list(graph._nodes[0].output) == ["y", "y:1", "y:2"]


@pytest.mark.parametrize("variant", ["onnxruntime", "portable"])
def test_int8_products_of_the_largest_numbers_do_not_saturate(variant: str, tmp_path: Path) -> None:
    """Pairs of products beyond 16 bits, in which a processor without VNNI adds them up unless it is told otherwise."""
    graph = Graph(GraphOptions(variant, "int8", ranges={"all": 1.0}))
    graph.input("x", onnx.TensorProto.FLOAT, ["rows", 64])
    graph.result(graph.product("x", "all", np.ones((32, 64), np.float32), None), "y", ["rows", 32])
    graph.save(tmp_path / "graph.onnx", {})
    (y,) = open_session(tmp_path / "graph.onnx", 1).run(None, {"x": np.ones((4, 64), np.float32)})
    np.testing.assert_allclose(y, 64, rtol=1e-5)
