"""What TensorRT-RTX makes of the graphs for compute capability 7.5 (a T4's), compiled on this CPU and not run.

Random weights: compilers do not look at them. The bounds on kernels are those of the best graph forms found
with the pinned version; every kernel is a launch of about 2 us and a trip to memory.
"""

import dataclasses
from pathlib import Path

import pytest
from test_families import DECODERS, ENCODERS
from throughline.inference.exports.export_engine import (
    Profile,
    build_engine,
    engine_facts,
    export_engine,
    kernels_of_log,
)
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.onnx_bert import bert_graph
from throughline.inference.graphs.onnx_gpt import gpt_graph
from throughline.inference.runtimes.tensorrt_backend import load_library
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

pytest.importorskip("tensorrt_rtx", reason="pip install 'throughline[tensorrt-rtx]'")

BERT, GPT = BERTConfig(vocab_size=500), GPTConfig(vocab_size=500)
ENCODE, DECODE = Profile((1, 1, 8), (1, 128, 512)), Profile((1, 1, 1), (1, 1, 1))


def compiled(config, precision: str, profile: Profile, path: Path) -> tuple[dict, int]:
    model = build(config)
    options = GraphOptions("tensorrt", precision, ranges={name: 4.0 for name, _ in model.named_modules()})
    (gpt_graph if isinstance(config, GPTConfig) else bert_graph)(model, options).save(path / "m.onnx", {})
    library = load_library("tensorrt_rtx")
    engine, messages = build_engine(library, path / "m.onnx", config, [profile], "7.5")
    return engine_facts(kernels_of_log(messages), config, precision), len(engine)


@pytest.mark.parametrize(
    ("config", "precision", "profile", "most"),
    [(BERT, "fp16", ENCODE, 9), (BERT, "int8", ENCODE, 10), (GPT, "fp16", DECODE, 8)],
    ids=["bert-fp16", "bert-int8", "gpt-decode"],
)
@pytest.mark.parametrize("layers", [4, pytest.param(12, marks=pytest.mark.slow)], ids=["4-layers", "full"])
def test_blocks_compile_for_a_t4(config, precision, profile, most, layers: int, tmp_path: Path) -> None:
    """BERT-Base and GPT-2 124M blocks; with `slow` all 12 layers and the whole vocabulary."""
    vocab_size = type(config)().vocab_size if layers == 12 else 500
    config = dataclasses.replace(config, layers=layers, vocab_size=vocab_size)
    facts, size = compiled(config, precision, profile, tmp_path)
    assert facts["kernels_per_layer"] <= most and facts["fused_attention"] == layers
    assert facts["kernels"] <= most * layers + 13  # embeddings, mask and heads
    assert set(facts["product_types"]) == {"Half" if precision == "fp16" else "Int8"}
    # weights in 2 bytes or 1, the output matrix in 2; a tied table stands twice in the engine
    width = 1 if precision == "int8" else 2
    least = width * layers * config.block_matrix_parameters() + 4 * config.vocab_size * config.width
    assert 0.9 * least < size < 1.25 * least


def test_grouped_queries_are_fused(tmp_path: Path) -> None:
    llama = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False}
    config = dataclasses.replace(GPT, layers=2, kv_heads=4, tied=False, **llama)
    facts, _ = compiled(config, "fp16", DECODE, tmp_path)
    assert facts["fused_attention"] == 2 and facts["kernels_per_layer"] <= 12


DENSE = {kind: fields for kind, fields in DECODERS.items() if not {"experts", "kv_latent"} & fields.keys()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DENSE, *ENCODERS])
def test_every_dense_family_compiles_for_a_t4(kind: str, tmp_path: Path) -> None:
    """Two layers of a family, wide enough for products that are kernels of their own."""
    fields = DENSE.get(kind) or ENCODERS[kind]
    wide = {
        "vocab_size": 512,
        "sequence_length": 512,
        "width": 768,
        "heads": 12,
        "mlp_width": 2048,
        "layers": 2,
    }
    wide |= {"head_width": 64} if "head_width" in fields else {}
    wide |= {"query_scalar": 64} if "query_scalar" in fields else {}
    wide |= {"rope_width": 16} if "rope_width" in fields else {}
    family, profile = (GPTConfig, DECODE) if kind in DENSE else (BERTConfig, ENCODE)
    facts, _ = compiled(family.from_dict(fields | wide), "fp16", profile, tmp_path)
    assert set(facts["product_types"]) == {"Half"} and facts["kernels_per_layer"] <= 18
    assert facts["fused_attention"] == (0 if kind == "gemma2" else 2)  # scores with a cap are two products


def test_an_engine_is_an_artifact(bert_dir: Path, tmp_path: Path) -> None:
    from throughline.core.artifact import verify_artifact
    from throughline.inference.exports.export import Judging

    report = export_engine(bert_dir, tmp_path / "out", "tensorrt_rtx", judging=Judging(bench=False))
    facts = verify_artifact(tmp_path / "out").facts
    assert facts["standing"] == "compiled by TensorRT-RTX, not run" and facts["compute_capability"] == "7.5"
    assert facts["library_version"].startswith("1.") and facts["gpu"] is None
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "engine.plan",
        "parity.json",
        "tokenizer.json",
    }
    assert not list((tmp_path / "out").glob("*.onnx")) and report["engine"]["fused_attention"] == 2
