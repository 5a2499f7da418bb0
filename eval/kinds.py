"""The kinds of task, one class each: what it reads from a record, asks of a model, and makes of the answers.

A kind is made for one task. Runner, reports and the command know none of them: a new kind is a class here and a
name in `task_file.Kind`.

Every token of a text is predicted exactly once: by `rolling` as lm-evaluation-harness does it (documents apart,
disjoint windows, the first token predicted from the prefix token), by `stream` as Megatron-LM does (one stream, no
prefix, overlapping windows of which only the last `stride` targets count). Under a masked scorer the same sums are
pseudo-log-likelihoods; `hidden` asks it for many tokens of a window at once, as it was trained (Devlin et al. 2019).
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.errors import Failed, WrongUse
from ..core.scorer import Ids, Question, Score, Scorer, check_question
from ..data.records import Record
from .answers import packed, unpacked
from .items import MASK, Form, Item, joined
from .metrics import METRICS
from .task_file import Task
from .textops import plain_answer

Outcome = dict[str, list[float]]  # what a record contributes to each metric
Asks = list[Any]  # of one record: Questions or, where the model writes, contexts


class Kind:
    """What all kinds share: pairs of a context and a continuation, whose log-probabilities count."""

    needs: tuple[str, ...]  # keys that every [[prompt]] gives
    metrics: tuple[str, ...]
    field = "target"  # what a task file calls the scored text; {} stands for its number
    no_examples = ""  # why solved examples cannot stand before a question
    probabilities = True  # answers have log-probabilities
    asked = frozenset(
        ["kind", "prompt", "delimiter", "until", "max_tokens", "stride"]
    )  # what the prompt hash covers

    def __init__(self, task: Task, name: str) -> None:
        self.task, self.name = task, name

    def item(self, form: Form) -> Item:
        """The question that a record becomes. Raises Failed naming its file, line and field."""
        raise NotImplementedError

    def items(self, records: Sequence[Record]) -> list[Item]:
        """The questions of all records."""
        return [self.item(Form.of(self.task, self.name, record)) for record in records]

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        """For each item what is asked of the model, and how many context tokens the window takes from it. Raises
        WrongUse for a model that cannot answer.
        """
        for question in scorer.encode([item.pairs for item in items]):
            yield [question], scorer.lost(question)

    def key(self, ask: Any) -> str:
        """What an answer depends on besides the model."""
        return repr(ask.pairs)

    def check(self, item: Item, asks: Asks, scorer: Scorer) -> None:
        """Raises Failed when there is nothing to score, or too much for the window."""
        where = f"{item.where} (task {self.name})"
        fields = [self.field.format(number) for number in range(max(1, len(item.pairs)))]
        for question in asks:
            check_question(question, scorer.window, where, fields, scorer.mask)
        if not asks:
            why, fix = (
                "the tokenizer makes no token of it that could be predicted",
                "mend or remove the record",
            )
            raise Failed("nothing to score: text has no tokens", where=where, why=why, fix=fix)

    def answers(
        self, scorer: Scorer, asks: Asks, where: Callable[[int], str]
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yields batches of (index into `asks`, answer as it is stored). Raises Failed for a NaN, saying `where`."""
        for batch in scorer.score(asks):
            for place, scores in batch:
                if not all(math.isfinite(score.logprob) for score in scores):
                    why = (
                        "a log-probability is no finite number; among such the first choice would always win"
                    )
                    fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
                    raise Failed("the model predicts nothing", where=where(place), why=why, fix=fix)
            yield [(place, [packed(score) for score in scores]) for place, scores in batch]

    def outcome(self, item: Item, found: Sequence[Any]) -> Outcome:
        """What the stored answers to all that was asked for an item contribute."""
        return self.of_scores(item, [unpacked(values) for answer in found for values in answer])

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """The same of answers with log-probabilities."""
        raise NotImplementedError


class MultipleChoice(Kind):
    """One context with its choices."""

    needs: tuple[str, ...] = ("choices", "gold")
    metrics = ("acc", "acc_norm", "acc_bytes", "f1", "f1_macro")
    field = "choices[{}]"

    def item(self, form: Form) -> Item:
        context, choices = form.text("context"), form.texts("choices")
        pairs = tuple((context, self.task.delimiter + choice) for choice in choices)
        return Item(form.where, pairs, choices, form.gold(len(choices)))

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """Ties go to the first choice. acc compares sums, acc_norm sums per character of the choice, acc_bytes
        sums per UTF-8 byte, delimiters left out.
        """
        sums = np.array([score.logprob for score in scores])
        characters = np.array([len(choice) for choice in item.choices])
        size = np.array([len(choice.encode()) for choice in item.choices])
        picks = {"acc": sums, "acc_norm": sums / characters, "acc_bytes": sums / size}
        found = {name: [float(np.argmax(values) == item.gold)] for name, values in picks.items()}
        labels = [float(item.gold), float(np.argmax(sums))]
        return found | {"f1": labels, "f1_macro": [*labels, float(len(scores))]}


