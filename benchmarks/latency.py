"""Latency on this CPU, one text or one token at a time, against transformers, OpenVINO and llama.cpp.

    python benchmarks/latency.py [--quick] [--threads 2]

BERT-Base, 1 x 128, and GPT-2 124M decoding at 128 tokens of context, both with random weights (latency does not
depend on them; what quantisation costs is judged on trained ones). `bert-fp32`, `bert-int8-default` (dynamic int8,
ONNX Runtime) and `bert-int8-best` (int8 with fixed scales, OpenVINO), `gpt-fp32` and `gpt-quantised` (q8_0) are
against transformers as it comes (sdpa, fp32, inference mode). `bert-int8-vs-openvino` is against a model that
OpenVINO's own NNCF quantised, where that is installed. `gpt-vs-llamacpp-*` is our generation loop against
llama.cpp's C interface called directly on the same files. Decode also prints the share of the memory bandwidth,
measured here, that its weights alone take.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import Claim, claim, finish, paired, parser
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions
from throughline.inference.backends import onnx_backend
from throughline.inference.calibration import calibrate
from throughline.inference.export import write_graph
from throughline.inference.generation import Request
from throughline.inference.gguf_writer import write_gguf
from throughline.inference.graph_options import GraphOptions
from throughline.inference.real_text import TextRows
from throughline.inference.slots import SlotBatch
from throughline.models.init import build
from throughline.models.presets import preset

NOWHERE = Input("", "model", "")
BERT_TOKENS, CONTEXT = 128, 128
GOALS = {
    "bert-fp32": 1.25,
    "bert-int8-default": 3.5,
    "bert-int8-best": 5.0,
    "gpt-fp32": 1.7,
    "gpt-quantised": 7.0,
}
VS_LLAMA, VS_OPENVINO = 0.97, 1.0
Call = Callable[[], object]


def median_ms(call: Call, calls: int) -> Callable[[], float]:
    """A measurement: the median wall milliseconds of some calls, after two that warm up."""
    call(), call()

    def measure() -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return float(np.median(times)) * 1e3

    return measure


def bert_calls(folder: Path, threads: int) -> dict[str, Call]:
    """Every way to read one text, as a call."""
    from transformers import BertConfig, BertModel

    config = preset("bert-base")
    model = build(config, 0).eval()
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, BERT_TOKENS))
    rest = (np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((1, 0), np.int64))
    rows = TextRows("random ids", "", np.repeat(ids, 4, axis=0), None, frozenset())
    calls: dict[str, Call] = {}
    for name, options, runtime in (
        ("fp32", GraphOptions("onnxruntime"), "onnxruntime"),
        ("int8-default", GraphOptions("onnxruntime", "int8"), "onnxruntime"),
        ("int8-best", GraphOptions("portable", "int8", opset=20, ranges=calibrate(model, rows)), "openvino"),
    ):
        if runtime == "openvino" and importlib.util.find_spec("openvino") is None:
            print("bert-int8-best: OpenVINO is not installed")
            continue
        (folder / name).mkdir()
        write_graph(model, folder / name / "model.onnx", {}, options)
        how = BackendOptions("cpu", runtime=runtime, threads=threads)
        encoder = onnx_backend(
            folder / name / "model.onnx", config, None, NOWHERE, how, options.precision
        ).encoder
        assert encoder is not None
        calls[name] = lambda encoder=encoder: encoder.forward(ids, *rest)
    theirs = BertModel(BertConfig(attn_implementation="sdpa")).eval()
    tensor = torch.from_numpy(ids)

    def transformers() -> object:
        with torch.inference_mode():
            return theirs(tensor).last_hidden_state

    calls["transformers"] = transformers
    if importlib.util.find_spec("nncf") and importlib.util.find_spec("openvino"):
        calls["nncf"] = nncf_call(theirs, tensor, threads)
    return calls


def nncf_call(model: torch.nn.Module, ids: torch.Tensor, threads: int) -> Call:
    """OpenVINO's own path: its converter, its quantiser, its latency hint."""
    import nncf
    import openvino

    converted = openvino.convert_model(model, example_input={"input_ids": ids})
    kind = nncf.ModelType.TRANSFORMER
    feeds = nncf.Dataset([{"input_ids": ids.numpy()}])
    quantised = nncf.quantize(converted, feeds, model_type=kind)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(quantised, "CPU", settings).create_infer_request()
    return lambda: request.infer({"input_ids": ids.numpy()})


