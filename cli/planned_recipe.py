"""`plan --write-recipe`: the best layout as a recipe that trains."""

from typing import Any

from ..core.errors import WrongUse
from ..core.recipe import build_recipe, dump_toml
from ..models.config import family_of
from ..planner.search import Candidate, Found
from ..planner.work import RECOMPUTES
from ..train.recipes.new_recipe import usual_sections
from ..train.recipes.recipe import Recipe
from ..train.recipes.rules import RULES


def planned_recipe(found: Found, recipe: Recipe | None, options: dict[str, Any]) -> str:
    """The best layout as a recipe that `recipe check` accepts: the given one with another layout, or a new one."""
    refused = None
    for best in found.best:  # the fastest that the rest of the recipe, such as its optimizer, can be had in
        try:
            return _recipe_text(found, best, recipe, options)
        except WrongUse as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _recipe_text(found: Found, best: Candidate, recipe: Recipe | None, options: dict[str, Any]) -> str:
    work = found.search.work
    parallel = {key: value for key, value in best.layout().facts().items() if key != "world"}
    train: dict[str, Any] = {
        "sequence_length": work.length,
        "batch_rows": work.rows,
        "micro_batch_rows": best.layouts.micro_rows,
        "precision": found.search.software.precision.compute,
        "recompute": RECOMPUTES[best.layouts.recompute],
        "offload": bool(best.layouts.offload),
    }
    if recipe is None:
        steps = max(1, round((options["target_tokens"] or 1000 * work.tokens) / work.tokens))
        data = {"train": "tokens", "validation_fraction": 0.001}
        model = {"preset": options["model"], "family": family_of(work.config)}
        if work.length > work.config.sequence_length:
            model["overrides"] = {"sequence_length": work.length}
        sections = usual_sections(work.config, work.rows, work.length, steps)
        tree: dict[str, Any] = {"data": data, "model": model} | sections
        tree["train"] = sections["train"] | {"steps": steps}
    else:
        tree = recipe.model_dump(mode="json", exclude_none=True)
        tree["train"].pop("batch_tokens", None)
    tree["train"] = tree["train"] | train
    tree["parallel"] = parallel
    built = build_recipe(tree, Recipe, RULES, where="the planned recipe")
    world = f"{found.search.world} x {found.search.cluster.chip.name}"
    return f"# Planned for {world}: {best.describe()}, {best.seconds:.3g} s a step predicted\n" + dump_toml(
        built
    )
