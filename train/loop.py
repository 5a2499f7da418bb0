"""The training loop: start or resume, step, log, evaluate, save; stop on a signal with everything saved."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

from ..core.console import amount, duration, progress, say
from ..core.errors import EXIT_INTERRUPTED, Stopped
from ..core.hardware import keep_freed_memory
from ..core.recipe import recipe_hash
from ..core.signals import handling
from ..data.dataset import Loader
from .build import RunPlan, build_trainer
from .checkpoints.changes import check_rate, rates_around, recorded_changes
from .checkpoints.checkpoint import CheckpointWriter, restore
from .checkpoints.run_directory import HEARTBEAT, RunWorkspace, check_owners, claim, open_run, verified_share
from .divergence import Divergence
from .engine import SIGNALS, Engine
from .logs.metrics import Metrics, StepReport
from .logs.profile import Profile
from .logs.target import convergence, reached, write_mllog
from .memory import beside
from .objective import StepBatch
from .optimizers.averages import averaged
from .optimizers.build import learning_rate_factor
from .parallel.ranks import Ranks
from .recipes.recipe import Recipe
from .recipes.resolved import predicted_step_seconds
from .step import Launched, StepResult, Trainer, launch_step

Evaluator = Callable[[Engine, int], dict[str, Any]]  # the engine and the step
UNSAVED = "not saved, because the loss is not finite: the last checkpoint stays"
LOOK_EVERY_S = 0.02  # at the checkpoint that is being written, when the next one waits for it


def train(
    plan: RunPlan,
    run_dir: Path | str,
    *,
    resume: str = "auto",
    evaluators: Sequence[Evaluator] = (),
    profile: bool = False,
) -> dict[str, Any]:
    """Train to the recipe's last step and return the summary. Each process of a layout calls this; the first keeps the
    directory. `resume`: "auto" continues what is in it, "never" refuses a directory that holds a run.

    Raises Stopped after SIGTERM or SIGHUP, KeyboardInterrupt after Ctrl-C, both saved; Failed after too many steps that
    were not finite.
    """
    parallel = plan.recipe.parallel
    with (
        Ranks.start(parallel.layout(), plan.device, parallel.timeout_seconds) as ranks,
        ExitStack() as entered,
    ):
        workspace = RunWorkspace(run_dir, ranks.token, ranks.leads)
        ranks.first_enters(workspace, entered)
        before = ranks.first_decides(lambda: claim(workspace, plan.recipe, resume))
        check_shared(workspace, ranks)
        world = ranks.mesh.world
        shares = ranks.gathered(verified_share(workspace.path / "checkpoints", world.rank, world.size))
        check = partial(check_rate, plan.recipe, before, workspace.path)
        opened = partial(open_run, workspace, plan.recipe, plan.corpus.inputs, set().union(*shares), check)
        checkpoint, done = ranks.first_decides(opened)
        if done is not None:
            say(f"{workspace.path} is already trained to step {done['step']:,}")
            return done
        if plan.device.type == "cpu":
            keep_freed_memory()
        trainer = build_trainer(plan, ranks.mesh, fill=checkpoint is None)
        if checkpoint is not None:
            restore(checkpoint, trainer, before.train.steps if before else None)
            say(f"resumed at step {trainer.step:,} from {checkpoint}")
        return Run(plan, workspace, trainer, evaluators, profile, ranks, before).to_the_end()


def check_shared(workspace: RunWorkspace, ranks: Ranks) -> None:
    """Raise Refused unless every process sees the run's directory that the first one has claimed. Collective."""
    if not ranks.alone:
        seen = ranks.gathered(workspace.seen_owner())
        ranks.first_decides(lambda: check_owners(workspace.path, ranks.token, seen))


