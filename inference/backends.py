"""A path becomes something that runs: torch for a run, checkpoint or model directory, ONNX Runtime for an ONNX artifact."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ..core.backend import CausalBackend, EncoderBackend
from ..core.files import read_json
from ..models.config import FAMILIES, GPTConfig, ModelConfig
from .source import open_model

if TYPE_CHECKING:
    from ..models.bert import BERT
    from ..models.gpt import GPT


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


def torch_backend(model: "GPT | BERT", tokenizer: Path | None, source: Input) -> Loaded:
    """The torch module behind the protocol of its family."""
    from ..models.gpt import GPT
    from .torch_backend import TorchCausal, TorchEncoder

    if isinstance(model, GPT):
        return Loaded("gpt", model.config, tokenizer, source, causal=TorchCausal(model))
    return Loaded("bert", model.config, tokenizer, source, encoder=TorchEncoder(model))


def _open_onnx(path: Path, threads: int | None) -> Loaded:
    verify_artifact(path)
    described = read_json(path / "model.json")
    tokenizer = path / "tokenizer.json"
    return onnx_backend(
        path / "model.onnx", FAMILIES[described["family"]].from_dict(described["config"]),
        tokenizer if tokenizer.is_file() else None, input_record(path), threads,
    )  # fmt: skip


def onnx_backend(
    graph: Path, config: ModelConfig, tokenizer: Path | None, source: Input, threads: int | None
) -> Loaded:
    """A graph of our writer behind the protocol of its family."""
    from .onnx_backend import OnnxCausal, OnnxEncoder

    if isinstance(config, GPTConfig):
        return Loaded("gpt", config, tokenizer, source, causal=OnnxCausal(graph, config, threads))
    return Loaded("bert", config, tokenizer, source, encoder=OnnxEncoder(graph, config, threads))