def gpt_transformers() -> Call:
    """One token with transformers' cache, cut back to the same context each time."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")).eval()
    ids = torch.randint(0, 50257, (1, CONTEXT))
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
            batch.add(Request(prompt, 256))
            batch.step()
        return batch.step()

    return decode


def llama_decode(path: Path, threads: int) -> Call:
    """llama.cpp's own interface and nothing else: one token, its logits' arg-max."""
    import llama_cpp
    from throughline.inference.llama_backend import LlamaContext, open_model

    library, model = open_model(path, "cpu")
    settings = {"cache_type": 0} if "f32" in path.name else {}
    context = LlamaContext(library, model, 1, 1024, threads, **settings)
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    ids = np.random.default_rng(0).integers(0, vocab, CONTEXT)
    context.fill([(int(token), place, 0, False) for place, token in enumerate(ids)])
    context.run()
    state = {"place": CONTEXT, "token": 5}

    def decode() -> object:
        if state["place"] == CONTEXT + 256:
            library.llama_memory_seq_rm(context.memory, 0, CONTEXT, -1)
            state["place"] = CONTEXT
        context.fill([(state["token"], state["place"], 0, True)])
        context.run()
        state["place"] += 1
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context.pointer), (vocab,))
        state["token"] = int(logits.argmax())
        return state["token"]

    return decode


def bandwidth_gb_s(threads: int) -> float:
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
    arguments = options.parse_args()
    threads, pairs, calls = arguments.threads, 3 if arguments.quick else 5, 5 if arguments.quick else 30
    torch.set_num_threads(threads)
    claims: list[Claim] = []

    def compare(name: str, ours: Call, theirs: Call, peer: str, goal: float) -> float:
        found = paired(median_ms(ours, calls), median_ms(theirs, calls), pairs)
        claims.append(claim(name, *found, peer=peer, unit="ms", better="lower", goal=goal))
        print(f"{name}: {claims[-1].ours:.2f} ms, {peer} {claims[-1].theirs:.2f} ms", flush=True)
        return claims[-1].ours

    facts: dict[str, object] = {"threads": threads, "bert": "1 x 128", "gpt_context": CONTEXT}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bert = bert_calls(folder, threads)
        for kind in ("fp32", "int8-default", "int8-best"):
            if kind in bert:
                peer = "transformers fp32 sdpa"
                compare(f"bert-{kind}", bert[kind], bert["transformers"], peer, GOALS[f"bert-{kind}"])
        if "nncf" in bert and "int8-best" in bert:
            compare(
                "bert-int8-vs-openvino", bert["int8-best"], bert["nncf"], "OpenVINO + NNCF int8", VS_OPENVINO
            )
        else:
            print("bert-int8-vs-openvino: nncf or openvino is not installed")
            facts["missing"] = "nncf"
        del bert
        gpt_claims(folder, threads, compare, facts)
    finish(
        "latency", claims, packages=["transformers", "onnxruntime", "openvino", "llama-cpp-python"], **facts
    )


def gpt_claims(folder: Path, threads: int, compare: Callable[..., float], facts: dict[str, object]) -> None:
    """Decode: ONNX Runtime and llama.cpp behind our loop, against transformers and llama.cpp alone."""
    config = preset("gpt2-124m")
    model = build(config, 0).eval()
    graph = folder / "gpt.onnx"
    write_graph(model, graph, {}, GraphOptions("onnxruntime"))
    how = BackendOptions("cpu", threads=threads)
    ort = onnx_backend(graph, config, None, NOWHERE, how).causal
    theirs = gpt_transformers()
    speed = bandwidth_gb_s(threads)
    shares: dict[str, float] = {}
    ours_ms = compare(
        "gpt-fp32-onnxruntime", our_decode(ort), theirs, "transformers fp32 sdpa", GOALS["gpt-fp32"]
    )
    shares["onnxruntime fp32"] = config.parameter_count() * 4 / ours_ms / 1e6 / speed
    if importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None:
        print("gpt-fp32, gpt-quantised, gpt-vs-llamacpp: llama-cpp-python or gguf is not installed")
    else:
        from throughline.inference.llama_backend import LlamaCausal

        for precision in ("f32", "q8_0", "q4_0"):
            file = folder / f"gpt-{precision}.gguf"
            write_gguf(model, None, file, precision)
            ours = our_decode(LlamaCausal(file, config, threads, "cpu", precision))
            claim_name = {"f32": "gpt-fp32", "q8_0": "gpt-quantised"}.get(precision)
            if claim_name is not None:
                compare(claim_name, ours, theirs, "transformers fp32 sdpa", GOALS[claim_name])
            ours_ms = compare(
                f"gpt-vs-llamacpp-{precision}", ours, llama_decode(file, threads), "llama.cpp", VS_LLAMA
            )
            shares[f"llama.cpp {precision}"] = file.stat().st_size / ours_ms / 1e6 / speed
    print(f"memory bandwidth {speed:.1f} GB/s; decode reads its weights at")
    for name, share in shares.items():
        print(f"  {share:4.0%} of it: {name}")
    facts |= {
        "bandwidth_gb_s": round(speed, 1),
        "share_of_bandwidth": {k: round(v, 3) for k, v in shares.items()},
    }


if __name__ == "__main__":
    main()
