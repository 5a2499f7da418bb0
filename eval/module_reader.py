"""Log-probabilities by torch modules: questions packed into one line, logits in pieces of the vocabulary.

Rows of a batch lie behind one another in one sequence without padding between them: matrix products and norms see one
token a line, and only attention knows where a row begins. Results are then the same whatever shares a batch: a matrix
product on the CPU gives each line the same bits however many lines there are, from 4 a thread on (measured, MKL), so
the sequence is filled up to whole blocks a thread.

The output matrix is used in pieces of `PIECE` tokens with a running maximum and sum (the online softmax), so the logits
of a piece stay in the cache: for 50,257 tokens half the time of a full log-softmax on a narrow model, and 2 MB instead
of 100. Sums and the softmax are float32 whatever the model's dtype.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.artifact import programs
from ..core.scorer import Ids, Question
from ..models.attention import scaled_dot_product
from ..models.bert import BERT
from ..models.gpt import GPT
from ..models.layers import Attention, attending
from ..models.linear import linear, one_kernel
from ..models.transformer import AttentionPattern
from .scoring import Predicted, Tree, plant

BATCH_TOKENS = 16384  # of a GPU
NARROW = 512  # hidden units: below, the head is most of the work, best done for many questions at a time
ONE_CALL_TOKENS = 64  # up to this length one masked attention call beats a causal and a masked one
LINES = 512  # positions at a time
PIECE = {"cpu": 1024, "cuda": 16384}  # tokens of the vocabulary at a time
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


class ModuleTrees(ModuleReader):
    """A GPT."""

    model: GPT
    shares = True
    trunk: tuple[Ids, list[tuple[Tensor, Tensor]]] = ((), [])  # keys and values of each layer, (1, G, S, D)

    @cached_property
    def backend(self) -> Any:
        """The module behind the protocol of backends, for text that it writes."""
        from ..inference.runtimes.torch_backend import TorchCausal

        return TorchCausal(self.model)

    @torch.inference_mode()
    @one_kernel()
    def predict(self, trees: list[Tree], lines: np.ndarray, targets: np.ndarray) -> Predicted:
        """Of the targets (T,) at `lines` (T,) of the trees behind one another: log-probability, and whether it is
        the arg-max. All have one trunk, which is kept for the next call.
        """
        if (trunk := trees[0].trunk) != self.trunk[0]:
            self.trunk = (), []  # until it is whole: memory may end while it is read
            kept: list[tuple[Tensor, Tensor]] = []
            if trunk:
                self.hidden([plant(Question(((trunk, (0,)),)), len(trunk))], kept.append)
            self.trunk = trunk, kept
        head = self.model.output_weight(), self.model.output_bias(), self.hidden(trees)
        return token_logprobs(*head, lines, targets, softcap=self.model.config.logit_softcap)[:2]

    def hidden(self, trees: Sequence[Tree], keep: Callable[[Any], None] | None = None) -> Tensor:
        """(S, W): hidden states of the trees behind one another; `keep` is given every layer's keys and values."""
        tokens = sum(tree.tokens for tree in trees)
        packed = np.zeros((2, whole_blocks(tokens)), np.int64)
        packed[0, :tokens] = np.concatenate([tree.ids for tree in trees])
        packed[1, :tokens] = np.concatenate([tree.positions for tree in trees])
        ids, positions = torch.from_numpy(packed).to(self.device)

        @cache
        def attention(pattern: AttentionPattern | None, layer: int) -> Callable[..., Tensor]:
            return tree_attention(trees, self.device, self.model.output_weight().dtype, pattern, layer)

        def of_layer(layer: int) -> Callable[..., Tensor]:
            pattern = self.model.config.pattern_of(layer)
            attend = attention(pattern, layer if pattern and pattern.random_blocks else 0)  # these draw anew
            return partial(attend, keep=keep, before=self.trunk[1][layer] if trees[0].trunk else ())

        modules = (module for module in self.model.modules() if isinstance(module, Attention))
        with attending(modules, of_layer):
            return self.model.hidden(ids[None], positions[None])[0]


