"""Engines as artifacts of kind `engine`: engine.plan, model.onnx's parity report, model.json, tokenizer.

The graph is written, compared with torch on ONNX Runtime, then compiled by TensorRT (10.15 to 11) or TensorRT-RTX with
a profile for each bucket; what the compiler made of it is read back and asserted.

- Precision stands in the graph. TensorRT 11 has no precision flags any more; none is touched here.
- TensorRT needs the GPU that the engine is for. TensorRT-RTX compiles for compute capability 7.5 to 12.0 on a
  CPU alone, and is for consumer GPUs: whether a T4 runs its engines is not known. It cannot open an engine there, so
  its verbose log is read; TensorRT's own engine inspector says it in JSON, whose fields differ by version.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...core.console import warn
from ...core.errors import Failed, Refused, WrongUse
from ...core.files import sha256_file, write_atomic
from ...core.hardware import machine
from ...models.config import GPTConfig
from ...models.transformer import TransformerConfig
from ..graphs.graph_options import GraphOptions
from ..graphs.parity import BOUNDS, sweep
from ..runtimes.backends import on_engine
from ..runtimes.tensorrt_backend import EngineSession, gpu_facts, load_library
from .export import Export, exports, judge, on_our_terms, write_judged

T4 = "7.5"
RTX_CAPABILITIES = (T4, "8.0", "8.6", "8.9", "12.0")
BATCHES, LENGTHS = (1, 8), (128, 512)
HALF = GraphOptions("tensorrt", "fp16")
NO_KERNELS = {"shape_call", "signal", "wait", "constant"}
PRODUCTS = {"gemm", "runtime_fusion"}  # of weights; attention has its own kernel, called …_mha_…
LINE = re.compile(
    r"^Name: ([^,]*), LayerType: ([^,]*), Inputs: \[(.*?)\], (?:Constants|Outputs):.*Metadata: (.*)$"
)
TYPE = re.compile(r"Datatype: (\w+)")
TYPES = {  # by the words for them, in layers and in names of tactics
    "BFloat16": r"bf16|bfloat16",
    "Half": r"half|fp16|float16|f16f16|h\d{3,}",
    "Int8": r"int8|i8i8|imma",
    "Float": r"float|fp32|f32f32|tf32",
}
BLOCK = re.compile(r"(?:blocks\.|hidden\.|present\.)(\d+)")  # in names of nodes, which compilers repeat


@dataclass(frozen=True)
class Profile:
    """The shapes that one optimisation profile of an engine serves; `best` is what it is tuned for."""

    batch: tuple[int, int, int]  # least, best, most rows
    tokens: tuple[int, int, int]  # of a call; a GPT decodes with (1, 1, 1)

    def shapes(self, name: str, config: TransformerConfig) -> list[tuple[int, ...]]:
        """Least, best and largest shape of the graph's input `name`."""
        cache = (config.key_value_heads, config.sequence_length, config.head_size)
        if name == "past_length":
            return [(rows,) for rows in self.batch]
        if name.startswith("past."):
            return [(rows, *cache) for rows in self.batch]
        asked = (0, 1, self.tokens[2])
        return list(zip(self.batch, asked if name == "logit_positions" else self.tokens))


@dataclass(frozen=True)
class Kernel:
    """One launch: its first input's type ("": not known), the first block whose nodes it computes (None: of none)."""

    name: str
    kind: str
    type: str
    block: int | None


@exports("engine")
def export_engine(export: Export, library_name: str, options: GraphOptions = HALF, **plan: Any) -> None:
    """An engine of `tensorrt` (for the GPU of this machine) or `tensorrt_rtx` (for `capability`, on a CPU); the report
    has the compiler's facts under `engine`. `plan`: what `compiled` takes besides. Raises as `export_onnx`, and Refused
    when attention is not fused or a product is not in the precision of the graph.
    """
    engine, facts = compiled(export, library_name, options, **plan)
    export.keep_sentence()
    (export.folder / "engine.plan").write_bytes(engine)
    for file in export.folder.glob("model.onnx*"):
        file.unlink()  # the engine has the weights
    export.draft.facts |= facts


