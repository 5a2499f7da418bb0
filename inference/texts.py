"""Text in, text or vectors out, for the command line: opens the model at a path and runs it here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..core.errors import WrongUse
from ..data.tokenizer import Tokenizer
from .backends import Loaded, open_backend
from .encoding import embed, frame
from .generation import Piece, Request, generate
from .sampling import Sampling


def continue_text(
    path: Path | str, prompt: str, settings: Sequence[Sampling], max_tokens: int, stop: tuple[str, ...] = ()
) -> Iterator[tuple[int, Piece]]:
    """Continue `prompt` once per setting with the GPT at `path`; yields (number, piece) as text is made.

    The answer ends with the model's context when `max_tokens` would go beyond it. Raises WrongUse when the model is no GPT
    or the prompt alone fills its context.
    """
    loaded, tokenizer = _open(path, "gpt")
    assert loaded.causal is not None
    ids = tokenizer.encode(prompt)
    if len(ids) == 0 and tokenizer.eos_id is not None:
        ids = np.array([tokenizer.eos_id])  # the beginning of a document
    room = loaded.causal.context - len(ids)
    if room < 1:
        raise WrongUse(
            "the prompt fills the model's context", where="prompt",
            why=f"{len(ids)} tokens, the context is {loaded.causal.context}", fix="shorten the prompt",
        )  # fmt: skip
    requests = [
        Request(ids, min(max_tokens, room), sampling, stop, tokenizer.eos_id) for sampling in settings
    ]
    yield from generate(loaded.causal, tokenizer.decode, requests, vocab_size=tokenizer.vocab_size)


def embed_texts(path: Path | str, texts: Sequence[str]) -> np.ndarray:
    """Embeddings of the texts with the BERT at `path`, each of length 1, float32 (texts, width)."""
    loaded, tokenizer = _open(path, "bert")
    assert loaded.encoder is not None
    sizes = (loaded.config.sequence_length, loaded.config.vocab_size)
    rows = [
        frame(tokenizer, text, *sizes, f"text {number}: {text[:60]}") for number, text in enumerate(texts, 1)
    ]
    return embed(loaded.encoder, rows, tokenizer.pad_id or 0)


def _open(path: Path | str, family: str) -> tuple[Loaded, Tokenizer]:
    loaded = open_backend(path)
    if loaded.family != family:
        needed = "generating needs a GPT" if family == "gpt" else "embedding needs a BERT"
        raise WrongUse(needed, where=path, why=f"this is a {loaded.family.upper()}")
    if loaded.tokenizer is None:
        raise WrongUse("this model has no tokenizer.json", where=path, fix="put one beside the weights")
    return loaded, Tokenizer.load(loaded.tokenizer)
