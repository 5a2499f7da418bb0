"""Scoring by an endpoint: any server of OpenAI's completions that returns the log-probabilities of a prompt, which is
tokenised here and sent as ids: a pair is parted where `causal.py` parts it.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ..core.artifact import Input
from ..core.errors import Failed, WrongUse, did_you_mean, extra
from ..core.scorer import Ids, Question, Score, Written
from .causal import CausalScorer
from .opening import Opened, ScorerOptions, open_chat, scorer_of

RETRIES = 5  # of a request that meets no server, a busy one or a fault of its own
BATCH_TOKENS = 1 << 16  # whose answers are stored together
STOPS = 4  # strings that OpenAI's servers take; the others end the answer here
BIAS = 10_000  # above any difference of logits


class Endpoint:
    """A model behind a URL (`scoring.Reader`). Raises WrongUse for a model that the server does not list, Failed for
    a server that does not answer. The environment's OPENAI_API_KEY is its key.
    """

    name, dtype, batch_tokens, shares = " (endpoint)", "as served", BATCH_TOKENS, False

    def __init__(self, url: str, model: str | None, tokenizer: Any) -> None:
        self.openai = extra("openai", "--url", "endpoint")
        key = os.environ.get("OPENAI_API_KEY", "none")
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.client = self.openai.OpenAI(base_url=base, api_key=key, max_retries=RETRIES)
        self.url, self.decode = url, tokenizer.decode
        self.bos = (tokenizer.bos_id,) if tokenizer.puts_bos else ()
        try:
            listed = {one.id: one.to_dict() for one in self.client.models.list()}
        except self.openai.OpenAIError as error:
            raise self.failed(error) from error
        self.model = model or next(iter(listed), "")
        if self.model not in listed:
            fix = did_you_mean(self.model, listed, f"give --model: {', '.join(listed)}")
            raise WrongUse(f"the server has no model {self.model!r}", where=url, fix=fix)
        told = listed[self.model]
        self.as_text = told.get("owned_by") == "me"  # llama-cpp-python's server, which takes no ids
        self.forced = self.as_text or told.get("owned_by") == "llamacpp"  # these tell nothing of a prompt
        self.context = int(told.get("max_model_len") or told.get("meta", {}).get("n_ctx") or 0)
        self.vocab_size = int(told.get("vocab_size") or tokenizer.vocab_size)
        self.by = [base, self.model, str(told.get("hash") or told.get("created"))]

    def failed(self, error: Exception) -> Failed:
        """What a request ended with."""
        why = str(error.__cause__ or error)[:300]
        fix = "check the address and OPENAI_API_KEY; the same command asks what is not answered yet"
        return Failed("the server gave no answer", where=self.url, why=why, fix=fix)

    def untold(self, why: str) -> Failed:
        """What a server cannot be asked."""
        fix = "choose other tasks, or a server that returns them for ids (throughline, vLLM)"
        what = "the server returns no log-probabilities of the prompt"
        return Failed(what, where=self.url, why=why, fix=fix)

    def complete(self, ids: Sequence[int], **asked: Any) -> Any:
        """The one choice of a greedy completion."""
        asked["prompt"] = list(ids)
        if self.as_text:  # this server puts its BOS before a text, and punishes repetition
            asked["prompt"] = self.decode(ids[tuple(ids[:1]) == self.bos :])
            asked["extra_body"] = {"repeat_penalty": 1.0}
        try:
            made = self.client.completions.create(model=self.model, temperature=0, **asked)
        except self.openai.OpenAIError as error:
            raise self.failed(error) from error
        if self.as_text and made.usage.prompt_tokens != len(ids):
            raise self.untold(f"it parts a text of {len(ids)} tokens in {made.usage.prompt_tokens}")
        return made.choices[0]

    def of_prompt(self, ids: Sequence[int], last: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the last tokens of a prompt: log-probability, and whether it is the arg-max."""
        first = len(ids) - last
        if self.forced:
            own, best = np.array([self.of_next(ids[:end], ids[end]) for end in range(first, len(ids))]).T
            return own, own >= best
        found = self.complete(ids, max_tokens=1, echo=True, logprobs=1).logprobs
        logprobs = (found and found.token_logprobs) or []
        if len(logprobs) < len(ids):
            raise self.untold(f"it was asked for those of {len(ids)} tokens and told {len(logprobs)}")
        own = np.array(logprobs[first : len(ids)], np.float64)
        best = np.array([max(top.values()) for top in found.top_logprobs[first : len(ids)]])
        return own, own >= best

    def of_next(self, ids: Sequence[int], token: int) -> tuple[float, float]:
        """The log-probabilities of the token behind the ids, which a bias makes llama.cpp write, and of the likeliest
        one; neither has the bias in it.
        """
        found = self.complete(ids, max_tokens=1, logprobs=1, logit_bias={str(token): BIAS}).logprobs
        if content := getattr(found, "content", None):
            return content[0]["logprob"], content[0]["top_logprobs"][0]["logprob"]
        if not found or not found.token_logprobs:
            raise self.untold(f"it tells nothing of the token {self.decode([token])!r}")
        return found.token_logprobs[0], max(found.top_logprobs[0].values())


