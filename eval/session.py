"""One `throughline eval`: open the model or two forms of it, score the tasks or every checkpoint, check, report."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.console import table, warn
from ..core.errors import Refused, WrongUse
from ..core.workspace import Workspace
from .asked import Settings, TaskScores
from .contamination import contaminated, open_searched
from .endpoint import open_endpoint
from .harness.reader import read_harness_task
from .opening import Opened, ScorerOptions, checkpoints_of, open_scorer
from .report import check_place, lines_of, rows_of, write_scores
from .runner import Ranks, evaluate, group_means, join_ranks
from .task import KINDS, BoundTask, find_tasks


@dataclass(frozen=True)
class Request(Settings, ScorerOptions):
    """Everything a user can ask of an evaluation; see `throughline eval --help`."""

    path: Path
    tasks: str = ""
    harness_tasks: tuple[Path, ...] = ()
    task_code: bool = False
    against: str | None = None
    bound: float = 1e-3
    contamination: str | None = None
    out: Path | None = None
    fresh: bool = False

    @property
    def home(self) -> Path:
        """Where scores go: beside the model or, of a checkpoint, beside its run, whose manifest covers all in it."""
        if self.out is not None:
            return self.out
        if self._in_run:
            run = Path(os.path.abspath(self.path)).parents[1]
            home = run.with_name(run.name + ".scores")
            return home if self.path.is_absolute() else Path(os.path.relpath(home))
        named = self.path if self.path.name not in ("", "..") else self.path.resolve()
        return named.with_name(self.path.resolve().name + ".scores")

    @property
    def scores(self) -> Path:
        """The artifact of one model's scores; of a run's checkpoint where --all-checkpoints would write it."""
        of_run = self.out is None and self._in_run
        return self.home / (Path(os.path.abspath(self.path)).name if of_run else "scores")

    @property
    def _in_run(self) -> bool:
        return Path(os.path.abspath(self.path)).parent.name == "checkpoints"


def wanted_tasks(request: Request) -> list[BoundTask]:
    """The tasks. Raises WrongUse when one of the checks asked for would have nothing to look at."""
    tasks = find_tasks([name.strip() for name in request.tasks.split(",") if name.strip()])
    for file in request.harness_tasks:
        tasks += read_harness_task(file, code=request.task_code)
    model = Path(os.path.realpath(request.path))
    inside = model.parents[1] if model.parent.name == "checkpoints" else model
    if request.out is not None and Path(os.path.realpath(request.out)).is_relative_to(inside):
        why = f"the files of {inside} are hashed: with scores among them it would count as changed"
        what = "scores cannot lie inside what is scored"
        raise WrongUse(what, where=request.out, why=why, fix="choose another --out")
    if request.contamination is not None and not tasks:
        why = "it looks for the records of tasks"
        raise WrongUse("--contamination has nothing to look for", why=why, fix="give --tasks")
    if request.against is not None and not any(task.kind.probabilities for task in tasks):
        why = "it compares the probabilities of answers, and no task has any"
        raise WrongUse("--against has nothing to compare", why=why, fix="give --tasks, for example blimp")
    return tasks


def evaluate_one(request: Request) -> tuple[dict[str, Any], list[str]] | None:
    """Score one model; returns (results, lines to print), or None on ranks other than 0."""
    tasks = wanted_tasks(request)
    check_place(request.scores)
    ranks = join_ranks()
    forms = _open(request)
    with Workspace(request.home) if ranks.rank == 0 else nullcontext():
        results = _score(request, forms, tasks, ranks, request.scores)
    return None if results is None else (results, [*lines_of(results), f"scores in {request.scores}"])


def evaluate_checkpoints(request: Request) -> tuple[dict[str, Any], list[str]] | None:
    """Score every checkpoint of a run, oldest first; answers that are there already are not asked again."""
    tasks = wanted_tasks(request)
    ranks = join_ranks()
    history: list[dict[str, Any]] = []
    checkpoints = checkpoints_of(request.path)
    for checkpoint in checkpoints:
        check_place(request.home / checkpoint.name)
    with Workspace(request.home) if ranks.rank == 0 else nullcontext():
        for checkpoint in checkpoints:
            one = replace(request, path=checkpoint, out=request.home)
            results = _score(one, _open(one), tasks, ranks, request.home / checkpoint.name, history)
            if results is not None:
                history.append(results)
    if ranks.rank:
        return None
    rows: list[tuple[Any, ...]] = []
    for found in history:
        rows += [(found["step"], *row[:2], *row[3:5]) for row in rows_of(found)]
        rows += [(found["step"], "validation", *figure, None) for figure in found["validation"].items()]
    last = request.home / f"step-{history[-1]['step']:08d}" / "report.html"
    lines = table(("step", "task", "metric", "value", "stderr"), rows)
    return {"checkpoints": history}, [*lines, f"curves in {last}"]


Forms = tuple[Opened, Opened | None, Any]  # the model, a second form of it, a store to search


def _open(request: Request) -> Forms:
    options = replace(request, keep_tokens=request.against is not None)
    opened = open_endpoint(options) if request.url else open_scorer(request.path, options)
    other = None if request.against is None else open_scorer(request.against, options)
    if other is not None:
        check_alike(opened, other)
    store = None if request.contamination is None else open_searched(request.contamination, opened.tokenizer)
    return opened, other, store


def _score(
    request: Request,
    forms: Forms,
    tasks: list[BoundTask],
    ranks: Ranks,
    out: Path,
    history: list[dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    opened, other, store = forms
    validation = validation_figures(opened, needed=not tasks) if ranks.rank == 0 else {}
    kept = request.home / "answers"
    scores = evaluate(opened.scorer, tasks, request, kept, ranks, fresh=request.fresh)
    against = None
    if other is not None and request.against is not None:
        others = evaluate(other.scorer, tasks, request, kept, ranks, fresh=request.fresh)
        if ranks.rank == 0:
            against = token_gate(scores, others, request.against, request.bound)
    if ranks.rank:
        return None
    results: dict[str, Any] = {
        "model": str(request.path),
        "step": opened.step,
        "hash": opened.input.hash,
        "scorer": opened.scorer.recipe,
        "validation": validation,
        "tasks": [score.summary for score in scores],
        "groups": group_means(scores),
    }
    if against is not None:
        results["against"] = against
    if store is not None:
        results["contamination"] = contaminated(store, opened.tokenizer, scores)
    write_scores(out, results, scores, [opened.input], history or ())
    return results


def validation_figures(opened: Opened, *, needed: bool) -> dict[str, Any]:
    """The run's own validation figures of a checkpoint of ours; without tasks (`needed`) their absence is an error."""
    run = Path(opened.input.path).absolute().parents[1] if opened.step is not None else None
    if run is None or not (run / "recipe.toml").is_file():
        if needed:
            why = "no tasks, and not a run with a validation split"
            raise WrongUse("nothing to evaluate", why=why, fix="give --tasks")
        return {}
    from ..core.recipe import load_recipe
    from ..train.build import validation_plan
    from ..train.engine import Engine
    from ..train.evaluate import Validation
    from ..train.precision import pick_device
    from ..train.recipes.recipe import Recipe

    try:
        recipe, device = load_recipe(run / "recipe.toml", Recipe), opened.model.token_table.weight.device
        pick_device(device.type, recipe.train.precision)
        plan = validation_plan(recipe, device, run / "cache")
    except (WrongUse, Refused) as error:
        if needed:
            raise
        warn(f"no validation figures: {error.what} ({error.where})")
        return {}
    if not plan.corpus.validation:
        return {}
    engine = Engine.holding(opened.model, recipe.train.precision, device)
    return Validation(plan, run / "cache").measure(engine)


