"""Log-probabilities by torch modules: questions packed into one line, logits in pieces of the vocabulary.

Rows of a batch lie behind one another in one sequence without padding between them: matrix products and norms see one
token a line, and only attention knows where a row begins. Results are then the same whatever shares a batch: a matrix
product on the CPU gives each line the same bits however many lines there are, from 4 a thread on (measured, MKL), so
the sequence is filled up to whole blocks a thread.

The output matrix is used in pieces of `PIECE` tokens, each with its maximum and sum, so the logits of a piece stay in
the cache: for 50,257 tokens half the time of a full log-softmax on a narrow model, and 2 MB instead of 100. Sums and
the softmax are float32 whatever the model's dtype. The last block's feed-forward computes at the scored lines alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.artifact import programs
from ..core.scorer import Ids, Question
from ..models.attention import scaled_dot_product
from ..models.bert import BERT
from ..models.gpt import GPT
from ..models.layers import attending
from ..models.linear import linear, one_kernel
from ..models.transformer import AttentionPattern
from .scoring import MaskedRows, Predicted, Ranked, Tree, plant

BATCH_TOKENS = 16384  # of a GPU
NARROW = 512  # hidden units: below, the head is most of the work, best done for many questions at a time
LINES = {"cpu": 256, "cuda": 4096}  # positions at a time
PIECE = {"cpu": 2048, "cuda": 16384}  # tokens of the vocabulary at a time
Keep = Callable[[Any], None] | None  # is given keys and values
LINES_PER_THREAD = 16  # whole vector registers, and enough lines for the general matrix product


class ModuleReader:
    """A torch module that reads (`scoring.Reader`)."""

    name = ""
    shares = False

    def __init__(self, model: GPT | BERT) -> None:
        self.model = model.eval()
        weight = model.token_table.weight
        self.device = weight.device
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.vocab_size, self.context = model.config.vocab_size, model.config.sequence_length
        self.batch_tokens = BATCH_TOKENS
        if self.device.type == "cpu":
            # On one CPU thread a model of 128 hidden units takes 50 % longer with 256 than with 512 where questions
            # are long; one of 768 is as fast with 256, and needs 15 MB less (100 MB less than with 1024).
            self.batch_tokens = whole_blocks(512 if weight.shape[1] < NARROW else 256)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        self.by = [*programs("torch"), name]
        # one launch a batch; a CPU gives the same bits in any batch
        self.together = self.device.type != "cpu"


class ModuleTrees(ModuleReader):
    """A GPT."""

    model: GPT
    shares = True
    trunk: tuple[Ids, list[tuple[Tensor, Tensor]]] = ((), [])  # keys and values of each layer, (1, G, S, D)

    def writer(self, tokens: int) -> Any:
        """The module behind the protocol of backends, for texts that it writes: a cache row holds so many tokens,
        prompt and answer.
        """
        from ..inference.runtimes.torch_backend import TorchCausal

        return TorchCausal(self.model, min(tokens, self.context))

    @torch.inference_mode()
    @one_kernel()
    def predict(self, trees: list[Tree], lines: np.ndarray, targets: np.ndarray) -> Predicted:
        """Of the targets (T,) at `lines` (T,) of trees with one trunk, which is kept for the next call."""
        if (trunk := trees[0].trunk) != self.trunk[0]:
            self.trunk = (), []  # until it is whole: memory may end while it is read
            kept: list[tuple[Tensor, Tensor]] = []
            if trunk:
                whole = plant(Question(((trunk, (0,)),)), len(trunk))
                self.hidden([whole], lines[:0], kept.append)
            self.trunk = trunk, kept
        head = Head(self.model.output_weight(), self.model.output_bias(), self.model.config.logit_softcap)
        return token_logprobs(head, self.hidden(trees, lines), lines, targets)[:2]

    def hidden(self, trees: Sequence[Tree], lines: np.ndarray, keep: Keep = None) -> Tensor:
        """(S, W): hidden states of the trees, final at `lines` alone; `keep` is given every layer's keys and values."""
        tokens = sum(tree.tokens for tree in trees)
        packed = np.zeros((2, whole_blocks(tokens)), np.int64)
        packed[0, :tokens] = np.concatenate([tree.ids for tree in trees])
        packed[1, :tokens] = np.concatenate([tree.positions for tree in trees])
        ids, positions = torch.from_numpy(packed).to(self.device)

        @cache
        def attention(pattern: AttentionPattern | None, layer: int) -> Callable[..., Tensor]:
            groups = [trees] if self.together else [[tree] for tree in trees]
            return tree_attention(groups, self.model.output_weight(), pattern, layer)

        def of_layer(layer: int) -> Callable[..., Tensor]:
            pattern = self.model.config.pattern_of(layer)
            attend = attention(pattern, layer if pattern and pattern.random_blocks else 0)  # these draw anew
            return partial(attend, self.trunk[1][layer] if trees[0].trunk else (), keep)

        blocks: list[Any] = list(self.model.blocks.values())
        asked = torch.from_numpy(filled(distinct(lines))).to(self.device)
        with attending([block.attention for block in blocks], of_layer), narrowed(blocks[-1].mlp, asked):
            return self.model.hidden(ids[None], positions[None])[0]


