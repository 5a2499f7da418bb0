"""Latency on this CPU, one text or one token at a time, against transformers, OpenVINO and llama.cpp.

    python benchmarks/latency.py [--quick] [--threads 2] [--parts bert,openvino,gpt,llamacpp]

Each part ends within ten minutes. BERT-Base reads 1 x 128, GPT-2 124M decodes at 128 tokens of context, both with
random weights (latency does not depend on them; what quantisation costs is judged on trained ones). Against
transformers as it comes (sdpa, fp32, inference mode): `bert-fp32`, `bert-int8-default` (dynamic int8, ONNX Runtime),
`bert-int8-best` (fixed scales, OpenVINO), `gpt-fp32`, `gpt-quantised` (the fastest: q4_0) and `gpt-quantised-q8_0`.
`bert-int8-vs-openvino` is against a model that OpenVINO's own NNCF quantised, where that is installed.
`gpt-vs-llamacpp-*` is our generation loop against llama.cpp's C interface called directly on the same weights, in
processor time of one thread: what our loop adds. Decode
also prints the share of the memory bandwidth, measured here, at which it reads its weights. The two sides take turns
every few calls. `--quick` takes two layers of each model, 8,192 tokens in GPT-2's vocabulary and one pair of a few
calls, the same for both sides.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, claim, finish, paired, parser
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions
from throughline.inference.exports.export import write_graph
from throughline.inference.exports.gguf_export import write_gguf
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.real_text import TextRows, calibrate
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.llama_backend import LlamaCausal, LlamaContext
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch
from throughline.models.config import ModelConfig, preset
from throughline.models.init import build

NOWHERE = Input("", "model", "")
BERT_TOKENS, CONTEXT = 128, 128
ANSWER = 32  # tokens decoded before the context is cut back
PARTS = ("bert", "openvino", "gpt", "llamacpp")
PEER = "transformers fp32 sdpa"
GOALS = {
    "bert-fp32": 1.25,
    "bert-int8-default": 3.5,
    "bert-int8-best": 5.0,
    "gpt-fp32": 1.7,
    "gpt-quantised": 7.0,
    "gpt-quantised-q8_0": 7.0,
}
VS_LLAMA, VS_OPENVINO = 0.97, 1.0
QUICK_LAYERS, QUICK_VOCABULARY = 2, 8192
Call = Callable[[], object]
Compare = Callable[..., float]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Models:
    """The shapes that both sides build: BERT-Base and GPT-2 124M, or smaller ones."""

    bert: ModelConfig
    gpt: ModelConfig

    @staticmethod
    def of(quick: bool) -> "Models":
        if not quick:
            return Models(preset("bert-base"), preset("gpt2-124m"))
        small = preset("gpt2-124m", layers=QUICK_LAYERS, vocab_size=QUICK_VOCABULARY)
        return Models(preset("bert-base", layers=QUICK_LAYERS), small)


def median_ms(call: Call, calls: int, clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A measurement: the median milliseconds of some calls by a clock, after two that warm up."""
    call(), call()

    def measure() -> float:
        times = []
        for _ in range(calls):
            start = clock()
            call()
            times.append(clock() - start)
        return float(np.median(times)) * 1e3

    return measure


def bert_model(folder: Path, name: str, threads: int, config: ModelConfig) -> Call:
    """Ours: one text of random ids, its hidden states and embedding."""
    model = build(config, 0).eval()
    ids = bert_ids(config)
    rest = (np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((1, 0), np.int64))
    runtime = "openvino" if name == "int8-best" else "onnxruntime"
    options = GraphOptions("onnxruntime", "fp32" if name == "fp32" else "int8")
    if name == "int8-best":
        rows = TextRows("random ids", "", np.repeat(ids, 4, axis=0), None)
        options = GraphOptions("portable", "int8", opset=20, ranges=calibrate(model, rows))
    (folder / name).mkdir()
    graph = folder / name / "model.onnx"
    write_graph(model, graph, {}, options)
    how = BackendOptions("cpu", runtime=runtime, threads=threads)
    encoder = run_graph(graph, config, how, options.precision)
    return lambda: encoder.forward(ids, *rest)


def bert_ids(config: ModelConfig) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, (1, BERT_TOKENS))


def bert_transformers(config: ModelConfig) -> tuple[torch.nn.Module, Call]:
    """transformers' model and one text through it."""
    from transformers import BertConfig, BertModel

    shape: dict[str, Any] = {"num_hidden_layers": config.layers, "attn_implementation": "sdpa"}
    model, ids = BertModel(BertConfig(**shape)).eval(), torch.from_numpy(bert_ids(config))

    def read() -> object:
        with torch.inference_mode():
            return model(ids).last_hidden_state

    return model, read