def check_alike(one: Opened, other: Opened) -> None:
    """Raises WrongUse when two forms of a model would be asked different questions."""
    ours, theirs = one.scorer.recipe, other.scorer.recipe
    both = [(key, ours.get(key), theirs.get(key)) for key in ("window", "bos")]
    differ = [f"{key} {own} and {other}" for key, own, other in both if own != other]
    if one.tokenizer.vocab != other.tokenizer.vocab:
        differ.append("tokenizers with other tokens")
    if one.family != other.family:
        differ = [f"a {one.family} and a {other.family}"]
    if differ:
        fix = "give two forms of one model, with the same --window and --bos or --no-bos"
        what, why = "the two forms cannot be compared", ", ".join(differ)
        raise WrongUse(what, where=other.input.path, why=why, fix=fix)


def token_gate(ours: list[TaskScores], theirs: list[TaskScores], name: str, bound: float) -> dict[str, Any]:
    """Largest difference of a token's log-probability by task. Raises Refused above `bound`, naming the record."""
    worst: dict[str, float] = {}
    for first, second in zip(ours, theirs, strict=True):
        task = first.summary["task"]
        if not KINDS[first.summary["kind"]].probabilities:
            continue  # the texts of two equal models may part at a near tie
        worst[task] = 0.0
        for one, other in zip(first.samples, second.samples, strict=True):
            packed = ([part for answer in sample["answers"] for part in answer] for sample in (one, other))
            values = ([value for part in parts for value in part[4]] for parts in packed)
            for a, b in zip(*values, strict=True):
                difference = abs(a - b)
                if not difference <= bound:  # a NaN is refused too
                    what = "the two forms of the model do not predict the same"
                    why = f"a token's log-probability {a:.6f} and {b:.6f}: {difference:.3g} apart, bound {bound:g}"
                    fix = "export the model again; the scores of the second form would mean nothing"
                    raise Refused(what, where=f"{name}, task {task}, {one['where']}", why=why, fix=fix)
                worst[task] = max(worst[task], difference)
    said = [score.summary for score in theirs]
    return {"path": name, "bound": bound, "largest_difference": worst, "scores": said}
