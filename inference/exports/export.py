"""Exports a model as an ONNX artifact that has been compared with the torch model before it may exist.

An artifact of kind `onnx` holds model.onnx (and model.onnx.data above 1.8 GB), model.json, tokenizer.json and
parity.json: errors per output and per layer, what ONNX Runtime fused, what real text and a task say, and a
latency table unless that was not wanted.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.artifact import Input, check_free, create_artifact
from ...core.backend import BackendOptions
from ...core.errors import Refused, WrongUse
from ...models.config import GPTConfig, TransformerConfig, family_of
from ..graphs.calibration import calibrate, read_calibration
from ..graphs.graph_options import PLAIN, GraphOptions
from ..graphs.graph_probe import first_bad_node, layer_errors, optimised_operators
from ..graphs.onnx_blocks import grouped
from ..graphs.parity import BOUNDS, Bounds, Score, compare, compare_scores, require
from ..graphs.real_text import TextRows, compare_on_text, read_rows
from ..graphs.reference import Adapted, OptimumCausal, at_asked_positions, reference_of
from ..runtimes.backends import run_graph
from ..runtimes.bench import latency_table
from ..runtimes.devices import pick_device
from ..runtimes.loaded import Loaded
from ..runtimes.source import OpenedModel, open_model

if TYPE_CHECKING:
    from ...models.bert import BERT
    from ...models.gpt import GPT
    from ...models.heads import BERTWithHead

Report = dict[str, Any]


@dataclass(frozen=True)
class Judging:
    """What an export is judged by besides the sweep of shapes.

    `text`: a plain text file; int8 and int4 need it, and calibrate on one half of it unless `calibration`
    names an artifact. `score`: computes scores of a loaded model, higher is better. `bench`: measure latency.
    """

    text: Path | str | None = None
    calibration: Path | str | None = None
    score: Score | None = None
    bench: bool = True
    bounds: Bounds | None = None  # None: those of the precision
    device: str = "cpu"  # of the comparison, both sides


ALONE = Judging()


def export_onnx(
    path: Path | str,
    out: Path | str,
    graph_options: GraphOptions = PLAIN,
    judging: Judging = ALONE,
    overwrite: bool = False,
) -> Report:
    """Write the model at `path` as an ONNX artifact; returns what parity.json holds.

    Raises WrongUse for a graph that cannot be written and when text or calibration is missing, Refused when
    something differs from torch by more than its bound: then nothing is left at `out`.
    """
    check_free(out, overwrite)
    opened = open_model(path)
    options, rows, inputs = prepare(opened, graph_options, judging)
    with create_artifact(out, "onnx", inputs=[opened.input, *inputs], overwrite=overwrite) as draft:
        graph = draft.path / "model.onnx"
        nodes = write_described(opened, graph, options)
        report = judge(opened, graph, options, judging, rows)
        write_json(draft.path / "parity.json", report)
        facts = {"family": family_of(opened.model.config), "precision": options.precision, "nodes": nodes}
        facts |= {name: getattr(options, name) for name in ("variant", "opset", "names", "pooling")}
        draft.facts |= facts | parity_facts(report)
    return report


def prepare(
    opened: OpenedModel, options: GraphOptions, judging: Judging
) -> tuple[GraphOptions, TextRows | None, list[Input]]:
    """The options with the ranges that int8 needs, the rows of the text, and both as inputs of an artifact."""
    config = opened.model.config
    rows = None
    inputs = []
    if judging.text is not None:
        rows = read_rows(judging.text, opened.tokenizer, config.sequence_length)
        inputs.append(Input(rows.source, "foreign", rows.sha256))
    elif options.precision in ("int8", "int4"):
        why = "random ids show whether a graph is right; whether rounded weights are good enough shows on text alone"
        fix = "give a text file like the model's own: --text FILE"
        raise WrongUse(f"{options.precision} is judged on real text", where="--precision", why=why, fix=fix)
    ranges: Mapping[str, float] = {}
    if options.static and judging.calibration is not None:
        from ...core.artifact import input_record

        ranges = read_calibration(judging.calibration, opened.input)
        inputs.append(input_record(judging.calibration))
    elif options.static and rows is not None:
        ranges = calibrate(opened.model, rows)
    options = dataclasses.replace(options, ranges=ranges)
    options.check(family_of(config))
    return options, rows, inputs


def write_described(opened: OpenedModel, graph: Path, options: GraphOptions) -> int:
    """Write the graph with its model.json and tokenizer beside it; returns its number of nodes."""
    described: dict[str, Any] = {
        "family": family_of(opened.model.config),
        "config": opened.model.config.to_dict(),
    }
    if (head := getattr(opened.model, "head", None)) is not None and not callable(head):
        described["head"] = dataclasses.asdict(head)
    inside = {**described, "source": opened.input.hash, "precision": options.precision}
    nodes = write_graph(opened.model, graph, {"throughline": json.dumps(inside)}, options)
    write_json(graph.parent / "model.json", described)
    special = copy_tokenizer(opened, graph.parent)
    if options.names == "optimum" and isinstance(opened.model.config, GPTConfig):
        write_json(graph.with_name("genai_config.json"), genai_config(opened.model.config, special))
    return nodes


def genai_config(config: GPTConfig, special: Mapping[str, int]) -> Report:
    """What onnxruntime-genai reads beside a graph under optimum's names. Its type `llama` stands for any decoder
    with these inputs, learned positions included.
    """
    end = special.get("eos", 0)
    decoder = {
        "filename": "model.onnx",
        "head_size": config.head_size,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "num_hidden_layers": config.layers,
        "session_options": {"provider_options": []},
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "llama",
        "context_length": config.sequence_length,
        "vocab_size": config.vocab_size,
        "bos_token_id": special.get("bos", end),
        "eos_token_id": end,
        "pad_token_id": special.get("pad", end),
        "decoder": decoder,
    }
    search = {"max_length": config.sequence_length, "do_sample": False, "past_present_share_buffer": False}
    return {"model": model, "search": search}


def write_graph(
    model: "GPT | BERT | BERTWithHead",
    path: Path,
    metadata: dict[str, str],
    options: GraphOptions = PLAIN,
) -> int:
    """Write the graph of a module to `path`; returns the number of nodes."""
    from ..graphs.onnx_bert import bert_graph
    from ..graphs.onnx_gpt import gpt_graph

    if model.config.attention_pattern is not None:
        why = "the graphs look at the whole sequence, and the model was trained to look at a part"
        fix = "evaluate, generate and serve it with the torch backend"
        raise Refused(
            "a model with an attention pattern has no ONNX graph yet",
            where="attention_window",
            why=why,
            fix=fix,
        )
    writer: Any = gpt_graph if isinstance(model.config, GPTConfig) else bert_graph
    return writer(model, options).save(path, metadata)


def judge(
    opened: OpenedModel, graph: Path, options: GraphOptions, judging: Judging, rows: TextRows | None
) -> Report:
    """The parity report of a written graph. Raises Refused when something is above its bound."""
    bounds = judging.bounds or BOUNDS[options.precision]
    config = opened.model.config
    tokenizer = graph.with_name("tokenizer.json")
    kept = tokenizer if tokenizer.is_file() else None
    device = pick_device(judging.device)
    candidate = _candidate(opened, graph, kept, options, device)
    reference = reference_of(opened.model.to(device), kept, opened.input, options.pooling)
    report = compare(reference, candidate, bounds)
    report["precision"] = options.precision
    if rows is not None:
        report["text"] = compare_on_text(reference, candidate, rows, bounds)
    if judging.score is not None:
        report["scores"] = compare_scores(reference, candidate, judging.score, bounds)
    require(report, "the ONNX graph", lambda: first_bad_node(graph, config))
    report["latency"] = latency_table(reference) + latency_table(candidate) if judging.bench else []
    report["layers"] = layer_errors(opened.model.to("cpu"), graph, config)
    report["fused"] = check_fusion(graph, config, options)
    return report


def _candidate(
    opened: OpenedModel, graph: Path, tokenizer: Path | None, options: GraphOptions, device: str
) -> Loaded:
    """The graph behind the protocol of its family; under optimum's names it is asked for every position."""
    config = opened.model.config
    if options.names == "optimum" and isinstance(config, GPTConfig):
        from ..runtimes.onnx_session import open_session

        backend: Any = OptimumCausal(open_session(graph, device=device), config)
    else:
        backend = run_graph(graph, config, BackendOptions(device))
        if options.names == "optimum" and not hasattr(opened.model, "head"):
            backend = Adapted(backend, at_asked_positions)
    return Loaded(config, tokenizer, opened.input, backend)


