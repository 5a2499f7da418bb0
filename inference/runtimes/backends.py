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
from typing import TYPE_CHECKING, Any

from ...core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ...core.backend import AUTO, BackendOptions
from ...core.errors import WrongUse
from ...core.files import read_json
from ...core.hardware import usable_cores
from ...models.config import FAMILIES, GPTConfig, ModelConfig
from .choice import fastest
from .devices import check_options, pick_device, pick_dtype
from .loaded import Loaded
from .source import find_model

if TYPE_CHECKING:
    from ...models.bert import BERT
    from ...models.gpt import GPT
    from ...models.heads import BERTWithHead

ON_CPU = BackendOptions(device="cpu")


def open_backend(path: Path | str, options: BackendOptions = AUTO) -> Loaded:
    """The backend for the model at `path`. Raises WrongUse or Refused as `open_model` does, and when the
    options ask for a device, dtype or runtime that this file or this machine does not have.
    """
    path = Path(path)
    if options.runtime == "auto":
        names = runtimes_of(path, options)
        return fastest(
            [(name, partial(open_backend, path, replace(options, runtime=name))) for name in names]
        )
    opening = {"onnx": _open_onnx, "engine": _open_engine, "gguf": _open_gguf}.get(kind_of(path), _open_torch)
    return opening(path, options)


def kind_of(path: Path) -> str:
    """The kind of artifact at `path`, `gguf` for a bare .gguf file, "" for anything else."""
    if path.suffix == ".gguf" and not path.is_dir():
        return "gguf"
    return read_manifest(path).kind if is_artifact(path) else ""


def runtimes_of(path: Path, options: BackendOptions) -> list[str]:
    """Those that are worth measuring for this file here: installed, and able to run its family."""
    kind = kind_of(path)
    if kind in ("gguf", "engine"):
        return ["llamacpp" if kind == "gguf" else "tensorrt"]
    if kind != "onnx":
        found = find_model(path).directory
        config = read_json(found / ("model.json" if (found / "model.json").is_file() else "config.json"))
        is_bert = config.get("family", config.get("model_type")) == "bert"
        return ["torch", "torch-compiled"] if is_bert and shutil.which("c++") else ["torch"]
    on_cpu = pick_onnx_device(options.device) == "cpu"
    names = ["onnxruntime"]
    if on_cpu and read_json(path / "model.json")["family"] == "bert" and find_spec("openvino"):
        names.append("openvino")
    return names if on_cpu else [*names, "tensorrt"]


def _open_torch(path: Path, options: BackendOptions) -> Loaded:
    found = find_model(path)
    runtime = check_options(options, "a torch model", ("torch", "torch-compiled"))
    device = pick_device(options.device)
    opened = found.open(device, pick_dtype(options.dtype, found.stored_dtype(), device))
    return torch_backend(opened.model, opened.tokenizer, opened.input, runtime == "torch-compiled")


def torch_backend(
    model: "GPT | BERT | BERTWithHead", tokenizer: Path | None, source: Input, compiled: bool = False
) -> Loaded:
    """The torch module behind the protocol of its family."""
    from ...models.gpt import GPT
    from ...models.heads import BERTWithHead
    from .torch_backend import TorchCausal, TorchEncoder, TorchHead

    if isinstance(model, BERTWithHead):
        classes = model.head.labels if model.head.kind == "sequence-classification" else ()
        return Loaded("bert", model.config, tokenizer, source, encoder=TorchHead(model), classes=classes)
    if isinstance(model, GPT):
        if compiled:
            fix = "leave --backend out"
            raise WrongUse("only a BERT runs compiled", where="--backend torch-compiled", fix=fix)
        return Loaded("gpt", model.config, tokenizer, source, causal=TorchCausal(model))
    return Loaded("bert", model.config, tokenizer, source, encoder=TorchEncoder(model, compiled))


def _open_onnx(path: Path, options: BackendOptions) -> Loaded:
    runtime = check_options(options, "an ONNX artifact", ("onnxruntime", "openvino", "tensorrt"))
    verify_artifact(path)
    described = read_json(path / "model.json")
    tokenizer = path / "tokenizer.json"
    loaded = onnx_backend(
        path / "model.onnx",
        FAMILIES[described["family"]].from_dict(described["config"]),
        tokenizer if tokenizer.is_file() else None,
        input_record(path),
        replace(options, runtime=runtime),
        str(read_manifest(path).facts.get("precision", "fp32")),
    )
    head = described.get("head", {})
    classes = head["labels"] if head.get("kind") == "sequence-classification" else ()
    return replace(loaded, classes=tuple(classes))


