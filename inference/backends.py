"""A path becomes something that runs: torch for a run, checkpoint or model directory, ONNX Runtime for an ONNX artifact."""

from dataclasses import dataclass
from pathlib import Path

from ..core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ..core.backend import CausalBackend, EncoderBackend
from ..core.files import read_json
from ..models.config import FAMILIES, ModelConfig, family_of
from .source import open_model


@dataclass(frozen=True)
class Loaded:
    """A backend with what belongs to it. `causal` or `encoder` is set, as the family says."""

    family: str  # "gpt" or "bert"
    config: ModelConfig
    tokenizer: Path | None
    input: Input
    causal: CausalBackend | None = None
    encoder: EncoderBackend | None = None


def open_backend(path: Path | str, threads: int | None = None, device: str = "cpu") -> Loaded:
    """The backend for the model at `path`. Raises WrongUse or Refused as `open_model` does.

    `threads`: CPU threads of ONNX Runtime, None = one per core; torch keeps the process's own setting.
    """
    path = Path(path)
    if is_artifact(path) and read_manifest(path).kind == "onnx":
        return _open_onnx(path, threads)
    opened = open_model(path, device)
    return torch_backend(opened.model, opened.tokenizer, opened.input)


def torch_backend(model, tokenizer: Path | None, source: Input) -> Loaded:
    """The torch module behind the protocol of its family."""
    from .torch_backend import TorchCausal, TorchEncoder

    family = family_of(model.config)
    if family == "gpt":
        return Loaded(family, model.config, tokenizer, source, causal=TorchCausal(model))
    return Loaded(family, model.config, tokenizer, source, encoder=TorchEncoder(model))


def _open_onnx(path: Path, threads: int | None) -> Loaded:
    verify_artifact(path)
    described = read_json(path / "model.json")
    tokenizer = path / "tokenizer.json"
    return onnx_backend(
        path / "model.onnx", FAMILIES[described["family"]].from_dict(described["config"]),
        tokenizer if tokenizer.is_file() else None, input_record(path), threads,
    )  # fmt: skip


def onnx_backend(graph: Path, config: ModelConfig, tokenizer: Path | None, source: Input, threads: int | None) -> Loaded:
    """A graph of our writer behind the protocol of its family."""
    from .onnx_backend import OnnxCausal, OnnxEncoder

    family = family_of(config)
    if family == "gpt":
        return Loaded(family, config, tokenizer, source, causal=OnnxCausal(graph, config, threads))
    return Loaded(family, config, tokenizer, source, encoder=OnnxEncoder(graph, config, threads))
