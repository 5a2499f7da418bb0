"""`throughline prove RECIPE`: a recipe's layout trains what one process trains, shown on this machine."""

import click

from ..core import console
from .common import pretraining_recipe, recipe_options, throughline_command


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
    from ..prove.forked import warm

    resolved = pretraining_recipe(recipe, overrides)
    warm()
    from ..prove.proof import BOUNDS, Prover
    from ..prove.twin import twin

    case, notes = twin(resolved)
    prover, rows, lines = Prover(), [], [f"{case.layout.product()}: {case.layout.describe()}", *notes, ""]
    for precision in dict.fromkeys(("fp64", case.precision)):
        tried = dataclasses.replace(case, precision=precision)
        errors = prover.prove(tried, timeout_s=540.0)
        broken, bounds = errors.beyond(tried.bounds), BOUNDS[tried.bounds]
        figures = {name: getattr(errors, name) for name in bounds}
        rows.append({"precision": precision, "equal": not broken, "errors": figures, "bounds": bounds})
        shown = ", ".join(f"{name} {value:.1e} of {bounds[name]:g}" for name, value in figures.items())
        lines.append(f"{precision}: {'NOT EQUAL' if broken else 'equal'}: {shown}")
        if broken:
            worst = f"the gradient that differs most: {errors.worst}"
            lines.append(f"  beyond the bound: {', '.join(broken)}; {worst}")
    equal = all(row["equal"] for row in rows)
    facts = {"layout": case.layout.facts(), "notes": notes, "proofs": rows, "equal": equal}
    console.result(facts, lines)
    if not equal:
        fix = "train in another layout, and report this one"
        raise Refused("the layout does not train what one process trains", where="parallel", fix=fix)
