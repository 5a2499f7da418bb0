"""Every layout of a model on a cluster: enumerated as arrays, pruned by what is legal and what fits, ranked by time.

What is legal `layout.layout_problems` says: of degrees before they are multiplied out, of layouts before they are
shown. A test compares the two on random layouts.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.files import shipped_table
from .cost import step_time
from .hardware import FITTED, Cluster
from .layout import Layout, divisors, layout_problems
from .memory import capacity_bytes, host_terms, needed_bytes
from .work import AXES, RECOMPUTES, SHARDINGS, Layouts, Software, Work

NEAR = 0.02  # of the step time: closer layouts are taken for as fast


@dataclass(frozen=True)
class Candidate:
    """One layout with what it is predicted to need."""

    layouts: Layouts  # of whole numbers
    seconds: float
    parts: dict[str, float]
    needed_bytes: float
    host_bytes: float
    fits: bool

    def layout(self) -> Layout:
        """As a recipe's `[parallel]` describes it."""
        here = self.layouts
        return Layout(
            *(here.data, here.tensor, here.pipeline, here.context),
            sharding=SHARDINGS[here.sharding],
            schedule="interleaved-1f1b" if here.turns > 1 else "1f1b",
            stages_per_process=here.turns,
            expert=math.gcd(here.expert, here.data),  # other programs' may count tensor ranks among them
        )

    def describe(self) -> str:
        """One short line: degrees, rows of a micro-batch, and what is shared, recomputed or on the host."""
        here = self.layouts
        degrees = zip("TPCDE", ("tensor", "pipeline", "context", "data", "expert"))
        words = [f"{short}{getattr(here, axis)}" for short, axis in degrees if getattr(here, axis) > 1]
        words = words or ["one process"]
        words += [f"micro {here.micro_rows}"]
        words += [f"turns {here.turns}"] if here.turns > 1 else []
        words += [SHARDINGS[here.sharding]] if here.sharding else []
        words += [f"recompute {RECOMPUTES[here.recompute]}"] if here.recompute else []
        return " ".join(words + (["offload"] if here.offload else []))


@dataclass(frozen=True)
class Search:
    """What was asked: chips, and the values that each axis may take (an empty tuple: all)."""

    work: Work
    cluster: Cluster
    software: Software
    world: int
    fixed: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """All legal layouts as arrays, and the best that fit, best first."""

    search: Search
    layouts: Layouts
    seconds: Any
    needed: Any
    fits: Any
    best: list[Candidate]

    @property
    def capacity(self) -> float:
        return capacity_bytes(self.search.cluster.chip.memory_gib)


