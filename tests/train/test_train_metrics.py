"""What a run writes down, how two runs are compared, and that memory stays flat."""

import importlib.util
import json
import re
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import Failed, MissingExtra, Refused, WrongUse
from throughline.core.recipe import dump_toml
from throughline.core.workspace import Workspace, read_records
from throughline.train.build import RunPlan, training_rows
from throughline.train.evaluate import Validation
from throughline.train.logs.metrics import Metrics, StepReport, flat, peak_flops, read_metrics
from throughline.train.logs.report import check_bound, compare_runs, curves, summary_rows, write_report
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe


def write(run: Path, *records: dict) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return run


def test_records_hold_what_is_promised(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    plan = make_plan("bert", train={"eval_every_steps": 3})
    train(plan, tmp_path / "run", evaluators=[Validation(plan)])
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    wanted = {
        "loss",
        "mlm",
        "nsp",
        "lr",
        "grad_norm",
        "tokens",
        "step_s",
        "tokens_per_s",
        "mfu",
        "sequences_per_s",
    }
    assert all(wanted <= set(record) for record in records)
    assert all(record["loss"] == pytest.approx(record["mlm"] + record["nsp"]) for record in records)
    assert set(records[0]["memory"]["host"]) == {"forward", "backward", "optimizer"}
    assert {"mlm_loss", "mlm_accuracy", "nsp_accuracy"} <= set(records[2]["validation"])
    events = [event["event"] for event in read_records(tmp_path / "run/events.jsonl")]
    assert events == ["started", "checkpoint", "finished"]


@pytest.mark.parametrize(("seconds", "size"), [(0.026, 192), (0.001, 768)])
def test_a_dtype_without_products_is_measured_small(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large product of bf16 takes seconds where the processor has none: nobody waits for it at the start of a run."""
    monkeypatch.setattr(timeit, "repeat", lambda *_, **__: [9.0, seconds])
    flops, source = peak_flops(torch.device("cpu"), "bf16")
    threads = torch.get_num_threads()
    assert flops == threads * 2 * size**3 / seconds and f" {size} wide" in source


def test_the_peak_of_a_cpu_is_not_lowered_by_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which this process does not run is none of the product's: here a nap beside each one, as of a CPU that
    another program has. The number of threads is as before.
    """
    threads, real = torch.get_num_threads(), timeit.repeat

    def interrupted(statement: str, **how: Any) -> list[float]:
        how["globals"] |= {"nap": time.sleep}
        return real(f"{statement}; nap(0.005)", **how)

    alone, _ = peak_flops(torch.device("cpu"), "fp32")
    monkeypatch.setattr(timeit, "repeat", interrupted)
    busy, _ = peak_flops(torch.device("cpu"), "fp32")
    assert busy > alone / 2 and torch.get_num_threads() == threads


def test_a_share_above_the_peak_is_not_told() -> None:
    """A peak that was measured on a busy machine is lower than what the run reaches later."""
    shares = [
        StepReport._mfu(SimpleNamespace(peak=peak, _flops_per_token=2.0), 30.0) for peak in (0, 59, 120)
    ]
    assert shares == [None, None, 0.5]


@pytest.mark.parametrize(("steps", "told"), [([None, None, 0.9], False), ([None, 0.4, 0.9], True)])
def test_a_median_of_shares_counts_those_that_are_not_told(steps: list[float | None], told: bool) -> None:
    rows = summary_rows([{"step": 1, "loss": 1.0, "mfu": share} for share in steps], [])
    assert dict(rows).get("MFU, median step") == ("90.0 %" if told else None)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("sentences", ["nsp", "sop", "none"])
def test_sequences_of_a_step_are_counted_with_and_without_pairs(
    make_plan: Callable[..., RunPlan], tmp_path: Path, sentences: str, packing: bool
) -> None:
    """Each sequence begins with one [CLS], which is never masked: their count in the rows that were read over the
    step's seconds. The report has the median.
    """
    objective = {"sentences": sentences, "packing": packing}
    size = {"steps": 2, "sequence_length": 256, "batch_rows": 16, "micro_batch_rows": 8}
    plan = make_plan("bert", objective=objective, train=size)
    train(plan, tmp_path / "run", evaluators=[Validation(plan)])
    data = training_rows(plan)
    for step, record in enumerate(read_metrics(tmp_path / "run")):
        ids = data.batch(16 * step, 16)["input_ids"]
        count = int((ids == plan.corpus.tokenizer.cls_id).sum())
        assert count > 16 if packing else count == 16
        # both figures are rounded in the file
        assert record["sequences_per_s"] * record["step_s"] == pytest.approx(count, rel=1e-2)
    page = (tmp_path / "run/report.html").read_text()
    for row in ("sequences/s, median step", "tokens/s without padding", "validation mlm accuracy"):
        assert row in page
    assert ("validation nsp accuracy" in page) == (sentences != "none")


def test_numbers_that_are_not_finite_are_null_and_the_later_record_counts(tmp_path: Path) -> None:
    with Workspace(tmp_path / "run") as workspace:
        metrics = Metrics(workspace, [], "run")
        metrics.add({"step": 1, "loss": float("nan")})
        metrics.add({"step": 2, "loss": 3.0})
        metrics.add({"step": 2, "validation": {"loss": 4.0}})
        metrics.add({"step": 2, "loss": 2.0})
        kept = metrics.add({"step": 3, "validation": {"loss": float("inf"), "tokens": 5}})
        assert kept == {"step": 3, "validation": {"loss": None, "tokens": 5}}
        metrics.flush()
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second, third = read_metrics(tmp_path / "run")
    assert (first, second) == (
        {"step": 1, "loss": None},
        {"step": 2, "loss": 2.0, "validation": {"loss": 4.0}},
    )
    assert third == kept


def test_a_run_that_left_the_finite_numbers_says_so(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Every step but the first is skipped: the run fails and says so, and no file of it holds what JSON cannot."""
    (tmp_path / "r.toml").write_text(dump_toml(make_recipe("gpt", optimizer={"learning_rate": 1e30})))
    done = CliRunner().invoke(main, ["train", str(tmp_path / "r.toml"), "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 1 and "5 steps in a row" in done.stderr, done.output
    write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "manifest.json").exists()
    for name in ("metrics.jsonl", "events.jsonl", "report.html"):
        assert not re.search(r"\b(NaN|nan|Infinity)\b", (tmp_path / "run" / name).read_text()), name


def test_dashboards_have_every_record_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensorboard's writer keeps what it is given for two minutes and loses it with the process, unless it is
    flushed.
    """
    written: dict[str, list[tuple]] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            self.folder, self.held = folder, []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.held.append((name, value, step))

        def flush(self) -> None:
            written.setdefault(self.folder, []).extend(self.held)
            self.held = []

    session = SimpleNamespace(
        log=lambda numbers, step: written.setdefault("wandb", []).append((numbers, step))
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: session))
    with Workspace(tmp_path / "run") as workspace:
        metrics = Metrics(workspace, ["tensorboard", "wandb"], "run")
        for step in (1, 2):
            metrics.add({"step": step, "loss": 3.0 - step})
        metrics.flush()
    assert written[str(tmp_path / "run" / "tensorboard")] == [("loss", 2.0, 1), ("loss", 1.0, 2)]
    assert written["wandb"] == [({"loss": 2.0}, 1), ({"loss": 1.0}, 2)]


def test_a_dashboard_that_is_not_installed_is_said_before_the_run(
    make_plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)
    )
    with pytest.raises(MissingExtra, match="wandb"):
        make_plan("gpt", log={"sinks": ["wandb"]})


def test_dashboards_get_flat_numbers() -> None:
    record = {
        "step": 3,
        "loss": 1.5,
        "validation": {"loss": 2.0, "note": "x"},
        "memory": {"host": {"forward": 7}},
    }
    assert flat(record) == {"loss": 1.5, "validation/loss": 2.0, "memory/host/forward": 7}


def test_compare_finds_the_largest_difference_and_judges_it(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 1.0 + step, "grad_norm": 2.0} for step in (1, 2, 3)]
    first = write(tmp_path / "a", *steps)
    second = write(tmp_path / "b", *steps[:1], steps[1] | {"loss": 3.0 * (1 + 1e-6)}, steps[2])
    loss, norm = compare_runs(first, second)
    assert (loss.step, loss.steps, norm.difference) == (2, 3, 0.0)
    assert loss.difference == pytest.approx(1e-6, rel=1e-3)
    check_bound([loss, norm], 1e-5, first, second)
    with pytest.raises(Refused, match="1e-07") as caught:
        check_bound([loss, norm], 1e-7, first, second)
    assert "loss by 1e-06 at step 2" in caught.value.why
    # it ended early, and logged another step
    cut = compare_runs(first, write(tmp_path / "c", *steps[:1], steps[2] | {"step": 7}))
    assert [(row.steps, row.alone) for row in cut] == [(1, 3)] * 2


