"""Opening a model wherever it lies (a run, a checkpoint, a model artifact, a Hugging Face directory), on which device
and in which dtype: what was asked for, or refused; never silently another.
"""

import contextlib
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ...core.backend import BackendOptions, CausalBackend, EncoderBackend
from ...core.errors import WrongUse, beside, download_hint
from ...models.config import SINGLE_LABEL, ModelConfig, family_of
from ...models.sentence import MEAN, Sentence

if TYPE_CHECKING:
    import torch

    from ...models.bert import BERT, BERTWithHead
    from ...models.gpt import GPT


class OpenedModel(NamedTuple):
    """A model in eval mode, its tokenizer.json (None when it has none) and what to record as an input."""

    model: "GPT | BERT | BERTWithHead"
    tokenizer: Path | None
    input: Input


class FoundModel(NamedTuple):
    """A model not yet read."""

    directory: Path
    tokenizer: Path | None

    def stored_dtype(self, device: str) -> str:
        """The dtype that most of its weights are stored in; of a checkpoint, whose masters are fp32, the 16 bits in
        which it was trained, but for a CPU. Of any other "fp32".
        """
        if not (self.directory / "config.json").is_file():
            trained = read_manifest(self.directory).facts.get("precision")
            return trained if trained in ("bf16", "fp16") and device != "cpu" else "fp32"
        from safetensors import SafetensorError, safe_open

        sizes: Counter[str] = Counter()
        with contextlib.suppress(SafetensorError):  # a cut file: `open` says so
            for file in sorted(self.directory.glob("*.safetensors")):
                with safe_open(file, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (this is no dict)
                        part = tensors.get_slice(name)
                        sizes[part.get_dtype()] += math.prod(part.get_shape())
        return {"F16": "fp16", "BF16": "bf16"}.get(max(sizes, key=sizes.__getitem__, default=""), "fp32")

    def open(self, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
        """Read it, without what only training has. Raises as `open_model` does."""
        from ...models.gpt import in_use

        if not (self.directory / "config.json").is_file():
            from ...train.checkpoints.checkpoint import load_model

            model, tokenizer = load_model(self.directory, device, dtype)
            return OpenedModel(in_use(model), tokenizer, input_record(self.directory, remembered=True))
        import torch

        from ...models.huggingface import load_huggingface

        if is_artifact(self.directory):
            verify_artifact(self.directory)
        model = load_huggingface(self.directory, dtype or torch.float32).to(device).eval()
        return OpenedModel(in_use(model), self.tokenizer, input_record(self.directory, remembered=True))


def no_model(path: Path) -> WrongUse:
    """The error of a path that is not there, with the nearest name beside it."""
    fix = beside(path, "check the spelling; runs are under runs/") + download_hint(path)
    return WrongUse("no such model", where=path, fix=fix)


def find_model(path: Path | str) -> FoundModel:
    """The torch model that `path` means. Raises WrongUse when there is none there."""
    path = Path(path)
    if not path.exists():
        raise no_model(path)
    if path.is_file():
        fix = "give its directory: an ONNX artifact, a Hugging Face directory, a run or a checkpoint"
        raise WrongUse("this file is no model", where=path, why="of single files only .gguf is read", fix=fix)
    if not (path / "config.json").is_file():
        if is_artifact(path) and (kind := read_manifest(path).kind) in ("onnx", "engine", "gguf"):
            what = f"a torch model is needed, this is an artifact of kind {kind}"
            fix = "give the run or checkpoint that it was exported from (`throughline show` names it)"
            raise WrongUse(what, where=path, fix=fix)
        from ...train.checkpoints.run_directory import locate

        path = locate(path)
    tokenizer = path / "tokenizer.json"
    return FoundModel(path, tokenizer if tokenizer.is_file() else None)


def open_model(path: Path | str) -> OpenedModel:
    """The torch model at `path`. Raises WrongUse for none, Refused for a damaged one and what ours cannot express."""
    return find_model(path).open()


def pick_device(wanted: str) -> str:
    """One of "cpu" and "cuda:N"; "auto" is the first GPU, if any. Raises WrongUse for one that is not here."""
    if wanted == "cpu":
        return "cpu"
    if wanted != "auto" and not re.fullmatch(r"cuda(:\d+)?", wanted):
        raise WrongUse(f"no device is called {wanted!r}", where="--device", fix="auto, cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        if wanted == "auto":
            return "cpu"
        fix = "leave --device out, or see: throughline doctor"
        raise WrongUse("no CUDA device here", where="--device", fix=fix)
    number, there = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= there:
        why = f"this machine has {there}"
        raise WrongUse(f"no {wanted} here", where="--device", why=why, fix=f"0 … {there - 1}")
    return f"cuda:{number}"


def pick_dtype(wanted: str, stored: str, device: str) -> "torch.dtype":
    """The dtype of a torch model. "auto" is the one the weights are stored in, where the device computes in it; else
    fp16 for bf16 on a GPU, and fp32. Raises Refused when the device does not compute in what was asked for.
    """
    import torch

    from ...core.hardware import check_dtype, computes_in, machine

    by_name = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if wanted not in ("auto", *by_name):
        fix = f"give auto, {', '.join(by_name)}"
        raise WrongUse(f"no dtype is called {wanted!r}", where="--dtype", fix=fix)
    native: tuple[str, ...] = machine().cpu.dtypes
    if device != "cpu":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        native = tuple(name for name in by_name if computes_in(name, capability))
        if wanted != "auto":
            check_dtype(wanted, capability=capability, name=torch.cuda.get_device_name(device))
    if wanted != "auto":
        return by_name[wanted]
    if stored not in native:
        stored = "fp16" if stored == "bf16" and "fp16" in native and device != "cpu" else "fp32"
    return by_name[stored]


def context_of(config: ModelConfig, options: BackendOptions) -> int:
    """Tokens of the longest sequence. Raises WrongUse for more than the model's."""
    if options.context is not None and options.context > config.sequence_length:
        what, why = "the model has a shorter context", f"it reads {config.sequence_length:,} tokens"
        raise WrongUse(what, where=f"--context {options.context}", why=why, fix="give at most that")
    return options.context or config.sequence_length


def check_options(options: BackendOptions, kind: str, runtimes: tuple[str, ...]) -> str:
    """The runtime for a file of this kind. Raises WrongUse when it has none of that name, or its own dtype."""
    if options.runtime not in ("own", "auto", *runtimes):
        fix = f"give one of {', '.join(runtimes)}, or export the model for the other"
        raise WrongUse(f"{options.runtime} does not run {kind}", where="--backend", fix=fix)
    if options.dtype != "auto" and "torch" not in runtimes:
        why = "it was decided when it was exported"
        fix = "leave --dtype out, or export the model again with another precision"
        raise WrongUse(f"{kind} has its own precision", where=f"--dtype {options.dtype}", why=why, fix=fix)
    return runtimes[0] if options.runtime == "own" else options.runtime


@dataclass(frozen=True)
class Loaded:
    """A model that runs, with what belongs to it."""

    config: ModelConfig
    tokenizer: Path | None
    input: Input
    backend: Any  # a `CausalBackend` or an `EncoderBackend`
    classes: tuple[str, ...] = ()  # of a BERT fine-tuned to classify texts: the names of its `logits`
    sentence: Sentence = MEAN  # how an encoder's outputs become the vector of a text
    problem: str = SINGLE_LABEL  # what its `logits` are: one class, several, or numbers

    @property
    def family(self) -> str:
        return family_of(self.config)

    @property
    def causal(self) -> CausalBackend | None:
        """The backend of a GPT that generates."""
        return self.backend if hasattr(self.backend, "step") else None

    @property
    def encoder(self) -> EncoderBackend | None:
        """The backend of a BERT, or of a GPT that embeds."""
        return self.backend if self.causal is None else None