def nncf_call(model: torch.nn.Module, ids: torch.Tensor, threads: int) -> Call:
    """OpenVINO's own path: its converter, its quantiser, its latency hint."""
    import nncf
    import openvino

    converted = openvino.convert_model(model, example_input={"input_ids": ids})
    kind = nncf.ModelType.TRANSFORMER
    feeds = nncf.Dataset([{"input_ids": ids.numpy()}])
    quantised = nncf.quantize(converted, feeds, model_type=kind)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    settings |= {"INFERENCE_PRECISION_HINT": "f32"}  # of what is not int8: as ours
    request = openvino.Core().compile_model(quantised, "CPU", settings).create_infer_request()
    return lambda: request.infer({"input_ids": ids.numpy()})


def gpt_transformers(config: ModelConfig) -> Call:
    """One token with transformers' cache, cut back to the same context each time."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"attn_implementation": "sdpa"}
    shape |= {"n_layer": config.layers, "vocab_size": config.vocab_size}
    if config.vocab_size <= GPT2Config().eos_token_id:
        shape |= {"bos_token_id": None, "eos_token_id": None}  # they lie outside a small vocabulary
    model = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    ids = torch.randint(0, config.vocab_size, (1, CONTEXT))
    with torch.inference_mode():
        cache = model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values

    def decode() -> object:
        with torch.inference_mode():
            logits = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
            cache.crop(-1)
            return int(logits[0, -1].argmax())

    return decode


def our_decode(backend) -> Call:
    """One step of the batch that serving uses: choose, book-keep, stream, all of it."""
    prompt = np.random.default_rng(0).integers(0, backend.vocab_size, CONTEXT)
    batch = SlotBatch(backend, lambda ids: "", 1, prefix_bytes=0)

    def decode() -> object:
        if not batch.busy:
            batch.add(Job(prompt, ANSWER))
            batch.step()
        return batch.step()

    return decode


def llama_decode(backend: LlamaCausal, threads: int) -> Call:
    """llama.cpp's own interface and nothing else: one token, its logits' arg-max. The weights are those that our
    side has in memory: a second copy lies on other pages, which is worth some per cent to either side by luck.
    """
    library, model = backend.library, backend.model
    settings = {"type_k": 0, "type_v": 0} if backend.dtype == "f32" else {}
    context = LlamaContext(library, model, 1, backend.context, threads, **settings)
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    ids = np.random.default_rng(0).integers(0, vocab, CONTEXT)
    context.run([(int(token), place, 0, False) for place, token in enumerate(ids)])
    state = {"place": CONTEXT, "token": 5}

    def decode() -> object:
        if state["place"] == CONTEXT + ANSWER:
            library.llama_memory_seq_rm(context.memory, 0, CONTEXT, -1)
            state["place"] = CONTEXT
        context.run([(state["token"], state["place"], 0, True)])
        state["place"] += 1
        logits = np.ctypeslib.as_array(library.llama_get_logits(context.pointer), (vocab,))
        state["token"] = int(logits.argmax())
        return state["token"]

    return decode


def bert_part(folder: Path, threads: int, compare: Compare, models: Models) -> Facts:
    """Three precisions against transformers."""
    _, theirs = bert_transformers(models.bert)
    for kind in ("fp32", "int8-default", "int8-best"):
        if kind == "int8-best" and (missing := absent("openvino")):
            return missing
        goal = GOALS[f"bert-{kind}"]
        compare(f"bert-{kind}", bert_model(folder, kind, threads, models.bert), theirs, PEER, goal)
    return {}


def openvino_part(folder: Path, threads: int, compare: Compare, models: Models) -> Facts:
    """int8 with our scales against int8 of OpenVINO's own quantiser, both run by OpenVINO."""
    if missing := absent("openvino", "nncf"):
        return missing
    peer, ids = bert_transformers(models.bert)[0], torch.from_numpy(bert_ids(models.bert))
    theirs = nncf_call(peer, ids, threads)
    ours = bert_model(folder, "int8-best", threads, models.bert)
    compare("bert-int8-vs-openvino", ours, theirs, "OpenVINO + NNCF int8", VS_OPENVINO)
    return {}


