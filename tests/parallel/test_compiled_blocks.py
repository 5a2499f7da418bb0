"""Blocks are compiled whole in every layout, and compute what they compute eagerly."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.core.errors import WrongUse  # noqa: E402
from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, make_trainer, own_rows  # noqa: E402
from throughline.train import parallelize as compilation  # noqa: E402
from throughline.train.build import plan_run  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402
from throughline.train.loop import train  # noqa: E402
from throughline.train.loss import COLUMNS  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.parallelize import cpp_compiler  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import resolve  # noqa: E402
from throughline.train.recipes.rules import RULES  # noqa: E402
from throughline.train.step import train_step  # noqa: E402

LLAMA = {
    "tied": False,
    "kv_heads": 2,
    "gated": True,
    "positions": "rotary",
    "norm": "rmsnorm",
    "bias": False,
    "layers": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"layers": 2}),
    "llama": ("gpt", LLAMA),
    "bert": ("bert", {"layers": 2}),
}


def traced(case: Case) -> tuple[float, dict[str, int], int]:
    """(loss of a step, reasons of graph breaks, graphs) with blocks traced and run without code generation."""
    device = torch.device("cpu")
    if case.layout.world > 1:
        start_group(device, 60)
    torch._dynamo.utils.counters.clear()
    compile_as_asked = torch.compile
    torch.compile = lambda function, **options: compile_as_asked(function, **options, backend="aot_eager")
    mesh = make_mesh(case.layout, device, 60)
    engine = Engine(case.config, mesh, case.precision, SEED, case.recompute, compiling="on")
    engine.fill()
    loss = train_step(make_trainer(case, engine), own_rows(case, engine, 0), 1.0).loss
    counters = torch._dynamo.utils.counters
    return loss, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


ONES = [
    Case(model, layout, MODELS[model][0], precision, model=MODELS[model][1], rows=4)
    for layout in (Layout(), Layout(data=2), Layout(data=2, sharding="full"), Layout(tensor=2))
    for precision in ("bf16", "fp32")
    for model in MODELS
    if precision == "bf16" or layout.data == 1  # over data the blocks are the same
]


@pytest.mark.parametrize(
    "case", ONES, ids=lambda case: f"{case.layout.describe()}-{case.precision}-{case.name}"
)
def test_a_block_is_one_graph(case: Case) -> None:
    """No graph break inside a block, whose graph holds the collectives of tensor processes too; blocks of one
    shape share a graph. In bf16 gradients are fp32, at which torch's compiler would break.
    """
    warm()
    for loss, breaks, graphs in run_ranks(case.layout.world, lambda: traced(case), 600.0):
        assert loss > 0 and breaks == {}, breaks
        assert graphs == 2  # the blocks', and the head's with its loss


@pytest.mark.parametrize(("model", "words"), [("gpt", 50257), ("bert", 30522), ("llama", 128256)])
def test_published_vocabularies_are_one_graph_in_whole_tiles(
    model: str, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose matrices have a multiple of 64 rows: blocks, head and loss without a break in bf16."""
    monkeypatch.setitem(COLUMNS, "cpu", 64)
    family, fields = MODELS[model]
    shape = fields | {"vocab_size": words, "width": 16, "heads": 2}
    shape |= {"kv_heads": 1} if model == "llama" else {}
    case = Case("traced", Layout(), family, "bf16", model=shape, rows=4, length=32)
    ((loss, breaks, graphs),) = run_ranks(1, lambda: traced(case), 600.0)
    assert loss > 0 and breaks == {} and graphs == 2


