"""Sessions of ONNX Runtime, on the CPU or with its CUDA or TensorRT provider.

Threads do not spin: on a shared or small machine spinning threads burn several times the CPU that the work needs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import Refused, WrongUse

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
TENSORRT = "TensorrtExecutionProvider"


PROFILE_ROWS = 64  # of a call of TensorRT's provider


def profile_of(graph: Path | str, context: int) -> dict[str, str]:
    """The shapes of a BERT's inputs for which TensorRT's provider builds at once: without them it builds again, for
    minutes, at every shape beyond those that it has seen.
    """
    import onnx

    names = [given.name for given in onnx.load(graph, load_external_data=False).graph.input]
    sizes = {"min": (1, 1), "opt": (8, min(128, context)), "max": (PROFILE_ROWS, context)}
    return {
        f"trt_profile_{end}_shapes": ",".join(f"{name}:{rows}x{tokens}" for name in names)
        for end, (rows, tokens) in sizes.items()
    }


def providers_of(device: str, tensorrt: Mapping[str, str] | None = None) -> list[Any]:
    """What to ask ONNX Runtime for; `tensorrt`: its provider with these settings. Raises WrongUse when it was built
    without it.
    """
    import onnxruntime

    kind, _, number = device.partition(":")
    wanted = [PROVIDERS[kind]] if tensorrt is None else [TENSORRT, PROVIDERS[kind]]
    there = onnxruntime.get_available_providers()
    if missing := [name for name in wanted if name not in there]:
        raise WrongUse(
            f"this ONNX Runtime has no {missing[0]}",
            where=f"--device {device}",
            why=f"it was built with {', '.join(there)}",
            fix="pip uninstall onnxruntime && pip install onnxruntime-gpu, or --device cpu",
        )
    if kind == "cpu":
        return wanted
    settings = {"device_id": number or "0"}
    # fp32 is fp32, as torch has it: with TF32 its errors are those of fp16. A build takes minutes: it is kept.
    kept = f"{Path.home()}/.cache/throughline/tensorrt"
    caches = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": kept}
    caches |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": kept}
    of = {PROVIDERS["cuda"]: {"use_tf32": "0"}, TENSORRT: {**caches, **(tensorrt or {})}}
    return [(name, settings | of[name]) for name in wanted]


def check_version(facts: Mapping[str, Any], where: Path) -> None:
    """Refuse a GPT whose graph has the standard Attention over a cache on an ONNX Runtime older than the one that it
    was compared on: versions differ in which end of it the causal triangle stands at, and say nothing.
    """
    import onnxruntime

    made, here = str(facts.get("onnxruntime", "0.0")), onnxruntime.__version__
    older = [int(part) for part in here.split(".")[:2]] < [int(part) for part in made.split(".")[:2]]
    if older and facts["family"] == "gpt" and facts["opset"] >= 24 and facts["variant"] != "onnxruntime":
        fix = f"pip install 'onnxruntime>={made}', or export it with --opset 23"
        why = f"it was compared with torch on {made}, here is {here}"
        raise Refused("this graph is for a newer ONNX Runtime", where=where, why=why, fix=fix)


def open_session(
    path: Path | str,
    threads: int | None = None,
    device: str = "cpu",
    tensorrt: Mapping[str, str] | None = None,
) -> Any:
    """An `onnxruntime.InferenceSession` on the device.

    Raises WrongUse when this ONNX Runtime has no provider for it, Refused when the file is not a graph that
    it can run or the provider fell back to another.
    """
    import onnxruntime

    wanted = providers_of(device, tensorrt)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # its warnings are about choices made here on purpose
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise Refused(
            "ONNX Runtime cannot load this graph",
            where=path,
            why=str(error).splitlines()[0][:300],
            fix="export it again; `throughline verify` says whether the file is damaged",
        ) from error
    first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
    if session.get_providers()[0] != first:  # it falls back to the CPU with a log line
        raise Refused(
            f"ONNX Runtime could not start {first}",
            where=path,
            why=f"it would run with {session.get_providers()[0]}",
            fix="install the CUDA and cuDNN (or TensorRT) libraries it was built for, or --device cpu",
        )
    return session
