"""A whole run: how often to save, spare nodes, a growing batch, money and energy, and choices side by side."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from throughline.core.artifact import verify_artifact
from throughline.models.config import preset
from throughline.planner.cost import peak_flops, step_seconds, step_time
from throughline.planner.hardware import OVER_CHIPS, find_cluster
from throughline.planner.layout import Layout
from throughline.planner.run import (
    PRODUCTION,
    Run,
    goodput,
    node_failures,
    run_facts,
    run_seconds,
    save_interval,
    spare_nodes,
    trained_share,
    usual_failures,
)
from throughline.planner.search import Search, find_layouts, simplest_first, usual_worlds
from throughline.planner.view import compared, write_comparison
from throughline.planner.work import Layouts, Work, find_software

CONFIG = preset("sc21-1.7b")


def search(chips: int = 16, on: str = "dgx-a100-80gb") -> Search:
    return Search(Work(CONFIG, 64, 2048), find_cluster(on), find_software("throughline", "bf16"), chips)


@pytest.mark.parametrize("save_s", [0.1, 10, 600])
@pytest.mark.parametrize("between_s", [3600.0, 86400.0, 3e6])
def test_no_other_interval_trains_longer(save_s: float, between_s: float) -> None:
    """Daly's estimate reaches the best share of a scan of intervals within 0.1 %, and a simulated run its share."""
    best = save_interval(save_s, between_s)
    share = trained_share(best, save_s, 300.0, between_s)
    scan = np.geomspace(1.0, 20 * between_s, 2000)
    assert share >= max(trained_share(every, save_s, 300.0, between_s) for every in scan) * 0.999
    rng, trained, clock = np.random.default_rng(0), 0.0, 0.0
    for _ in range(20_000):  # stretches, each repeated until it and its save end before the next failure
        while (failed := rng.exponential(between_s)) < best + save_s:
            clock += failed
            while (again := rng.exponential(between_s)) < 300.0:
                clock += again
            clock += 300.0
        trained, clock = trained + best, clock + best + save_s
    assert trained / clock == pytest.approx(share, rel=0.02)


def test_published_runs_fail_as_they_were_reported() -> None:
    """419 interruptions in 54 days on 2,048 nodes are one in about three hours; such a run trained more than 90 %."""
    rates = node_failures()
    assert 24 / (2048 * rates["llama3-405b"]) == pytest.approx(3.1, abs=0.05)
    least, median, most = usual_failures()
    assert least < median < most
    assert goodput(2048, rates["llama3-405b"], 10.0, 300.0, 3.0).share > 0.9


@pytest.mark.parametrize("away", [0.05, 3.0, 40.0, 900.0])
def test_spares_suffice_in_99_cases_of_100(away: float) -> None:
    drawn = np.random.default_rng(1).poisson(away, 200_000)
    spares = spare_nodes(away)
    assert (drawn > spares).mean() <= 0.0115 and (drawn > 0.97 * spares - 1).mean() >= 0.0085


def test_a_growing_batch_by_hand() -> None:
    """16, 32 and 48 rows each over a third of 9,600 rows, then 64: more steps, each at its own price."""
    asked = search()
    best = find_layouts(asked).best[0]
    run = Run(2048.0 * 96_000, (16, 16, 9_600))
    layouts = best.layouts
    unit = layouts.data * layouts.micro_rows
    seconds = (96_000 - 9_600) / 64 * best.seconds
    for rows in (16, 32, 48):
        work = replace(asked.work, rows=max(unit, math.ceil(rows / unit) * unit))
        seconds += 3_200 / rows * step_seconds(work, layouts, asked.cluster, asked.software)
    assert run_seconds(asked, best, run) == pytest.approx(seconds)
    assert run_seconds(asked, best, run) > run_seconds(asked, best, replace(run, ramp=None))


def test_money_energy_and_carbon_follow_from_the_days() -> None:
    asked = search()
    asked = replace(asked, cluster=replace(asked.cluster, price_per_chip_hour=2.0))
    best = find_layouts(asked).best[0]
    facts = run_facts(asked, best, Run(1e11, grid=100.0))
    hours = facts["expected_days"] * 24 * (16 + 8 * facts["spare_nodes"])
    assert facts["cost"] == pytest.approx(2.0 * hours)
    assert facts["kwh"] == pytest.approx(hours * 0.4 * OVER_CHIPS)
    assert facts["co2_kg"] == pytest.approx(facts["kwh"] / 10)
    assert facts["days_low"] < facts["days"] < facts["expected_days"] < facts["days_high"]
    slower = run_facts(asked, best, Run(1e11, production=True))
    assert slower["days"] == pytest.approx(PRODUCTION * facts["days"])
    assert run_facts(asked, best, Run()) == {}


