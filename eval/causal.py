"""Causal scoring: the log-probability of continuations under a GPT, by lm-evaluation-harness's rules.

- A pair is tokenised whole and then split at the length of the context's own encoding; blanks at the end of
  the context belong to the continuation; an empty context is the prefix token (BOS, else EOS).
- An input longer than the window loses tokens from its left; how many is counted in every answer.
- Log-softmax in float32 whatever the model's dtype; logits only at scored positions.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.backend import CausalBackend
from ..core.errors import WrongUse
from ..core.scorer import Ids, Question, Score, Texts, Written, common
from ..models.gpt import GPT
from .backend_reader import BackendTrees, greedy_texts
from .module_reader import ModuleTrees
from .scoring import BatchedScorer, Tree, plant


class CausalScorer(BatchedScorer):
    """Scores with a GPT, a module or a backend. `window`: the longest input; `how`: see `BatchedScorer`.

    `end_ids` are tokens that end an answer besides the tokenizer's end of text.
    """

    mask = None  # no token hides another

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        bos: bool = False,
        window: int | None = None,
        end_ids: Iterable[int] = (),
        **how: Any,
    ) -> None:
        self.reader = self.reader_of(model)
        self.window = min(window or self.reader.context, self.reader.context)
        if bos and tokenizer.bos_id is None:
            raise WrongUse("the tokenizer has no BOS token", fix="evaluate without --bos")
        self.bos: Ids = (tokenizer.bos_id,) if bos else ()
        recipe: dict[str, Any] = {"scorer": f"causal{self.reader.name}", "window": self.window, "bos": bos}
        if others := sorted({*end_ids} - {tokenizer.eos_id}):
            recipe["end ids"] = others
        super().__init__(self.reader, tokenizer, recipe, **how)
        self.end_ids = frozenset(end_ids) | (self.chat.end_ids if self.chat else frozenset())

    def reader_of(self, model: GPT | CausalBackend) -> Any:
        """What computes with the model."""
        if isinstance(model, GPT) and model.config.positions == "alibi":  # a bias by the places of whole rows
            from ..inference.runtimes.torch_backend import TorchCausal

            model = TorchCausal(model)
        return ModuleTrees(model) if isinstance(model, GPT) else BackendTrees(model)

    @property
    def prefix(self) -> int:
        """The token that stands for an empty context."""
        for found in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if found is not None:
                return int(found)
        why = "a text without context (BLiMP, perplexity of a document) is predicted from one of them"
        fix = "choose tasks with a context, or a tokenizer with an end-of-text token"
        raise WrongUse("the tokenizer has neither a BOS nor an EOS token", why=why, fix=fix)

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without BOS; that of a chat template stands before every text anyway."""
        if not texts:
            return []
        if self.chat is not None:
            chats = [tuple(self.chat.encode(text).tolist()) for text in texts]
            return [ids[len(self.bos) :] if ids[:1] == self.bos else ids for ids in chats]
        flat, lengths = self.tokenizer.encode_batch(list(texts))
        parts = np.split(np.asarray(flat), np.cumsum(lengths)[:-1])
        return [tuple(part.tolist()) for part in parts]

    def encode(self, questions: Sequence[Texts], before: Sequence[int] = ()) -> list[Question]:
        """(context, continuation) texts -> ids. Each distinct text is tokenised once."""
        parted = [[(context.rstrip(), context + rest) for context, rest in pairs] for pairs in questions]
        trunks = [pairs[0][0][:end] for pairs, end in zip(questions, before or [0] * len(questions))]
        texts = list(dict.fromkeys([*trunks, *(text for pairs in parted for pair in pairs for text in pair)]))
        ids, made = dict(zip(texts, self.tokenize(texts))), []
        for pairs, trunk in zip(parted, trunks):
            own = tuple(self._pair(ids[context], ids[whole]) for context, whole in pairs)
            made.append(Question(own))
            if trunk and self.reader.shares and not self.lost(made[-1]):
                every = [self.bos + ids[trunk], *(context[:-1] for context, _ in own)]
                made[-1] = Question(own, common(every))
        return made

    def lost(self, question: Question) -> int:
        """See `core.scorer.Scorer.lost`: the last token of an input is predicted, not read."""
        return max(max(0, len(context) + len(answer) - self.window - 1) for context, answer in question.pairs)

    def _pair(self, context: Ids, whole: Ids) -> tuple[Ids, Ids]:
        if context:
            return self.bos + context, whole[len(context) :]
        if whole[:1] == (self.prefix,):  # the text brings its own prefix token: it is not predicted
            return whole[:1], whole[1:]
        return (self.prefix,), whole

    def laid_out(self, question: Question) -> tuple[int, Tree]:
        tree = plant(question, self.window)
        return tree.tokens, tree

    def answered(self, laid: list[Tree]) -> list[tuple[Score, ...]]:
        starts = np.concatenate([[0], np.cumsum([tree.tokens for tree in laid])])
        lines = np.concatenate([line + start for tree, start in zip(laid, starts) for line in tree.lines])
        targets = np.concatenate([target for tree in laid for target in tree.targets])
        logprobs, greedy = self.reader.predict(laid, lines, targets)
        ends = np.cumsum([len(target) for tree in laid for target in tree.targets])
        scores = map(self.of_tokens, np.split(logprobs, ends[:-1]), np.split(greedy, ends[:-1]))
        return [tuple(next(scores) for _ in tree.targets) for tree in laid]

    def room(self, max_tokens: int, who: str = "the request") -> int:
        """See `core.scorer.Scorer.room`."""
        if (room := self.window - max_tokens) < 1:
            why = f"its answers have {max_tokens:,} tokens, the window {self.window:,}"
            fix = "evaluate a model with a longer window"
            raise WrongUse(f"{who} leaves no room for a question", why=why, fix=fix)
        return room

    def generate(self, contexts: Sequence[str], until: Sequence[str], max_tokens: int) -> Iterator[Written]:
        """Greedy text by the server's batching; contexts are cut on the left to leave room for the answer."""
        room = self.room(max_tokens)
        prompts = [(self.bos + ids)[-room:] or (self.prefix,) for ids in self.tokenize(contexts)]
        yield from self.written(prompts, until, max_tokens)

    def written(self, prompts: Sequence[Ids], until: Sequence[str], max_tokens: int) -> Iterator[Written]:
        """Greedy text after prompts that leave room for it."""
        longest = max(map(len, prompts), default=0) + max_tokens
        backend = self.reader.writer(longest)
        yield from greedy_texts(backend, self.tokenizer, prompts, until, max_tokens, self.end_ids)
