"""Predictions kept before their measurement: errors as printed, and a prediction that was changed is refused."""

import json
from pathlib import Path

import pytest
from throughline.core.errors import WrongUse
from throughline.prove.validate import own_validation, prediction_digest


def case(name: str, seconds: float, size: int, measured: bool = True) -> dict:
    """A prediction; what was measured is 1 s and 1,000 bytes."""
    found = {"name": name, "settings": [], "predicted": {"seconds": seconds, "bytes": size}}
    return found | ({"measured": {"seconds": 1.0, "bytes": 1000, "spread": 0.02}} if measured else {})


CASES = [case("fast", 1.1, 1050), case("slow", 2.0, 900), case("later", 1.0, 10, measured=False)]


def write(folder: Path, cases: list[dict]) -> Path:
    file = folder / "runs.json"
    file.write_text(
        json.dumps({"prepared": "2026-01-01T00:00:00Z", "digest": prediction_digest(CASES), "cases": cases})
    )
    return file


def test_errors_of_what_was_measured_since(tmp_path: Path) -> None:
    """Median of 10 % and 100 % in time, of 5 % and 10 % in memory; what is not measured yet counts for nothing."""
    write(tmp_path, CASES)
    facts, lines, good = own_validation(tmp_path)
    assert facts["medians"]["seconds"] == pytest.approx(0.55) and facts["medians"]["bytes"] == pytest.approx(
        0.075
    )
    assert not good and "2 of 3 predictions measured since" in lines


def test_a_changed_prediction_is_refused(tmp_path: Path) -> None:
    """Measurements may be added, a prediction may not be moved towards them."""
    changed = json.loads(json.dumps(CASES))
    changed[1]["predicted"]["seconds"] = 1.0
    write(tmp_path, changed)
    with pytest.raises(WrongUse, match="changed after"):
        own_validation(tmp_path)


def test_an_empty_folder_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no predictions"):
        own_validation(tmp_path)
