"""Exports a model as an artifact that has been compared with the torch model before it may exist.

Every target goes one way: `exports` opens the model and the artifact, the target writes its files, `judge` compares
them with the torch model, and what it says is parity.json. An artifact of kind `onnx` holds model.onnx (and
model.onnx.data above 1.8 GB), model.json, tokenizer.json and parity.json.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime

from ...core.artifact import Draft, Input, check_free, create_artifact, input_record
from ...core.backend import BackendOptions
from ...core.errors import Refused, WrongUse
from ...core.files import from_template
from ...models.bert import BERT, Head
from ...models.config import GPTConfig, family_of
from ...models.huggingface import to_huggingface
from ...models.init import build_with_head
from ...models.sentence import MEAN, Sentence, embeds, read_sentence
from ..graphs import parity
from ..graphs.graph_options import PLAIN, GraphOptions, Pooling
from ..graphs.graph_probe import check_fusion, first_bad_node, probe
from ..graphs.onnx_bert import bert_graph
from ..graphs.onnx_blocks import grouped
from ..graphs.onnx_gpt import gpt_graph
from ..graphs.real_text import TextRows, calibrate, compare_on_text, read_calibration, read_rows
from ..runtimes.backends import run_graph
from ..runtimes.bench import latency_table
from ..runtimes.onnx_session import open_session
from ..runtimes.source import Loaded, OpenedModel, open_model, pick_device

Report = dict[str, Any]


@dataclass(frozen=True)
class Judging:
    """What an export is judged by besides the sweep of shapes."""

    text: Path | str | None = None  # plain; int8 and int4 need it, and calibrate on one half of it
    calibration: Path | str | None = None  # an artifact, instead of that half
    score: parity.Score | None = None  # of a loaded model, higher is better
    bench: bool = True  # measure latency
    bounds: parity.Bounds | None = None  # None: those of the precision
    device: str = "cpu"  # of the comparison, both sides


ALONE = Judging()


@dataclass
class Export:
    """An export on its way: the model, the artifact that is being written, and what was found out."""

    opened: OpenedModel
    draft: Draft
    judging: Judging
    device: str
    rows: TextRows | None
    sentence: Sentence  # how the directory embeds
    report: Report = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.draft.path

    def reference(self, pooling: Pooling = "mean") -> Loaded:
        """The torch model in float32 on the device of the comparison."""
        model = self.opened.model.to(self.device)
        return parity.reference_of(model, self.tokenizer, self.opened.input, pooling)

    def keep_sentence(self) -> None:
        """What becomes of a text before the model, beside the export."""
        if self.sentence != MEAN:
            config = self.opened.model.config
            self.sentence.write(self.folder, config.width, config.sequence_length)

    @property
    def tokenizer(self) -> Path | None:
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None


def exports(kind: str) -> Callable[[Callable[..., None]], Callable[..., Report]]:
    """Of a function that fills an `Export`, one that exports `path` to `out` as this kind of artifact (`_exported`)."""
    return lambda fill: partial(_exported, kind, fill)


def _exported(
    kind: str,
    fill: Callable[..., None],
    path: Path | str,
    out: Path | str,
    *given: Any,
    judging: Judging = ALONE,
    overwrite: bool = False,
    **named: Any,
) -> Report:
    """Fill an artifact from the model at `path`, with what `fill` takes besides; returns what parity.json holds."""
    check_free(out, overwrite)
    device = pick_device(judging.device)
    opened = open_model(path)
    length, text, inputs = opened.model.config.sequence_length, judging.text, [opened.input]
    rows = None if text is None else read_rows(text, opened.tokenizer, length)
    if rows is not None:
        inputs.append(Input(rows.source, "foreign", rows.sha256))
    directory = Path(opened.input.path)
    sentence = read_sentence(directory)
    reads = isinstance(opened.model.config, GPTConfig) and embeds(directory)
    if kind != "model" and (reads or sentence.pooling == "last"):
        what, fix = "a model that embeds like this runs in torch alone", "export it with --to huggingface"
        raise Refused(what, where=path, why="it is a decoder, or pools by the last token", fix=fix)
    with create_artifact(out, kind, inputs=inputs, overwrite=overwrite) as draft:
        export = Export(opened, draft, judging, device, rows, sentence)
        fill(export, *given, **named)
        write_json(draft.path / "parity.json", export.report)
        draft.facts = {"family": family_of(opened.model.config)} | draft.facts | _parity_facts(export.report)
    return export.report


def judge(
    export: Export,
    reference: Loaded,
    backend: Any,
    bounds: parity.Bounds,
    what: str,
    cases: list[parity.Case] | None = None,
    bad_node: Callable[[], str] = lambda: "",
) -> None:
    """Compare what runs an export with the torch model. Raises Refused, by this name, for what is above its bound."""
    judging, report, opened = export.judging, export.report, export.opened
    bounds = judging.bounds or bounds
    candidate = Loaded(opened.model.config, export.tokenizer, opened.input, backend)
    report |= parity.compare(reference, candidate, bounds, cases)
    if export.rows is not None:
        report["text"] = compare_on_text(reference, candidate, export.rows, bounds)
    if judging.score is not None:
        report["scores"] = parity.compare_scores(reference, candidate, judging.score, bounds)
    parity.require(report, what, bad_node)
    timed = {one.backend.name: one for one in (reference, candidate) if judging.bench}
    report["latency"] = [row for loaded in timed.values() for row in latency_table(loaded)]


@exports("onnx")
def export_onnx(export: Export, options: GraphOptions = PLAIN) -> None:
    """An ONNX artifact. Raises WrongUse for what cannot be written and missing text, Refused beyond a bound."""
    nodes = write_judged(export, options)
    export.keep_sentence()
    facts = {name: getattr(options, name) for name in ("precision", "variant", "opset", "names")}
    export.draft.facts |= facts | {"nodes": nodes, "onnxruntime": onnxruntime.__version__}


def write_judged(export: Export, options: GraphOptions) -> int:
    """Write model.onnx, what describes it and the tokenizer, and judge it; returns its number of nodes."""
    encoder: Any = getattr(export.opened.model, "encoder", export.opened.model)
    if (options.pooling or options.outputs == "embedding") and not isinstance(encoder, BERT):
        where = "--pooling" if options.pooling else "--outputs"
        raise WrongUse("a GPT has no embedding", where=where, fix="leave it out")
    if options.outputs == "embedding":  # the encoder alone
        export.opened = export.opened._replace(model=build_with_head(encoder, Head("embedding", ())).eval())
    opened, folder, graph = export.opened, export.folder, export.folder / "model.onnx"
    config, described = opened.model.config, description(opened.model)
    pooling = options.pooling or export.sentence.name
    options = dataclasses.replace(calibrated(export, options), pooling=pooling)
    options.check(family_of(config))
    inside = {**described, "source": opened.input.hash, "precision": options.precision}
    nodes = write_graph(opened.model, graph, {"throughline": json.dumps(inside)}, options)
    write_json(folder / "model.json", described)
    special = copy_tokenizer(opened, folder)
    export.draft.facts["pooling"] = pooling
    if options.names == "optimum":
        with suppress(Refused):  # a shape that Hugging Face's classes do not express has no config.json
            write_json(folder / "config.json", to_huggingface(opened.model)[0])
    backend: Any
    if options.names == "optimum" and isinstance(config, GPTConfig):
        (folder / "genai_config.json").write_text(genai_config(config, special, options))
        backend = parity.OptimumCausal(open_session(graph, device=export.device), config)
    else:
        backend = on_our_terms(run_graph(graph, config, BackendOptions(export.device)), export, options)
    bounds = parity.with_experts(parity.BOUNDS[options.precision], config)
    bad_node = partial(first_bad_node, graph, config)
    judge(export, export.reference(pooling), backend, bounds, "the ONNX graph", bad_node=bad_node)
    layers, operators = probe(opened.model.to("cpu"), graph, config)
    fused = check_fusion(operators, config, options)
    export.report |= {"precision": options.precision, "layers": layers, "fused": fused}
    return nodes


def on_our_terms(backend: Any, export: Export, options: GraphOptions) -> Any:
    """What runs a graph, with the outputs of our names."""
    theirs = options.names == "optimum" and not hasattr(export.opened.model, "head")
    return parity.Adapted(backend, parity.at_asked_positions) if theirs else backend


def calibrated(export: Export, options: GraphOptions) -> GraphOptions:
    """The options with the ranges that int8 with fixed scales needs. Raises WrongUse where text is missing."""
    judging, rows = export.judging, export.rows
    if rows is None and options.precision in ("int8", "int4"):
        why = "random ids show whether a graph is right; whether rounded weights are good enough shows on text alone"
        fix = "give a text file like the model's own: --text FILE"
        raise WrongUse(f"{options.precision} is judged on real text", where="--precision", why=why, fix=fix)
    if judging.calibration is not None and not options.static:
        why = f"{options.precision} for {options.variant} has no fixed scales"
        raise WrongUse("nothing here is calibrated", where="--calibration", why=why, fix="leave it out")
    if not options.static or rows is None:
        return options
    if judging.calibration is None:
        return dataclasses.replace(options, ranges=calibrate(export.opened.model, rows))
    export.draft.inputs.append(input_record(judging.calibration))
    return dataclasses.replace(options, ranges=read_calibration(judging.calibration, export.opened.input))


def description(model: Any) -> dict[str, Any]:
    """What model.json says of a model: its family, its shape and its fine-tuned head."""
    described: dict[str, Any] = {"family": family_of(model.config), "config": model.config.to_dict()}
    if (head := getattr(model, "head", None)) is not None and not callable(head):
        described["head"] = dataclasses.asdict(head)
    return described


def genai_config(config: GPTConfig, special: Mapping[str, int], options: GraphOptions) -> str:
    """What onnxruntime-genai reads beside a graph under optimum's names. Its type `llama` stands for any decoder
    with these inputs, learned positions included. A cache that one operator reads and writes is one buffer.
    """
    end = special.get("eos", 0)
    facts = {"config": config, "eos": end} | {role: special.get(role, end) for role in ("bos", "pad")}
    facts |= {"cuda": options.variant == "cuda", "shared": grouped(config, options)}
    return from_template(Path(__file__).with_name("genai_config.json"), facts)


def write_graph(model: Any, path: Path, metadata: dict[str, str], options: GraphOptions = PLAIN) -> int:
    """Write a model's graph; returns its number of nodes. Raises Refused, by name, for what the graphs do not have."""
    writer: Any = gpt_graph if isinstance(model.config, GPTConfig) else bert_graph
    return writer(model, options).save(path, metadata)


