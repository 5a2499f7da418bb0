"""The training loop: start or resume, step, log, evaluate, save; stop on a signal with everything saved.

A run is a workspace directory: recipe.toml (resolved), metrics.jsonl, events.jsonl, checkpoints/,
report.html, and manifest.json when it has ended. The same command continues a run that was stopped or killed,
on a CPU to the last bit.
"""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from ..core.allocator import keep_freed_memory
from ..core.console import amount, duration, progress, say
from ..core.errors import Failed, Stopped
from ..core.recipe import recipe_hash
from ..data.loader import Loader
from ..data.samples import Dataset
from .build import RunPlan, StepBatches, build_trainer, training_rows
from .checkpoint import CheckpointWriter, restore
from .engine import Engine
from .memory import beside, out_of_memory
from .metrics import Metrics, PhaseMemory, Record, peak_flops, read_metrics
from .objective import TERMS, StepBatch
from .parallel.heartbeat import Heartbeat
from .parallel.ranks import HEARTBEAT, Ranks, RunWorkspace
from .predict import predicted_step_seconds
from .profile import Profile
from .run_directory import environment, open_run
from .schedule import learning_rate_factor
from .signals import Signals, StopNow
from .step import StepResult, Trainer, train_step
from .target import convergence, reached
from .weights_in import start_from

Evaluator = Callable[[Engine, int], dict[str, Any]]  # the engine and the step
MEMORY_EVERY_S = 1.0
LOOK_EVERY_S = 0.02  # at the checkpoint that is being written, when the next one waits for it
NEXT_PHASE = {
    "": "forward",
    "optimizer": "forward",
    "forward": "backward",
    "backward": "the optimizer",
    "save": "forward",
}