class Run:
    """One process's share of a run: from where the trainer stands to the last step or a signal."""

    def __init__(
        self,
        plan: RunPlan,
        workspace: RunWorkspace,
        trainer: Trainer,
        evaluators: Sequence[Evaluator],
        profile: bool,
        ranks: Ranks,
        before: Recipe | None = None,  # the recipe of the start before this one
    ) -> None:
        self.plan, self.workspace, self.trainer = plan, workspace, trainer
        self.evaluators, self.ranks, self.signals = evaluators, ranks, Signals()
        recipe = plan.recipe
        self.metrics = Metrics(workspace, list(recipe.log.sinks) if ranks.leads else [], workspace.path.name)
        self.writer = CheckpointWriter(
            workspace.path / "checkpoints",
            recipe.checkpoint.keep,
            plan.corpus.tokenizer_json,
            plan.corpus.beside,
            plan.corpus.inputs,
            recipe_hash(recipe),
            process=ranks.mesh.rank,
            processes=ranks.mesh.world.size,
            token=ranks.token,
            may_write=workspace.check_owner,
            patience_s=ranks.timeout_seconds,
        )
        self.profile = Profile(workspace.path / "profile", plan) if profile and ranks.leads else None
        self.report = StepReport(plan, trainer, self.metrics)
        self.recipe_before = before
        self.divergence = Divergence(trainer, workspace.path)
        self.saved_step = trainer.step
        self.last_result: StepResult | None = None
        self.save_is_due = False  # it was put off while steps were skipped
        self.validation: dict[str, Any] = {}
        self.reached = False  # the recipe's target

    def to_the_end(self) -> dict[str, Any]:
        trainer, start = self.trainer, time.monotonic()
        self._event("resumed" if trainer.step else "started", **self.report.environment())
        self._report_changes()
        try:
            with (
                self.ranks.watch(self.workspace.path / HEARTBEAT) as self.report.heartbeat,
                self.signals,
                self._batches() as batches,
                progress("train", self.plan.recipe.train.tokens, "tokens") as bar,
            ):
                bar.start_at(trainer.samples * self.plan.recipe.train.sequence_length)
                if self.plan.recipe.target is not None:  # what its log is made of
                    self._event("running")
                self._steps(cast(Iterator[StepBatch], batches), bar)
                if self.profile is not None:
                    self.profile.close()
                if not self.reached and not self._agree_to_stop():
                    if self.last_result is not None and self.divergence.diverged:
                        self._until_written()
                        raise self.divergence.error(self.last_result, self.plan.recipe)
                    self._evaluate()
                if self._agree_to_stop():
                    self._stop()
                self._save()
                self._until_written()
        except BaseException:
            self.writer.abandon()
            self.metrics.flush()
            raise
        self.metrics.flush()
        self.writer.close()
        return self._finish(time.monotonic() - start)

    def _batches(self) -> Loader:
        data, train = self.ranks.mesh.data, self.plan.recipe.train
        opened = partial(self.plan.batches, self.ranks.mesh, self.workspace.path / "cache")
        self.ranks.first_decides(lambda: opened() and None)  # builds the index that all find
        where = {"position": self.trainer.samples, "rank": data.rank, "world": data.size}
        return Loader(opened(), lambda position: train.rows_at(position) // data.size, **where, ahead=2)

    def _steps(self, batches: Iterator[StepBatch], bar: Any) -> None:
        """The steps that are left; where nothing waits for one, its figures are read when the next is under way."""
        trainer, recipe = self.trainer, self.plan.recipe
        upcoming: StepBatch | None = None
        under_way: Callable[[], None] | None = None  # reads the step before
        while trainer.step < recipe.train.steps and not self.reached and not self.signals.agreed:
            factor = learning_rate_factor(trainer.step, recipe, trainer.earlier_lengths)
            with self.report.step() as mark:
                batch = upcoming or next(batches)
                # the target counts of the next batch travel with this step's figures
                upcoming = next(batches) if trainer.step + 1 < recipe.train.steps else None
                self.report.heartbeat.mark("its batch", trainer.step)
                launched = launch_step(trainer, batch, factor, mark, self.signals.number, upcoming)
            if under_way is not None:
                under_way()
            under_way = partial(self._read, launched, factor, batch, bar)
            if self.profile is not None:
                self.profile.step()
            last = trainer.step == recipe.train.steps
            evaluates = not last and _due(recipe.train.eval_every_steps, trainer.step)
            saves = not last and (self.save_is_due or _due(recipe.checkpoint.save_every_steps, trainer.step))
            if last or evaluates or saves or self.signals.agreed or launched.is_there:
                under_way()
                under_way = None
            if evaluates and not self.signals.agreed:  # those of the last step come at the end
                self._evaluate()
            if saves and not self.signals.agreed:
                self._save()

    def _read(self, launched: Launched, factor: float, batch: StepBatch, bar: Any) -> None:
        result = launched.read()
        self.signals.agree(result.signal)
        self.report.add(result, factor, batch, bar)
        self.divergence.add(result)
        self.last_result = result
        if not result.skipped and self.divergence.confirms(self.saved_step):
            self.writer.retire()
        if result.skipped:
            self._skipped(result)
        elif self.plan.recipe.checkpoint.save_every_steps and not self.writer.prepared:
            self.writer.prepare(self.trainer)  # now that the optimizer has its state

    def _skipped(self, result: StepResult) -> None:
        trainer = self.trainer
        self._event("skipped", result.step, in_row=trainer.skipped_in_row)
        if trainer.skipped_in_row >= self.plan.recipe.train.stop_after_skipped:
            self._until_written()
            raise self.divergence.error(result, self.plan.recipe)

    def _report_changes(self) -> None:
        """Write down and say what this start changed of the recipe, and both learning rates where they changed."""
        trainer, recipe = self.trainer, self.plan.recipe
        if self.recipe_before is None or not (changes := recorded_changes(self.recipe_before, recipe)):
            return
        facts: dict[str, Any] = {"changes": {key: list(values) for key, values in changes.items()}}
        texts = [f"{key} was {old}, is {new}" for key, (old, new) in changes.items()]
        if trainer.step:
            rates = rates_around(self.recipe_before, recipe, trainer)
            facts["rates"] = list(rates)
            now, last = (
                f"{rates[1]:.4g} at step {trainer.step + 1:,}",
                f"{rates[2]:.4g} at step {recipe.train.steps:,}",
            )
            texts.append(
                f"the learning rate was {rates[0]:.4g} at step {trainer.step:,}, is {now} and {last}"
            )
        self._event("changed", **facts)
        say("; ".join(texts))

    def _agree_to_stop(self) -> bool:
        """Whether a signal reached any process; all end with the same step. Collective."""
        self.signals.agree(self.ranks.most(self.signals.number()))
        return self.signals.agreed

    def _evaluate(self) -> None:
        start, figures = time.perf_counter(), dict[str, Any]()
        self.report.pause()
        try:
            # in a layout an evaluation is collective: all come to its end
            with (
                averaged(self.trainer.engine, self.trainer.optimizer),
                self.signals.interruptible() if self.ranks.alone else nullcontext(),
            ):
                for evaluator in self.evaluators:
                    figures |= evaluator(self.trainer.engine, self.trainer.step)
        except StopNow:  # alone
            self._agree_to_stop()
            return
        figures = self.ranks.first_decides(lambda: figures)  # it may score longer than a collective may take
        self.report.heartbeat.mark("an evaluation")
        if figures:
            spent, target = round(time.perf_counter() - start, 3), self.plan.recipe.target
            record = {"step": self.trainer.step, "validation": figures, "eval_s": spent}
            self.validation = self.metrics.add(record)["validation"]
            self.reached = reached(target, figures)
            if target is not None:
                samples, looked = self.trainer.samples, self.validation
                self._event("evaluation", samples=samples, seconds=spent, figures=looked)

    def _save(self) -> None:
        if self.trainer.step == self.saved_step and self.trainer.step:
            return
        self.save_is_due = self.divergence.diverged
        if self.save_is_due:
            return
        facts: dict[str, Any] = {"validation": self.validation} if self.validation else {}
        facts |= {"special": tokenizer.special} if (tokenizer := self.plan.corpus.tokenizer) else {}
        self.report.pause()
        self.metrics.flush()  # before the checkpoint can appear: a resume repeats no earlier step
        start = time.perf_counter()
        self._until_written()
        self.writer.save(self.trainer, facts)
        pause = time.perf_counter() - start
        self.saved_step = self.trainer.step
        self.report.heartbeat.mark("the copy for a checkpoint")
        self.report.memory.mark("save")
        self._event("checkpoint", pause_s=round(pause, 4), memory=self.report.memory.record())

    def _until_written(self) -> None:
        """Wait until no process writes a checkpoint: longer, it may be, than one collective may take."""
        while self.ranks.most(int(not self.writer.idle)):
            self.report.heartbeat.mark("a look at the checkpoint")
            time.sleep(LOOK_EVERY_S)
        self.writer.wait()

    def _stop(self) -> None:
        self._save()
        self._until_written()
        saved = not self.divergence.diverged
        if saved:
            self.writer.retire()
        self.metrics.flush()
        received = self.signals.received
        assert received is not None
        self._event("stopped", signal=received.name)
        if received == signal.SIGINT:
            place = f"saved at step {self.trainer.step:,}" if saved else UNSAVED
            say(f"{place}; the same command continues")
            raise KeyboardInterrupt
        what = f"stopped by {received.name} at step {self.trainer.step:,}, {'saved and verified' if saved else UNSAVED}"
        raise Stopped(what, where=self.workspace.path, fix="the same command continues")

    def _finish(self, seconds: float) -> dict[str, Any]:
        recipe, steps = self.plan.recipe, self.report.summary()
        predicted = predicted_step_seconds(self.plan.config, recipe)
        summary: dict[str, Any] = {
            "run": str(self.workspace.path),
            "step": self.trainer.step,
            "parameters": self.plan.config.parameter_count(),
            "validation": self.validation,
            "seconds": round(seconds, 2),
            **steps,
            "skipped_steps": self.trainer.skipped,
            "memory_bytes": beside(self.plan.memory, self.plan.device, self.report.memory.peak),
            "step_seconds": {"predicted": round(predicted, 6), "measured": steps["step_seconds"]},
        }
        if recipe.target is not None:
            spent = (self.validation, self.trainer.samples, recipe.train.rows_per_step, seconds)
            summary["target"] = convergence(recipe.target, *spent)
        self._event("finished", **summary)
        if self.ranks.leads:
            from .logs.report import write_report

            write_report(self.workspace.path)
            if recipe.target is not None:
                write_mllog(self.workspace.path, recipe, self.plan.config)
        self.workspace.finish("run", self.plan.corpus.inputs, recipe_hash(recipe), summary)
        rate = amount(steps["tokens_per_s"], "tokens")
        say(f"{steps['steps_here']:,} steps in {duration(seconds)}, {rate}/s in a step")
        return summary

    def _event(self, name: str, at: int | None = None, **facts: Any) -> None:
        step = self.trainer.step if at is None else at
        self.workspace.append("events.jsonl", {"event": name, "step": step, "time": time.time(), **facts})


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


class StopNow(Exception):
    """Raised by a signal inside `Signals.interruptible`."""


class Signals:
    """Which signal asked the run to stop, in the main thread alone. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.agreed = False  # by all processes of a run, to stop for it
        self._raise = False
        self._handlers = ExitStack()

    def __enter__(self) -> "Signals":
        self._handlers.enter_context(handling(self._handle, SIGNALS))
        return self

    def number(self) -> int:
        return int(self.received or 0)

    def agree(self, number: int) -> None:
        """Some process has received this one (0: none): all stop for the same."""
        if number:
            self.agreed, self.received = True, signal.Signals(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            say("\nfinishing the step and saving; Ctrl-C again quits at once")
        if self._raise:
            self._raise = False
            raise StopNow

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A part that changes nothing (an evaluation): a signal ends it at once with StopNow."""
        if self.received is not None:
            raise StopNow
        self._raise = True
        try:
            yield
        finally:
            self._raise = False

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