def test_shapes_beyond_the_bound_share_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes have graphs of their own, and all that come then one together, which is said once."""
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    as_asked = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: as_asked(function, **options, backend=counting)
    )
    monkeypatch.setattr(compilation, "SHAPES", 2)
    torch._dynamo.reset()
    layer = torch.nn.Linear(4, 4)
    compiled = compilation._compiled(layer.forward, "on", layer.parameters)
    for rows in (2, 3, 5, 7, 11, 2, 13):
        x = torch.ones(rows, 4)
        assert torch.equal(compiled(x), layer(x))
    assert len(graphs) == 3 and capsys.readouterr().err.count("more than 2 shapes") == 1


@pytest.mark.parametrize("model", MODELS)
def test_graphs_break_at_the_ring_of_keys_alone(model: str) -> None:
    """Context processes: a whole function that is left as it is."""
    warm()
    family, fields = MODELS[model]
    case = Case("traced", Layout(context=2), family, "fp32", model=fields, rows=4)
    for loss, breaks, _ in run_ranks(2, lambda: traced(case), 600.0):
        assert loss > 0 and breaks
        assert all("disable" in why and "ChunkDocuments.attend" in why for why in breaks), breaks


def test_without_functional_collectives_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a torch that lacks them: products with their collectives would break every graph."""
    monkeypatch.setattr("throughline.train.parallelize.FIT_A_GRAPH", False)
    warm()
    case = Case("traced", Layout(tensor=2), "gpt", "fp32", model={"layers": 2}, rows=4)
    for loss, breaks, graphs in run_ranks(2, lambda: traced(case), 600.0):
        assert loss > 0 and (breaks, graphs) == ({}, 0)


@pytest.fixture
def make(store: Path) -> Callable[..., Recipe]:
    def recipe(parallel: dict[str, Any], **section: Any) -> Recipe:
        tree = {
            "data": {"train": str(store)},
            "model": {"overrides": {"layers": 2, "width": 32, "heads": 2, "vocab_size": 40}},
            "train": {"steps": 4, "sequence_length": 32, "batch_rows": 4, "compile": "off", "device": "cpu"}
            | section,
            "schedule": {"kind": "constant"},
            "parallel": parallel,
        }
        return resolve(build_recipe(tree, Recipe, RULES))

    return recipe


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full, recomputed": ({"data": 2, "sharding": "full"}, {"recompute": "full"}),
    "tensor": ({"tensor": 2}, {}),
    "pipeline, offload off": ({"pipeline": 2}, {"micro_batch_rows": 2}),
    "offload alone": ({}, {"offload": True}),
    "zero1, offload": ({"data": 2, "sharding": "zero1"}, {"offload": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager_to_rounding(name: str, make: Callable[..., Recipe], tmp_path: Path) -> None:
    """Losses and gradient norms of four steps in fp32.

    In a process of its own: torch's compiler waits for ever in a fork of a process that has compiled.
    """
    if not cpp_compiler():
        pytest.skip("needs a C++ compiler")
    if os.environ.get("THROUGHLINE_TEST_FORKS_FROM") != name:
        test = f"{__file__}::test_compiled_equals_eager_to_rounding[{name}]"
        environment = os.environ | {"THROUGHLINE_TEST_FORKS_FROM": name}
        words = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", test]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return
    warm()
    parallel, section = COMPILED[name]
    runs = []
    for compiles in ("off", "on"):
        recipe = make(parallel, **section, compile=compiles)

        def work(recipe: Recipe = recipe, compiles: str = compiles) -> None:
            torch.set_num_threads(1)
            train(plan_run(recipe), tmp_path / compiles)

        run_ranks(recipe.parallel.layout().world, work, 600.0)
        runs.append([(record["loss"], record["grad_norm"]) for record in read_metrics(tmp_path / compiles)])
    for (loss, norm), (eager_loss, eager_norm) in zip(*runs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-5)
        assert norm == pytest.approx(eager_norm, rel=1e-4)


def test_split_backwards_are_not_compiled(make: Callable[..., Recipe]) -> None:
    with pytest.raises(WrongUse, match="compiled backward"):
        make(
            {"pipeline": 2, "schedule": "zero-bubble-v", "stages_per_process": 2},
            compile="on",
            micro_batch_rows=1,
        )
