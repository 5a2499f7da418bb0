"""Running an evaluation. An answer's key is a hash of what was asked and of whom (weights, tokenizer, window, versions,
device), and a question belongs to a rank by its key: neither ranks nor batches nor a crash leave a trace in scores.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.console import say
from ..core.errors import WrongUse
from ..core.scorer import Scorer
from .asked import Answers, Asked, Settings, TaskScores, replace_answers
from .task import BoundTask


@dataclass(frozen=True)
class Ranks:
    """The processes that share the work; `meet` waits for all of them."""

    rank: int = 0
    world: int = 1
    meet: Callable[[], None] = lambda: None


def join_ranks() -> Ranks:
    """The processes that a launcher has started; one without. Raises WrongUse where they cannot meet."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Ranks()
    import torch.distributed as dist

    from ..train.parallel.ranks import Lost

    try:
        if not dist.is_initialized():  # a rank may wait long for the slowest one
            dist.init_process_group("gloo", timeout=timedelta(days=7))
    except ValueError as error:
        fix = "start them with `throughline launch --nproc N -- eval …`, or unset WORLD_SIZE"
        what, why = "the processes cannot find each other", str(error)
        raise WrongUse(what, where="WORLD_SIZE", why=why, fix=fix) from None

    def meet() -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            what, why = "the processes of the evaluation no longer work together", str(error).splitlines()[0]
            raise Lost(what, why=why, fix="the same command asks what is not answered yet") from error

    return Ranks(dist.get_rank(), dist.get_world_size(), meet)


def evaluate(
    scorer: Scorer,
    tasks: Sequence[BoundTask],
    settings: Settings,
    directory: Path | None = None,
    ranks: Ranks = Ranks(),
    *,
    fresh: bool = False,
) -> list[TaskScores]:
    """Score the tasks; ranks other than 0 return nothing. `directory` keeps the answers for a later start; with `fresh`
    they give way to the new ones when all of these stand. Raises WrongUse for a task without data, Failed for a record.
    """
    asked = prepare(scorer, tasks, settings)
    keys = [key for work in asked for key in work.keys]
    kept, directory = directory, directory / "fresh" if fresh and directory else directory
    answers = Answers(directory, ranks.rank)
    if ranks.rank == 0 and (days := answers.dates(keys)):
        when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        say(f"{len(days):,} of {len(keys):,} answers are kept from {when}; --fresh asks all of them again")
    for work in asked:
        work.answer(answers, lambda key: int(key, 16) % ranks.world == ranks.rank)
    ranks.meet()
    if ranks.rank:
        return []
    answers.reload()
    for work in asked:
        work.answer(answers, lambda _: True)  # what a rank that died has left
    if kept and directory and kept != directory:
        replace_answers(kept, directory, set(keys))
    return [work.scores(answers) for work in asked]


def prepare(scorer: Scorer, tasks: Sequence[BoundTask], settings: Settings) -> list[Asked]:
    """Every question, checked; nothing is computed. Raises as `evaluate` does."""
    return [Asked(scorer, task, settings) for task in present(tasks, settings)]


def present(tasks: Sequence[BoundTask], settings: Settings) -> list[BoundTask]:
    """The tasks whose data are there. Raises WrongUse for one whose data are not. Where files of some members of a
    group are at hand, the others are left out (said once) and not fetched, but for those asked for by their own names.
    """
    at_hand = {task.name for task in tasks if task.files(settings.data_dir)}
    partly = {task.group for task in tasks if task.group and task.name in at_hand}
    missing = [task for task in tasks if task.group in partly and task.name not in at_hand and not task.named]
    found = [task for task in tasks if task not in missing]
    for task in found:
        task.records(settings.data_dir, 1)
    for group in sorted({task.group for task in missing}):
        names = [task.name.removeprefix(f"{group}_") for task in missing if task.group == group]
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        say(f"{group}: {len(names)} member{'s have' if len(names) > 1 else ' has'} no data, left out: {some}")
    return found


def group_means(scores: Sequence[TaskScores]) -> list[dict[str, Any]]:
    """Summaries of groups that report a mean of their members or of all records, whose errors are independent."""
    made = []
    groups = {group: weigh for score in scores for group, weigh in score.summary["groups"].items()}
    for group, by_record in groups.items():
        members = [score.summary for score in scores if group in score.summary["groups"]]
        if len(members) < 2:
            continue
        metrics = {}
        weights = [member["n"] if by_record else 1 for member in members]
        shares = [weight / sum(weights) for weight in weights]
        counts = ("n", "truncated_records", "truncated_tokens", "skipped_records")
        for name, first in members[0]["metrics"].items():
            each = [member["metrics"][name] for member in members]
            errors = [value["stderr"] for value in each]
            error = None if None in errors else sum((w * e) ** 2 for w, e in zip(shares, errors)) ** 0.5
            value = sum(w * one["value"] for w, one in zip(shares, each))
            metrics[name] = first | {"value": value, "stderr": error}
            if None not in (guesses := [value["random"] for value in each]):
                metrics[name]["random"] = sum(w * guess for w, guess in zip(shares, guesses))
        sums = {key: sum(member[key] for member in members) for key in counts}
        mean = {"task": group, "group": "", "members": len(members), "metrics": metrics}
        made.append(members[0] | mean | sums)
    return made