def compiled(
    export: Export,
    library_name: str,
    options: GraphOptions,
    capability: str = T4,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    timing_cache: Path | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """The engine of a model, judged, and its facts; the export's folder has the graph and what describes the model."""
    precision, rtx = options.precision, library_name == "tensorrt_rtx"
    if rtx and capability not in RTX_CAPABILITIES:
        why = f"TensorRT-RTX compiles for {', '.join(RTX_CAPABILITIES)}"
        raise WrongUse(f"no compiler for compute capability {capability}", where="--capability", why=why)
    library = load_library(library_name)
    config, graph = export.opened.model.config, export.folder / "model.onnx"
    lengths = tuple(sorted({min(length, config.sequence_length) for length in lengths}))
    profiles = buckets(config, batches, lengths)
    write_judged(export, options)
    only = capability if rtx else None
    engine, messages = build_engine(library, graph, config, profiles, only, timing_cache)
    said = "" if rtx else _inspected(library, engine, profiles[0], config)
    kernels = kernels_of_log(messages) if rtx else kernels_of_inspector(said)
    device = export.judging.device if export.judging.device != "cpu" else "cuda:0"
    card = {"gpu": None, "compute_capability": capability} if rtx else gpu_facts(device)
    facts: dict[str, Any] = {"precision": precision, "library": library.__name__}
    facts |= {"library_version": library.__version__, **card}
    facts |= {"profiles": [dataclasses.asdict(profile) for profile in profiles]}
    facts |= {"graph_sha256": sha256_file(graph), "source": export.opened.input.hash}
    facts |= {"standing": "compiled by TensorRT-RTX, not run", "compared": "its graph, on ONNX Runtime"}
    facts |= engine_facts(kernels, config, precision, len(profiles), whole=rtx)
    if "not known" in (facts["product_types"], facts["fused_attention"]):
        warn("TensorRT does not say in which type its products are, or that attention is fused")
    if not rtx or capability in [gpu.capability for gpu in machine().gpus[:1]]:
        session = EngineSession(library, engine, export.folder, device)
        backend = on_our_terms(on_engine(session, config, precision), export, options)
        cases = sweep(config.vocab_size, config.sequence_length, session.limits)
        reference = export.reference(export.draft.facts["pooling"])
        of_graph = {name: export.report[name] for name in ("bound", "outputs", "passed")}  # stays beside it
        judge(export, reference, backend, BOUNDS[precision], "the engine", cases)
        export.report["graph"] = of_graph
        facts |= {"standing": f"built and run by {library.__name__}", "compared": "the engine"}
        facts |= {"captures_failed": session.capture_failures}
    export.report["engine"] = facts
    return engine, facts


def buckets(config: TransformerConfig, batches: Sequence[int], lengths: Sequence[int]) -> list[Profile]:
    """A profile for each batch and length bucket, and for a GPT one of decode steps for each batch."""
    tokens = [(1, 1, 1)] if isinstance(config, GPTConfig) else []
    tokens += [(shorter + 1, length, length) for length, shorter in zip(lengths, (0, *lengths))]
    rows = [(smaller + 1, batch, batch) for batch, smaller in zip(batches, (0, *batches))]
    return [Profile(*shapes) for shapes in product(rows, tokens)]


def build_engine(
    library: Any,
    graph: Path,
    config: TransformerConfig,
    profiles: Sequence[Profile],
    capability: str | None = None,
    timing_cache: Path | None = None,
) -> tuple[bytes, list[str]]:
    """Compile a graph; returns the engine and the messages of the build. `capability`: what TensorRT-RTX compiles for.
    `timing_cache`: kernel timings of TensorRT, read where the file exists, and written. Raises WrongUse without a GPU
    where one is needed, Failed with the library's last error when it cannot build.
    """
    logger = _logger(library)
    try:
        builder = library.Builder(logger)
    except TypeError as error:  # "pybind11::init(): factory function returned nullptr"
        fix = "build on the machine that has the GPU; --to tensorrt-rtx compiles without one"
        raise WrongUse("TensorRT found no GPU", why=logger.error or str(error), fix=fix) from error
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # 11 has no other kind
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        problems = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise Failed("the graph could not be read", where=graph, why=problems[:400] or logger.error)
    settings = builder.create_builder_config()
    settings.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    if capability is not None:
        settings.num_compute_capabilities = 1
        member = "SM" + capability.replace(".", "")
        settings.set_compute_capability(getattr(library.ComputeCapability, member), 0)
    for profile in profiles:
        added = builder.create_optimization_profile()
        for name in (network.get_input(i).name for i in range(network.num_inputs)):
            added.set_shape(name, *profile.shapes(name, config))
        if settings.add_optimization_profile(added) < 0:
            raise Failed("the compiler refused a profile", where=str(profile), why=logger.error)
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        if not settings.set_timing_cache(settings.create_timing_cache(known), False):
            warn(f"{timing_cache} is of another GPU or version and is written anew")
            settings.set_timing_cache(settings.create_timing_cache(b""), False)
    engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise Failed("the engine could not be built", where=graph, why=logger.error)
    if timing_cache is not None and (timings := settings.get_timing_cache()) is not None:
        write_atomic(timing_cache, bytes(timings.serialize()))
    return bytes(engine), logger.messages


def _logger(library: Any) -> Any:
    """A logger that keeps every message."""

    class Logger(library.ILogger):
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.messages: list[str] = []
            self.error = ""  # the last one

        def log(self, severity: Any, message: str) -> None:
            self.messages.append(message)
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.error = message

    return Logger()


def _inspected(library: Any, engine: bytes, profile: Profile, config: TransformerConfig) -> str:
    """What TensorRT says of an engine that it has just built, as JSON, for shapes that this profile is tuned for."""
    runtime = library.Runtime(library.Logger(library.Logger.ERROR))
    opened = runtime.deserialize_cuda_engine(engine)
    inspector = opened.create_engine_inspector()
    if (context := opened.create_execution_context()) is not None:
        for name in (opened.get_tensor_name(i) for i in range(opened.num_io_tensors)):
            if opened.get_tensor_mode(name) == library.TensorIOMode.INPUT:
                context.set_input_shape(name, profile.shapes(name, config)[1])
        inspector.execution_context = context
    return inspector.get_engine_information(library.LayerInformationFormat.JSON)


def kernels_of_log(messages: Iterable[str]) -> list[Kernel]:
    """From a verbose build log with detailed profiling."""
    found = []
    for match in map(LINE.match, "\n".join(messages).splitlines()):
        if match and match[2] not in NO_KERNELS:
            of = TYPE.search(match[3])
            found.append(Kernel(match[1], match[2], of[1] if of else "", _block(match[4])))
    return found


def kernels_of_inspector(text: str) -> list[Kernel]:
    """From the JSON of an engine inspector, of which layers have details only where the build was asked for them."""
    found = []
    for layer in json.loads(text).get("Layers", []):
        if not isinstance(layer, str) and layer.get("LayerType") not in NO_KERNELS:
            block, kind = _block(layer.get("Metadata", "") or layer["Name"]), layer.get("LayerType", "")
            found.append(Kernel(layer["Name"], kind, type_of_layer(layer), block))
    return found


def type_of_layer(layer: dict[str, Any]) -> str:
    """The type in which a layer computes, as the first of these says it: its inputs' Datatype, their
    Format/Datatype ("N/A due to dynamic shapes" where a profile is a range), its weights' type, its tactic's name.
    """
    given, weights = layer.get("Inputs") or [{}], layer.get("Weights")
    said = [given[0].get("Datatype"), given[0].get("Format/Datatype")]
    said += [weights.get("Type") if isinstance(weights, dict) else None, layer.get("TacticName")]
    found = (name for text in said for name, words in TYPES.items() if re.search(words, str(text), re.I))
    return next(found, "")


def _block(text: str) -> int | None:
    return min(map(int, BLOCK.findall(text)), default=None)


def engine_facts(
    kernels: list[Kernel], config: TransformerConfig, precision: str, profiles: int = 1, whole: bool = True
) -> dict[str, Any]:
    """Counts for a manifest, of one profile: kernels in all, of the largest inner block (the first and the last share
    kernels with what stands around them), fused attention; and the types of the blocks' products. Raises Refused when
    these are in another precision than the graph, and, where the list is `whole` (an inspector may leave out anything),
    when it names no type or an attention block was not fused.
    """
    per_block = Counter(kernel.block for kernel in kernels if kernel.block is not None)
    fused = sum("_mha" in kernel.name for kernel in kernels) // profiles
    products = [kernel for kernel in kernels if kernel.kind in PRODUCTS and kernel.block is not None]
    types = Counter(kernel.type for kernel in products if kernel.type)
    wanted = {"fp16": "Half", "int8": "Int8", "fp32": "Float"}[precision]
    if set(types) != {wanted} and (whole or types):
        why = f"products with inputs of type {dict(types)}, all should be {wanted}"
        fix = "build with another version of TensorRT, or export with another --precision"
        raise Refused("the engine does not multiply in the precision of the graph", why=why, fix=fix)
    fusable = 0 if getattr(config, "attention_softcap", 0) else config.layers  # a tanh stands between
    if fused < fusable and whole:
        why = f"{fused} fused attention kernels for {config.layers} layers"
        fix = "build with the version of TensorRT that pyproject.toml names"
        raise Refused("attention was not fused", why=why, fix=fix)
    inner = range(1, config.layers - 1) if config.layers > 2 else range(config.layers)
    return {
        "kernels": len(kernels) // profiles,
        "kernels_per_layer": max(per_block[layer] for layer in inner) / profiles,
        "fused_attention": fused if fused >= fusable else "not known",
        "product_types": dict(types) or "not known",
    }
