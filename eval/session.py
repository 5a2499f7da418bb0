"""One `throughline eval`: open the model, score the tasks, check, report; for one model or every checkpoint
of a run.
"""

import copy
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..core.console import table, warn
from ..core.errors import Refused, WrongUse
from ..core.workspace import Workspace
from .asked import Settings, TaskScores
from .contamination import contaminated, open_searched
from .kinds import KINDS
from .opening import Opened, ScorerOptions, checkpoints_of, open_scorer
from .report import check_place, lines_of, write_scores
from .runner import Ranks, evaluate, group_means
from .task import BoundTask, find_tasks, load_task, shipped_tasks


@dataclass(frozen=True)
class Request:
    """Everything a user can ask of an evaluation; see `throughline eval --help`."""

    path: Path
    tasks: str = ""
    data_dir: Path | None = None
    limit: int | None = None
    shots: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    bos: bool | None = None
    window: int | None = None
    batch_tokens: int | None = None
    pll: str = "within_word_l2r"
    against: str | None = None
    bound: float = 1e-3
    contamination: str | None = None
    overlong: Literal["truncate", "error", "skip"] = "truncate"
    out: Path | None = None
    fresh: bool = False

    @property
    def settings(self) -> Settings:
        if self.data_dir is not None and not self.data_dir.is_dir():
            fix = "--data-dir names the directory that holds the tasks' files"
            raise WrongUse("no such directory", where=self.data_dir, fix=fix)
        return Settings(self.data_dir, self.limit, self.shots, self.seed, self.overlong)

    @property
    def options(self) -> ScorerOptions:
        return ScorerOptions(
            self.device,
            self.bos,
            self.window,
            self.batch_tokens,
            keep_tokens=self.against is not None,
            pll=self.pll,
            dtype=self.dtype,
        )

    @property
    def home(self) -> Path:
        """Where scores go: beside the model or, of a checkpoint, beside its run, whose manifest covers all
        that lies inside it.
        """
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
        """The artifact of one model's scores; of a run's checkpoint it is where --all-checkpoints would write
        it.
        """
        return self.home / (
            Path(os.path.abspath(self.path)).name if self.out is None and self._in_run else "scores"
        )

    @property
    def _in_run(self) -> bool:
        return Path(os.path.abspath(self.path)).parent.name == "checkpoints"

    def found_tasks(self) -> list[BoundTask]:
        return find_tasks([name.strip() for name in self.tasks.split(",") if name.strip()])


def evaluate_one(request: Request) -> tuple[dict[str, Any], list[str]] | None:
    """Score one model; returns (results, lines to print), or None on ranks other than 0."""
    tasks = _wanted(request)
    check_place(request.scores)
    ranks = join_ranks()
    forms = _open(request)
    with _owned(request.home, ranks):
        _forget(request, ranks)
        results = _score(request, forms, tasks, ranks, request.scores)
    return None if results is None else (results, [*lines_of(results), f"scores in {request.scores}"])


def evaluate_checkpoints(request: Request) -> tuple[dict[str, Any], list[str]] | None:
    """Score every checkpoint of a run, oldest first; answers that are there already are not asked again."""
    tasks = _wanted(request)
    ranks = join_ranks()
    history: list[dict[str, Any]] = []
    checkpoints = checkpoints_of(request.path)
    for checkpoint in checkpoints:
        check_place(request.home / checkpoint.name)
    with _owned(request.home, ranks):
        _forget(request, ranks)
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


def _forget(request: Request, ranks: Ranks) -> None:
    """With --fresh, remove the stored answers before any process reads them."""
    if not request.fresh:
        return
    if ranks.rank == 0:
        shutil.rmtree(request.home / "answers", ignore_errors=True)
    ranks.meet()


def _wanted(request: Request) -> list[BoundTask]:
    """The tasks. Raises WrongUse when one of the checks asked for would have nothing to look at."""
    tasks = request.found_tasks()
    request.settings  # noqa: B018 - a missing --data-dir is said before a model is opened
    model = Path(os.path.realpath(request.path))
    inside = model.parents[1] if model.parent.name == "checkpoints" else model
    if request.out is not None and Path(os.path.realpath(request.out)).is_relative_to(inside):
        why = f"the files of {inside} are hashed: with scores among them it would count as changed"
        raise WrongUse(
            "scores cannot lie inside what is scored", where=request.out, why=why, fix="choose another --out"
        )
    if request.contamination is not None and not tasks:
        raise WrongUse(
            "--contamination has nothing to look for",
            why="it looks for the records of tasks",
            fix="give --tasks",
        )
    if request.against is not None and not any(task.kind.probabilities for task in tasks):
        why, fix = (
            "it compares the probabilities of answers, and no task has any",
            "give --tasks, for example blimp",
        )
        raise WrongUse("--against has nothing to compare", why=why, fix=fix)
    return tasks