def _parity_facts(report: Report) -> dict[str, Any]:
    if not report:  # nothing here could run it
        return {}
    facts: dict[str, Any] = {
        "parity_max_abs": max(summary["max_abs"] for summary in report["outputs"].values()),
        "parity_bound": report["bound"],
    }
    for name, keys in (("text", ("kl", "top1_agreement", "contested")), ("scores", ("difference",))):
        facts |= {f"{name}_{key}": report[name][key] for key in keys if name in report}
    return facts | {key: report[key] for key in ("greedy_tokens",) if key in report}


def copy_tokenizer(opened: OpenedModel, target: Path) -> dict[str, int]:
    """Copy tokenizer.json with what stands beside it; returns the ids of its special tokens by our names."""
    if opened.tokenizer is None:
        return {}
    from ...data.model_settings import write_beside
    from ...data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(opened.tokenizer)
    if tokenizer.vocab_size > opened.model.config.vocab_size:
        why = f"{tokenizer.vocab_size} > {opened.model.config.vocab_size}"
        what, fix = "the tokenizer has more tokens than the model", "use the tokenizer it was trained with"
        raise WrongUse(what, where=opened.tokenizer, why=why, fix=fix)
    (target / "tokenizer.json").write_bytes(opened.tokenizer.read_bytes())
    write_beside(target, tokenizer, opened.tokenizer.parent, opened.model.config.sequence_length)
    return tokenizer.special


def write_json(path: Path, value: Any) -> None:
    """Write a small file of an artifact."""
    path.write_text(json.dumps(value, indent=1) + "\n")