def _open_engine(path: Path, options: BackendOptions) -> Loaded:
    """An engine behind the protocol of its family, run by the backends of ONNX graphs."""
    from .onnx_backend import OnnxCausal, OnnxEncoder
    from .tensorrt_backend import open_engine

    check_options(options, "an engine", ("tensorrt",))
    session = open_engine(path)
    described, facts = read_json(path / "model.json"), read_manifest(path).facts
    config = FAMILIES[described["family"]].from_dict(described["config"])
    tokenizer = path / "tokenizer.json"
    kept, source = tokenizer if tokenizer.is_file() else None, input_record(path)
    rest: tuple[Any, ...] = (None, session.device, False, facts["precision"], session)
    backend: Any
    if isinstance(config, GPTConfig):
        backend = OnnxCausal(path, config, *rest)
        loaded = Loaded("gpt", config, kept, source, causal=backend)
    else:
        backend = OnnxEncoder(path, config, *rest)
        loaded = Loaded("bert", config, kept, source, encoder=backend)
    backend.name = "tensorrt"
    return loaded


def _open_gguf(path: Path, options: BackendOptions) -> Loaded:
    from .gguf_reader import read_gguf
    from .llama_backend import LlamaCausal, LlamaEncoder, has_gpu

    check_options(options, "a GGUF file", ("llamacpp",))
    if path.is_dir():
        verify_artifact(path)
        file, kept, precision = (
            path / "model.gguf",
            path / "tokenizer.json",
            read_manifest(path).facts["precision"],
        )
        described = read_json(path / "model.json")
        config: ModelConfig = FAMILIES[described["family"]].from_dict(described["config"])
        tokenizer = kept if kept.is_file() else None
    else:
        file, (config, precision, tokenizer) = path, read_gguf(path)
    device = "cpu" if options.device == "auto" and not has_gpu() else pick_device(options.device)
    belongs = (config, tokenizer, input_record(path))
    rest = (options.threads or usable_cores(), device, precision)
    if isinstance(config, GPTConfig):
        return Loaded("gpt", *belongs, causal=LlamaCausal(file, config, *rest))
    return Loaded("bert", *belongs, encoder=LlamaEncoder(file, config, *rest))


def onnx_backend(
    graph: Path,
    config: ModelConfig,
    tokenizer: Path | None,
    source: Input,
    options: BackendOptions = ON_CPU,
    precision: str = "fp32",
) -> Loaded:
    """A graph of our writer behind the protocol of its family."""
    from .onnx_backend import OnnxCausal, OnnxEncoder

    if options.runtime == "openvino":
        return _open_openvino(graph, config, tokenizer, source, options, precision)
    device = pick_onnx_device(options.device)
    rest = (options.threads, device, options.runtime == "tensorrt", precision)
    if isinstance(config, GPTConfig):
        return Loaded("gpt", config, tokenizer, source, causal=OnnxCausal(graph, config, *rest))
    return Loaded("bert", config, tokenizer, source, encoder=OnnxEncoder(graph, config, *rest))


def _open_openvino(
    graph: Path,
    config: ModelConfig,
    tokenizer: Path | None,
    source: Input,
    options: BackendOptions,
    precision: str,
) -> Loaded:
    from .openvino_backend import OpenVinoEncoder

    if options.device not in ("auto", "cpu"):
        raise WrongUse(
            "OpenVINO runs on the CPU here", where=f"--device {options.device}", fix="--device cpu"
        )
    if isinstance(config, GPTConfig):
        why = "it has no operator that writes a cache at a place of each row"
        raise WrongUse("OpenVINO does not run a GPT's graph", where="--backend openvino", why=why)
    encoder = OpenVinoEncoder(graph, config, options.threads, precision)
    return Loaded("bert", config, tokenizer, source, encoder=encoder)


def pick_onnx_device(wanted: str) -> str:
    """As `pick_device`; "auto" is a GPU only where ONNX Runtime has its provider."""
    if wanted != "auto":
        return pick_device(wanted)
    import onnxruntime

    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return pick_device("auto") if has_cuda else "cpu"
