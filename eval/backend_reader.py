"""Log-probabilities and greedy text by any backend: a graph, an engine, a file of llama.cpp."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from ..core.artifact import programs
from ..core.backend import CausalBackend, EncoderBackend, Limits, Span, batches, library, log_sum, on_host
from ..core.errors import Failed
from ..core.scorer import Ids, Written
from ..inference.runtimes.sampling import GREEDY
from ..inference.serving.generation import Job
from ..inference.serving.slots import SlotBatch, answer
from .scoring import MaskedRows, Predicted, Ranked, Tree

BATCH_TOKENS = 1024
SLOTS = 16  # texts written at a time
LOGITS = 1 << 24  # numbers asked for at a time: 64 MiB, and once more of what is asked


class BackendReader:
    """A backend that reads (`scoring.Reader`)."""

    dtype = "as exported"
    batch_tokens = BATCH_TOKENS
    shares = False

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.name = f" ({backend.name})"
        self.vocab_size, self.context = backend.vocab_size, backend.context
        self.by = [*programs(backend.name), backend.device, backend.dtype]


class BackendTrees(BackendReader):
    """A GPT."""

    backend: CausalBackend

    def writer(self, tokens: int) -> CausalBackend:
        """What writes texts of so many tokens, prompt and answer."""
        return self.backend

    def predict(self, trees: list[Tree], lines: np.ndarray, targets: np.ndarray) -> Predicted:
        """See `ModuleTrees.predict`. Prefixes are in rows 0 … Q-1, branches in rows in the order of the trees."""
        firsts = np.cumsum([0, *(max(1, len(tree.branches)) for tree in trees)]).tolist()
        cache = self.backend.new_cache(firsts[-1])
        prefixes, branches = [], []
        start = 0
        for number, tree in enumerate(trees):
            stop = start + (tree.prefix if tree.branches else tree.tokens)
            prefixes.append((number, 0, start, stop))
            for row, length in enumerate(tree.branches, firsts[number]):
                start, stop = stop, stop + length
                branches.append((row, tree.prefix, start, stop))
            start = stop
        ids = np.concatenate([tree.ids for tree in trees])
        logprobs, greedy = np.empty(len(lines), np.float32), np.empty(len(lines), bool)

        def read(parts: list[tuple[int, int, int, int]]) -> None:
            spans = []
            for row, past, start, stop in parts:
                asked = np.flatnonzero((lines >= start) & (lines < stop))
                count = stop - int(lines[asked].min()) if len(asked) else 0
                if stop > start:
                    spans.append((Span(row, past, ids[start:stop], count), asked, stop - count))
            limits = Limits(self.backend.limits.rows, LOGITS // self.vocab_size)
            for batch in batches(spans, lambda one: one[0].asked, limits, packed=True):
                logits_NV = self.backend.step([span for span, _, _ in batch], cache)
                done = np.cumsum([0, *(span.asked for span, _, _ in batch)])
                places = [lines[asked] - first + at for (_, asked, first), at in zip(batch, done)]
                mine = np.concatenate([asked for _, asked, _ in batch])
                logprobs[mine], greedy[mine] = predicted(logits_NV[np.concatenate(places)], targets[mine])

        read(prefixes)
        for number, tree in reversed(list(enumerate(trees))):
            for row in reversed(range(firsts[number], firsts[number + 1])):
                if tree.branches and tree.prefix and row != number:
                    self.backend.copy_row(cache, number, row, tree.prefix)
        read(branches)
        return logprobs, greedy


class BackendRows(BackendReader):
    """A BERT."""

    backend: EncoderBackend

    def predict(self, asked: MaskedRows, batch_tokens: int, ranks: bool) -> Ranked:
        """See `ModuleRows.predict`; the last bits may depend on what shares a batch."""
        lines, owner, places, targets = asked
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        most = int(np.diff(begins).max())  # asked of one line
        found = []
        limits = Limits(max(1, LOGITS // self.vocab_size // most), batch_tokens).within(self.backend.limits)
        for batch in batches(range(len(lines)), lambda _: lines.shape[1], limits):
            first, ids = batch[0], lines[batch]
            part = slice(begins[first], begins[first + len(ids)])
            line = owner[part] - first
            nth = np.arange(part.start, part.stop) - begins[owner[part]]
            wanted = np.zeros((len(ids), most), np.int64)
            wanted[line, nth] = places[part]
            out = self.backend.forward(ids, np.zeros_like(ids), np.ones(ids.shape, bool), wanted)
            logits_TV = out["mlm_logits"][line, nth]
            chosen_T1 = logits_TV[np.arange(len(line)), targets[part]][:, None]
            above = (logits_TV > chosen_T1).sum(axis=1) if ranks else np.zeros(len(line), np.int64)
            found.append((*predicted(logits_TV, targets[part]), above))
        logprobs, greedy, larger = (np.concatenate(parts) for parts in zip(*found))
        return logprobs, greedy, larger


def predicted(logits_TV: np.ndarray, targets: np.ndarray) -> Predicted:
    """Of each target (T,): log-probability, and whether it is the arg-max."""
    logprobs = logits_TV[np.arange(len(targets)), targets] - log_sum(logits_TV)[:, 0]
    return on_host(logprobs), on_host(logits_TV.argmax(axis=1)) == targets


class _Checked:
    """A backend that refuses logits without a finite maximum: a NaN would be written as the first token."""

    def __init__(self, backend: CausalBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, spans: Sequence[Span], cache: Any) -> Any:
        logits_NV = self._backend.step(spans, cache)
        xp = library(logits_NV)
        if not xp.isfinite(xp.amax(logits_NV, axis=-1)).all():
            why = "a logit is no finite number, so the answers would mean nothing"
            fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
            raise Failed("the model predicts nothing", why=why, fix=fix)
        return logits_NV


def greedy_texts(
    backend: CausalBackend,
    tokenizer: Any,
    prompts: Sequence[Ids],
    until: Sequence[str],
    max_tokens: int,
    end_ids: Iterable[int] = (),
) -> Iterator[Written]:
    """Yields batches of (index, answer) as they end; `end_ids` end an answer, too.

    An answer is decoded as a text of its own, as the harness decodes it: SentencePiece's has no blank at its beginning.
    """
    stop, stop_ids = tuple(until), tuple(end_ids)
    jobs = [Job(np.array(ids, np.int64), max_tokens, GREEDY, stop, stop_ids=stop_ids) for ids in prompts]
    answers = [""] * len(jobs)
    first: list[int | None] = [None] * len(jobs)
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    rest = tokenizer.decode, min(SLOTS, len(jobs)), tokenizer.vocab_size, ends, 0
    for number, _, piece in answer(SlotBatch(cast(CausalBackend, _Checked(backend)), *rest), jobs):
        if first[number] is None and piece.token is not None:
            first[number] = piece.token.id
        answers[number] += piece.text
        if piece.finish:
            yield [(number, _own_text(tokenizer, first[number], answers[number]))]


def _own_text(tokenizer: Any, first: int | None, answer: str) -> str:
    """The answer as a text that begins with its first token, where the prompt stood before it."""
    if first is None:
        return answer
    behind, alone = tokenizer.token_text(first), tokenizer.decode([first], skip_special_tokens=True)
    return alone + answer.removeprefix(behind) if behind and answer.startswith(behind) else answer
