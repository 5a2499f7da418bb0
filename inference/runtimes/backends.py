"""A path becomes something that runs, on the device and with the runtime that was asked for.

| path | runtimes, its own first |
|---|---|
| run, checkpoint, model directory | torch, torch-compiled (BERT) |
| GGUF artifact, .gguf file | llamacpp |
| ONNX artifact | onnxruntime, openvino (BERT), tensorrt (through ONNX Runtime's provider) |
| engine | tensorrt |
"""

import shutil
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.artifact import input_record, is_artifact, read_manifest, verify_artifact
from ...core.backend import AUTO, BackendOptions, Limits
from ...core.console import say, warn, warn_once
from ...core.errors import WrongUse
from ...core.files import read_json
from ...core.hardware import usable_cores
from ...data.model_settings import end_ids, no_end
from ...data.tokenizer import Tokenizer
from ...models.config import FAMILIES, SINGLE_LABEL, GPTConfig, ModelConfig
from ...models.sentence import embeds, read_sentence
from .bench import fastest
from .onnx_causal import OnnxCausal
from .onnx_session import PROFILE_ROWS, OnnxEncoder, OpenVinoSession, check_version, open_session, profile_of
from .source import Loaded, check_options, context_of, find_model, pick_device, pick_dtype

ON_CPU = BackendOptions(device="cpu")
KINDS = {  # of exports: what each is called, and what runs it
    "onnx": ("an ONNX artifact", ("onnxruntime", "openvino", "tensorrt")),
    "engine": ("an engine", ("tensorrt",)),
    "gguf": ("a GGUF file", ("llamacpp",)),
}


def open_backend(path: Path | str, options: BackendOptions = AUTO) -> Loaded:
    """The model at `path`. Raises as `open_model`, and WrongUse or Refused for options that file or machine lack."""
    path = Path(path)
    if options.runtime == "auto":
        by_name = {name: replace(options, runtime=name) for name in runtimes_of(path, options)}
        return fastest({name: partial(open_backend, path, own) for name, own in by_name.items()})
    kind = kind_of(path)
    if not kind:
        found = find_model(path)
        runtime = check_options(options, "a torch model", ("torch", "torch-compiled"))
        from .torch_backend import run_module  # seconds, which a mistyped path does not wait for

        device = pick_device(options.device)
        opened = found.open(device, pick_dtype(options.dtype, found.stored_dtype(device), device))
        loaded = run_module(*opened, replace(options, runtime=runtime), embeds(found.directory))
        return replace(loaded, sentence=read_sentence(found.directory)) if loaded.encoder else loaded
    options = replace(options, runtime=check_options(options, *KINDS[kind]))
    if path.is_dir():
        loaded = _open_export(path, kind, options)
    else:
        from .llama_backend import read_gguf

        config, precision, tokenizer, sentence = read_gguf(path)
        backend = run_gguf(path, config, options, precision)
        loaded = Loaded(config, tokenizer, input_record(path, remembered=True), backend, sentence=sentence)
    if loaded.causal is not None:
        loaded.causal.context = min(loaded.causal.context, context_of(loaded.config, options))
    return loaded


def open_text_model(path: Path | str, family: str, options: BackendOptions) -> tuple[Loaded, Tokenizer]:
    """The model at `path` with its tokenizer: a "gpt" that generates, a "bert", which may be a GPT that embeds, or ""
    for any. Raises WrongUse when it has none or is of the other kind.
    """
    loaded = open_backend(path, options)
    if family and (loaded.causal is None) == (family == "gpt"):
        reads = " that embeds, as its modules.json says" * (loaded.causal is None and loaded.family == "gpt")
        needed = "generating needs a GPT" if family == "gpt" else "embedding needs a BERT, or a modules.json"
        fix = f"`throughline {'embed' if loaded.causal is None else 'generate'}` and `serve` take it"
        raise WrongUse(needed, where=path, why=f"this is a {loaded.family.upper()}{reads}", fix=fix)
    if loaded.tokenizer is None:
        raise WrongUse("this model has no tokenizer.json", where=path, fix="put one beside the weights")
    tokenizer = Tokenizer.load(loaded.tokenizer)
    if loaded.causal is not None and not end_ids(loaded.tokenizer.parent, tokenizer):
        warn_once(f"answers end at their longest alone: {no_end(tokenizer)}")
    return loaded, tokenizer