class Partial(MultipleChoice):
    """The choices are contexts, before one target."""

    needs = ("contexts", "target", "gold")
    field = "target"

    def item(self, form: Form) -> Item:
        contexts, target = form.texts("contexts"), form.filled("target")
        pairs = tuple((context, self.task.delimiter + target) for context in contexts)
        return Item(form.where, pairs, contexts, form.gold(len(contexts)))


class LogLikelihood(Kind):
    """One continuation. acc: every token is the arg-max; perplexity: per record, whatever its number of tokens."""

    needs: tuple[str, ...] = ("context", "target")
    metrics = ("acc", "perplexity")

    def item(self, form: Form) -> Item:
        return Item(form.where, ((form.text("context"), form.filled("target")),), gap=self.task.delimiter)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        return {"acc": [float(scores[0].greedy)], "perplexity": [scores[0].logprob]}


class Text(Kind):
    """Texts as a whole, cut into windows in which every token that counts is predicted once."""

    needs: tuple[str, ...] = ("text",)
    field = "text"
    no_examples = "it predicts whole documents"

    def item(self, form: Form) -> Item:
        text = form.text("text")
        return Item(form.where, text=text, original=form.text("original") if form.prompt.original else text)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        for ids in scorer.tokenize([item.text for item in items]):
            yield self.windows(ids, scorer), 0  # windows of one text lose nothing

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        """The questions of a text."""
        raise NotImplementedError


class LastToken(Text, LogLikelihood):
    """The last token of a text after all others."""

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        for questions, _ in super().asks(items, scorer):
            yield questions, sum(map(scorer.lost, questions))

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return [Question(((scorer.bos + ids[:-1] or (scorer.prefix,), ids[-1:]),))]


class Rolling(Text):
    """Documents apart, as lm-evaluation-harness reads them."""

    metrics: tuple[str, ...] = ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity")

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return rolling(scorer.bos + ids, scorer.window, scorer.prefix)

    def words(self, original: str) -> int:
        """By `re.split` on white space, which counts an empty one at each end that is white space."""
        return len(re.split(r"\s+", original))

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """Words and UTF-8 bytes are those of the original."""
        total = math.fsum(score.logprob for score in scores)
        units = {"word": self.words(item.original), "byte": len(item.original.encode())}
        units["token"] = sum(score.tokens for score in scores)
        return {name: [total, float(units[METRICS[name].per])] for name in self.metrics}


class Stream(Rolling):
    """All records as one text, as Megatron-LM reads it."""

    metrics = ("adjusted_perplexity", "token_perplexity", "bits_per_byte")

    def items(self, records: Sequence[Record]) -> list[Item]:
        items = super().items(records)
        return items if len(items) == 1 else super().items([joined(records)])

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return stream(ids, scorer.window, self.task.stride)

    def words(self, original: str) -> int:
        """Megatron-LM's: parted by single blanks, less one."""
        return len(original.strip().split(" ")) - 1


def _check_masks(name: str, scorer: Scorer) -> int:
    if scorer.mask is None:
        why, fix = f"task {name} asks what stands behind a mask", "leave the task out, or evaluate a BERT"
        raise WrongUse("a model that reads from left to right has no masks", why=why, fix=fix)
    return scorer.mask


class Masked(Text):
    """Some of a text's tokens, masked at once: how many a BERT names, and their log-probability."""

    metrics = ("mlm_accuracy", "mlm_perplexity")
    asked = Kind.asked | {"hidden"}

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return hidden(ids, scorer.window, _check_masks(self.name, scorer), self.task.hidden)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        tokens = float(sum(score.tokens for score in scores))
        return {
            "mlm_accuracy": [float(sum(score.right for score in scores)), tokens],
            "mlm_perplexity": [math.fsum(score.logprob for score in scores), tokens],
        }