def check_fusion(graph: Path, config: TransformerConfig, options: GraphOptions) -> dict[str, Any]:
    """How many of each fused operator ONNX Runtime's optimised graph holds, beside how many there should be.

    Raises Refused when one is missing. A graph of an opset without Attention, or for TensorRT, has none.
    """
    found = optimised_operators(graph)
    layers, expected = config.layers, {}
    fused = options.variant == "onnxruntime"
    if found["com.microsoft.Attention"] or found["com.microsoft.QAttention"]:
        kind = "QAttention" if options.precision == "int8" else "Attention"
        sums = 0 if options.half else 2 * layers  # in fp16 graphs norms stand apart from sums
        expected = {f"com.microsoft.{kind}": layers, "com.microsoft.SkipLayerNormalization": sums}
    elif grouped(config, options):
        expected = {"com.microsoft.GroupQueryAttention": layers}
    elif options.opset >= 23 and options.variant != "tensorrt" and options.names == "throughline":
        expected = {"Attention": layers} if options.opset >= 24 or not isinstance(config, GPTConfig) else {}
    if fused and options.precision == "int8":
        least = (3 if "com.microsoft.QAttention" in expected else 4) * layers
        expected["com.microsoft.DynamicQuantizeMatMul"] = least
    if options.precision == "int4":
        expected["com.microsoft.MatMulNBits"] = 4 * layers
    for name, count in expected.items():
        if found[name] < count:
            why = f"its optimised graph has {found[name]} x {name}, there should be {count}"
            fix = "install the onnxruntime that constraints.txt names"
            raise Refused("ONNX Runtime does not run this graph fused", where=graph, why=why, fix=fix)
    return {name: {"found": found[name], "expected": count} for name, count in expected.items()}


