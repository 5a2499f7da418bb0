"""Two forms of one model: asked alike, and compared token by token."""

from typing import Any

from ..core.errors import Refused, WrongUse
from .asked import TaskScores
from .kinds.table import KINDS
from .opening import Opened


def check_alike(one: Opened, other: Opened) -> None:
    """Raises WrongUse when the two forms would be asked different questions."""
    ours, theirs = one.scorer.recipe, other.scorer.recipe
    if one.family != other.family:
        differ = [f"a {one.family} and a {other.family}"]
    else:
        differ = [
            f"{key} {ours[key]} and {theirs[key]}"
            for key in ("window", "bos")
            if ours.get(key) != theirs.get(key)
        ]
        if one.tokenizer.vocab != other.tokenizer.vocab:
            differ.append("tokenizers with other tokens")
    if differ:
        fix = "give two forms of one model; --window and --bos or --no-bos make both alike"
        raise WrongUse(
            "the two forms cannot be compared", where=other.input.path, why=", ".join(differ), fix=fix
        )


def token_gate(ours: list[TaskScores], theirs: list[TaskScores], name: str, bound: float) -> dict[str, Any]:
    """Compare log-probabilities token by token. Raises Refused above `bound`, naming the record; returns the
    largest per task.
    """
    worst: dict[str, float] = {}
    for first, second in zip(ours, theirs, strict=True):
        task = first.summary["task"]
        if not KINDS[first.summary["kind"]].probabilities:
            continue  # the texts of two equal models may part at a near tie
        worst[task] = 0.0
        for one, other in zip(first.samples, second.samples, strict=True):
            for a, b in zip(_token_logprobs(one), _token_logprobs(other), strict=True):
                difference = abs(a - b)
                if not difference <= bound:  # a NaN is refused too
                    raise Refused(
                        "the two forms of the model do not predict the same",
                        where=f"{name}, task {task}, {one['where']}",
                        why=f"log-probability of a token {a:.6f} and {b:.6f}: {difference:.3g} apart, "
                        f"the bound is {bound:g}",
                        fix="export the model again; the scores of the second form would mean nothing",
                    )
                worst[task] = max(worst[task], difference)
    return {
        "path": name,
        "bound": bound,
        "largest_difference": worst,
        "scores": [score.summary for score in theirs],
    }


def _token_logprobs(sample: dict[str, Any]) -> list[float]:
    return [
        value
        for answer in sample["answers"]
        if isinstance(answer, list)
        for packed in answer
        for value in packed[4]
    ]
