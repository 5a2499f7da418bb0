"""Scoring on any backend (ONNX Runtime, later engines) through the protocols of `core.backend`, GPT or BERT.

A causal question is laid out as in tree.py: its prefix is read once into a cache row, copied to one row per
branch, and the branches are read on top of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.backend import CausalBackend, EncoderBackend, Limits, batches
from ..core.errors import WrongUse
from ..core.files import sha256_json
from ..core.logits import log_sum
from ..core.scorer import Question, Score, Scored, check_question
from ..core.version import programs
from .causal import halving, longest_first
from .causal_text import CausalText
from .masked import MaskedText, Row
from .tree import Tree, plant
from .written import greedy_texts

BATCH_TOKENS = 1024
LOGITS = 1 << 25  # numbers asked for at a time: 128 MiB


class ExportedScorer(CausalText):
    """Scores with a causal backend; implements `core.scorer.Scorer` by the same rules as `CausalScorer`."""

    def __init__(
        self,
        backend: CausalBackend,
        tokenizer: Any,
        *,
        identity: str = "",
        bos: bool = False,
        window: int | None = None,
        batch_tokens: int | None = None,
        keep_tokens: bool = False,
    ) -> None:
        super().__init__(tokenizer, bos=bos, window=min(window or backend.context, backend.context))
        if tokenizer.vocab_size > backend.vocab_size:
            why = f"it has {tokenizer.vocab_size:,} tokens, the model predicts {backend.vocab_size:,}"
            raise WrongUse(
                "the tokenizer does not belong to the model",
                why=why,
                fix="export the model again with its tokenizer",
            )
        self.backend = backend
        self.batch_tokens = batch_tokens or BATCH_TOKENS
        self.keep_tokens = keep_tokens
        self.recipe = {
            "scorer": f"causal ({backend.name})",
            "window": self.window,
            "bos": bos,
            "dtype": "as exported",
        }
        by = [*programs(backend.name), backend.device, backend.dtype]
        self.identity = sha256_json([identity, tokenizer.fingerprint(), self.recipe, keep_tokens, by])

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """See `CausalScorer.score`; that an answer does not depend on its batch is here the backend's affair."""
        for question in questions:
            check_question(question, self.window)
        trees = {index: plant(question, self.window) for index, question in enumerate(questions)}
        sizes = {index: tree.tokens for index, tree in trees.items()}
        for batch in longest_first(sizes, Limits(tokens=self.batch_tokens)):
            yield from halving(batch, lambda part: self._answer([trees[index] for index in part]))

    def generate(
        self, contexts: Sequence[str], until: Sequence[str], max_tokens: int
    ) -> Iterator[list[tuple[int, str]]]:
        """Greedy text; see `CausalScorer.generate`."""
        yield from greedy_texts(self.backend, self, contexts, until, max_tokens)

    def _answer(self, trees: list[Tree]) -> list[tuple[Score, ...]]:
        """Prefixes in rows 0 … Q-1, then each copied to its branches' rows, which end up in the order of the
        trees.
        """
        counts = [max(1, len(tree.branches)) for tree in trees]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        cache = self.backend.new_cache(int(offsets[-1]))
        prefixes = [tree.ids[: tree.prefix] if tree.branches else tree.ids for tree in trees]
        wanted = [
            [] if not len(prefix) else _lines_between(tree, 0, len(prefix))
            for tree, prefix in zip(trees, prefixes)
        ]
        found = (
            [{} for _ in trees] if not any(map(len, prefixes)) else self._read(prefixes, None, wanted, cache)
        )
        if not any(tree.branches for tree in trees):
            return [self._scores(tree, lines) for tree, lines in zip(trees, found)]
        for number in reversed(range(len(trees))):
            for row in reversed(range(int(offsets[number]), int(offsets[number + 1]))):
                if row != number and len(prefixes[number]):
                    self.backend.copy_row(cache, number, row, len(prefixes[number]))
        rows, past, asked, owners = [], [], [], []
        for number, tree in enumerate(trees):
            start = tree.prefix
            for length in tree.branches or (0,):
                rows.append(tree.ids[start : start + length])
                past.append(len(prefixes[number]))
                asked.append(_lines_between(tree, start, start + length))
                owners.append((number, start))
                start += length
        for (number, start), lines in zip(owners, self._read(rows, past, asked, cache)):
            found[number].update({start + line: logits for line, logits in lines.items()})
        return [self._scores(tree, lines) for tree, lines in zip(trees, found)]

    def _read(
        self, rows: list[np.ndarray], past: list[int] | None, asked: list[list[int]], cache: Any
    ) -> list[dict[int, np.ndarray]]:
        """Append rows to the cache; the logits of each row at the places asked for, as {place: (V,)}."""
        most = max(len(lines) for lines in asked)
        before = past or [0] * len(rows)
        found: list[dict[int, np.ndarray]] = []
        for part in self._groups([len(row) for row in rows], before, most):
            longest = max(len(row) for row in rows[part]) or 1
            ids = np.zeros((part.stop - part.start, longest), np.int64)
            ask = np.zeros((part.stop - part.start, most), np.int64)
            for line, (row, lines) in enumerate(zip(rows[part], asked[part])):
                ids[line, : len(row)], ask[line, : len(lines)] = row, lines
            logits = self.backend.forward(ids, np.array(before[part], np.int64), ask, cache, part.start)
            found += [
                {place: logits[line, i] for i, place in enumerate(lines)}
                for line, lines in enumerate(asked[part])
            ]
        return found

    def _groups(self, lengths: list[int], past: list[int], most: int) -> Iterator[slice]:
        """Runs of rows for one call: few enough logits, and no row's padding reaches behind the context."""
        at_once = max(1, LOGITS // (max(most, 1) * self.backend.vocab_size))
        at_once = min(at_once, self.backend.limits.rows or at_once)
        start = 0
        for row in range(1, len(lengths) + 1):
            full = row - start == at_once
            if (
                row == len(lengths)
                or full
                or max(past[start : row + 1]) + max(lengths[start : row + 1]) > self.backend.context
            ):
                yield slice(start, row)
                start = row

    def _scores(self, tree: Tree, logits: dict[int, np.ndarray]) -> tuple[Score, ...]:
        answers = []
        for lines, targets, truncated in zip(tree.lines, tree.targets, tree.truncated):
            rows_TV = np.stack([logits[line] for line in lines.tolist()])
            tokens, greedy = _predicted(rows_TV, targets)
            kept = tuple(tokens.tolist()) if self.keep_tokens else ()
            total = float(tokens.sum(dtype=np.float64))
            answers.append(Score(total, int(greedy.sum()), len(targets), truncated, token_logprobs=kept))
        return tuple(answers)


class ExportedMaskedScorer(MaskedText):
    """Scores with an encoder backend; implements `core.scorer.Scorer` by the same rules as `MaskedScorer`."""

    def __init__(
        self,
        backend: EncoderBackend,
        tokenizer: Any,
        *,
        identity: str = "",
        pll: str = "within_word_l2r",
        window: int | None = None,
        batch_tokens: int | None = None,
        keep_tokens: bool = False,
    ) -> None:
        self.backend = backend
        longest = min(window or backend.context, backend.context)
        batch = batch_tokens or BATCH_TOKENS
        super().__init__(
            tokenizer, backend.vocab_size, longest, pll=pll, batch_tokens=batch, keep_tokens=keep_tokens
        )
        self.recipe = {"scorer": f"masked, {pll} ({backend.name})", "window": longest, "dtype": "as exported"}
        by = [*programs(backend.name), backend.device, backend.dtype]
        self.identity = sha256_json([identity, tokenizer.fingerprint(), self.recipe, keep_tokens, by])

    def predict(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `MaskedText.predict`; the last bits may depend on what shares a batch."""
        lines, owner, places, targets = self.masked(rows)
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        most = int(np.diff(begins).max())  # asked of one line
        found = []
        at_once = Limits(max(1, LOGITS // self.backend.vocab_size // most), self.batch_tokens)
        limits = at_once.within(self.backend.limits)
        for batch in batches(range(len(lines)), lambda _: lines.shape[1], limits):
            first, ids = batch[0], lines[batch]
            part = slice(begins[first], begins[first + len(ids)])
            line = owner[part] - first
            nth = np.arange(part.start, part.stop) - begins[owner[part]]
            asked = np.zeros((len(ids), most), np.int64)
            asked[line, nth] = places[part]
            out = self.backend.forward(ids, np.zeros_like(ids), np.ones(ids.shape, bool), asked)
            logits_TV = out["mlm_logits"][line, nth]
            chosen = logits_TV[np.arange(len(line)), targets[part]]
            above = (
                (logits_TV > chosen[:, None]).sum(axis=1)
                if self.cloze(rows)
                else np.zeros(len(line), np.int64)
            )
            found.append((*_predicted(logits_TV, targets[part]), above))
        logprobs, greedy, ranks = zip(*found)
        return np.concatenate(logprobs), np.concatenate(greedy), np.concatenate(ranks)


def _predicted(logits_TV: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each target (T,): log-probability, and whether it is the arg-max."""
    norm = log_sum(logits_TV)[:, 0]
    return logits_TV[np.arange(len(targets)), targets] - norm, logits_TV.argmax(axis=1) == targets


def _lines_between(tree: Tree, start: int, stop: int) -> list[int]:
    """The scored lines of a tree in [start, stop), counted from `start`, each once."""
    lines = np.unique(np.concatenate(tree.lines))
    return (lines[(lines >= start) & (lines < stop)] - start).tolist()


def task_scorer(names: str, limit: int | None = None) -> Callable[[Any], dict[str, float]]:
    """A function that scores a loaded backend on tasks: {"task metric": value} of metrics of which more is
    better. Raises WrongUse for tasks that are not known, at once.
    """
    from ..data.tokenizer import Tokenizer
    from .asked import Settings
    from .runner import evaluate
    from .task import find_tasks

    tasks = find_tasks([name.strip() for name in names.split(",") if name.strip()])

    def score(loaded: Any) -> dict[str, float]:
        if loaded.tokenizer is None:
            raise WrongUse("the model has no tokenizer, so no task can be scored", where="--tasks")
        tokenizer = Tokenizer.load(loaded.tokenizer)
        scorer: Any
        if loaded.causal is not None:
            scorer = ExportedScorer(loaded.causal, tokenizer, bos=tokenizer.puts_bos)
        else:
            scorer = ExportedMaskedScorer(loaded.encoder, tokenizer)
        return {
            f"{scores.summary['task']} {name}": metric["value"]
            for scores in evaluate(scorer, tasks, Settings(limit=limit))
            for name, metric in scores.summary["metrics"].items()
            if metric["higher_is_better"]
        }

    return score