@dataclass(frozen=True)
class _Forms:
    """What an evaluation reads: the model, a second form of it, a store to search."""

    opened: Opened
    other: Opened | None
    store: Any


def _open(request: Request) -> _Forms:
    opened = open_scorer(request.path, request.options)
    other = None if request.against is None else open_scorer(request.against, request.options)
    if other is not None:
        _check_alike(opened, other)
    store = None if request.contamination is None else open_searched(request.contamination, opened.tokenizer)
    return _Forms(opened, other, store)


def _check_alike(one: Opened, other: Opened) -> None:
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


def _score(
    request: Request,
    forms: _Forms,
    tasks: list[BoundTask],
    ranks: Ranks,
    out: Path,
    history: list[dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    opened, other, store = forms.opened, forms.other, forms.store
    validation = validation_figures(opened, needed=not tasks) if ranks.rank == 0 else {}
    scores = evaluate(opened.scorer, tasks, request.settings, request.home / "answers", ranks)
    against = None
    if other is not None and request.against is not None:
        others = evaluate(other.scorer, tasks, request.settings, request.home / "answers", ranks)
        if ranks.rank == 0:
            against = token_gate(scores, others, request.against, request.bound)
    if ranks.rank:
        return None
    groups = {task.group: task.task.mean for task in tasks if task.group}
    results: dict[str, Any] = {
        "model": str(request.path),
        "step": opened.step,
        "hash": opened.input.hash,
        "scorer": opened.scorer.recipe,
        "validation": validation,
        "tasks": [score.summary for score in scores],
        "groups": group_means(scores, groups),
    }
    if against is not None:
        results["against"] = against
    if store is not None:
        results["contamination"] = contaminated(store, opened.tokenizer, tasks, scores, request.settings)
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
    from ..train.evaluate import Validation
    from ..train.precision import pick_device
    from ..train.recipe import Recipe
    from ..train.single_engine import SingleEngine

    try:
        recipe, device = load_recipe(run / "recipe.toml", Recipe), opened.model.token_table.weight.device
        pick_device(device.type, recipe.train.precision)
        plan = validation_plan(recipe, device, run / "cache")
    except (WrongUse, Refused) as error:
        if needed:
            raise
        warn(f"no validation figures: {error.what} ({error.where})")
        return {}
    if not plan.validation_stores:
        return {}
    engine = SingleEngine(
        copy.deepcopy(opened.model), recipe.train.precision, device
    )  # which may round its weights
    return Validation(plan, run / "cache").measure(engine)


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
        for value in packed[5]
    ]


def _owned(home: Path, ranks: Ranks) -> AbstractContextManager[Any]:
    """The first rank holds the directory's lock; the others write files of their own."""
    return Workspace(home) if ranks.rank == 0 else nullcontext()


def join_ranks() -> Ranks:
    """The processes that a launcher (torchrun, `throughline launch`) started with RANK and WORLD_SIZE; one
    without. Raises WrongUse when the environment has not all that it takes to meet.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Ranks()
    from datetime import timedelta

    import torch.distributed as dist

    try:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", timeout=timedelta(days=7)
            )  # a rank may wait long for the slowest one
    except ValueError as error:
        fix = "start them with `throughline launch --nproc N -- eval …`, or unset WORLD_SIZE"
        raise WrongUse(
            "the processes cannot find each other", where="WORLD_SIZE", why=str(error), fix=fix
        ) from None
    from ..train.parallel.ranks import Lost

    def meet() -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise Lost(
                "the processes of the evaluation no longer work together",
                why=str(error).splitlines()[0],
                fix="the same command asks what is not answered yet",
            ) from error

    return Ranks(dist.get_rank(), dist.get_world_size(), meet)


def task_listing() -> tuple[dict[str, Any], list[str]]:
    """All shipped tasks and the files they look for: (JSON, lines)."""
    tasks = {name: load_task(file) for name, file in shipped_tasks().items()}
    rows = [
        (name, task.kind, ", ".join(task.metrics), len(task.members) or None, task.checked, task.about)
        for name, task in tasks.items()
    ]
    lines = table(("task", "kind", "metrics", "members", "checked", "about"), rows)
    lines += [
        "",
        "checked: what the tests compared with lm-evaluation-harness (nothing: it has no such task)",
    ]
    lines += ["", "files looked for below --data-dir, in order:"]
    lines += [f"  {name:<26}{'  '.join(task.source.files)}" for name, task in tasks.items()]
    payload = {
        name: task.model_dump(include={"about", "kind", "metrics", "checked"})
        | {"files": {bound.name: bound.source.files for bound in find_tasks([name])}}
        for name, task in tasks.items()
    }
    return {"tasks": payload}, lines
