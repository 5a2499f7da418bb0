"""Masked scoring: pseudo-log-likelihoods under a BERT (Salazar et al. 2020), cloze answers, masked-token accuracy.

A pair is [CLS] context continuation [SEP]; the score is the sum over the continuation's tokens of the log-probability
of each one while it is masked. `original` masks that token alone; `within_word_l2r` (Kauf and Ivanova 2023) also
masks the later pieces of the same word, so that a rare word's pieces do not give each other away. A context with
[MASK]s in it is a cloze question: the tokens of the continuation are predicted in their places, all at once.

Otherwise only continuation tokens are masked, one row each. Rows of one length are batched without padding and the
head sees the masked positions alone, so a score does not depend on what shares its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..core.backend import EncoderBackend
from ..core.errors import WrongUse
from ..core.scorer import Ids, Question, Score, Texts
from ..models.bert import BERT
from .backend_reader import BackendRows
from .items import MASK
from .module_reader import ModuleRows
from .scoring import BatchedScorer

PLL = ("within_word_l2r", "original")


@dataclass(frozen=True, eq=False)
class Row:
    """[CLS] context continuation [SEP], the places asked for and their tokens; `given`: masked already."""

    ids: np.ndarray
    asked: np.ndarray
    targets: np.ndarray
    given: bool = False

    @property
    def lines(self) -> int:
        """Lines that are predicted for it."""
        return 1 if self.given else len(self.asked)


class MaskedScorer(BatchedScorer):
    """Scores with a BERT, a module or a backend. `window` counts [CLS] and [SEP]; `how`: see `BatchedScorer`."""

    bos: Ids = ()
    roles = ("cls", "sep", "mask")

    def __init__(
        self,
        model: BERT | EncoderBackend,
        tokenizer: Any,
        *,
        pll: str = "within_word_l2r",
        window: int | None = None,
        **how: Any,
    ) -> None:
        self.reader = ModuleRows(model) if isinstance(model, BERT) else BackendRows(model)
        longest = min(window or self.reader.context, self.reader.context)
        self.whole_words = pll == "within_word_l2r"
        self.window = longest - 2
        if self.window < 1:
            why = f"[CLS] and [SEP] take two of its {longest} tokens"
            raise WrongUse("the window has no room for a text", why=why, fix="give a --window of 3 or more")
        recipe = {"scorer": f"masked, {pll}{self.reader.name}", "window": longest}
        super().__init__(self.reader, tokenizer, recipe, **how)
        self.inner = np.zeros(self.reader.vocab_size, bool)  # pieces that continue a word
        self.inner[[number for word, number in tokenizer.vocab.items() if word.startswith("##")]] = True

    @property
    def prefix(self) -> int:
        """[CLS]: what a document begins with."""
        return self.tokenizer.cls_id

    @property
    def mask(self) -> int:
        """[MASK]."""
        return self.tokenizer.mask_id

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without [CLS] and [SEP]."""
        return [tuple(self.tokenizer.encode(text).tolist()) for text in texts]

    def encode(self, questions: Sequence[Texts], before: Sequence[int] = ()) -> list[Question]:
        """(context, continuation) texts -> ids, each tokenised apart: WordPiece never merges over a blank."""
        ids = cache(self._with_masks)
        return [Question(tuple((ids(context), ids(rest)) for context, rest in pairs)) for pairs in questions]

    def _with_masks(self, text: str) -> Ids:
        """Tokenise around literal [MASK]s, which the tokenizer would take for text."""
        ids: Ids = ()
        for number, part in enumerate(text.split(MASK)):
            ids += ((self.tokenizer.mask_id,) if number else ()) + tuple(self.tokenizer.encode(part).tolist())
        return ids

    def laid_out(self, question: Question) -> tuple[int, list[Row]]:
        rows = [self._row(context, continuation) for context, continuation in question.pairs]
        return sum(len(row.ids) * row.lines for row in rows), rows

    def lost(self, question: Question) -> int:
        """See `core.scorer.Scorer.lost`."""
        return max(
            max(0, len(context) + (0 if self.mask in context else len(answer)) - self.window)
            for context, answer in question.pairs
        )

    def room(self, max_tokens: int, who: str = "the request") -> NoReturn:
        """A BERT writes nothing."""
        why, fix = f"{who} asks for generated text", "leave the task out, or evaluate a GPT"
        raise WrongUse("a BERT cannot write answers", why=why, fix=fix)

    def generate(self, contexts: Sequence[str], until: Sequence[str], max_tokens: int) -> NoReturn:
        self.room(max_tokens)

    def _row(self, context: Ids, continuation: Ids) -> Row:
        tokenizer = self.tokenizer
        if tokenizer.mask_id in context:
            ids = np.array([tokenizer.cls_id, *context, tokenizer.sep_id], np.int64)
            asked = np.flatnonzero(ids == tokenizer.mask_id)
            return Row(ids, asked, np.array(continuation, np.int64), given=True)
        if context[:1] == (tokenizer.cls_id,):  # a document's windows bring their prefix
            context = context[1:]
        room = self.window - len(continuation)
        kept = context[len(context) - room :] if len(context) > room else context
        ids = np.array([tokenizer.cls_id, *kept, *continuation, tokenizer.sep_id], np.int64)
        first = 1 + len(kept)
        asked = np.arange(first, first + len(continuation))
        return Row(ids, asked, ids[asked].copy())

    def _masked(self, row: Row) -> np.ndarray:
        """The row once for each asked token, which is masked with later pieces of its word; masked already, once."""
        if row.given:
            return row.ids[None]
        made = np.tile(row.ids, (len(row.asked), 1))
        for line, place in enumerate(row.asked):
            stop = place + 1
            while self.whole_words and self.inner[row.ids[stop]]:  # ends at [SEP] at the latest
                stop += 1
            made[line, place:stop] = self.tokenizer.mask_id
        return made

    def answered(self, laid: list[list[Row]]) -> list[tuple[Score, ...]]:
        flat = [row for rows in laid for row in rows]
        found: dict[int, Score] = {}
        for length in sorted({len(row.ids) for row in flat}):
            group = [number for number, row in enumerate(flat) if len(row.ids) == length]
            rows = [flat[number] for number in group]
            lines = np.concatenate([self._masked(row) for row in rows])
            per_line = [len(row.asked) // row.lines for row in rows for _ in range(row.lines)]
            owner = np.repeat(np.arange(len(lines)), per_line)
            places = np.concatenate([row.asked for row in rows])
            targets = np.concatenate([row.targets for row in rows])
            ranks = any(row.given for row in rows)  # of a cloze question the answer's rank counts
            predicted = self.reader.predict((lines, owner, places, targets), self.batch_tokens, ranks)
            ends = np.cumsum([len(row.asked) for row in rows])[:-1]
            parts = zip(*(np.split(values, ends) for values in predicted))
            for number, row, (logprobs, greedy, above) in zip(group, rows, parts):
                rank = int(above.max()) if row.given else 0  # whatever shares its batch
                found[number] = self.of_tokens(logprobs, greedy, rank)
        scores = (found[number] for number in range(len(flat)))
        return [tuple(next(scores) for _ in rows) for rows in laid]
