"""Dropout in layouts: the rate of the recipe on every process, masks that no two processes share, the same again
for the same step.
"""

import hashlib
import math

import pytest

torch = pytest.importorskip("torch")

from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, make_rows, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from torch.nn import functional as F  # noqa: E402

RATE = 0.25
LAYOUTS = [Layout(data=2), Layout(tensor=2), Layout(pipeline=2), Layout(data=2, sharding="full")]
Drawn = tuple[int, int, set[float], list[str]]  # numbers, dropped, rates of attention, a digest of each mask


def draw(case: Case) -> list[Drawn]:
    """What steps 0, 1 and 0 again, and an evaluation, drew on this process."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    dropout, attention = F.dropout, F.scaled_dot_product_attention
    seen: list[tuple[int, int, str]] = []
    rates: set[float] = set()

    def watched_dropout(x, p=0.5, training=True, inplace=False):
        y = dropout(x, p, training)
        if training:
            kept = (y.detach() != 0) | (x.detach() == 0)
            digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()
            seen.append((kept.numel(), int((~kept).sum()), digest))
        return y

    def watched_attention(*args, dropout_p=0.0, **named):
        rates.add(dropout_p)
        return attention(*args, dropout_p=dropout_p, **named)

    F.dropout, F.scaled_dot_product_attention = watched_dropout, watched_attention
    found: list[Drawn] = []
    for step in (0, 1, 0, None):
        seen.clear()
        rates.clear()
        if step is None:
            engine.evaluate([make_rows(case, 0)], 1.0)
        else:
            engine.accumulate(own_rows(case, engine, 0), step)
            engine.discard()
        found.append((sum(s[0] for s in seen), sum(s[1] for s in seen), set(rates), [s[2] for s in seen]))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.describe().replace(" ", "-") for layout in LAYOUTS])
def test_the_rate_is_the_recipes_on_every_process(layout: Layout) -> None:
    """Within five standard deviations of the count; an evaluation drops nothing."""
    warm()
    case = Case("dropout", layout, precision="fp32", model={"dropout": RATE})
    ranks = run_ranks(layout.world, lambda: draw(case))
    for first, other, again, evaluation in ranks:
        numbers, dropped, rates, masks = first
        assert numbers > 10_000 and rates == {RATE}
        assert abs(dropped - RATE * numbers) < 5 * math.sqrt(numbers * RATE * (1 - RATE))
        assert again == first
        assert not set(masks) & set(other[3])  # every step has masks of its own
        assert evaluation[0] == 0 and evaluation[2] == {0.0}
    assert not set(ranks[0][0][3]) & set(ranks[1][0][3])
    assert len(set(ranks[0][0][3])) == len(ranks[0][0][3])  # and so has every layer and micro-batch
