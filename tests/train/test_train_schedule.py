"""The learning rate: within bounds, continuous where it should be, at the stated values."""

import itertools

import pytest
from throughline.core.recipe import build_recipe
from throughline.train.optimizers.build import learning_rate_factor
from throughline.train.recipes.recipe import Recipe


def factors(steps: int = 100, **schedule: object) -> list[float]:
    recipe = build_recipe(
        {"train": {"steps": steps, "sequence_length": 8, "batch_rows": 4}, "schedule": schedule}, Recipe
    )
    return [learning_rate_factor(step, recipe) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "polynomial", "constant", "wsd", "inverse-sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_rises_to_the_peak_then_never_rises_again(kind: str, warmup: int) -> None:
    values = factors(kind=kind, warmup_steps=warmup, final_fraction=0.1, power=2.0)
    assert values[max(warmup - 1, 0)] == 1.0
    assert all((0.0 if kind == "inverse-sqrt" else 0.1) <= value <= 1.0 for value in values)
    assert all(later >= earlier for earlier, later in itertools.pairwise(values[:warmup]))
    assert all(later <= earlier for earlier, later in itertools.pairwise(values[warmup:]))


@pytest.mark.parametrize("kind", ["cosine", "linear", "polynomial", "constant", "wsd", "inverse-sqrt"])
@pytest.mark.parametrize("ramp", [None, (4, 4, 400), (60, 4, 7000), (4, 28, 7000)])
def test_no_step_moves_the_rate_by_more_than_a_whole_batch_of_the_warm_up(
    kind: str, ramp: tuple[int, int, int] | None
) -> None:
    """Whether the batch is whole when the warm-up ends or long after: every decay of 300 steps is flatter than that."""
    train = {"steps": 300, "sequence_length": 8, "batch_rows": 64}
    if ramp:
        train["batch_ramp"] = dict(zip(("start_rows", "step_rows", "over_rows"), ramp))
    recipe = build_recipe({"train": train, "schedule": {"kind": kind, "warmup_steps": 20}}, Recipe)
    values = [learning_rate_factor(step, recipe) for step in range(300)]
    assert max(abs(later - earlier) for earlier, later in itertools.pairwise(values)) <= 1 / 20 + 1e-12


def test_warm_up_is_linear_and_its_first_step_moves() -> None:
    assert factors(kind="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.5), ("linear", 0.5), ("polynomial", 0.125)])
def test_the_middle_of_the_decay(kind: str, middle: float) -> None:
    values = factors(kind=kind, warmup_steps=20, final_fraction=0.0, power=3.0)
    assert values[60] == pytest.approx(middle, abs=1e-12)
    assert 0 < values[99] < 0.04  # a decay to zero spends no step on a rate of zero


def test_the_shape_of_the_decay() -> None:
    """A quarter of the way down, where the shapes differ most; a constant rate does not go down."""
    at = {kind: factors(kind=kind, warmup_steps=20, final_fraction=0.0)[40] for kind in ("cosine", "linear")}
    assert at == {"cosine": pytest.approx((1 + 0.5**0.5) / 2), "linear": pytest.approx(0.75)}
    assert factors(kind="constant", warmup_steps=20, final_fraction=0.1)[20:] == [1.0] * 80


def test_a_shorter_decay_stays_at_its_end() -> None:
    values = factors(kind="linear", decay_steps=40, final_fraction=0.2)
    assert values[40:] == [pytest.approx(0.2)] * 60


def test_wsd_is_stable_until_its_decay() -> None:
    values = factors(kind="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.0)
    assert values[10:80] == [1.0] * 70
    assert values[90] == pytest.approx(0.5)


def test_wsd_decays_over_a_fifth_of_the_run() -> None:
    """In whole steps, and over one at least."""
    values = factors(104, kind="wsd", warmup_steps=10, final_fraction=0.0)
    assert values[84] == 1.0 and values[85:] == pytest.approx([1 - step / 20 for step in range(1, 20)])
    assert factors(4, kind="wsd", warmup_steps=0, final_fraction=0.0) == [1.0] * 4


def test_wsd_after_a_long_warm_up_decays_over_what_is_left() -> None:
    """A fifth of the run would end beyond it."""
    values = factors(kind="wsd", warmup_steps=90, final_fraction=0.0)
    assert values[90:] == pytest.approx([1 - step / 10 for step in range(10)])


def test_the_inverse_root_goes_on_from_the_warm_up() -> None:
    values = factors(kind="inverse-sqrt", warmup_steps=25)
    assert values[24] == 1.0
    assert values[99] == pytest.approx(0.5)  # four times the warm-up's steps
    values = factors(kind="inverse-sqrt", warmup_steps=25, warmup_start_step=-5)
    assert values[19] == 1.0 and values[94] == pytest.approx(0.5)


def test_nvidias_and_mlperfs_schedules() -> None:
    """The decay follows the share of the whole run, so the rate falls where the warm-up ends; a warm-up can
    start before the run.
    """
    values = factors(kind="polynomial", power=0.5, warmup_steps=20, final_fraction=0.0, decay_from_start=True)
    assert values[19] == 1.0
    assert values[20] == pytest.approx((1 - 0.2) ** 0.5)
    assert values[75] == pytest.approx(0.5)
    values = factors(kind="linear", warmup_steps=40, warmup_start_step=-10, final_fraction=0.0)
    assert values[0] == pytest.approx(11 / 40)
    assert values[29] == values[30] == 1.0
    assert values[65] == pytest.approx(0.5)  # half of the 70 steps that are left
