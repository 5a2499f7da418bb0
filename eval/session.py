"""One `throughline eval`: open the model, score the tasks, check, report; or every checkpoint of a run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.console import table, warn
from ..core.errors import Refused, WrongUse
from ..core.workspace import Workspace
from .contamination import contaminated, open_searched
from .endpoint import open_endpoint
from .gate import check_alike, token_gate
from .opening import Opened, checkpoints_of, open_scorer
from .report import check_place, lines_of, write_scores
from .request import Request, wanted_tasks
from .runner import Ranks, evaluate, group_means, join_ranks
from .task import BoundTask


def evaluate_one(request: Request) -> tuple[dict[str, Any], list[str]] | None:
    """Score one model; returns (results, lines to print), or None on ranks other than 0."""
    tasks = wanted_tasks(request)
    check_place(request.scores)
    ranks = join_ranks()
    forms = _open(request)
    with _owned(request.home, ranks):
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
    with _owned(request.home, ranks):
        for checkpoint in checkpoints:
            one = replace(request, path=checkpoint, out=request.home)
            results = _score(one, _open(one), tasks, ranks, request.home / checkpoint.name, history)
            if results is not None:
                history.append(results)
    if ranks.rank:
        return None
    rows = [
        (results["step"], summary["task"], name, metric["value"], metric["stderr"])
        for results in history
        for summary in (*results["tasks"], *results["groups"])
        for name, metric in summary["metrics"].items()
    ]
    rows += [
        (found["step"], "validation", name, value, None)
        for found in history
        for name, value in found["validation"].items()
    ]
    last = request.home / f"step-{history[-1]['step']:08d}" / "report.html"
    return {"checkpoints": history}, [
        *table(("step", "task", "metric", "value", "stderr"), rows),
        f"curves in {last}",
    ]


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
        results["contamination"] = contaminated(store, opened.tokenizer, tasks, scores, request)
    write_scores(out, results, scores, [opened.input], history or ())
    return results


def validation_figures(opened: Opened, *, needed: bool) -> dict[str, Any]:
    """The run's own validation figures of a checkpoint of ours (loss, bits per byte; masked-token and
    sentence accuracy).

    Empty for foreign models; without tasks (`needed`) their absence is an error, since nothing would be
    measured.
    """
    run = Path(opened.input.path).absolute().parents[1] if opened.step is not None else None
    if run is None or not (run / "recipe.toml").is_file():
        if needed:
            raise WrongUse(
                "nothing to evaluate",
                why="no tasks, and not a run with a validation split",
                fix="give --tasks",
            )
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


def _owned(home: Path, ranks: Ranks) -> AbstractContextManager[Any]:
    """The first rank holds the directory's lock; the others write files of their own."""
    return Workspace(home) if ranks.rank == 0 else nullcontext()
