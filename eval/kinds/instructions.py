"""Kind `instructions`: IFEval (Zhou et al. 2023, arXiv 2311.07911), judged by lm-evaluation-harness's own checks."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ...core.errors import MissingExtra, WrongUse
from ..items import Form, Item
from .kind import Outcome
from .written import GenerateUntil

LEVELS = "prompt_level_strict_acc inst_level_strict_acc prompt_level_loose_acc inst_level_loose_acc"


class Instructions(GenerateUntil):
    """Text that the model writes, judged by the instructions of its record: `prompt_level` is the share of answers that
    follow all of theirs, `inst_level` the share of instructions; `loose` forgives a first or last line and asterisks.
    """

    needs = ("context",)
    metrics = tuple(LEVELS.split())

    def item(self, form: Form) -> Item:
        followed()  # refused before anything is written
        return Item(form.where, ((form.text("context"), ""),), data=form.data)

    def outcome(self, item: Item, found: Sequence[Any]) -> Outcome:
        made = {name: np.atleast_1d(value) for name, value in followed()(item.data, found).items()}
        return {name: [float(each.sum()), float(len(each))] for name, each in made.items()}


@cache
def followed() -> Callable[[Any, Sequence[str]], dict[str, Any]]:
    """The harness's judgement of an answer to a record. Raises MissingExtra, or WrongUse without nltk's data."""
    try:
        import langdetect
        import nltk

        nltk.data.find("tokenizers/punkt_tab")  # which the harness would download unasked
        from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        raise MissingExtra(str(error.name), "IFEval", "lm_eval langdetect immutabledict nltk") from error
    except LookupError as error:
        fix = "python -m nltk.downloader punkt_tab, or name its place in NLTK_DATA"
        raise WrongUse("IFEval needs nltk's punkt_tab, which is not here", fix=fix) from error
    langdetect.DetectorFactory.seed = 0  # it guesses at random otherwise
    return process_results
