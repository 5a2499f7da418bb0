"""The runs that are predicted before they are measured are legal, and none is predicted from a study of itself."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from throughline.core.recipe import load_recipe
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES


def test_cases_are_legal_and_studied_at_other_sizes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case has another number of layers than any run of its study (the recipe studied, half its rows, half its
    layers), and other rows than the recipe studied.
    """
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import own_cases

    def sizes(case: own_cases.Case, settings: tuple[str, ...]) -> tuple[int | None, int, int]:
        file = tmp_path / "recipe.toml"
        file.write_text(case.recipe)
        recipe = resolve(
            load_recipe(str(file) if "\n" in case.recipe else case.recipe, Recipe, settings, RULES)
        )
        assert recipe.train.compile == "off" or case.study in own_cases.DRAWN_LAYOUTS
        assert recipe.parallel.layout().world == case.processes
        layers = recipe.model.overrides.get("layers")
        return layers, recipe.train.rows_per_step, recipe.train.sequence_length

    for name, cases in own_cases.CASES.items():
        made = cases()
        assert len({case.name for case in made}) == len(made) >= 5
        for case in made:
            few = (f"train.steps={case.warm_up + case.steps}",)
            layers, *own = sizes(case, case.settings + few)
            other, *studied = sizes(case, case.studied + few)
            assert other is not None and other % 2 == 0 and layers not in (other, other // 2), case.name
            assert own != studied, (name, case.name)


def test_what_was_predicted_is_still_what_would_be_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed predictions name the cases as they are now; `measure` refuses others."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import own_cases

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    for name, cases in own_cases.CASES.items():
        file = root / "benchmarks" / "results" / "predictions" / f"{name}.json"
        if not file.exists():
            continue
        said = json.loads(file.read_text())["cases"]
        assert [(case["name"], tuple(case["settings"])) for case in said] == [
            (case.name, case.settings) for case in cases()
        ]
