"""Causal scoring: the log-probability of continuations under a GPT, by lm-evaluation-harness's rules.

- A pair is tokenised whole and then split at the length of the context's own encoding; blanks at the end of
  the context
  belong to the continuation; an empty context is the prefix token (BOS, else EOS).
- An input longer than the window loses tokens from its left; how many is counted in every answer.
- Log-softmax in float32 whatever the model's dtype; logits only at scored positions (see logits.py).
- Batches hold questions of similar length up to a budget of tokens and are halved when memory runs out. What
  shares a batch
  does not change an answer by a bit on the CPU (see tree.py).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.allocator import return_freed_memory
from ..core.backend import Limits, batches
from ..core.errors import Failed, WrongUse
from ..core.files import sha256_json
from ..core.scorer import Question, Score, Scored, check_question
from ..models.gpt import GPT
from ..models.layers import Attention, attending
from ..models.linear import one_kernel
from .causal_text import CausalText
from .logits import computed_by, token_logprobs, whole_blocks
from .tree import Tree, TreeAttention, plant
from .written import greedy_texts

BATCH_TOKENS = 16384  # of a GPU
NARROW = (
    512  # hidden units: below, the head is most of the work, and does it best for many questions at a time
)
RETURN_SECONDS = 0.25  # between two returns of freed memory: of a small model's time they would take a tenth


class CausalScorer(CausalText):
    """Scores with a torch GPT; implements `core.scorer.Scorer`.

    `identity` names the weights (a checkpoint's hash). `batch_tokens` bounds memory, not results. `window` is
    the longest input, by default the model's. With `keep_tokens` answers carry the log-probability of every
    token.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Any,
        *,
        identity: str = "",
        bos: bool = False,
        window: int | None = None,
        batch_tokens: int | None = None,
        batch_questions: int | None = None,
        keep_tokens: bool = False,
    ) -> None:
        longest = model.config.sequence_length
        super().__init__(tokenizer, bos=bos, window=min(window or longest, longest))
        if tokenizer.vocab_size > model.config.vocab_size:
            raise WrongUse(
                "the tokenizer does not belong to the model",
                why=f"it has {tokenizer.vocab_size:,} tokens, the model predicts {model.config.vocab_size:,}",
                fix="give the tokenizer that the model was trained with",
            )
        self.model = model.eval()
        weight = model.output_weight()
        self.device, self.dtype = weight.device, weight.dtype
        self.batch_tokens = batch_tokens or default_batch_tokens(weight)
        self.batch_questions = batch_questions
        self.keep_tokens = keep_tokens
        self.recipe = {
            "scorer": "causal",
            "window": self.window,
            "bos": bos,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        by = computed_by(self.device)
        self.identity = sha256_json([identity, tokenizer.fingerprint(), self.recipe, keep_tokens, by])

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Answers, longest questions first, so that memory is at its peak at once. Raises Failed as
        `check_question` does.
        """
        for question in questions:
            check_question(question, self.window)
        trees = {index: plant(question, self.window) for index, question in enumerate(questions)}
        returned = time.monotonic()
        limits = Limits(self.batch_questions, self.batch_tokens)
        for batch in longest_first({index: tree.tokens for index, tree in trees.items()}, limits):
            yield from halving(batch, lambda part: self._answer([trees[index] for index in part]))
            if (
                time.monotonic() - returned > RETURN_SECONDS
            ):  # what differing sizes leave in the heap adds up to 20 MB
                return_freed_memory()
                returned = time.monotonic()

    def generate(
        self, contexts: Sequence[str], until: Sequence[str], max_tokens: int
    ) -> Iterator[list[tuple[int, str]]]:
        """Greedy text, through the batching that serving uses; contexts are cut from the left to leave room
        for the answer.
        """
        from ..inference.runtimes.torch_backend import TorchCausal

        yield from greedy_texts(TorchCausal(self.model), self, contexts, until, max_tokens)

    @torch.inference_mode()
    @one_kernel()
    def _answer(self, trees: list[Tree]) -> list[tuple[Score, ...]]:
        hidden_SW = self._hidden(trees)
        starts = np.concatenate([[0], np.cumsum([tree.tokens for tree in trees])])
        lines = np.concatenate([line + start for tree, start in zip(trees, starts) for line in tree.lines])
        targets = np.concatenate([target for tree in trees for target in tree.targets])
        logprobs, greedy, _ = token_logprobs(self.model.output_weight(), None, hidden_SW, lines, targets)
        answers, done = [], 0
        for tree in trees:
            scores = []
            for target, truncated in zip(tree.targets, tree.truncated):
                part = slice(done, done + len(target))
                done = part.stop
                kept = tuple(logprobs[part].tolist()) if self.keep_tokens else ()
                total = float(logprobs[part].sum(dtype=np.float64))
                scores.append(
                    Score(total, int(greedy[part].sum()), len(target), truncated, token_logprobs=kept)
                )
            answers.append(tuple(scores))
        return answers

    def _hidden(self, trees: list[Tree]) -> Tensor:
        """The packed batch through the model: (S, W)."""
        tokens = sum(tree.tokens for tree in trees)
        packed = np.zeros((2, whole_blocks(tokens)), np.int64)
        packed[0, :tokens] = np.concatenate([tree.ids for tree in trees])
        packed[1, :tokens] = np.concatenate([tree.positions for tree in trees])
        ids, positions = torch.from_numpy(packed).to(self.device)
        attend = TreeAttention(trees, self.device, self.dtype, self.model.config.attention_pattern)
        modules = (module for module in self.model.modules() if isinstance(module, Attention))
        with attending(modules, attend.of_layer):
            return self.model.hidden(ids[None], positions[None])[0]


def default_batch_tokens(weight_VW: Tensor) -> int:
    """Tokens in a batch. On one CPU thread a model of 128 hidden units takes 50 % longer with 256 than with
    512 where questions are long; one of 768 is as fast with 256, and needs 15 MB less (100 MB less than with
    1024).
    """
    if weight_VW.device.type != "cpu":
        return BATCH_TOKENS
    return whole_blocks(512 if weight_VW.shape[1] < NARROW else 256)


def longest_first(sizes: dict[int, int], limits: Limits) -> Iterator[list[int]]:
    """Questions by index in batches, the longest first; their tokens stand behind one another."""
    order = sorted(sizes, key=lambda index: (-sizes[index], index))
    return batches(order, sizes.__getitem__, limits, packed=True)


def halving(batch: list[int], answer: Callable[[list[int]], list[tuple[Score, ...]]]) -> Iterator[Scored]:
    """Answer a batch; when memory runs out, its halves. Raises Failed when one question alone does not fit."""
    try:
        found = answer(batch)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        if not _out_of_memory(error):
            raise
        found = None
    if found is not None:
        yield list(zip(batch, found))
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(batch) == 1:
        raise Failed(
            "out of memory on a single question", fix="use a device with more memory, or a smaller --window"
        )
    middle = len(batch) // 2
    for half in (batch[:middle], batch[middle:]):
        yield from halving(half, answer)


# What torch's allocator (a plain RuntimeError on the CPU), CUDA and ONNX Runtime write where memory ends.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Failed to allocate memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY
    )