def parity_facts(report: Report) -> dict[str, Any]:
    """What a manifest says of a parity report."""
    facts: dict[str, Any] = {
        "parity_max_abs": max(summary["max_abs"] for summary in report["outputs"].values()),
        "parity_bound": report["bound"],
    }
    for name, keys in (("text", ("kl", "top1_agreement", "contested")), ("scores", ("difference",))):
        facts |= {f"{name}_{key}": report[name][key] for key in keys if name in report}
    return facts | ({"greedy_tokens": report["greedy_tokens"]} if "greedy_tokens" in report else {})


def copy_tokenizer(opened: OpenedModel, target: Path) -> dict[str, int]:
    """Copy tokenizer.json with a tokenizer_config.json that names its special tokens; returns their ids by
    our names.
    """
    if opened.tokenizer is None:
        return {}
    from ...data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(opened.tokenizer)
    if tokenizer.vocab_size > opened.model.config.vocab_size:
        raise WrongUse(
            "the tokenizer has more tokens than the model",
            where=opened.tokenizer,
            why=f"{tokenizer.vocab_size} > {opened.model.config.vocab_size}",
            fix="use the tokenizer it was trained with",
        )
    (target / "tokenizer.json").write_bytes(opened.tokenizer.read_bytes())
    texts = {i: text for text, i in tokenizer.vocab.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": opened.model.config.sequence_length,
    }
    config |= {f"{role}_token": texts[i] for role, i in tokenizer.special.items()}
    write_json(target / "tokenizer_config.json", config)
    return tokenizer.special


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small file of an artifact."""
    path.write_text(json.dumps(value, indent=1) + "\n")