def gpt_part(folder: Path, threads: int, compare: Compare, models: Models) -> Facts:
    """Decode with ONNX Runtime and llama.cpp behind our loop, against transformers."""
    config = models.gpt
    model, theirs, speed = build(config, 0).eval(), gpt_transformers(config), bandwidth_gb_s()
    read = {}
    for precision, name in (("fp32", "gpt-fp32-onnxruntime"), ("int8", "gpt-int8-onnxruntime")):
        graph = folder / f"gpt-{precision}.onnx"
        write_graph(model, graph, {}, GraphOptions("onnxruntime", precision))
        ours = run_graph(graph, config, BackendOptions("cpu", threads=threads))
        milliseconds = compare(name, our_decode(ours), theirs, PEER, None)
        read[f"onnxruntime {precision}"] = graph.stat().st_size / milliseconds / 1e6
    if not (missing := absent("llama_cpp", "gguf")):
        named = {"f32": "gpt-fp32", "q8_0": "gpt-quantised-q8_0", "q4_0": "gpt-quantised"}
        for precision, name in named.items():
            file = gguf_file(folder, model, precision)
            ours = our_decode(LlamaCausal(file, config, threads, "cpu", precision))
            milliseconds = compare(name, ours, theirs, PEER, GOALS.get(name))
            read[f"llama.cpp {precision}"] = file.stat().st_size / milliseconds / 1e6
    print(f"memory bandwidth {speed:.1f} GB/s; decode reads its weights at")
    for name, rate in read.items():
        print(f"  {rate / speed:4.0%} of it: {name}")
    shares = {name: round(rate / speed, 3) for name, rate in read.items()}
    return {"bandwidth_gb_s": round(speed, 1), "share_of_bandwidth": shares} | missing


def llamacpp_part(folder: Path, threads: int, compare: Compare, models: Models) -> Facts:
    """Our generation loop over llama.cpp against llama.cpp's C interface, on the same weights: processor time of one
    thread, because what is asked is what our loop adds.
    """
    if missing := absent("llama_cpp", "gguf"):
        return missing
    config = models.gpt
    model = build(config, 0).eval()
    for precision in ("f32", "q8_0", "q4_0"):
        file = gguf_file(folder, model, precision)
        backend = LlamaCausal(file, config, 1, "cpu", precision)
        sides = (our_decode(backend), llama_decode(backend, 1))
        name = f"gpt-vs-llamacpp-{precision}"
        compare(name, *sides, "llama.cpp", VS_LLAMA, "CPU ms, one thread", time.process_time)
    return {}


def gguf_file(folder: Path, model: torch.nn.Module, precision: str) -> Path:
    file = folder / f"gpt-{precision}.gguf"
    if not file.exists():
        write_gguf(model, None, file, precision)
    return file


def absent(*modules: str) -> Facts:
    """Says which of the peer's modules are not installed; empty when all are."""
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    if names:
        print(f"left out: {', '.join(names)} not installed")
    return {"missing": names} if names else {}


def bandwidth_gb_s() -> float:
    """What reading memory in a row reaches here: the sum of 512 MiB, the best of five."""
    values = torch.ones(1 << 27)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--parts", default=",".join(PARTS), help="parts to measure")
    options.add_argument("--pairs", type=int, default=15, help="paired measurements")
    arguments = options.parse_args()
    threads, pairs, calls = (
        arguments.threads,
        1 if arguments.quick else arguments.pairs,
        5 if arguments.quick else 10,
    )
    models = Models.of(arguments.quick)
    torch.set_num_threads(threads)
    claims: list[Claim] = []

    def compare(
        name: str,
        ours: Call,
        theirs: Call,
        peer: str,
        goal: float | None,
        unit: str = "ms",
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        found = paired(median_ms(ours, calls, clock), median_ms(theirs, calls, clock), pairs)
        claims.append(claim(name, *found, peer=peer, unit=unit, better="lower", goal=goal))
        print(f"{name}: {claims[-1].ours:.2f} ms, {peer} {claims[-1].theirs:.2f} ms", flush=True)
        return claims[-1].ours

    measures = dict(zip(PARTS, (bert_part, openvino_part, gpt_part, llamacpp_part), strict=True))
    details: dict[str, object] = {"threads": threads, "bert": "1 x 128", "gpt_context": CONTEXT}
    for part in arguments.parts.split(","):
        with tempfile.TemporaryDirectory() as name:
            details |= {
                f"{part}_{key}": value
                for key, value in measures[part](Path(name), threads, compare, models).items()
            }
    packages = ["transformers", "onnxruntime", "openvino", "nncf", "llama-cpp-python"]
    finish("latency", claims, packages=packages, details=details)


if __name__ == "__main__":
    main()
