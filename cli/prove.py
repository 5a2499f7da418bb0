"""`throughline prove RECIPE`: a recipe's layout trains what one process trains, shown on this machine."""

import click

from ..core import console
from .common import recipe_options, throughline_command


@click.command()
@recipe_options
@throughline_command
def command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Prove that the layout of RECIPE trains the same model as one process.

    A small twin of the model is trained for four steps on forked processes of this CPU (at most 64) and on one
    process: losses, gradient norms, the first gradient of every parameter and the final parameters are compared, in
    float64 to rounding and in the recipe's own precision to its bounds. Exit code 0: equal; 3: not.

    \b
    Example:  throughline prove gpt-shakespeare --set parallel.tensor=2 --set parallel.data=2
    """
    import dataclasses

    from ..core.errors import Refused
    from ..core.recipe import load_recipe
    from ..prove.forked import warm
    from ..train.recipe import Recipe, resolve
    from ..train.rules import RULES

    resolved = resolve(load_recipe(recipe, Recipe, overrides, RULES))
    warm()
    from ..prove.proof import BOUNDS, Prover
    from ..prove.twin import twin

    case, notes = twin(resolved)
    prover, rows, lines = Prover(), [], [f"{case.layout.product()}: {case.layout.describe()}", *notes, ""]
    for precision in dict.fromkeys(("fp64", case.precision)):
        tried = dataclasses.replace(case, precision=precision)
        errors = prover.prove(tried, timeout_s=540.0)
        broken = errors.beyond(tried.bounds)
        figures = {name: getattr(errors, name) for name in BOUNDS[tried.bounds]}
        rows.append(
            {"precision": precision, "equal": not broken, "errors": figures, "bounds": BOUNDS[tried.bounds]}
        )
        shown = ", ".join(
            f"{name} {value:.1e} of {BOUNDS[tried.bounds][name]:g}" for name, value in figures.items()
        )
        lines.append(f"{precision}: {'equal' if not broken else 'NOT EQUAL'}: {shown}")
        if broken:
            lines.append(
                f"  beyond the bound: {', '.join(broken)}; the gradient that differs most: {errors.worst}"
            )
    facts = {
        "layout": case.layout.facts(),
        "notes": notes,
        "proofs": rows,
        "equal": all(row["equal"] for row in rows),
    }
    console.result(facts, lines)
    if not facts["equal"]:
        raise Refused(
            "the layout does not train what one process trains",
            where="parallel",
            fix="train in another layout, and report this one",
        )