class EndpointScorer(CausalScorer):
    """Scores with a model behind a URL; a token of its context stays free, for servers that generate at least one."""

    def __init__(
        self, reader: Endpoint, tokenizer: Any, *, clients: int, window: int | None, **how: Any
    ) -> None:
        if not reader.context and window is None:
            fix = "give --window: the model's context"
            raise WrongUse("the server does not say how long its inputs may be", where=reader.url, fix=fix)
        reader.context = reader.context - 2 if reader.context else window or 0
        self.pool = ThreadPoolExecutor(clients)
        super().__init__(reader, tokenizer, window=window, **how)

    def reader_of(self, model: Any) -> Any:
        return model

    def laid_out(self, question: Question) -> tuple[int, Any]:
        return sum(len(context) + len(rest) for context, rest in question.pairs), question

    def answered(self, laid: list[Any]) -> list[tuple[Score, ...]]:
        asked = [pair for question in laid for pair in question.pairs]
        scores = self.pool.map(lambda pair: self._pair_score(*pair), asked)
        return [tuple(next(scores) for _ in question.pairs) for question in laid]

    def _pair_score(self, context: Ids, rest: Ids) -> Score:
        cut = max(0, len(context) + len(rest) - self.window - 1)
        return self.of_tokens(*self.reader.of_prompt(context[cut:] + rest, len(rest)))

    def written(self, prompts: Sequence[Ids], until: Sequence[str], max_tokens: int) -> Iterator[Written]:
        asked: dict[str, Any] = {"stop": list(until[:STOPS])} if until else {}
        # llama.cpp's servers know the ends of the model's file alone.
        if self.end_ids and not self.reader.forced:
            asked["extra_body"] = {"stop_token_ids": sorted(self.end_ids)}

        def answer(ids: Ids) -> str:
            text = self.reader.complete(ids, max_tokens=max_tokens, **asked).text
            return text[: min((text.find(stop) for stop in until if stop in text), default=None)]

        yield from ([found] for found in enumerate(self.pool.map(answer, prompts)))


def open_endpoint(options: ScorerOptions) -> Opened:
    """The scorer of the model behind `options.url`. Raises as `Endpoint` does, and WrongUse without a tokenizer."""
    from ..data.model_settings import end_ids
    from ..data.tokenizer import Tokenizer

    if options.tokenizer is None:
        why = "texts become tokens here, as the served model knows them"
        fix = "give --tokenizer: the model's directory, or its tokenizer.json"
        raise WrongUse("--url needs a tokenizer", why=why, fix=fix)
    tokenizer, place = Tokenizer.load(options.tokenizer), options.tokenizer
    reader = Endpoint(options.url or "", options.model, tokenizer)
    directory = place if place.is_dir() else place.parent
    chat = open_chat(options, directory, tokenizer)
    ends = end_ids(directory, tokenizer)
    made = partial(EndpointScorer, clients=options.clients)
    scorer = scorer_of(
        reader, made, tokenizer, options, identity="/".join(reader.by), chat=chat, end_ids=ends
    )
    source = Input(f"{reader.url} {reader.model}", "endpoint", "")
    return Opened(scorer, "gpt", source, None, tokenizer=tokenizer)