def train(
    plan: RunPlan,
    run_dir: Path | str,
    *,
    resume: str = "auto",
    evaluators: Sequence[Evaluator] = (),
    profile: bool = False,
) -> dict[str, Any]:
    """Train to the recipe's last step and return the summary.

    `resume`: "auto" continues what is in `run_dir`, "never" refuses a directory that holds a run. Raises
    Stopped after SIGTERM and KeyboardInterrupt after Ctrl-C, both saved; Failed when too many steps in a row
    were not finite. With a layout of several processes each of them calls this; the first keeps the
    directory.
    """
    parallel = plan.recipe.parallel
    with (
        Ranks.start(parallel.layout(), plan.device, parallel.timeout_seconds) as ranks,
        ranks.workspace(run_dir) as workspace,
    ):
        checkpoint, done = ranks.first_decides(lambda: open_run(workspace, plan, resume))
        if done is not None:
            say(f"{workspace.path} is already trained to step {done['step']:,}")
            return done
        if plan.device.type == "cpu":
            keep_freed_memory()
        trainer = build_trainer(plan, ranks.mesh, fill=checkpoint is None)
        if checkpoint is not None:
            restore(checkpoint, trainer)
            say(f"resumed at step {trainer.step:,} from {checkpoint}")
        elif plan.recipe.model.init_from:
            start_from(plan.recipe.model.init_from, trainer.engine)
        return Run(plan, workspace, trainer, evaluators, profile, ranks).to_the_end()


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
    ) -> None:
        self.plan, self.workspace, self.trainer = plan, workspace, trainer
        self.evaluators, self.ranks = evaluators, ranks
        recipe = self.recipe = plan.recipe
        self.metrics = Metrics(workspace, list(recipe.log.sinks) if ranks.leads else [], workspace.path.name)
        self.writer = CheckpointWriter(
            workspace.path / "checkpoints",
            recipe.checkpoint.keep,
            plan.tokenizer_json,
            plan.inputs,
            recipe_hash(recipe),
            process=ranks.mesh.rank,
            processes=ranks.mesh.world.size,
            token=ranks.token,
            may_write=workspace.check_owner,
            patience_s=ranks.timeout_seconds,
        )
        self.heartbeat = Heartbeat(None)
        self.memory, self.memory_read = PhaseMemory(plan.device), float("-inf")
        self.profile = Profile(workspace.path / "profile", plan) if profile and ranks.leads else None
        self.signals = Signals()
        self.stopping = False  # agreed by all processes
        self.upcoming: StepBatch | None = None  # the batch of the next step, in a layout
        self.clock: float | None = None  # when the last step's figures were read, if nothing came after it
        self.peak, self.peak_source = peak_flops(plan.device, recipe.train.precision)
        self.peak = self.peak and self.peak * ranks.mesh.world.size
        predicted = {} if recipe.objective is None else {"predicted": recipe.objective.mask_fraction}
        self.flops_per_token = plan.config.flops_per_token(recipe.train.sequence_length, **predicted)
        self.first_step, self.saved_step = trainer.step, trainer.step
        # of this process, without its first step, which compiles and allocates
        self.tokens, self.step_seconds = 0, 0.0
        self.last: Record = next(
            (record for record in reversed(read_metrics(workspace.path)) if "loss" in record), {}
        )
        self.validation: dict[str, Any] = {}
        self.reached = False  # the recipe's target

    def to_the_end(self) -> dict[str, Any]:
        """Every step that is left, the last evaluation and save, the report and the manifest."""
        recipe, trainer = self.recipe, self.trainer
        start = time.monotonic()
        self._event(
            "resumed" if trainer.step else "started", **environment(self.plan, self.peak, self.peak_source)
        )
        with self.ranks.one_first():  # which builds the index that the others find
            dataset = training_rows(self.plan, self.workspace.path / "cache")
        data = self.ranks.mesh.data
        rows = StepBatches(self.plan, dataset, data, self.ranks.mesh.context)
        loader = Loader(
            cast(Dataset, rows),
            lambda position: recipe.train.rows_at(position) // data.size,
            position=trainer.samples,
            rank=data.rank,
            world=data.size,
            ahead=2,
        )
        try:
            with (
                self.ranks.watch(self.workspace.path / HEARTBEAT) as self.heartbeat,
                self.signals,
                loader as batches,
                self._progress() as bar,
            ):
                if recipe.target is not None:  # what its log is made of
                    self._event("running")
                while trainer.step < recipe.train.steps and not self.reached and not self._told_to_stop():
                    self._step(batches, bar)
                    self._between_steps()
                if self.profile is not None:
                    self.profile.close()
                if not self.reached and not self._agree_to_stop():
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

    def _agree_to_stop(self) -> bool:
        """Whether a signal reached any process; all end with the same step. Collective."""
        number = self.ranks.most(self.signals.received or 0)
        if number:
            self.stopping, self.signals.received = True, signal.Signals(number)
        return self.stopping

    def _told_to_stop(self) -> bool:
        """The same without a collective: in a layout, what the processes told each other in the last step."""
        return self.stopping if not self.ranks.alone else self._agree_to_stop()

    def _progress(self) -> progress:
        length = self.recipe.train.sequence_length
        bar = progress("train", self.plan.tokens_to_train, "tokens")
        bar.start_at(self.trainer.samples * length)
        return bar

    def _step(self, batches: Any, bar: progress) -> None:
        """One step, its record and its line."""
        trainer, recipe = self.trainer, self.recipe
        start = time.perf_counter()
        factor = learning_rate_factor(trainer.step, recipe)
        clock = start if self.clock is None else self.clock  # so that a step's time has an update in it
        watch = trainer.step - self.first_step < 3 or start - self.memory_read > MEMORY_EVERY_S
        if watch:
            self.memory.start()
            self.memory_read = start
        batch = next(batches) if self.upcoming is None else self.upcoming
        ahead = not self.ranks.alone and trainer.step + 1 < recipe.train.steps
        self.upcoming = next(batches) if ahead else None  # its target counts travel with this step's figures
        self.heartbeat.mark("its batch", trainer.step)

        def mark(phase: str) -> None:
            self.heartbeat.mark(phase)
            if watch:
                self.memory.mark(phase)

        try:
            received = int(self.signals.received or 0)
            result = train_step(trainer, batch, factor, mark, received, self.upcoming)
        except torch.OutOfMemoryError as error:
            phase = NEXT_PHASE[self.memory.phase] if watch else "a step"
            raise out_of_memory(self.plan.config, recipe, self.plan.device, phase) from error
        seconds, self.clock = result.read_at - clock, result.read_at
        if result.signal and not self.ranks.alone:
            self.stopping, self.signals.received = True, signal.Signals(result.signal)
        if trainer.step > self.first_step + 1:
            self.tokens, self.step_seconds = self.tokens + batch.tokens, self.step_seconds + seconds
        self._record(result, factor, seconds, batch, watch)
        rate = batch.tokens / seconds
        bar.advance(batch.rows * recipe.train.sequence_length, self._note(result, rate))
        if self.profile is not None:
            self.profile.step()
        if recipe.checkpoint.save_every_steps and not self.writer.prepared and not result.skipped:
            self.writer.prepare(trainer)  # now that the optimizer has its state
        if result.skipped:
            self._event("skipped", in_row=trainer.skipped_in_row)
            if trainer.skipped_in_row >= recipe.train.stop_after_skipped:
                raise Failed(
                    f"{trainer.skipped_in_row} steps in a row had a loss or gradient that is not finite",
                    where=f"{self.workspace.path}, step {trainer.step:,}",
                    why=f"loss {result.loss}, gradient norm {result.grad_norm}, loss scale {trainer.scaler.scale:g}",
                    fix="lower optimizer.learning_rate, lengthen schedule.warmup_steps, or train in bf16 or fp32",
                )

    def _note(self, result: StepResult, tokens_per_s: float) -> str:
        mfu = f"  MFU {100 * tokens_per_s * self.flops_per_token / self.peak:.0f}%" if self.peak else ""
        return f"step {self.trainer.step:,}  loss {result.loss:.4f}{mfu}"

    def _record(
        self, result: StepResult, factor: float, seconds: float, batch: StepBatch, watch: bool
    ) -> None:
        step = self.trainer.step
        if step % self.recipe.log.every_steps and not result.skipped and step != self.recipe.train.steps:
            return
        rate = batch.tokens / seconds
        record: Record = {
            "step": step,
            "loss": result.loss,
            "lr": self.recipe.optimizer.learning_rate * factor,
            "grad_norm": result.grad_norm,
            "tokens": batch.tokens,
            "step_s": round(seconds, 6),
            "tokens_per_s": round(rate, 1),
            "mfu": round(rate * self.flops_per_token / self.peak, 4) if self.peak else None,
        }
        if len(result.terms) > 1:
            record |= dict(zip(TERMS[self.plan.family], result.terms))
        if batch.sequences:
            record["sequences_per_s"] = round(batch.sequences / seconds, 1)
        if self.trainer.scaler.active:
            record["scale"] = self.trainer.scaler.scale
        if result.skipped:
            record["skipped"] = True
        if result.gradient_bytes:
            record["gradient_bytes"] = result.gradient_bytes
        if watch:
            record["memory"] = self.memory.record()
        self.last = self.metrics.add(record)

    def _between_steps(self) -> None:
        """What is due after this step: an evaluation, a checkpoint. The last step has both at the end."""
        step, recipe = self.trainer.step, self.recipe
        if step == recipe.train.steps or (self.ranks.alone and self.signals.received is not None):
            return
        if recipe.train.eval_every_steps and step % recipe.train.eval_every_steps == 0:
            self._evaluate()
        if recipe.checkpoint.save_every_steps and step % recipe.checkpoint.save_every_steps == 0:
            self._save()

    def _evaluate(self) -> None:
        start, self.clock = time.perf_counter(), None
        figures: dict[str, Any] = {}
        try:
            with self.signals.interruptible() if self.ranks.alone else nullcontext():
                for evaluator in self.evaluators:
                    figures |= evaluator(self.trainer.engine, self.trainer.step)
        except StopNow:
            return
        self.heartbeat.mark("an evaluation")
        if figures:
            spent = round(time.perf_counter() - start, 3)
            record = {"step": self.trainer.step, "validation": figures, "eval_s": spent}
            self.validation = self.metrics.add(record)["validation"]
            self.reached = reached(self.recipe.target, figures)
            if self.recipe.target is not None:
                looked = {"samples": self.trainer.samples, "seconds": spent, "figures": self.validation}
                self._event("evaluation", **looked)

    def _save(self) -> None:
        if self.trainer.step == self.saved_step and self.trainer.step:
            return
        facts: dict[str, Any] = {"validation": self.validation} if self.validation else {}
        facts |= {"special": self.plan.tokenizer.special} if self.plan.tokenizer else {}
        self.clock = None
        self.metrics.flush()  # before the checkpoint can appear: a resume repeats no earlier step
        start = time.perf_counter()
        self._until_written()
        self.writer.save(self.trainer, facts)
        pause = time.perf_counter() - start
        self.saved_step = self.trainer.step
        self.heartbeat.mark("the copy for a checkpoint")
        self.memory.mark("save")
        self._event("checkpoint", pause_s=round(pause, 4), memory=self.memory.record())

    def _until_written(self) -> None:
        """Wait until no process writes a checkpoint; raises what went wrong with this one's. Collective.

        By many collectives: the time limit is for one, and to write a large state may take longer.
        """
        while True:
            idle = self.ranks.alone or self.writer.idle
            if idle:
                self.writer.wait()
            if not self.ranks.most(int(not idle)):
                return
            self.heartbeat.mark("a look at the checkpoint")
            time.sleep(LOOK_EVERY_S)

    def _stop(self) -> None:
        """Save where a signal stopped the run, and say how to go on."""
        self._save()
        self._until_written()
        self.metrics.flush()
        received = self.signals.received
        assert received is not None
        self._event("stopped", signal=received.name)
        if received == signal.SIGINT:
            say(f"saved at step {self.trainer.step:,}; the same command continues")
            raise KeyboardInterrupt
        raise Stopped(
            f"stopped by {received.name} at step {self.trainer.step:,}, saved and verified",
            where=self.workspace.path,
            fix="the same command continues",
        )

    def _finish(self, seconds: float) -> dict[str, Any]:
        rate = self.tokens / self.step_seconds if self.step_seconds else 0.0
        recipe = self.recipe
        summary: dict[str, Any] = {
            "run": str(self.workspace.path),
            "step": self.trainer.step,
            "parameters": self.plan.config.parameter_count(),
            "loss": self.last.get("loss"),
            "validation": self.validation,
            "seconds": round(seconds, 2),
            "steps_here": self.trainer.step - self.first_step,
            "tokens_per_s": round(rate, 1),
            "mfu": round(rate * self.flops_per_token / self.peak, 4) if self.peak else None,
            "skipped_steps": self.trainer.skipped,
            "memory_bytes": beside(self.plan.memory, self.plan.device, self.memory.peak),
            "step_seconds": {
                "predicted": round(predicted_step_seconds(self.plan.config, recipe), 6),
                "measured": round(self.plan.tokens_per_step / rate, 6)
                if rate
                else None,  # mean of this stretch
            },
        }
        if recipe.target is not None:
            spent = (self.validation, self.trainer.samples, recipe.train.rows_per_step, seconds)
            summary["target"] = convergence(recipe.target, *spent)
        self._event("finished", **summary)
        if self.ranks.leads:
            from .report import write_report

            write_report(self.workspace.path)
            if recipe.target is not None:
                from .mllog import write_mllog

                write_mllog(self.workspace.path, recipe, self.plan.config)
        self.workspace.finish("run", self.plan.inputs, recipe_hash(self.recipe), summary)
        say(f"{summary['steps_here']:,} steps in {duration(seconds)}, {amount(rate, 'tokens')}/s in a step")
        return summary

    def _event(self, name: str, **facts: Any) -> None:
        self.workspace.append(
            "events.jsonl", {"event": name, "step": self.trainer.step, "time": time.time(), **facts}
        )