@pytest.mark.parametrize("bound", ["nan", "-1"])
def test_compare_asks_for_a_bound_that_something_can_meet(bound: str, tmp_path: Path) -> None:
    run = str(write(tmp_path / "a", {"step": 1, "loss": 1.0, "grad_norm": 2.0}))
    done = CliRunner().invoke(main, ["compare", run, run, "--bound", bound])
    assert done.exit_code == 2 and f"{bound} is no bound" in done.stderr
    assert CliRunner().invoke(main, ["compare", run, run, "--bound", "0"]).exit_code == 0


def test_compare_counts_a_skipped_step_of_one_run_alone(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"step": 1, "loss": None, "grad_norm": None})
    second = write(tmp_path / "b", {"step": 1, "loss": 1.0, "grad_norm": 1.0})
    assert compare_runs(first, second)[0].difference == float("inf")
    assert compare_runs(first, first)[0].difference == 0.0
    with pytest.raises(WrongUse, match="no metrics"):
        compare_runs(first, tmp_path / "c")
    with pytest.raises(WrongUse, match="no step in common"):
        compare_runs(first, write(tmp_path / "d", {"step": 5, "loss": 1.0, "grad_norm": 1.0}))


def test_the_report_stands_alone_and_shows_every_curve(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    plan = make_plan("bert", train={"eval_every_steps": 2})
    train(plan, tmp_path / "run <b>", evaluators=[Validation(plan)])
    html = (tmp_path / "run <b>/report.html").read_text()
    assert not re.search(r"""(src|href)=["']|url\(|@import""", html), "nothing is fetched"
    titles = re.findall(r"<figcaption>([^<]*)</figcaption>", html)
    assert titles == [
        "loss",
        "BERT losses",
        "accuracy",
        "gradient norm",
        "learning rate",
        "tokens per second",
        "host memory after each phase, GiB",
    ]
    assert html.count('class="plot"') == len(titles)
    assert "run &lt;b&gt;" in html
    assert "sequence_length = 32" in html
    with pytest.raises(WrongUse, match="no run to report on"):
        write_report(tmp_path)


def test_a_task_s_curve_has_a_band() -> None:
    """1.96 standard errors on both sides; steps without an evaluation are none of it."""
    score = {"validation": {"t/acc": 0.5, "t/acc_stderr": 0.1}}
    charts = curves([{"step": 1} | score, {"step": 2, "loss": 3.0}, {"step": 3} | score])
    plots = {chart.title: chart for chart in charts}
    assert plots["tasks: acc"].series == [("t", [(1, 0.5), (3, 0.5)])]
    assert plots["tasks: acc"].errors == {"t": [(1, 0.196), (3, 0.196)]}


def test_too_many_bad_steps_in_a_row_stop_the_run(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 3 on every loss is NaN; a single one before is skipped and forgotten."""
    from throughline.train import objective

    healthy, calls = objective.gpt_sums, []

    def failing(*inputs: object) -> torch.Tensor:
        calls.append(1)
        bad = len(calls) == 2 or len(calls) > 3
        return healthy(*inputs) * (float("nan") if bad else 1.0)

    monkeypatch.setattr(objective, "gpt_sums", failing)
    with pytest.raises(Failed, match="4 steps in a row") as caught:
        train(make_plan("gpt", train={"steps": 50, "stop_after_skipped": 4}), tmp_path / "run")
    assert "learning_rate" in caught.value.fix
    records = read_metrics(tmp_path / "run")
    assert [bool(record.get("skipped")) for record in records] == [False, True, False, True, True, True, True]
    assert records[3]["loss"] is None


@pytest.mark.slow
def test_memory_is_flat_over_steps_and_saves(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    """Between step 100 and step 400, with a save every 50: at most 4 MB more (a leaked batch or snapshot a
    step is more).
    """
    levels: dict[int, int] = {}

    def watch(model: torch.nn.Module, step: int) -> dict:
        levels[step] = psutil.Process().memory_info().rss
        return {}

    plan = make_plan(
        "gpt", train={"steps": 400, "eval_every_steps": 100}, checkpoint={"save_every_steps": 50}
    )
    train(plan, tmp_path / "run", evaluators=[watch])
    assert levels[400] - levels[100] < 4 * 2**20
