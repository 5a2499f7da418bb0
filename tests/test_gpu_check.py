"""`make gpu-check` writes each result down at once, goes on where it stopped and tries again what failed."""

import json
from pathlib import Path

import pytest
from gpu_check import Checks, LeftOut
from gpu_doubts import DOUBTS


def test_a_second_start_goes_on(tmp_path: Path) -> None:
    made: list[str] = []

    def work(name: str, error: Exception | None = None) -> str:
        made.append(name)
        if error:
            raise error
        return name

    def start(again: bool, broken: Exception | None) -> dict[str, dict[str, object]]:
        checks = Checks(tmp_path / "checks", "cpu", 6, again)
        checks.check("good", lambda: work("good"))
        checks.check("bad", lambda: work("bad", broken), "what it means")
        checks.check("absent", lambda: work("absent", LeftOut("no card")))
        return json.loads((tmp_path / "checks.json").read_text())["results"]

    first = start(False, AssertionError("wrong"))
    assert [result["result"] for result in first.values()] == ["ok", "FAILED", "left out"]
    assert first["bad"]["means"] == "what it means" and "wrong" in str(first["bad"]["found"])
    second = start(False, None)
    assert second["bad"]["result"] == "ok" and made == ["good", "bad", "absent", "bad", "absent"]
    start(True, None)
    assert made[5:] == ["good", "bad", "absent"]


@pytest.mark.parametrize("name", DOUBTS)
def test_every_doubt_says_what_a_failure_means(name: str) -> None:
    work, meaning = DOUBTS[name]
    assert work.__doc__ and len(meaning) > 20