class ModuleRows(ModuleReader):
    """A BERT."""

    model: BERT

    def __init__(self, model: BERT) -> None:
        super().__init__(model)
        self.batch_tokens *= 8

    @torch.inference_mode()
    @one_kernel()
    def predict(
        self,
        lines: np.ndarray,
        owner: np.ndarray,
        places: np.ndarray,
        targets: np.ndarray,
        batch_tokens: int,
        ranks: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the targets (T,) at `places` of the lines (L, S) that own them: log-probability, whether it is the
        arg-max, and with `ranks` how many tokens are more probable.
        """
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        features = []
        at_once = max(1, batch_tokens // lines.shape[1])
        for first in range(0, len(lines), at_once):
            part = lines[first : first + at_once]
            # whole blocks of lines for the matrix products, as in logits.py: a small batch repeats its rows
            least = -(-whole_blocks(1) // lines.shape[1])
            ids = torch.from_numpy(np.resize(part, (max(len(part), least), lines.shape[1]))).to(self.device)
            asked = slice(begins[first], begins[first + len(part)])
            chosen = (torch.from_numpy(array[asked]).to(self.device) for array in (owner - first, places))
            features.append(self.model.hidden(ids)[tuple(chosen)])
        filled = torch.from_numpy(np.resize(np.arange(len(places)), whole_blocks(len(places))))
        hidden_NW = self.model.mlm_features(torch.cat(features)[filled.to(self.device)])
        table, bias = self.model.token_table.weight, self.model.mlm_bias
        return token_logprobs(table, bias, hidden_NW, np.arange(len(places)), targets, ranks=ranks)


def tree_attention(
    trees: Sequence[Tree],
    device: torch.device,
    dtype: torch.dtype,
    pattern: AttentionPattern | None,
    layer: int,
) -> Callable[..., Tensor]:
    """Attention of a packed batch, with the signature of `Attention.attend`, in its place for one forward."""
    calls: list[tuple[int, int, int, Tensor | None]] = []  # lines that ask, first line seen, mask or causal
    start = tokens = 0
    for tree in trees:
        tokens += tree.tokens
        mask = _mask(tree, device, dtype, pattern, layer)
        asked = tokens if mask is None else tokens - len(mask)
        if asked > start:
            calls.append((start, asked, start, None))
        if mask is not None:
            calls.append((asked, tokens, start, mask))
        start = tokens

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        before: Sequence[Tensor] = (),
        keep: Callable[[Any], None] | None = None,
        **_: Any,
    ) -> Tensor:
        """q (1, A, S, D), k and v (1, G, S, D) -> (1, A, S, D); lines behind the last row are zero. `before`: keys and
        values of the trunk; `keep` is given those of the trees.
        """
        if keep is not None:
            keep((k[:, :, :tokens].clone(), v[:, :, :tokens].clone()))
        out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        out[:, :, tokens:] = 0
        for first, stop, seen, mask in calls:
            own: tuple[Tensor, ...] = (k[:, :, seen:stop], v[:, :, seen:stop])
            if before:
                own = tuple(torch.cat(both, dim=2) for both in zip(before, own))
            how: Any = {"mask": mask, "is_causal": mask is None, "softcap": softcap, "sinks": sinks}
            out[:, :, first:stop] = scaled_dot_product(q[:, :, first:stop], *own, **how)
        return out

    return attend


def _mask(
    tree: Tree, device: torch.device, dtype: torch.dtype, pattern: AttentionPattern | None, layer: int
) -> Tensor | None:
    """What the last rows of a tree (with a `pattern` or a trunk all) may see of its trunk and itself, (rows, T + S), 0
    or -inf; None when the whole tree is one causal sequence.
    """
    if not tree.branches and pattern is None and not tree.trunk:
        return None
    behind = len(tree.trunk)
    lengths = behind + tree.tokens - sum(tree.branches), *tree.branches
    branch = np.repeat(np.arange(len(tree.branches) + 1), lengths)
    order = np.arange(behind + tree.tokens)
    whole = pattern is not None or behind or tree.tokens <= ONE_CALL_TOKENS
    first = behind if whole else tree.prefix
    seen = ((branch == 0) | (branch == branch[first:, None])) & (order <= order[first:, None])
    if pattern is not None:
        places = np.append(np.arange(behind), tree.positions)
        seen &= pattern.sees(places[first:, None], places, causal=True, layer=layer)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(torch.from_numpy(~seen).to(device), float("-inf"))


def whole_blocks(lines: int) -> int:
    """`lines` rounded up so that every thread gets whole blocks."""
    block = LINES_PER_THREAD * torch.get_num_threads()
    return -(-lines // block) * block


def token_logprobs(
    weight_VW: Tensor,
    bias_V: Tensor | None,
    hidden_SW: Tensor,
    lines: np.ndarray,
    targets: np.ndarray,
    *,
    ranks: bool = False,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each target id (T,) at position `lines` (T,) of `hidden`: log-probability float32, whether it is the arg-max
    (the first of equals), and with `ranks` how many tokens are more probable (else zeros).
    """
    places, which = np.unique(lines, return_inverse=True)
    logprobs, greedy = np.empty(len(lines), np.float32), np.empty(len(lines), bool)
    above = np.zeros(len(lines), np.int64)
    order = np.argsort(which, kind="stable")
    cuts = np.searchsorted(which[order], np.arange(0, len(places) + LINES, LINES))
    for piece, (first, last) in enumerate(pairwise(cuts)):
        chunk = places[piece * LINES : (piece + 1) * LINES]
        filled = np.resize(chunk, whole_blocks(len(chunk)))  # repeats lines up to whole blocks
        asked = order[first:last]
        hidden_NW = hidden_SW[torch.from_numpy(filled).to(hidden_SW.device)]
        wanted = which[asked] - piece * LINES, targets[asked]
        logprobs[asked], greedy[asked], above[asked] = _chunk(
            weight_VW, bias_V, hidden_NW, *wanted, softcap, ranks
        )
    return logprobs, greedy, above


def _chunk(
    weight_VW: Tensor,
    bias_V: Tensor | None,
    hidden_NW: Tensor,
    rows: np.ndarray,
    targets: np.ndarray,
    softcap: float,
    ranks: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`token_logprobs` of up to LINES positions; target t is asked of position rows[t]."""
    lines, device = len(hidden_NW), hidden_NW.device
    size = PIECE.get(device.type, PIECE["cpu"])
    starts = range(0, len(weight_VW), size)

    def logits_of(start: int) -> Tensor:
        """(N, PIECE) float32: logits of the tokens from `start` on."""
        bias = None if bias_V is None else bias_V[start : start + size]
        logits = linear(hidden_NW, weight_VW[start : start + size], bias).float()
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    highest = torch.full((lines, 1), -torch.inf, device=device)
    total = torch.zeros((lines, 1), device=device)
    maxima = torch.empty((len(starts), lines), device=device)
    chosen = torch.empty(len(targets), device=device)
    first_here = torch.zeros(len(targets), dtype=torch.bool, device=device)
    for number, start in enumerate(starts):
        logits = logits_of(start)
        best = logits.amax(dim=-1, keepdim=True)
        maxima[number] = best[:, 0]
        here = np.flatnonzero((targets >= start) & (targets < start + size))
        if len(here):
            asked = (here, rows[here], targets[here] - start)
            index, row, token = (torch.from_numpy(array).to(device) for array in asked)
            chosen[index] = logits[row, token]
            leads = (logits[row, token] == best[row, 0]).nonzero().flatten()
            first_here[index[leads]] = logits[row[leads]].argmax(dim=-1) == token[leads]
        lifted = torch.maximum(highest, best)
        total = total * torch.exp(highest - lifted) + logits.sub_(lifted).exp_().sum(dim=-1, keepdim=True)
        highest = lifted
    row = torch.from_numpy(rows).to(device)
    logprobs = chosen - (highest + torch.log(total))[row, 0]
    greedy = first_here & (maxima.argmax(dim=0)[row] == torch.from_numpy(targets // size).to(device))
    above = torch.zeros(len(targets), dtype=torch.int64, device=device)
    for start in starts if ranks else ():
        above += (logits_of(start)[row] > chosen[:, None]).sum(dim=-1)
    return logprobs.cpu().numpy(), greedy.cpu().numpy(), above.cpu().numpy()