class ModuleRows(ModuleReader):
    """A BERT."""

    model: BERT

    def __init__(self, model: BERT) -> None:
        super().__init__(model)
        self.batch_tokens *= 8

    @torch.inference_mode()
    @one_kernel()
    def predict(self, asked: MaskedRows, batch_tokens: int, ranks: bool) -> Ranked:
        """Of every target: log-probability, whether it is the arg-max, and with `ranks` how many tokens beat it."""
        lines, owner, places, targets = asked
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        features = []
        at_once = max(1, batch_tokens // lines.shape[1])
        for first in range(0, len(lines), at_once):
            part = lines[first : first + at_once]
            least = -(-whole_blocks(1) // lines.shape[1])
            ids = torch.from_numpy(np.resize(part, (max(len(part), least), lines.shape[1]))).to(self.device)
            here = slice(begins[first], begins[first + len(part)])
            chosen = (torch.from_numpy(array[here]).to(self.device) for array in (owner - first, places))
            features.append(self.model.hidden(ids)[tuple(chosen)])
        lines_N = torch.from_numpy(filled(np.arange(len(places)))).to(self.device)
        hidden_NW = self.model.mlm_features(torch.cat(features)[lines_N])
        head = Head(self.model.token_table.weight, self.model.mlm_bias)
        return token_logprobs(head, hidden_NW, np.arange(len(places)), targets, ranks=ranks)


@contextmanager
def narrowed(mlp: nn.Module, lines: Tensor) -> Iterator[None]:
    """Let the last block's feed-forward, most of its work, compute at the lines that are asked for alone."""
    whole = mlp.forward

    def forward(x_1SW: Tensor) -> Tensor:
        return torch.zeros_like(x_1SW).index_copy_(1, lines, whole(x_1SW[:, lines]))

    mlp.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del mlp.forward


def tree_attention(
    groups: Sequence[Sequence[Tree]], like: Tensor, pattern: AttentionPattern | None, layer: int
) -> Callable[..., Tensor]:
    """Attention of a packed batch, with the signature of `Attention.attend`, in its place for one forward. The trees of
    a group are one call: rows that repeat their last token up to the longest. Masks are `like` the model's weights.
    """
    calls: list[tuple[Any, Tensor | None]] = []  # lines of the rows, mask or causal
    tokens = 0
    for trees in groups:
        sizes = np.array([tree.tokens for tree in trees])
        places = np.arange(sizes.max())
        ends, tokens = tokens + np.cumsum(sizes), tokens + int(sizes.sum())
        lines: Any = slice(tokens - len(places), tokens)
        if len(trees) > 1:
            lines_BS = np.minimum((ends - sizes)[:, None] + places, ends[:, None] - 1)
            lines = torch.from_numpy(lines_BS).to(like.device)
        plain = pattern is None and not any(tree.branches or tree.trunk for tree in trees)
        if plain and sizes.min() == sizes.max():
            calls.append((lines, None))
            continue
        seen_BSP = np.zeros((len(trees), len(places), len(trees[0].trunk) + len(places)), bool)
        for own_SP, tree in zip(seen_BSP, trees):
            seen = _seen(tree, pattern, layer)
            own_SP[:, : seen.shape[1]] = seen[np.minimum(places, tree.tokens - 1)]
        hidden_B1SP = torch.from_numpy(~seen_BSP[:, None]).to(like.device)
        mask = torch.zeros(hidden_B1SP.shape, dtype=like.dtype, device=like.device)
        calls.append((lines, mask.masked_fill_(hidden_B1SP, -torch.inf)))

    def attend(before: Sequence[Tensor], keep: Keep, q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
        """q (1, A, S, D), k and v (1, G, S, D) -> (1, A, S, D); lines behind the last row are zero. `before`: keys and
        values of the trunk; `keep` is given those of the trees.
        """
        besides = {key: told[key] for key in ("softcap", "sinks") if key in told}
        if keep is not None:
            keep((k[:, :, :tokens].clone(), v[:, :, :tokens].clone()))
        out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        out[:, :, tokens:] = 0
        for lines, mask in calls:
            alone = isinstance(lines, slice)
            mine, *own = (x[:, :, lines] if alone else x[0][:, lines].transpose(0, 1) for x in (q, k, v))
            if before:
                own = [torch.cat((past.expand(len(x), -1, -1, -1), x), 2) for past, x in zip(before, own)]
            found = scaled_dot_product(mine, *own, mask=mask, is_causal=mask is None, **besides)
            out[0][:, lines] = found[0] if alone else found.transpose(0, 1)
        return out

    return attend


def _seen(tree: Tree, pattern: AttentionPattern | None, layer: int) -> np.ndarray:
    """Whether the tokens of a tree see those of its trunk and its own, (S, T + S)."""
    behind = len(tree.trunk)
    lengths = behind + tree.tokens - sum(tree.branches), *tree.branches
    branch = np.repeat(np.arange(len(tree.branches) + 1), lengths)
    order = np.arange(behind + tree.tokens)
    seen = ((branch == 0) | (branch == branch[behind:, None])) & (order <= order[behind:, None])
    if pattern is not None:
        places = np.append(np.arange(behind), tree.positions)
        seen &= pattern.sees(places[behind:, None], places, causal=True, layer=layer)
    return seen


def whole_blocks(lines: int) -> int:
    """`lines` rounded up so that every thread gets whole blocks."""
    block = LINES_PER_THREAD * torch.get_num_threads()
    return -(-lines // block) * block


def distinct(lines: np.ndarray) -> np.ndarray:
    """The lines in order, each once; `np.unique` would import another 50 ms of numpy."""
    return np.flatnonzero(np.bincount(lines))


def filled(lines: np.ndarray) -> np.ndarray:
    """The lines, repeated up to whole blocks; of none the first."""
    return np.resize(lines if len(lines) else np.zeros(1, np.int64), whole_blocks(max(1, len(lines))))


class Head(NamedTuple):
    """What makes logits of hidden states."""

    weight_VW: Tensor
    bias_V: Tensor | None
    softcap: float = 0.0

    def logits(self, hidden_NW: Tensor, piece: slice) -> Tensor:
        """(N, PIECE) float32: those of the tokens of a piece."""
        bias = None if self.bias_V is None else self.bias_V[piece]
        logits = linear(hidden_NW, self.weight_VW[piece], bias).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def token_logprobs(
    head: Head, hidden_SW: Tensor, lines: np.ndarray, targets: np.ndarray, *, ranks: bool = False
) -> Ranked:
    """For each target id (T,) at position `lines` (T,) of `hidden`: log-probability float32, whether it is the arg-max
    (the first of equals), and with `ranks` how many tokens are more probable (else zeros).
    """
    places = distinct(lines)
    which = np.searchsorted(places, lines)
    order = np.argsort(which, kind="stable")
    most = LINES.get(hidden_SW.device.type, LINES["cpu"])
    cuts = np.searchsorted(which[order], np.arange(0, len(places) + most, most))
    found = []
    for piece, (first, last) in enumerate(pairwise(cuts)):
        chunk = torch.from_numpy(filled(places[piece * most : (piece + 1) * most])).to(hidden_SW.device)
        asked = order[first:last]
        found.append(_chunk(head, hidden_SW[chunk], which[asked] - piece * most, targets[asked], ranks))
    logprobs, greedy, above = torch.cat(found, 1)[:, np.argsort(order)].cpu().numpy()  # the batch's one read
    return logprobs.astype(np.float32), greedy.astype(bool), above.astype(np.int64)


def _chunk(head: Head, hidden_NW: Tensor, rows: np.ndarray, targets: np.ndarray, ranks: bool) -> Tensor:
    """`token_logprobs` of up to LINES positions as float64 (3, T); target t is asked of position rows[t]."""
    device = hidden_NW.device
    size = PIECE.get(device.type, PIECE["cpu"])
    pieces = [slice(start, start + size) for start in range(0, len(head.weight_VW), size)]
    order = np.argsort(targets // size, kind="stable")
    bounds = np.searchsorted(targets[order] // size, np.arange(len(pieces) + 1)).tolist()
    row, token = (torch.from_numpy(array[order]).to(device) for array in (rows, targets % size))
    maxima_NP, sums_NP = torch.empty((2, len(hidden_NW), len(pieces)), device=device)
    chosen, first_here = [], []
    for number, piece in enumerate(pieces):
        logits = head.logits(hidden_NW, piece)
        here = slice(bounds[number], bounds[number + 1])
        mine = logits[row[here]]
        chosen.append(mine.gather(1, token[here, None])[:, 0])
        first_here.append(mine.argmax(dim=-1) == token[here])
        maxima_NP[:, number] = best = logits.amax(dim=-1)
        sums_NP[:, number] = logits.sub_(best[:, None]).exp_().sum(dim=-1)
    best = maxima_NP.amax(dim=-1)
    norm = best + torch.log((sums_NP * torch.exp(maxima_NP - best[:, None])).sum(dim=-1))
    picked = torch.cat(chosen)
    piece_of = torch.from_numpy(targets[order] // size).to(device)
    greedy = torch.cat(first_here) & (maxima_NP.argmax(dim=-1)[row] == piece_of)
    above = torch.zeros(len(targets), dtype=torch.int64, device=device)
    for piece in pieces if ranks else ():
        above += (head.logits(hidden_NW, piece)[row] > picked[:, None]).sum(dim=-1)
    found = torch.stack(((picked - norm[row]).double(), greedy.double(), above.double()))
    return found[:, np.argsort(order)]
