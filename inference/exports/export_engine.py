"""Engines as artifacts of kind `engine`: engine.plan, model.onnx's parity report, model.json, tokenizer.

The graph is written, compared with torch on ONNX Runtime, then compiled; what the compiler made of it is read
back and asserted. Facts: library and version, GPU, compute capability, driver, CUDA, profiles, precision.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import WrongUse
from ...core.files import sha256_file
from ..graphs.graph_options import GraphOptions, Precision
from ..runtimes.tensorrt_library import gpu_facts, load_library
from .engine_report import engine_facts, kernels_of_inspector, kernels_of_log
from .export import ALONE, Judging, Report, exporting, write_judged
from .tensorrt_build import RTX_CAPABILITIES, buckets, build_engine

T4 = "7.5"
BATCHES, LENGTHS = (1, 8), (128, 512)


def export_engine(
    path: Path | str,
    out: Path | str,
    library_name: str,
    precision: Precision = "fp16",
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
    rtx = library_name == "tensorrt_rtx"
    if rtx and capability not in RTX_CAPABILITIES:
        why = f"TensorRT-RTX compiles for {', '.join(RTX_CAPABILITIES)}"
        raise WrongUse(f"no compiler for compute capability {capability}", where="--capability", why=why)
    library = load_library(library_name)
    with exporting(path, out, "engine", judging, overwrite) as export:
        config, graph = export.opened.model.config, export.folder / "model.onnx"
        lengths = tuple(sorted({min(length, config.sequence_length) for length in lengths}))
        profiles = buckets(config, batches, lengths)
        write_judged(export, GraphOptions("tensorrt", precision))
        export.keep_sentence()
        engine, messages = build_engine(
            library, graph, config, profiles, capability if rtx else None, timing_cache
        )
        (export.folder / "engine.plan").write_bytes(engine)
        kernels = kernels_of_log(messages) if rtx else kernels_of_inspector(_inspected(library, engine))
        machine = {"gpu": None, "compute_capability": capability} if rtx else gpu_facts()
        facts: dict[str, Any] = {
            "precision": precision,
            "library": library.__name__,
            "library_version": library.__version__,
            **machine,
            "profiles": [dataclasses.asdict(profile) for profile in profiles],
            "graph_sha256": sha256_file(graph),
            "source": export.opened.input.hash,
            "standing": "compiled by TensorRT-RTX, not run" if rtx else "built and read back by TensorRT",
        }
        facts |= engine_facts(kernels, config, precision, len(profiles))
        for file in export.folder.glob("model.onnx*"):
            file.unlink()  # the engine has the weights
        export.report["engine"] = facts
        export.draft.facts |= facts
    return export.report


def _inspected(library: Any, engine: bytes) -> str:
    """What TensorRT says of an engine that it has just built, as JSON."""
    runtime = library.Runtime(library.Logger(library.Logger.ERROR))
    inspector = runtime.deserialize_cuda_engine(engine).create_engine_inspector()
    return inspector.get_engine_information(library.LayerInformationFormat.JSON)
