"""From a path to a scorer: a run, a checkpoint, a model directory or an ONNX artifact, GPT or BERT."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.allocator import return_freed_memory
from ..core.artifact import Input, is_artifact
from ..core.backend import BackendOptions
from ..core.console import warn
from ..core.errors import WrongUse
from ..core.scorer import Scorer

LEAST_SHARE = 0.9  # of a vocabulary: models are padded by some per cent at most

if TYPE_CHECKING:
    from ..models.bert import BERT
    from ..models.gpt import GPT


@dataclass(frozen=True)
class ScorerOptions:
    """How to open a scorer. None: its own window, a batch that suits the device, BOS as its tokenizer's file
    has it.
    """

    device: str = "auto"
    bos: bool | None = None
    window: int | None = None
    batch_tokens: int | None = None
    batch_questions: int | None = None
    keep_tokens: bool = False
    pll: str = "within_word_l2r"
    dtype: str = "auto"


@dataclass(frozen=True)
class Opened:
    """A scorer with what a report says of its model: family, where it came from, the step of a checkpoint,
    the module.
    """

    scorer: Scorer
    family: str
    input: Input
    step: int | None
    model: Any = None  # the torch module, None for an exported graph
    tokenizer: Any = None


def open_scorer(path: Path | str, options: ScorerOptions = ScorerOptions()) -> Opened:
    """The scorer of the model at `path`. Raises WrongUse when there is none, or it has no tokenizer."""
    from ..data.tokenizer import Tokenizer
    from ..inference.runtimes.backends import kind_of
    from ..models.config import family_of

    path = Path(path)
    if kind_of(path) in ("onnx", "engine", "gguf"):
        return _open_exported(path, options)
    from ..inference.runtimes.devices import pick_dtype
    from ..inference.runtimes.source import find_model

    found = find_model(path)
    file = _tokenizer_of(found.tokenizer, path)
    tokenizer = Tokenizer.load(file)
    tokenizer.fingerprint()  # takes 40 MB for a moment: now, and not on top of the weights
    return_freed_memory()
    device = own_gpu(options.device)
    opened = found.open(device, pick_dtype(options.dtype, found.stored_dtype(), device))
    family = family_of(opened.model.config)
    _check_tokenizer(tokenizer, opened.model.config.vocab_size, file)
    scorer: Scorer
    if family == "bert":
        from .masked import MaskedScorer

        scorer = MaskedScorer(
            cast("BERT", opened.model),
            tokenizer,
            identity=opened.input.hash,
            pll=options.pll,
            window=options.window,
            batch_tokens=options.batch_tokens,
            keep_tokens=options.keep_tokens,
        )
    else:
        from .causal import CausalScorer

        scorer = CausalScorer(
            cast("GPT", opened.model),
            tokenizer,
            identity=opened.input.hash,
            bos=tokenizer.puts_bos if options.bos is None else options.bos,
            window=options.window,
            batch_tokens=options.batch_tokens,
            batch_questions=options.batch_questions,
            keep_tokens=options.keep_tokens,
        )
    return_freed_memory()  # scoring would come on top of it
    return Opened(scorer, family, opened.input, _step(opened.input.path), opened.model, tokenizer)


def own_gpu(device: str) -> str:
    """The device as torch names it; under a launcher `cuda` and `auto` are the GPU of this process. Raises
    WrongUse for a device that the machine has not, or has fewer of than processes.
    """
    from ..inference.runtimes.devices import pick_device

    picked = pick_device(device)
    if picked == "cpu" or ":" in device:
        return picked
    import torch

    from ..train.parallel.mesh import own_device

    return str(own_device(torch.device("cuda")))


def _check_tokenizer(tokenizer: Any, vocab_size: int, file: Path) -> None:
    """Raises WrongUse when the model cannot predict all tokens; a much smaller vocabulary may be another
    model's and is said.
    """
    sizes = f"{tokenizer.vocab_size:,} tokens, and the model predicts {vocab_size:,}"
    if tokenizer.vocab_size > vocab_size:
        fix = "put the tokenizer.json that the model was trained with in its place"
        raise WrongUse(
            "the tokenizer does not belong to the model", where=file, why=f"it has {sizes}", fix=fix
        )
    if tokenizer.vocab_size < LEAST_SHARE * vocab_size:
        warn(f"{file} has {sizes}: if it is not the model's own, the scores mean nothing")


def _open_exported(path: Path, options: ScorerOptions) -> Opened:
    from ..data.tokenizer import Tokenizer
    from ..inference.runtimes.backends import open_backend, pick_onnx_device
    from .exported import ExportedMaskedScorer, ExportedScorer

    on_cpu = pick_onnx_device(options.device) == "cpu"
    device = "cpu" if on_cpu else own_gpu(options.device)
    loaded = open_backend(path, BackendOptions(device, options.dtype))
    file = _tokenizer_of(loaded.tokenizer, path)
    tokenizer = Tokenizer.load(file)
    common: dict[str, Any] = {
        "identity": loaded.input.hash,
        "window": options.window,
        "batch_tokens": options.batch_tokens,
        "keep_tokens": options.keep_tokens,
    }
    scorer: Scorer
    if loaded.causal is not None:
        scorer = ExportedScorer(
            loaded.causal, tokenizer, bos=tokenizer.puts_bos if options.bos is None else options.bos, **common
        )
    else:
        assert loaded.encoder is not None
        scorer = ExportedMaskedScorer(loaded.encoder, tokenizer, pll=options.pll, **common)
    return Opened(scorer, loaded.family, loaded.input, None, None, tokenizer)


def _tokenizer_of(file: Path | None, path: Path) -> Path:
    if file is None:
        raise WrongUse(
            "the model has no tokenizer",
            where=path,
            why="there is no tokenizer.json beside its weights",
            fix="put the tokenizer.json that it was trained with into its directory",
        )
    return file


def _step(path: str) -> int | None:
    found = re.fullmatch(r"step-(\d+)", Path(path).name)
    return int(found[1]) if found else None


def checkpoints_of(run: Path | str) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Raises WrongUse when there are none."""
    found = sorted(path for path in (Path(run) / "checkpoints").glob("step-*") if is_artifact(path))
    if not found:
        raise WrongUse("no checkpoints here", where=run, fix="--all-checkpoints needs the directory of a run")
    return found