def _open_export(path: Path, kind: str, options: BackendOptions) -> Loaded:
    """An artifact that `throughline export` wrote."""
    manifest = verify_artifact(path)
    facts, described, tokenizer = manifest.facts, read_json(path / "model.json"), path / "tokenizer.json"
    config: ModelConfig = FAMILIES[described["family"]].from_dict(described["config"])
    dtype, classes = str(facts.get("precision", "fp32")), classes_of(described)
    if kind == "engine":
        from .tensorrt_backend import open_engine

        backend = on_engine(open_engine(path, manifest, options.device), config, dtype)
    elif kind == "gguf":
        backend = run_gguf(path / "model.gguf", config, options, dtype, len(classes))
    else:
        check_version(facts, path)
        # As ONNX Runtime 1.31 places them: written for its CPU, float16 and a BERT in fp32 run whole on a GPU.
        whole = facts["family"] == "bert" if dtype == "fp32" else dtype == "fp16"
        on_cpu = facts.get("variant") == "onnxruntime" and not whole
        if on_cpu and pick_onnx_device(options.device) != "cpu":
            what = "work of this graph has no CUDA kernels in ONNX Runtime"
            if options.device == "auto":
                say(f"{what}: it runs on the CPU; one exported with --for cuda runs on the GPU")
                options = replace(options, device="cpu")
            else:
                warn(f"{what} and goes to the CPU and back in each layer; export it with --for cuda")
        backend = run_graph(path / "model.onnx", config, options, dtype)
    kept = tokenizer if tokenizer.is_file() else None
    pooling: Any = str(facts.get("pooling", "mean")).partition("-")[0]
    sentence = replace(read_sentence(path), pooling=pooling, inside=kind != "gguf")
    problem = described.get("head", {}).get("problem", SINGLE_LABEL)
    return Loaded(config, kept, input_record(path, remembered=True), backend, classes, sentence, problem)


def classes_of(described: dict[str, Any]) -> tuple[str, ...]:
    """The labels of a text, of a model that its model.json describes."""
    head = described.get("head", {})
    return tuple(head["labels"]) if head.get("kind") == "sequence-classification" else ()


def on_engine(session: Any, config: ModelConfig, precision: str) -> Any:
    """An engine behind the protocol of its family, with what its profiles take as limits."""
    from .onnx_cuda import on_gpu

    backend = on_gpu(session, config, precision, session.device)
    backend.name, backend.limits = "tensorrt", session.limits
    if not isinstance(config, GPTConfig):  # a text is read at once
        backend.limits = Limits(session.limits.rows)
        backend.context = min(backend.context, session.limits.tokens)
    return backend


def kind_of(path: Path) -> str:
    """The kind of export at `path`, `gguf` for a bare .gguf file, "" for a model that torch runs."""
    if path.suffix == ".gguf" and not path.is_dir():
        return "gguf"
    kind = read_manifest(path).kind if is_artifact(path) else ""
    return kind if kind in KINDS else ""


def runtimes_of(path: Path, options: BackendOptions) -> list[str]:
    """Those that are worth measuring for this file here: installed, and able to run its family."""
    kind = kind_of(path)
    if kind in ("gguf", "engine"):
        return list(KINDS[kind][1])
    if not kind:
        found = find_model(path).directory
        config = read_json(found / ("model.json" if (found / "model.json").is_file() else "config.json"))
        is_bert = config.get("family", config.get("model_type")) == "bert"
        return ["torch", "torch-compiled"] if is_bert and shutil.which("c++") else ["torch"]
    if pick_onnx_device(options.device) != "cpu":
        return ["onnxruntime", "tensorrt"]
    reads = read_json(path / "model.json")["family"] == "bert" and find_spec("openvino")
    return ["onnxruntime", "openvino"] if reads else ["onnxruntime"]


def run_gguf(
    file: Path, config: ModelConfig, options: BackendOptions, precision: str, labels: int = 0
) -> Any:
    """A GGUF file behind the protocol of its family; `labels`: of a text, if the file has a head that gives one."""
    from .llama_backend import LlamaCausal, LlamaEncoder, has_gpu

    device = "cpu" if options.device == "auto" and not has_gpu() else pick_device(options.device)
    rest = (options.threads or usable_cores(), device, precision)
    if isinstance(config, GPTConfig):
        return LlamaCausal(file, config, *rest)
    return LlamaEncoder(file, config, *rest, labels)


def run_graph(
    graph: Path, config: ModelConfig, options: BackendOptions = ON_CPU, precision: str = "fp32"
) -> Any:
    """A graph of our writer behind the protocol of its family."""
    if options.runtime == "openvino":
        if options.device not in ("auto", "cpu"):
            where = f"--device {options.device}"
            raise WrongUse("OpenVINO runs on the CPU here", where=where, fix="--device cpu")
        if isinstance(config, GPTConfig):
            why = "it has no operator that writes a cache at a place of each row"
            raise WrongUse("OpenVINO does not run a GPT's graph", where="--backend openvino", why=why)
        encoder = OnnxEncoder(OpenVinoSession(graph, options.threads), config, precision)
        encoder.name = "openvino"
        return encoder
    device, tensorrt = pick_onnx_device(options.device), None
    if options.runtime == "tensorrt":
        tensorrt = {} if isinstance(config, GPTConfig) else profile_of(graph, config.sequence_length)
    session = open_session(graph, options.threads, device, tensorrt)
    if device != "cpu":
        from .onnx_cuda import on_gpu

        backend = on_gpu(session, config, precision, device)
        backend.limits = Limits(PROFILE_ROWS) if tensorrt else backend.limits
        return backend
    if isinstance(config, GPTConfig):
        return OnnxCausal(session, config, precision)
    lanes = options.threads or usable_cores()
    return OnnxEncoder(session, config, precision, device, lanes, partial(open_session, graph, 1))


def pick_onnx_device(wanted: str) -> str:
    """As `pick_device`; "auto" is a GPU only where ONNX Runtime has its provider."""
    import onnxruntime

    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return "cpu" if wanted == "auto" and not has_cuda else pick_device(wanted)
