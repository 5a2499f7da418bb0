"""Small models of every family and the ways to a loaded graph that the tests of graphs share."""

from pathlib import Path

import numpy as np
import torch
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions, Span, on_host
from throughline.inference.graphs.graph_options import PLAIN, GraphOptions
from throughline.inference.graphs.onnx_bert import bert_graph
from throughline.inference.graphs.onnx_gpt import gpt_graph
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.source import Loaded
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

NOWHERE = Input("test", "foreign", "0")
GPT = GPTConfig(vocab_size=97, sequence_length=80, layers=2, width=32, heads=4)
BERT = BERTConfig(vocab_size=97, sequence_length=48, layers=2, width=32, heads=4)
LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "bias": False,
    "tied": False,
}
LATENT = LLAMA | {"kv_latent": 8, "head_width": 16, "rope_width": 4, "value_width": 8, "q_latent": 20}
SINKS = LLAMA | {"attention_sinks": True, "kv_heads": 2}
WINDOWS = LLAMA | {"kv_heads": 2, "attention_window": 9, "layer_pattern": "lg", "rope_local_theta": 500.0}
GEMMA = WINDOWS | {
    "norm_place": "around",
    "norm_from_one": True,
    "scaled_embeddings": True,
    "query_scalar": 2.0,
}
GEMMA |= {"activation": "gelu_tanh", "tied": True, "attention_softcap": 1.5, "logit_softcap": 3.0}
BLOOM = {"positions": "alibi", "embedding_norm": True}
MODERNBERT = {
    "positions": "rotary",
    "embedding_norm": True,
    "norm_first": True,
    "token_types": 0,
    "nsp": False,
}
MODERNBERT |= {"gated": True, "bias": False, "activation": "gelu", "output_bias": True, "pooler": "features"}
MODERNBERT |= {"attention_window": 5, "layer_pattern": "gl", "rope_theta": 400.0, "rope_local_theta": 90.0}


def opinionated_model(config, seed: int = 1):
    """Random weights large enough that a wrong mask or position changes the outputs in the first digit."""
    model = build(config, seed).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            if parameter.dim() == 2:
                parameter.mul_(8.0)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    return model


def exported(model, path: Path, options: GraphOptions = PLAIN, **saving) -> Loaded:
    """The model's graph, written to a directory and opened on one CPU thread."""
    graph = gpt_graph(model, options) if isinstance(model.config, GPTConfig) else bert_graph(model, options)
    graph.save(path / "model.onnx", {}, **saving)
    backend = run_graph(path / "model.onnx", model.config, BackendOptions("cpu", threads=1))
    return Loaded(model.config, None, NOWHERE, backend)


def read(backend, ids_BS, past_B, ask_BN, cache, first_row: int = 0) -> np.ndarray:
    """Logits (B, N, V) of a GPT after the tokens asked for, in a step of rows that hold so many tokens each."""
    spans = [
        Span(first_row + row, int(past), ids, len(ids)) for row, (ids, past) in enumerate(zip(ids_BS, past_B))
    ]
    logits = on_host(backend.step(spans, cache)).reshape(*ids_BS.shape, -1)
    return np.take_along_axis(logits, np.asarray(ask_BN)[..., None], 1)
