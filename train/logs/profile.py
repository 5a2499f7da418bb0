"""`train --profile`: a trace of a few steps (`trace.json`, for chrome://tracing or Perfetto), time per class of kernel
beside what the planner says (`kernels.json`), and on a GPU a memory snapshot (`memory.pickle`, for
pytorch.org/memory_viz). Profiled steps are slower than others.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ...core.console import say, table, warn
from ..build import RunPlan
from ..recipes.resolved import predicted_kernels

SKIPPED, WARMUP, ACTIVE = 3, 1, 5  # steps: the first ones compile and allocate
CLASSES = (  # the first pattern found in an operator's or kernel's name decides
    ("optimizer", r"fused_adam|foreach|multi_tensor|Optimizer"),
    ("attention", r"scaled_dot_product|flash|fmha|attention|softmax_backward|_softmax"),
    ("loss", r"nll|cross_entropy|log_softmax"),
    ("matrix products", r"mm\b|addmm|gemm|matmul|linear|cutlass|cublas|mkldnn|xmma"),
    ("norms", r"norm"),
    ("embedding", r"embedding|index|gather|scatter"),
    ("dropout", r"dropout|bernoulli|philox"),
    ("copies", r"copy|clone|Memcpy|Memset|contiguous|::to\b|cat\b|fill_|zero_"),
    ("compiled kernels", r"triton|inductor|cpp_fused|graph_|CompiledF|Compiled|Torch-Compiled"),
    ("elementwise", r"gelu|silu|add|mul|div|sub|tanh|pow|sum|elementwise|vectorized|reduce"),
)
PLANNED: dict[str, tuple[str, float, int | None]] = {  # of a kind: the planner's name, factor and digits
    "planned_ms": ("seconds", 1e3, 3),
    "planned_gflop": ("flops", 1e-9, 3),
    "planned_mb": ("bytes", 1e-6, 3),
    "planned_launches": ("launches", 1, None),
}
# the planner's; the other classes move memory
KINDS = {"matrix products": "product", "attention": "attention", "optimizer": "optimizer"}


class Profile:
    """Profiles steps SKIPPED + WARMUP .. + ACTIVE of this process; call step() after each."""

    def __init__(self, directory: Path, plan: RunPlan) -> None:
        self._planned = predicted_kernels(plan.config, plan.recipe)
        self.directory, self._cuda = directory, plan.device.type == "cuda"
        directory.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        # the only way to a snapshot of memory, under a private name: without it there is a trace and no snapshot
        self._snapshot = self._cuda and hasattr(torch.cuda.memory, "_record_memory_history")
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._ready,
            record_shapes=True,
        )
        self._profile.start()
        self._open, self._steps = True, 0

    def step(self) -> None:
        if self._open:
            self._steps += 1
            self._profile.step()

    def close(self) -> None:
        """End early, when the run was shorter than what is profiled."""
        if self._open:
            self._profile.stop()
            self._open = False
            if self._steps <= SKIPPED + WARMUP:
                left_out = f"the first {SKIPPED + WARMUP} steps are left out"
                warn(f"no profile: {left_out}, and there were {self._steps}")

    def _ready(self, profiled: Any) -> None:
        self._open = False
        active = self._steps - SKIPPED - WARMUP
        if active < 1:
            return
        profiled.export_chrome_trace(str(self.directory / "trace.json"))
        rows = time_per_class(profiled.key_averages(), self._cuda, active)
        facts = {"classes": rows, "kinds": (kinds := time_per_kind(rows, self._planned))}
        (self.directory / "kernels.json").write_text(json.dumps(facts, indent=1) + "\n")
        if self._snapshot:
            torch.cuda.memory._dump_snapshot(str(self.directory / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        header = ("kernels", "ms a step", "share %", "calls a step")
        say("\n".join(table(header, [(row["class"], row["ms"], row["share"], row["calls"]) for row in rows])))
        planned = ("kind", "ms a step", "planned ms", "planned GFLOP", "planned MB", "planned launches")
        say("\n".join(table(planned, [list(row.values()) for row in kinds])))
        say(f"trace in {self.directory / 'trace.json'}")


def time_per_class(averages: Any, cuda: bool, steps: int) -> list[dict[str, Any]]:
    """Own time of all operators (on a GPU: of its kernels) per class and step of `steps`, largest first."""
    times, calls = Counter[str](), Counter[str]()
    for event in averages:
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own and not event.key.startswith("ProfilerStep"):
            kind = next((kind for kind, pattern in CLASSES if re.search(pattern, event.key)), "other")
            times[kind] += own
            calls[kind] += event.count
    return [
        {
            "class": kind,
            "ms": us / 1000 / steps,
            "share": 100 * us / times.total(),
            "calls": round(calls[kind] / steps),
        }
        for kind, us in times.most_common()
    ]


def time_per_kind(rows: list[dict[str, Any]], planned: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The classes summed by the kinds of the planner's list of kernels, beside what that list says of a step."""
    found = []
    for kind in dict.fromkeys((*planned, *KINDS.values(), "memory")):
        ms = sum(row["ms"] for row in rows if KINDS.get(row["class"], "memory") == kind)
        entry: dict[str, Any] = {"kind": kind, "ms": round(ms, 3)}
        for name, (key, factor, digits) in PLANNED.items():
            entry[name] = round(planned[kind][key] * factor, digits) if kind in planned else None
        found.append(entry)
    return found
