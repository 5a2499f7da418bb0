"""Answers that fit a JSON schema or a regular expression, by the grammar compiler llguidance (an extra)."""

import json
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.errors import Failed, WrongUse, extra
from ...data.tokenizer import Tokenizer

GRAMMARS = 32  # that are remembered


class Grammars:
    """Grammars over one tokenizer's vocabulary. Raises MissingExtra and WrongUse."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        llguidance = extra("llguidance", "constrained output", "constrained")
        self._library, self._vocab_size = llguidance, tokenizer.vocab_size
        try:
            self._tokens = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_id
            )
        except ValueError as error:
            what, why = "this model's tokenizer cannot be constrained", str(error).splitlines()[0]
            raise WrongUse(what, where="response_format", why=why) from error

        self._compiled = lru_cache(GRAMMARS)(self._compile)

    def guide(self, constraint: dict[str, Any]) -> "Guide":
        """What keeps answers to {"json": schema} or {"regex": expression}; each gets a `copy`."""
        return self._compiled(json.dumps(constraint))

    def _compile(self, text: str) -> "Guide":
        constraint, matcher = json.loads(text), self._library.LLMatcher
        where = "guided_regex" if "regex" in constraint else "response_format"
        # White space is left to the writer of the schema: a model may otherwise go on with it for ever.
        compact: Any = {"whitespace_flexible": False}
        try:
            if "regex" in constraint:
                grammar = matcher.grammar_from_regex(constraint["regex"])
            else:
                grammar = matcher.grammar_from_json_schema(json.dumps(constraint["json"]), overrides=compact)
            guide = matcher(self._tokens, grammar)
            why = guide.get_error().splitlines()[0] if guide.is_error() else ""
        except (ValueError, RecursionError) as error:
            why = str(error) or "it is nested too deeply"
        if why:
            raise WrongUse("the constraint cannot be compiled", where=where, why=why)
        return Guide(guide, self._vocab_size)


class Guide:
    """One answer on its way through a grammar; called on the thread that runs the model."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> "Guide":
        """The same for another answer."""
        return Guide(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> np.ndarray:
        """Which tokens may come next: bool (V,) of the tokenizer's vocabulary."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> bool:
        """Take a token in; True when nothing may follow it."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():  # of its limits: what comes would be cut, and look complete
            raise Failed("the constraint is too large to follow")
        return bool(self._matcher.is_stopped())