def test_optimizers_have_their_own_times_and_states() -> None:
    """LAMB reads weight and update once more, 8 bytes; Muon keeps one number less of the blocks' matrices and computes
    five iterations of 6 a^3 FLOPs of a square matrix.
    """
    asked, layouts = search(), Layouts.of(Layout(data=16), 4, "none", False)
    plain = find_software("throughline", "bf16")
    adamw, lamb, muon = (plain.with_optimizer(name, CONFIG) for name in ("adamw", "lamb", "muon"))
    assert adamw == plain and lamb.optimizer_bytes == plain.optimizer_bytes + 8
    averaged = plain.with_optimizer("adamw", CONFIG, averages=True)
    assert averaged.precision.moments == plain.precision.moments + 4  # beside the two moments
    assert averaged.optimizer_bytes == plain.optimizer_bytes + 12  # read, written, and their weights read
    square = CONFIG.layers * CONFIG.block_matrix_parameters()
    kept = 4 * (2 - square / CONFIG.parameter_count())
    assert muon.precision.moments == pytest.approx(kept) and muon.precision.moments < 8
    times = [
        float(step_time(asked.work, layouts, asked.cluster, software)["optimizer"])
        for software in (muon, replace(muon, orthogonal_flops=0.0))
    ]
    flops = 30 * CONFIG.width * square
    assert times[0] - times[1] == pytest.approx(flops / peak_flops(asked.cluster, "bf16"))


def test_narrow_products_speed_the_blocks_alone() -> None:
    """fp8 on an H100: products of the blocks at its fp8 rate, logits and attention as in bf16, and casts besides."""
    cluster, layouts = find_cluster("dgx-h100"), Layouts.of(Layout(data=8), 4, "none", False)
    work = Work(preset("llama-8b"), 64, 8192)
    half, narrow = (
        step_time(work, layouts, cluster, find_software("nemo", name)) for name in ("bf16", "fp8")
    )
    ratio = peak_flops(cluster, "fp8") / peak_flops(cluster, "bf16")
    assert narrow["attention"] == half["attention"]
    assert narrow["memory-bound kernels"] > half["memory-bound kernels"]
    assert 1 < float(half["matrix products"] / narrow["matrix products"]) < ratio


def test_a_million_tokens_have_a_layout() -> None:
    asked = replace(search(256, "dgx-h200"), work=Work(preset("llama-8b", sequence_length=2**20), 32, 2**20))
    best = find_layouts(asked).best[0]
    assert (
        best.layouts.context > 1 and best.parts["context"] >= 0 and best.parts["attention"] > best.seconds / 2
    )


def test_126_layers_interleave_on_16_stages() -> None:
    """With as many micro-batches as stages and v stages a process the bubble is about (p - 1) / (m v) of the work."""
    asked = Search(
        Work(preset("llama-405b"), 2048, 8192),
        find_cluster("dgx-h100"),
        find_software("nemo", "bf16"),
        16384,
        {"tensor": (8,), "pipeline": (16,), "context": (1,), "recompute": (2,), "micro_rows": (1,)},
    )
    best = find_layouts(asked).best[0]
    plain = find_layouts(replace(asked, fixed=asked.fixed | {"turns": (1,)})).best[0]
    assert best.layouts.turns == 7 and best.seconds < 0.75 * plain.seconds
    work = best.seconds - best.parts["bubble"]
    assert best.parts["bubble"] == pytest.approx(15 / 16 / 7 * work, rel=0.1)


def test_near_layouts_are_taken_by_their_simplicity() -> None:
    best = find_layouts(search(64)).best
    near = [replace(each, seconds=1.0 + 0.001 * index) for index, each in enumerate(best)]
    ordered = simplest_first(near)
    assert [each.layouts.pipeline for each in ordered] == sorted(each.layouts.pipeline for each in near)
    assert usual_worlds(8, 64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_choices_side_by_side(tmp_path: Path) -> None:
    """The cheapest first, each other with its reason, the same on the page as in the terminal."""
    choices = []
    for name, chips, on in (("a", 16, "dgx-a100-80gb"), ("b", 8, "dgx-h100"), ("c", 64, "dgx-h100")):
        asked = search(chips, on)
        choices.append((name, asked, find_layouts(asked).best[0], Run(1e11, grid=56.0)))
    for by, key in (("cost", "cost"), ("days", "expected_days"), ("energy", "kwh")):
        facts, lines = compared(choices, by)
        values = [choice["run"][key] for choice in facts["choices"]]
        assert values == sorted(values) and lines[0].startswith(
            f"best by {by}: {facts['choices'][0]['name']}"
        )
        assert len(facts["reasons"]) == 2 and all(f"more {by}" in row["reason"] for row in facts["reasons"])
    write_comparison(tmp_path / "page", facts)
    assert verify_artifact(tmp_path / "page").facts["by"] == "energy"
    text = (tmp_path / "page" / "compare.html").read_text()
    assert all(row["reason"].split(";")[0] in text for row in facts["reasons"])
    assert json.loads((tmp_path / "page" / "compare.json").read_text())["by"] == "energy"
