"""Engines as artifacts of kind `engine`: engine.plan, model.onnx's parity report, model.json, tokenizer.

The graph is written, compared with torch on ONNX Runtime, then compiled; what the compiler made of it is read
back and asserted. Facts: library and version, GPU, compute capability, driver, CUDA, profiles, precision.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.console import warn
from ...core.errors import WrongUse
from ...core.files import sha256_file
from ...core.hardware import machine
from ...models.transformer import TransformerConfig
from ..graphs.graph_options import GraphOptions
from ..graphs.parity import BOUNDS, sweep
from ..runtimes.backends import on_engine
from ..runtimes.loaded import Loaded
from ..runtimes.tensorrt_backend import EngineSession
from ..runtimes.tensorrt_library import gpu_facts, load_library
from .engine_report import engine_facts, kernels_of_inspector, kernels_of_log
from .export import ALONE, Export, Judging, Report, exporting, judge, on_our_terms, write_judged
from .tensorrt_build import RTX_CAPABILITIES, Profile, buckets, build_engine

T4 = "7.5"
BATCHES, LENGTHS = (1, 8), (128, 512)
HALF = GraphOptions("tensorrt", "fp16")


def export_engine(
    path: Path | str,
    out: Path | str,
    library_name: str,
    options: GraphOptions = HALF,
    judging: Judging = ALONE,
    overwrite: bool = False,
    capability: str = T4,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    timing_cache: Path | None = None,
) -> Report:
    """Compile the model at `path`; returns the parity report with the compiler's facts under `engine`.

    `library_name`: `tensorrt` (for the GPU of this machine) or `tensorrt_rtx` (for `capability`, on a CPU).
    Raises what `export_onnx` raises, and Refused when attention is not fused or a product is not in the
    precision of the graph; then nothing is left at `out`.
    """
    with exporting(path, out, "engine", judging, overwrite) as export:
        engine, facts = compiled(export, library_name, options, capability, batches, lengths, timing_cache)
        export.keep_sentence()
        (export.folder / "engine.plan").write_bytes(engine)
        for file in export.folder.glob("model.onnx*"):
            file.unlink()  # the engine has the weights
        export.draft.facts |= facts
    return export.report


def compiled(
    export: Export,
    library_name: str,
    options: GraphOptions,
    capability: str = T4,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    timing_cache: Path | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """The engine of a model, judged, and its facts; what describes the model and its graph is written to the export's
    folder.
    """
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
    inspected = [] if rtx else kernels_of_inspector(_inspected(library, engine, profiles[0], config))
    kernels = kernels_of_log(messages) if rtx else inspected
    device = export.judging.device if export.judging.device != "cpu" else "cuda:0"
    card = {"gpu": None, "compute_capability": capability} if rtx else gpu_facts(device)
    facts: dict[str, Any] = {
        "precision": precision,
        "library": library.__name__,
        "library_version": library.__version__,
        **card,
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
        "graph_sha256": sha256_file(graph),
        "source": export.opened.input.hash,
        "standing": "compiled by TensorRT-RTX, not run",
        "compared": "its graph, on ONNX Runtime",
    }
    facts |= engine_facts(kernels, config, precision, len(profiles), whole=rtx)
    if "not known" in (facts["product_types"], facts["fused_attention"]):
        warn("TensorRT does not say in which type its products are, or that attention is fused")
    if not rtx or capability in [gpu.capability for gpu in machine().gpus[:1]]:
        session = EngineSession(library, engine, export.folder, device)
        _judge_engine(export, session, options)
        facts |= {"standing": f"built and run by {library.__name__}", "compared": "the engine"}
        facts |= {"captures_failed": session.capture_failures}
    export.report["engine"] = facts
    return engine, facts


def _judge_engine(export: Export, session: EngineSession, options: GraphOptions) -> None:
    """Compare the engine itself with torch, over what its profiles take; what was said of its graph stays beside it."""
    config, of_graph = export.opened.model.config, dict(export.report)
    backend = on_our_terms(on_engine(session, config, options.precision), export, options)
    candidate = Loaded(config, export.tokenizer, export.opened.input, backend)
    cases = sweep(config.vocab_size, config.sequence_length, session.limits)
    reference, bounds = export.reference(export.draft.facts["pooling"]), BOUNDS[options.precision]
    judge(export, reference, candidate, bounds, "the engine", cases)
    export.report["graph"] = {name: of_graph[name] for name in ("bound", "outputs", "passed")}


def _inspected(library: Any, engine: bytes, profile: Profile, config: TransformerConfig) -> str:
    """What TensorRT says of an engine that it has just built, as JSON: types are those of an execution context with
    the shapes that the first profile is tuned for.
    """
    runtime = library.Runtime(library.Logger(library.Logger.ERROR))
    opened = runtime.deserialize_cuda_engine(engine)
    inspector = opened.create_engine_inspector()
    if (context := opened.create_execution_context()) is not None:
        for name in (opened.get_tensor_name(i) for i in range(opened.num_io_tensors)):
            if opened.get_tensor_mode(name) == library.TensorIOMode.INPUT:
                context.set_input_shape(name, profile.shapes(name, config)[1])
        inspector.execution_context = context
    return inspector.get_engine_information(library.LayerInformationFormat.JSON)
