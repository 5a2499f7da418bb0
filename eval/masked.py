"""Masked scoring: pseudo-log-likelihoods under a BERT (Salazar et al. 2020), cloze answers, masked-token
accuracy.

A pair is [CLS] context continuation [SEP]; the score is the sum over the continuation's tokens of the
log-probability of each one while it is masked. `original` masks that token alone; `within_word_l2r` (Kauf and
Ivanova 2023) also masks the later pieces of the same word, so that a rare word's pieces do not give each
other away. A context with [MASK]s in it is a cloze question: the tokens of the continuation are predicted in
their places, all at once.

Otherwise only continuation tokens are masked, one row each. Rows of one length are batched without padding
and the head sees the masked positions alone, so a score does not depend on what shares its batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..core.backend import Limits
from ..core.errors import WrongUse
from ..core.files import sha256_json
from ..core.scorer import Ids, Question, Score, Scored, check_question
from ..models.bert import BERT
from ..models.linear import one_kernel
from .causal import default_batch_tokens, halving, longest_first
from .items import MASK
from .logits import computed_by, token_logprobs, whole_blocks

PLL = ("within_word_l2r", "original")


class MaskedText:
    """Rows of masked tokens and their scores, shared by whatever predicts them; `window` counts the [CLS] and
    the [SEP].
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, window: int, *, pll: str, batch_tokens: int, keep_tokens: bool
    ) -> None:
        missing = [role for role in ("cls", "sep", "mask") if getattr(tokenizer, f"{role}_id") is None]
        if missing or tokenizer.vocab_size > vocab_size:
            sizes = f"it has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}"
            why = f"it lacks {', '.join(missing)}" if missing else sizes
            fix = "give the tokenizer that the model was trained with"
            raise WrongUse("the tokenizer does not belong to a BERT", why=why, fix=fix)
        assert pll in PLL, pll
        self.tokenizer, self.pll = tokenizer, pll
        self.whole_words = pll == "within_word_l2r"
        self.bos: Ids = ()
        self.window = window - 2
        if self.window < 1:
            why = f"[CLS] and [SEP] take two of its {window} tokens"
            raise WrongUse("the window has no room for a text", why=why, fix="give a --window of 3 or more")
        self.batch_tokens, self.keep_tokens = batch_tokens, keep_tokens
        self.inner = np.zeros(vocab_size, bool)  # pieces that continue a word
        self.inner[[number for word, number in tokenizer.vocab.items() if word.startswith("##")]] = True

    def cloze(self, rows: list["Row"]) -> bool:
        """Whether any row is a cloze question, whose answer's rank counts."""
        return any(row.given for row in rows)

    def predict(self, rows: list["Row"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of one length: log-probability, arg-max flag and rank of every asked token, row after row."""
        raise NotImplementedError

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

    def encode(self, questions: Sequence[Sequence[tuple[str, str]]]) -> list[Question]:
        """(context, continuation) texts -> ids, each tokenised apart: WordPiece splits at blanks, so the two
        never merge.
        """
        known: dict[str, Ids] = {}
        for pairs in questions:
            for text in (part for pair in pairs for part in pair):
                if text not in known:
                    known[text] = self._with_masks(text)
        return [
            Question(tuple((known[context], known[continuation]) for context, continuation in pairs))
            for pairs in questions
        ]

    def _with_masks(self, text: str) -> Ids:
        """Tokenise around literal [MASK]s, which the tokenizer would take for text."""
        ids: Ids = ()
        for number, part in enumerate(text.split(MASK)):
            ids += ((self.tokenizer.mask_id,) if number else ()) + tuple(self.tokenizer.encode(part).tolist())
        return ids

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Answers; questions of one batch have rows of the same length. Raises Failed as `check_question`
        does.
        """
        rows = {}
        for index, question in enumerate(questions):
            check_question(question, self.window, mask=self.mask)
            rows[index] = [self._row(context, continuation) for context, continuation in question.pairs]
        sizes = {index: sum(len(row.ids) * row.lines for row in row_list) for index, row_list in rows.items()}
        for batch in longest_first(sizes, Limits(tokens=self.batch_tokens)):
            yield from halving(batch, lambda part: self._answer([rows[index] for index in part]))

    def lost(self, question: Question) -> int:
        """See `core.scorer.Scorer.lost`."""
        return max(
            max(0, len(context) + (0 if self.mask in context else len(answer)) - self.window)
            for context, answer in question.pairs
        )

    def generate(
        self, contexts: Sequence[str], until: Sequence[str], max_tokens: int
    ) -> Iterator[list[tuple[int, str]]]:
        """A BERT writes nothing."""
        why, fix = "the task asks for generated text", "leave the task out, or evaluate a GPT"
        raise WrongUse("a BERT cannot write answers", why=why, fix=fix)

    def _row(self, context: Ids, continuation: Ids) -> "Row":
        tokenizer = self.tokenizer
        if tokenizer.mask_id in context:
            ids = np.array([tokenizer.cls_id, *context, tokenizer.sep_id], np.int64)
            asked = np.flatnonzero(ids == tokenizer.mask_id)
            return Row(ids, asked, np.array(continuation, np.int64), 0, given=True)
        if context[:1] == (tokenizer.cls_id,):  # a document's windows bring their prefix
            context = context[1:]
        room = self.window - len(continuation)
        kept = context[len(context) - room :] if len(context) > room else context
        ids = np.array([tokenizer.cls_id, *kept, *continuation, tokenizer.sep_id], np.int64)
        first = 1 + len(kept)
        asked = np.arange(first, first + len(continuation))
        return Row(ids, asked, ids[asked].copy(), len(context) - len(kept))

    def masked(self, rows: list["Row"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows of one length as lines (L, S) to predict, and for each asked token (T,): its line, its place
        there, its id.
        """
        lines = np.concatenate([self._masked(row) for row in rows])
        per_line = [len(row.asked) // row.lines for row in rows for _ in range(row.lines)]
        places, targets = (
            np.concatenate(parts) for parts in zip(*((row.asked, row.targets) for row in rows))
        )
        return lines, np.repeat(np.arange(len(lines)), per_line), places, targets

    def _masked(self, row: "Row") -> np.ndarray:
        """The row once for each asked token, with that token (and later pieces of its word) masked; masked
        already, once.
        """
        if row.given:
            return row.ids[None]
        made = np.tile(row.ids, (len(row.asked), 1))
        for line, place in enumerate(row.asked):
            stop = place + 1
            while self.whole_words and self.inner[row.ids[stop]]:  # ends at [SEP] at the latest
                stop += 1
            made[line, place:stop] = self.tokenizer.mask_id
        return made

    def _answer(self, questions: list[list["Row"]]) -> list[tuple[Score, ...]]:
        flat = [row for rows in questions for row in rows]
        found: list[Score | None] = [None] * len(flat)
        for length in sorted({len(row.ids) for row in flat}):
            group = [number for number, row in enumerate(flat) if len(row.ids) == length]
            logprobs, greedy, above = self.predict([flat[number] for number in group])
            done = 0
            for number in group:
                part = slice(done, done + len(flat[number].asked))
                done = part.stop
                found[number] = self._score(flat[number], logprobs[part], greedy[part], above[part])
        scores = iter(found)
        return [tuple(next(scores) for _ in rows) for rows in questions]  # type: ignore[misc]

    def _score(self, row: "Row", logprobs: np.ndarray, greedy: np.ndarray, above: np.ndarray) -> Score:
        kept = tuple(logprobs.tolist()) if self.keep_tokens else ()
        total = float(logprobs.sum(dtype=np.float64))
        rank = int(above.max()) if row.given else 0  # whatever shares its batch
        return Score(total, int(greedy.sum()), len(row.asked), row.truncated, rank, kept)


class MaskedScorer(MaskedText):
    """Scores with a torch BERT; implements `core.scorer.Scorer`."""

    def __init__(
        self,
        model: BERT,
        tokenizer: Any,
        *,
        identity: str = "",
        pll: str = "within_word_l2r",
        window: int | None = None,
        batch_tokens: int | None = None,
        keep_tokens: bool = False,
    ) -> None:
        self.model, table = model.eval(), model.token_table.weight
        self.device = table.device
        longest = min(window or model.config.sequence_length, model.config.sequence_length)
        batch = batch_tokens or 8 * default_batch_tokens(table)
        super().__init__(
            tokenizer, model.config.vocab_size, longest, pll=pll, batch_tokens=batch, keep_tokens=keep_tokens
        )
        self.recipe = {
            "scorer": f"masked, {pll}",
            "window": longest,
            "dtype": str(table.dtype).removeprefix("torch."),
        }
        by = computed_by(table.device)
        self.identity = sha256_json([identity, tokenizer.fingerprint(), self.recipe, keep_tokens, by])

    @torch.inference_mode()
    @one_kernel()
    def predict(self, rows: list["Row"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `MaskedText.predict`."""
        lines, owner, places, targets = self.masked(rows)
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        features = []
        at_once = max(1, self.batch_tokens // lines.shape[1])
        for first in range(0, len(lines), at_once):
            part = lines[first : first + at_once]
            # whole blocks of lines for the matrix products, as in logits.py: a small batch repeats its rows
            least = -(-whole_blocks(1) // lines.shape[1])
            ids = torch.from_numpy(np.resize(part, (max(len(part), least), lines.shape[1]))).to(self.device)
            asked = slice(begins[first], begins[first + len(part)])
            line, place = (
                torch.from_numpy(array[asked]).to(self.device) for array in (owner - first, places)
            )
            features.append(self.model.hidden(ids)[line, place])
        hidden_NW = torch.cat(features)
        filled = torch.from_numpy(np.resize(np.arange(len(places)), whole_blocks(len(places)))).to(
            self.device
        )
        hidden_NW = self.model.mlm_features(hidden_NW[filled])
        table, bias = self.model.token_table.weight, self.model.mlm_bias
        return token_logprobs(table, bias, hidden_NW, np.arange(len(places)), targets, ranks=self.cloze(rows))


class Row:
    """[CLS] context continuation [SEP], the places asked for and what stands there; `given` when they are
    masked already.
    """

    def __init__(
        self, ids: np.ndarray, asked: np.ndarray, targets: np.ndarray, truncated: int, *, given: bool = False
    ) -> None:
        self.ids, self.asked, self.targets, self.truncated, self.given = ids, asked, targets, truncated, given
        self.lines = 1 if given else len(asked)
