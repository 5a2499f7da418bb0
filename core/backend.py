"""What runs a model, in whatever library: protocols for `inference`, `eval` and the server; log-probabilities.

- Ids come from the host as numpy. `step` leaves its logits where they were computed, as a NumPy array on the CPU
  and a torch tensor on a GPU, so that sampling happens there and only chosen ids travel.
- A cache is rows of memory; a row is one sequence with its own length, and costs what its own tokens cost.

Shapes: B rows, S tokens given, N positions asked for, V vocabulary, H width.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

Cache = Any  # what a backend keeps between calls; only that backend looks inside
Array = Any  # numpy.ndarray on the CPU, torch.Tensor on a GPU; this module imports no torch
Ids = np.ndarray  # int64, of a mask bool
Want = Collection[str] | None  # names of outputs; None: all
Item = TypeVar("Item")


@dataclass(frozen=True)
class BackendOptions:
    """How to run a model. "auto": the GPU when there is one, the dtype of the stored weights when it computes in it."""

    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    dtype: str = "auto"  # "auto", "fp32", "fp16" or "bf16": of a torch model; other files have their own
    runtime: str = "own"  # "own": the file's; "auto": the fastest, measured; or a name of RUNTIMES
    threads: int | None = None  # CPU threads, None = one per core (torch keeps the process's own number)
    context: int | None = None  # tokens of a GPT's longest sequence, None = the model's
    gpu_memory: float = 0.9  # share of a GPU's memory for a torch GPT's weights and cache


AUTO = BackendOptions()
RUNTIMES = ("torch", "torch-compiled", "onnxruntime", "openvino", "llamacpp", "tensorrt")


@dataclass(frozen=True)
class Limits:
    """The most that one call takes: rows, and tokens with their padding. None = any number."""

    rows: int | None = None
    tokens: int | None = None

    def within(self, other: "Limits") -> "Limits":
        """What keeps both."""
        pairs = ((self.rows, other.rows), (self.tokens, other.tokens))
        return Limits(*(min((one for one in pair if one is not None), default=None) for pair in pairs))


ALL = Limits()  # of a runtime that takes any number


def batches(
    items: Iterable[Item], length: Callable[[Item], int], limits: Limits, packed: bool = False
) -> Iterator[list[Item]]:
    """Items in their order, in batches within the limits; one that is beyond them alone goes alone. Rows are padded to
    the longest of a batch; `packed`: they stand behind one another in one line.
    """
    batch: list[Item] = []
    filled = 0  # its tokens when packed, else its longest row
    for item in items:
        own = length(item)
        more = filled + own if packed else max(filled, own)
        tokens = more if packed else more * (len(batch) + 1)
        full = len(batch) == limits.rows or (limits.tokens is not None and tokens > limits.tokens)
        if batch and full:
            yield batch
            batch, more = [], own
        batch.append(item)
        filled = more
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class Span:
    """What one cache row gets in a step: some of a prompt, or the newest token of an answer."""

    row: int
    past: int  # tokens that the row already holds
    ids: np.ndarray  # int64 (S,), at least one
    asked: int = 1  # logits are wanted after its last `asked` tokens: 0, 1, or all of them


class CausalBackend(Protocol):
    """A GPT with a cache of rows."""

    name: str  # "torch", "onnxruntime", ...
    device: str  # "cpu", "cuda:0"
    dtype: str  # of its weights: "fp32", "fp16", "int8", ...
    vocab_size: int
    context: int  # tokens of the longest sequence, prompt and answer together
    token_bytes: int  # of cache that one token takes; 0 where rows cannot be saved
    limits: Limits

    def new_cache(self, rows: int) -> Cache:
        """An empty cache for `rows` sequences."""

    def step(self, spans: Sequence[Span], cache: Cache) -> Array:
        """Append the ids of all spans, parts of prompts and single tokens of answers, to their rows (each at most once)
        and return the logits asked for: float32 (N, V) on the backend's device, span after span. What a row gets does
        not depend on the others, up to the rounding of a matrix product of another height.
        """

    def copy_row(self, cache: Cache, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of one cache row over another row."""

    def free_row(self, cache: Cache, row: int) -> None:
        """The row's sequence has ended: its memory may be given back."""

    def save_row(self, cache: Cache, row: int, tokens: int) -> Any:
        """A copy of the first `tokens` tokens of a row, for any row later; nobody asks where `token_bytes` is 0."""

    def load_row(self, cache: Cache, row: int, saved: Any, tokens: int) -> None:
        """Put the first `tokens` tokens of a saved row over a row."""


class OneCall:
    """What an encoder inherits that takes one call after another."""

    lanes = 1
    limits = ALL

    def lane(self) -> Any:
        """See `EncoderBackend.lane`."""
        return self


class EncoderBackend(Protocol):
    """A BERT, or a GPT that embeds: all inputs (B, S); `mask` is True for a row's real tokens, its first ones."""

    name: str
    device: str
    dtype: str
    vocab_size: int
    context: int
    limits: Limits
    lanes: int  # calls that `lane` takes at once, each from a thread of its own

    def lane(self) -> "EncoderBackend":
        """The same model for calls of one thread each, `lanes` of them at once."""

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        """float32 outputs: `last_hidden_state` (B, S, H); `mlm_logits` (B, N, V) at the positions `ask`;
        `sentence_embedding` (B, H), the mean over real tokens; `cls_embedding` (B, H), the first; asked for,
        `last_embedding`; with an NSP head `pooler_output` (B, H) and `nsp_logits` (B, 2). `want`: those alone need
        come from the device to the host; a backend that has no `cls_embedding` gives the hidden states for it.
        """


def library(array: Array) -> Any:
    """The module whose array this is, numpy or torch."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def on_host(array: Array) -> np.ndarray:
    """An array that was left on its device, here."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def log_sum(logits: Array) -> Array:
    """The logarithm of the sum of exponentials over the last axis, which stays with length 1."""
    xp = library(logits)
    largest = xp.amax(logits, axis=-1, keepdims=True)
    return largest + xp.log(xp.exp(logits - largest).sum(-1)[..., None])


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis."""
    return logits - log_sum(logits)


def divergence(ours: Array, theirs: Array) -> Array:
    """KL(ours || theirs) in nats of the distributions over the last axis, which goes."""
    with np.errstate(invalid="ignore"):  # of logits that are not finite, whoever judges them sees a NaN
        ours, theirs = log_softmax(ours), log_softmax(theirs)
        return (library(ours).exp(ours) * (ours - theirs)).sum(-1)
