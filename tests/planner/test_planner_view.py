"""The page of a plan: self-contained, its drawings sum to what the table says, its trace loads."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from throughline.core.artifact import verify_artifact
from throughline.models.presets import preset
from throughline.planner.hardware import find_cluster
from throughline.planner.report import ranked
from throughline.planner.search import Search, find_layouts
from throughline.planner.software import find_software
from throughline.planner.view import MOST_EVENTS, stacked, write_plan
from throughline.planner.work import Work


@pytest.mark.parametrize(("model", "chips"), [("gpt-1t-megatron", 512), ("bert-large", 8)])
def test_plan_is_an_artifact_to_look_at(tmp_path: Path, model: str, chips: int) -> None:
    work = Work(preset(model), 512, min(2048, preset(model).sequence_length), 0.15)
    found = find_layouts(
        Search(work, find_cluster("aws-p5.48xlarge"), find_software("throughline", "bf16"), chips)
    )
    facts, _ = ranked(found, 1e9)
    write_plan(tmp_path / "plan", found, facts, 1e9)
    assert verify_artifact(tmp_path / "plan").kind == "plan"
    text = (tmp_path / "plan" / "plan.html").read_text()
    HTMLParser().feed(text)
    assert not re.search(r"(src|href)=|@import|url\(|<link", text)  # nothing is fetched
    assert "capacity" in text and "Days against chips" in text
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


def test_bars_are_as_long_as_their_values() -> None:
    drawing = stacked([("one", {"a": 1.0, "b": 3.0})], "s", 4.0, None)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)" height="24"', drawing)]
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3)