class Cloze(Kind):
    """What a BERT names behind the masks of a context; the best of the accepted answers counts."""

    needs = ("context", "answers")
    metrics = ("p_at_1", "p_at_10")
    field = "answers[{}]"
    no_examples = "a solved example would have masks too"

    def item(self, form: Form) -> Item:
        answers, context = form.answers(), form.text("context")
        if MASK not in context:
            raise form.bad("context", f"it has no {MASK}")
        pairs = tuple((context, self.task.delimiter + answer) for answer in answers)
        return Item(form.where, pairs, answers=answers)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        """Of the accepted answers those that the masks can spell; all of them, to be refused, if none."""
        mask = _check_masks(self.name, scorer)
        for whole in scorer.encode([item.pairs for item in items]):
            pairs = tuple(pair for pair in whole.pairs if pair[0].count(mask) == len(pair[1]))
            question = Question(pairs) if pairs else whole
            yield [question], scorer.lost(question)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        best = min(score.rank for score in scores)
        return {"p_at_1": [float(best < 1)], "p_at_10": [float(best < 10)]}


class GenerateUntil(Kind):
    """Text that the model writes: right when it equals an accepted answer but for case and punctuation."""

    needs = ("context", "answers")
    metrics = ("exact_match",)
    probabilities = False

    def item(self, form: Form) -> Item:
        answers = form.answers()
        pair = (form.text("context"), self.task.delimiter + answers[0])
        return Item(form.where, (pair,), answers=answers)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        task = self.task
        room = scorer.window - task.max_tokens
        if scorer.mask is not None:
            why, fix = f"task {self.name} asks for generated text", "leave the task out, or evaluate a GPT"
            raise WrongUse("a BERT cannot write answers", why=why, fix=fix)
        if room < 1:
            why = f"answers have {task.max_tokens} tokens, the window {scorer.window}"
            fix = "evaluate a model with a longer window"
            raise WrongUse(f"task {self.name} leaves no room for a question", why=why, fix=fix)
        for item, ids in zip(items, scorer.tokenize([item.context for item in items])):
            yield [item.context], max(0, len(scorer.bos) + len(ids) - room)

    def key(self, ask: Any) -> str:
        return f"{ask}\0{self.task.until}\0{self.task.max_tokens}"

    def check(self, item: Item, asks: Asks, scorer: Scorer) -> None:
        """Any context can be gone on with."""

    def answers(
        self, scorer: Scorer, asks: Asks, where: Callable[[int], str]
    ) -> Iterator[list[tuple[int, Any]]]:
        yield from scorer.generate(asks, self.task.until, self.task.max_tokens)

    def outcome(self, item: Item, found: Sequence[Any]) -> Outcome:
        given = plain_answer(found[0])
        return {"exact_match": [float(any(plain_answer(answer) == given for answer in item.answers))]}


def rolling(ids: Ids, window: int, prefix: int) -> list[Question]:
    """Disjoint windows over one document, a BOS of which is predicted like the rest (as the harness does);
    the last is filled up to the left, so that its first target has context.
    """
    questions = []
    whole = (prefix, *ids)  # whole[i] is the token before target i
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))
        first = max(0, stop - window) if start else 0
        questions.append(Question(((whole[first : start + 1], ids[start:stop]),)))
    return questions


def stream(ids: Ids, window: int, stride: int) -> list[Question]:
    """Windows over one stream; targets are all tokens but the first. `stride` new targets a window, 0 = all
    of them.

    As Megatron-LM's zero-shot WikiText task reads it: the first window counts whole, later ones their last
    `stride` targets.
    """
    step = min(stride, window) or window
    questions = []
    done = 1
    while done < len(ids):
        stop = done + (
            window if done == 1 else step
        )  # the last window keeps its place where the stream ends inside it
        questions.append(Question(((ids[max(0, stop - window - 1) : done], ids[done:stop]),)))
        done = stop
    return questions


def hidden(ids: Ids, window: int, mask: int, share: float) -> list[Question]:
    """Disjoint windows with `share` of their tokens, one at least, masked at once; which ones is drawn from
    the window's ids.
    """
    questions = []
    for start in range(0, len(ids), window):
        row = np.array(ids[start : start + window], np.int64)
        seed = int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little")
        count = max(1, round(share * len(row)))
        places = np.sort(np.random.Generator(np.random.Philox(key=seed)).permutation(len(row))[:count])
        targets = tuple(row[places].tolist())
        row[places] = mask
        questions.append(Question(((tuple(row.tolist()), targets),)))
    return questions


KINDS: dict[str, type[Kind]] = {
    "multiple_choice": MultipleChoice,
    "partial": Partial,
    "loglikelihood": LogLikelihood,
    "last_token": LastToken,
    "rolling": Rolling,
    "stream": Stream,
    "generate_until": GenerateUntil,
    "cloze": Cloze,
    "masked": Masked,
}