def enumerate_layouts(search: Search, refused: Counter[str] | None = None) -> Layouts:
    """All legal layouts of exactly `world` processes, as arrays; `refused` counts the rules against the others."""
    work, config, fixed = search.work, search.work.config, search.fixed
    refused = Counter() if refused is None else refused
    factors = divisors(search.world)
    tensors = fixed.get("tensor") or [n for n in factors if n <= min(search.cluster.chips_per_node, 64)]
    pipelines = fixed.get("pipeline") or [n for n in factors if n <= config.layers]
    contexts = fixed.get("context") or [
        n for n in factors if n == 1 or (n in (2, 4, 8, 16, 32, 64) and work.length // n >= 4096)
    ]
    micro = fixed.get("micro_rows") or [2**power for power in range(11) if 2**power <= work.rows]
    columns: list[tuple[int, ...]] = []
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        rest, odd = divmod(search.world, tensor * pipeline * context)
        if odd or rest not in fixed.get("data", (rest,)):
            data = f" x data {fixed['data'][0]}" if "data" in fixed else ""
            text = f"tensor {tensor} x pipeline {pipeline} x context {context}{data}"
            refused[f"{text} do not make {search.world} processes"] += 1
            continue
        shared = shared_experts(search, rest, tensor)
        expert = 1 if shared else fixed["expert"][0]
        degrees = Layout(rest, tensor, pipeline, context, expert=expert)
        if problems := layout_problems(degrees, config, work.length, work.rows, 1):
            refused.update(f"{problem.field}: {problem.text}" for problem in problems)
            continue
        per = work.rows // rest
        shardings = (0,) if rest * context == 1 else (0, 1) if pipeline > 1 else (0, 1, 2, 3)
        core_alone = search.software.fused_attention and not search.software.saves_products
        recomputes = (0, 2) if core_alone else (0, 1, 2)
        offloads = [kind for kind in fixed.get("offload", (0,)) if pipeline == 1 or not kind]
        turns = fixed.get("turns") or turns_of(config.layers, pipeline)
        before = len(columns)
        columns += [
            (tensor, pipeline, rest, context, rows, turn, sharding, recompute, offload, expert)
            for rows in micro
            if per % rows == 0 and per // rows >= pipeline
            for turn in turns
            if turn == 1 or (pipeline > 1 and (per // rows) % (per // rows // pipeline) == 0)
            if pipeline * turn <= config.layers
            for sharding in (fixed.get("sharding") or shardings)
            for recompute in (fixed.get("recompute") or recomputes)
            for offload in offloads
            for expert in shared
        ]
        if len(columns) == before:
            held = ", ".join(f"{axis}={values[0]}" for axis, values in fixed.items()) or "any micro-batch"
            stages = f"{pipeline} stages of {config.layers} layers"
            refused[f"{per} rows of each of {rest} data processes on {stages} with {held}"] += 1
    table = np.array(columns, dtype=np.int64).reshape(-1, len(AXES)).T
    return Layouts(*table)


def shared_experts(search: Search, data: int, tensor: int) -> list[int]:
    """Processes of a stage that may share the experts; in programs other than ours tensor ranks are among them."""
    experts, others = getattr(search.work.config, "experts", 0), bool(search.software.layer_sums)
    most = math.gcd(experts, data * (tensor if others else 1)) if experts else 1
    return [n for n in search.fixed.get("expert") or divisors(most) if most % n == 0]


def turns_of(layers: int, pipeline: int) -> list[int]:
    """Stages of a process: those that keep stages equal where layers divide, else the first few."""
    stages, uneven = divmod(layers, pipeline)
    if pipeline == 1:
        return [1]
    return [n for n in range(1, stages + 1) if (n <= 8 if uneven else stages % n == 0)]


def find_layouts(search: Search, count: int = 8) -> Found:
    """Every legal layout priced; the best ones that fit, no two with the same degrees and sharding."""
    layouts = enumerate_layouts(search)
    parts = step_time(search.work, layouts, search.cluster, search.software)
    seconds = sum(np.broadcast_to(part, np.shape(layouts.tensor)) for part in parts.values())
    needed = needed_bytes(search.work, layouts, search.software)
    fits = fit_in(search, needed, sum(host_terms(search.work, layouts, search.software).values()))
    best: list[Candidate] = []
    seen = set()
    for index in np.argsort(np.where(fits, seconds, np.inf), kind="stable"):
        if len(best) == count or not fits[index]:
            break
        candidate = candidate_at(search, layouts.take(index))
        axes = ("tensor", "pipeline", "context", "sharding", "offload", "expert")
        key = tuple(getattr(candidate.layouts, axis) for axis in axes)
        if key not in seen and is_legal(search, candidate):
            best.append(candidate)
            seen.add(key)
    return Found(search, layouts, seconds, needed, fits, best)


def find_or_offload(search: Search, count: int = 8) -> Found:
    """As `find_layouts`; when nothing fits, with optimizer and masters in the host's memory."""
    found = find_layouts(search, count)
    if found.best or "offload" in search.fixed:
        return found
    offloaded = find_layouts(dataclasses.replace(search, fixed=search.fixed | {"offload": (1,)}), count)
    return offloaded if offloaded.best or not len(found.seconds) else found


def is_legal(search: Search, candidate: Candidate) -> bool:
    """Whether the trainer would say nothing against a layout."""
    work, micro_rows = search.work, candidate.layouts.micro_rows
    return not layout_problems(candidate.layout(), work.config, work.length, work.rows, micro_rows)


def candidate_at(search: Search, layouts: Layouts) -> Candidate:
    """One layout priced by itself."""
    numbers: dict[str, Any] = {axis: int(getattr(layouts, axis)) for axis in AXES}
    layouts = Layouts(**numbers)
    times = step_time(search.work, layouts, search.cluster, search.software)
    parts = {name: float(value) for name, value in times.items()}
    needed = float(needed_bytes(search.work, layouts, search.software))
    host = float(sum(host_terms(search.work, layouts, search.software).values()))
    return Candidate(layouts, sum(parts.values()), parts, needed, host, bool(fit_in(search, needed, host)))


def fit_in(search: Search, needed: Any, host: Any) -> Any:
    """Whether a chip holds these bytes, and a node's memory (where it is known) the host's bytes of all its chips."""
    cluster = search.cluster
    room = cluster.host_memory_gib * 2**30 or np.inf
    on_node = host * min(search.world, cluster.chips_per_node)
    return (needed <= capacity_bytes(cluster.chip.memory_gib)) & (on_node <= room)


def neighbours(search: Search, best: Candidate) -> list[tuple[str, Candidate]]:
    """Layouts one step from the best, with the step's name: what a person would try next."""
    here = best.layouts
    steps: list[tuple[str, dict[str, Any]]] = []
    for pair in (("tensor", "data"), ("pipeline", "data"), ("tensor", "pipeline"), ("context", "data")):
        for more, less in (pair, pair[::-1]):
            if getattr(here, less) % 2 == 0:
                change = {more: getattr(here, more) * 2, less: getattr(here, less) // 2}
                steps.append((f"{more} x 2, {less} / 2", change))
    for name, expert in (("expert x 2", 2 * here.expert), ("expert / 2", here.expert // 2)):
        if expert in shared_experts(search, here.data, here.tensor):
            steps.append((name, {"expert": expert}))
    steps += [("micro-batch x 2", {"micro_rows": here.micro_rows * 2})]
    steps += [("micro-batch / 2", {"micro_rows": here.micro_rows // 2})] if here.micro_rows > 1 else []
    for axis, words in (("recompute", RECOMPUTES), ("sharding", SHARDINGS if here.data > 1 else ())):
        others = [value for value in range(len(words)) if value != getattr(here, axis)]
        steps += [(f"{axis} {words[value]}", {axis: value}) for value in others]
    steps += [("without interleaving", {"turns": 1})] if here.turns > 1 else []
    found = [(name, candidate_at(search, dataclasses.replace(here, **change))) for name, change in steps]
    return [(name, candidate) for name, candidate in found if is_legal(search, candidate)]


def why_not(best: Candidate, other: Candidate, capacity: float) -> str:
    """One line: it does not fit, or which part of the step grew most."""
    if other.needed_bytes <= capacity and not other.fits:
        return f"does not fit: {other.host_bytes / 2**30:,.1f} GiB of the host's memory for each process"
    if not other.fits:
        return f"does not fit: {other.needed_bytes / 2**30:,.1f} of {capacity / 2**30:,.1f} GiB"
    grown = max(best.parts, key=lambda name: other.parts[name] - best.parts[name])
    slower = other.seconds / best.seconds - 1
    if slower <= -0.0005:
        return f"{-slower:.1%} faster, and left to the search's other choices"
    if slower <= 0:
        return "as fast"
    return f"{slower:.1%} slower, most of it {grown} (+{other.parts[grown] - best.parts[grown]:,.3g} s)"


def fewest_chips(
    search: Search, worlds: Sequence[int], meets: Callable[[Search, Candidate], bool] | None = None
) -> Found | None:
    """The fewest chips on which the model fits and the run `meets` what it must; near layouts by their simplicity."""
    for world in worlds:
        found = find_layouts(dataclasses.replace(search, world=world), 8)
        if found.best and (meets is None or meets(found.search, found.best[0])):
            return dataclasses.replace(found, best=simplest_first(found.best))
    return None


def simplest_first(best: Sequence[Candidate]) -> list[Candidate]:
    """Those within NEAR of the fastest first, by fewer stages and then parts of a matrix; the others in their order."""
    near = [candidate for candidate in best if candidate.seconds <= (1 + NEAR) * best[0].seconds]
    near.sort(key=lambda candidate: (candidate.layouts.pipeline, candidate.layouts.tensor, candidate.seconds))
    return [*near, *best[len(near) :]]


def usual_worlds(node: int, most: int) -> list[int]:
    """Numbers of chips that are bought: parts of a node, and nodes by 1, 3, 5 and 7 times a power of two."""
    nodes = {odd << times for odd in (1, 3, 5, 7) for times in range(24)}
    parts = {n for n in (1, 2, 4, 8, 16) if n < node and node % n == 0}
    return sorted(world for world in parts | {n * node for n in nodes} if world <= most)


def flops_facts(search: Search, candidate: Candidate) -> dict[str, float]:
    """FLOP/s of a chip and shares of the peak of the blocks' products: MFU leaves recomputation out, HFU counts it."""
    work, config = search.work, search.work.config
    model = config.flops_per_token(work.length) * work.tokens
    core = 4 * config.block_count * work.length * config.heads * config.head_size * work.tokens
    blocks = config.blocks_flops_per_token(work.length) * work.tokens / 3
    hardware = model + (0.0, core, blocks)[int(candidate.layouts.recompute)]
    numbers, rates = search.software.precision, search.cluster.chip.tflops
    peak = (rates.get(numbers.narrow or numbers.compute) or max(rates.values())) * 1e12
    rate = candidate.seconds * float(candidate.layouts.world)
    return {
        "model_tflops": model / rate / 1e12,
        "hardware_tflops": hardware / rate / 1e12,
        "mfu": model / rate / peak,
        "hfu": hardware / rate / peak,
    }


UNKNOWN = 0.35  # the band of a program or a chip without published rows


def band(search: Search) -> float:
    """Relative error that four predictions in five keep: of the program's rows left out of the fit (bands.toml), on a
    chip that has any row; else UNKNOWN, half of that after `study` of the machine itself.
    """
    table = shipped_table(__file__, "bands.toml")
    row, chips = table.get(search.software.name), {chip for row in table.values() for chip in row["chips"]}
    if row and search.cluster.chip.key in chips:
        return row["band"]
    return UNKNOWN / (1 if search.cluster.constants is FITTED else 2)
