"""The page of a plan: self-contained, its drawings sum to what the table says, its trace loads."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from throughline.core.artifact import verify_artifact
from throughline.models.config import preset
from throughline.planner.hardware import find_cluster
from throughline.planner.report import ranked
from throughline.planner.run import Run
from throughline.planner.search import Search, find_layouts
from throughline.planner.view import MOST_EVENTS, days_chart, shares, write_plan
from throughline.planner.work import Work, find_software


@pytest.mark.parametrize(("model", "chips"), [("gpt-1t-megatron", 512), ("bert-large", 8)])
def test_plan_is_an_artifact_to_look_at(tmp_path: Path, model: str, chips: int) -> None:
    work = Work(preset(model), 512, min(2048, preset(model).sequence_length), 0.15)
    found = find_layouts(
        Search(work, find_cluster("aws-p5.48xlarge"), find_software("throughline", "bf16"), chips)
    )
    facts, _ = ranked(found, Run(1e9))
    write_plan(tmp_path / "plan", found, facts, Run(1e9))
    assert verify_artifact(tmp_path / "plan").kind == "plan"
    text = (tmp_path / "plan" / "plan.html").read_text()
    HTMLParser().feed(text)
    assert not re.search(r"(src|href)=|@import|url\(|<link", text)  # nothing is fetched
    assert "capacity" in text and "Days against chips" in text
    for said in ("failures a day", "cost with spares", "energy of the machines", "T tensor, P pipeline"):
        assert said in text
    rows = list(csv.DictReader((tmp_path / "plan" / "layouts.csv").open()))
    first = rows[0]
    parts = [float(value) for name, value in first.items() if name.startswith("seconds ")]
    assert sum(parts) == pytest.approx(float(first["step_seconds"]), rel=1e-12)
    trace = tmp_path / "plan" / "trace.json"
    assert trace.exists() == (found.best[0].layouts.pipeline > 1)
    if trace.exists():
        events = json.loads(trace.read_text())["traceEvents"]
        assert {event["ph"] for event in events} == {"X"} and all(event["dur"] > 0 for event in events)
        assert text.count("of micro-batch") == min(len(events), MOST_EVENTS)


def test_bars_are_as_long_as_their_share() -> None:
    bars = shares({"a": 2.0**30, "b": 3 * 2.0**30}, 4 * 2.0**30, 2**30, "GiB")
    assert [(bar.name, bar.value, bar.text) for bar in bars] == [("a", 0.25, "1 GiB"), ("b", 0.75, "3 GiB")]


def test_the_band_is_about_the_days() -> None:
    chart = days_chart([(8, 10.0), (16, 6.0)], 0.2)
    drawn = {name: [round(days, 9) for _, days in points] for name, points in chart.series}
    assert drawn == {"days": [10.0, 6.0], "at least": [8.0, 4.8], "at most": [12.0, 7.2]}
    assert not days_chart([], 0.2).drawn
