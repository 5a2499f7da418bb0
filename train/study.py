"""Measure this machine for a minute: probes of products, copies, launches and sums, then short runs at two sizes of
the trainer, which correct speed, launch and the program's own memory; a third, of another depth, says how good that is.
"""

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.hardware import keep_freed_memory, machine, peak_bytes, restart_peak
from ..models.config import ModelConfig
from ..planner.hardware import FITTED, Cluster, this_machine
from ..planner.memory import IN_A_STEP
from .build import build_trainer, plan_run
from .parallel.mesh import make_mesh
from .parallel.rates import probe_all_reduce, probe_machine
from .precision import computing_dtype
from .recipes.recipe import Recipe
from .recipes.resolved import predicted_memory, predicted_step_seconds, resolve
from .step import train_step

WARM_UP = 3  # steps before the clock: allocations, compilation, caches


@dataclass(frozen=True)
class Stretch:
    """A short run: what was changed, its median step and spread (interquartile), the peak of the fullest process."""

    name: str
    recipe: Recipe
    config: ModelConfig
    seconds: float
    spread: float
    peak_bytes: int = 0

    def predicted(self, cluster: Cluster) -> float:
        return predicted_step_seconds(self.config, self.recipe, cluster)


def stretches(recipe: Recipe, steps: int, cache: Path) -> list[Stretch]:
    """The recipe, the same with half the rows (run first, with nothing left in memory) and with half the layers."""
    train, model, layers = recipe.train, recipe.model, plan_run(recipe).config.layers
    half, micro = max(train.rows_per_step // 2, 1), train.rows_per_micro_batch
    kept = micro if half % (micro * recipe.parallel.data) == 0 else None  # None: the default for so many rows
    fewer_rows = train.model_copy(update={"batch_rows": half, "micro_batch_rows": kept})
    overrides = model.overrides | {"layers": max(layers // 2, 1)}
    changes: dict[str, dict[str, Any]] = {
        "half the rows": {"train": fewer_rows},
        "half the layers": {"model": model.model_copy(update={"overrides": overrides})},
        "as given": {},
    }
    recipes = {name: resolve(recipe.model_copy(update=change)) for name, change in changes.items()}
    *smaller, whole = (_stretch(name, each, steps, cache) for name, each in recipes.items())
    return [whole, *smaller]


def _stretch(name: str, recipe: Recipe, steps: int, cache: Path) -> Stretch:
    """Some steps of the trainer without a run directory: batch, forward, backward, update."""
    plan, layout = plan_run(recipe, cache), recipe.parallel.layout()
    on_cpu = plan.device.type == "cpu"
    restart_peak() if on_cpu else torch.cuda.reset_peak_memory_stats(plan.device)
    mesh = make_mesh(layout, plan.device, 60)
    trainer, rows = build_trainer(plan, mesh), recipe.train.rows_per_step
    own = rows // mesh.data.size
    batches, times = plan.batches(mesh), []
    for step in range(WARM_UP + steps):
        batch = batches.batch(step * rows + mesh.data.rank * own, own)
        start = time.perf_counter()
        train_step(trainer, batch, 1.0)
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
        times.append(time.perf_counter() - start)
    peak = torch.tensor([float(peak_bytes() if on_cpu else torch.cuda.max_memory_allocated(plan.device))])
    peak = mesh.world.all_reduce(peak.to(plan.device), torch.distributed.ReduceOp.MAX)
    times = sorted(times[WARM_UP:])
    low, high = times[len(times) // 4], times[-1 - len(times) // 4]
    return Stretch(name, recipe, plan.config, statistics.median(times), high - low, int(peak.item()))


def probed(cluster: Cluster, probes: dict[str, float], dtype: str, summed: list[dict[str, float]]) -> Cluster:
    """The machine by its probes: what was measured was reached, so no fraction of it is taken again."""
    chip = dataclasses.replace(
        cluster.chip,
        tflops=cluster.chip.tflops | {dtype: probes["tflops"]},
        bandwidth_gb_s=probes["bandwidth_gb_s"],
        achieved=1.0,
    )
    reached = {"vector_fraction": 1.0, "memory_fraction": 1.0, "product_inner": 0.0, "issue_s": 0.0}
    constants = dataclasses.replace(FITTED, launch_s=probes["launch_s"], **reached)
    if summed:  # what a send takes, which was not measured, is that of the whole group's sum
        sums = tuple((row["ranks"], row["start_s"], row["gb_s"]) for row in summed)
        start = sums[-1][1] / (1 + math.log2(sums[-1][0]))
        constants = dataclasses.replace(constants, start_s=start, link_fraction=1.0)
        cluster = dataclasses.replace(cluster, node_gb_s=sums[-1][2], sums=sums)
    return dataclasses.replace(cluster, chip=chip, constants=constants)


def refit(runs: list[Stretch], cluster: Cluster, dtype: str) -> Cluster:
    """Speed of products and launch time of least log error over the runs; a weak pull keeps both near the probes."""

    def with_factors(speed: float, launch: float) -> Cluster:
        tflops = cluster.chip.tflops | {dtype: cluster.chip.tflops[dtype] * speed}
        chip = dataclasses.replace(cluster.chip, tflops=tflops)
        slower = dataclasses.replace(cluster.constants, launch_s=cluster.constants.launch_s * launch)
        return dataclasses.replace(cluster, chip=chip, constants=slower)

    def loss(factors: tuple[float, float]) -> float:
        errors = [math.log(run.predicted(with_factors(*factors)) / run.seconds) for run in runs]
        return sum(error**2 for error in errors) + 1e-3 * sum(math.log(factor) ** 2 for factor in factors)

    speeds = [2 ** (power / 4) for power in range(-12, 13)]
    launches = [2 ** (power / 2) for power in range(-2, 17)]
    return with_factors(*min(itertools.product(speeds, launches), key=loss))


def study(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Probes, stretches and the calibration: what `plan --on here` and the trainer then predict with."""
    precision, device = recipe.train.precision, plan_run(recipe).device
    if device.type == "cpu":
        keep_freed_memory()  # as the trainer does
    probes = probe_machine(device, computing_dtype(precision))
    summed = probe_all_reduce(device)
    with tempfile.TemporaryDirectory() as cache:  # of text made into tokens
        runs = stretches(recipe, steps, Path(cache))
    guess = dataclasses.replace(this_machine(recipe.parallel.layout().world), constants=FITTED)
    # of a stretch, which saves and evaluates nothing, without what the program itself takes
    terms = [predicted_memory(run.config, run.recipe, device.type, IN_A_STEP) for run in runs]
    run_bytes = [sum(found.values()) - found.get("runtime", 0) for found in terms]
    runtime = max(runs[1].peak_bytes - run_bytes[1], 0)
    world = recipe.parallel.layout().world if device.type == "cpu" else 1
    by_probes = probed(guess, probes, precision, summed)
    fitted = refit(runs[:2], by_probes, precision)
    rows = [
        {
            "run": run.name,
            "measured_seconds": run.seconds,
            "spread_seconds": run.spread,
            "datasheet_seconds": run.predicted(guess),
            "probes_seconds": run.predicted(by_probes),
            "refit_seconds": run.predicted(fitted),
            "measured_bytes": run.peak_bytes,
            "refit_bytes": run_bytes[index] + runtime,
            "left_out": index == 2,
        }
        for index, run in enumerate(runs)
    ]
    constants = vars(fitted.constants).items()
    changed = {name: value for name, value in constants if value != getattr(FITTED, name)}
    return {
        "machine": machine().cpu.name,
        "device": str(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "probes": probes,
        "all_reduce": summed,
        "runs": rows,
        # of all processes, which share a processor
        "tflops": {precision: world * fitted.chip.tflops[precision]},
        "bandwidth_gb_s": world * fitted.chip.bandwidth_gb_s,
        "runtime_bytes": runtime,
        "node_gb_s": fitted.node_gb_s,
        "sums": fitted.sums,
        "constants": changed,
    }
