"""fp8 products of the blocks, by their emulation: the rounding is fp8's, all else is that of a bf16 run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao", reason="the extra fp8 is not installed")

import numpy as np  # noqa: E402
from throughline.core.errors import MissingExtra, Refused, WrongUse  # noqa: E402
from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.models.attention_cuda import CAPABILITIES  # noqa: E402
from throughline.models.config import GPTConfig  # noqa: E402
from throughline.models.init import build  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.evaluate import whole_model  # noqa: E402
from throughline.train.objective import prepare  # noqa: E402
from throughline.train.parallel.mesh import Mesh, make_mesh, start_group  # noqa: E402
from throughline.train.precision import _fp8_product, check_products, convert_products  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import resolve  # noqa: E402
from throughline.train.recipes.rules import RULES  # noqa: E402

CPU = torch.device("cpu")
CONFIG = GPTConfig(vocab_size=61, sequence_length=16, layers=2, width=32, heads=2)


def rounded(x: Any, dtype: Any) -> Any:
    """As written in the paper: the largest element becomes the largest number of the format, in float64."""
    scale = torch.finfo(dtype).max / x.abs().max().float()
    return (x.float() * scale).to(dtype).double() / scale.double()


def test_a_product_and_its_gradients_are_those_of_rounded_factors() -> None:
    """The bound is a bf16 rounding of the sum; that of fp8 itself, which plain bf16 lacks, is ten times as large."""
    torch.manual_seed(0)
    model: Any = build(CONFIG, 0, dtype=torch.bfloat16)
    convert_products(model, "fp8-emulated")
    layer = model.blocks["0"].mlp.up
    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(48, layer.out_features, dtype=torch.bfloat16)
    layer(x).backward(gradient)
    x8, weight8 = (
        rounded(x.detach(), torch.float8_e4m3fn),
        rounded(layer.weight.detach(), torch.float8_e4m3fn),
    )
    gradient8 = rounded(gradient, torch.float8_e5m2)
    with torch.no_grad():
        found = {"output": layer(x), "input": x.grad, "weight": layer.weight.grad}
    expected = {"output": x8 @ weight8.T, "input": gradient8 @ weight8, "weight": gradient8.T @ x8}
    plain = {
        "output": x.double() @ layer.weight.double().T,
        "input": gradient.double() @ layer.weight.double(),
        "weight": gradient.double().T @ x.double(),
    }
    for name, value in found.items():
        size = expected[name].norm()
        assert (value.double() - expected[name]).norm() / size < 4e-3, name
        assert (value.double() - plain[name]).norm() / size > 2e-2, name


@pytest.mark.parametrize("which", ["output", "input", "weight"])
def test_a_cut_layer_rounds_what_a_whole_one_rounds(which: Any) -> None:
    """Of both gradients the first factor, that of the output, has e5m2's range; all else has e4m3's precision. The
    bound is a bf16 rounding of the sum, a tenth of what the other format would make of the first factor.
    """
    from torchao.float8 import Float8LinearConfig

    torch.manual_seed(0)
    x, weight_OI = torch.randn(48, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    product = _fp8_product(Float8LinearConfig(emulate=True, pad_inner_dim=True))
    first = torch.float8_e4m3fn if which == "output" else torch.float8_e5m2
    expected = rounded(x, first) @ rounded(weight_OI, torch.float8_e4m3fn).T
    found = product(x, weight_OI, None, which)
    assert (found.double() - expected).norm() / expected.norm() < 4e-3


def rows(count: int = 4) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (count, CONFIG.sequence_length + 1))
    return {"input_ids": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}


def test_all_layers_of_the_blocks_compute_in_fp8_and_keep_their_parameters() -> None:
    model, plain = build(CONFIG, 0, dtype=torch.bfloat16), build(CONFIG, 0, dtype=torch.bfloat16)
    before = dict(model.named_parameters())
    convert_products(model, "fp8-emulated")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    names = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert names == {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(model.state_dict()) == set(plain.state_dict())


def test_a_scored_model_computes_as_its_checkpoint_does() -> None:
    engine, ids = (
        Engine(CONFIG, Mesh(Layout(), CPU), "bf16", matmul="fp8-emulated"),
        torch.from_numpy(rows()["input_ids"]),
    )
    engine.fill()
    with torch.no_grad():
        scored = whole_model(engine)(ids)
        assert torch.equal(scored, build(CONFIG, 0)(ids)) and scored.dtype == torch.float32


@pytest.mark.parametrize("degrees", [{"data": 2}, {"data": 2, "sharding": "full"}])
def test_layouts_compute_what_one_process_computes(degrees: dict[str, Any]) -> None:
    """The same micro-batches, so the same scales: losses and norms of three steps agree to the rounding of sums. The
    head is not tied: `fully_shard` adds the two gradients of a tied table in 16 bits.
    """
    config = replace(CONFIG, tied=False)
    warm()

    def work(layout: Layout) -> list[list[float]]:
        torch.set_num_threads(1)
        if layout.world > 1:
            start_group(CPU, 60)
        mesh = make_mesh(layout, CPU)
        engine = Engine(config, mesh, "bf16", matmul="fp8-emulated")
        engine.fill()
        values = [value for _, value in engine.named_parameters()]
        optimizer = torch.optim.AdamW(values, lr=1e-2)
        mine = {name: part[mesh.data.rank :: layout.data] for name, part in rows().items()}
        figures = []
        for step in range(3):
            batch = prepare(mine, "gpt", 2, CPU, 0.0)
            figures.append(engine.accumulate(batch, step).tolist())
            engine.update(optimizer, 1.0)
        return figures

    (spread, *_) = run_ranks(2, lambda: work(Layout(**degrees)))
    single = Engine(config, Mesh(Layout(), CPU), "bf16", matmul="fp8-emulated")
    single.fill()
    values = [value for _, value in single.named_parameters()]
    optimizer = torch.optim.AdamW(values, lr=1e-2)
    order = np.array([0, 2, 1, 3])  # the rows of the first process, then those of the second
    for step, figures in enumerate(spread):
        same = {name: part[order] for name, part in rows().items()}
        mine = single.accumulate(prepare(same, "gpt", 2, CPU, 0.0), step).tolist()
        single.update(optimizer, 1.0)
        assert figures[:2] == pytest.approx(mine[:2], rel=1e-5), (step, figures, mine)


def test_layers_cut_over_tensor_processes_compute_in_fp8() -> None:
    """First gradients of two tensor processes and of one, put beside those of bf16: no further off than one process's
    by a quarter (scales differ where a process has a part of a factor), and off by what fp8 rounds, not by nothing.
    """
    config = replace(CONFIG, width=64, heads=4, tied=False)
    warm()

    def gradients(tensor: int, matmul: str) -> dict[str, tuple[Any, Any]]:
        torch.set_num_threads(1)
        if tensor > 1:
            start_group(CPU, 60)
        engine = Engine(config, make_mesh(Layout(tensor=tensor), CPU), "bf16", matmul=matmul)
        engine.fill()
        engine.accumulate(prepare(rows(), "gpt", 4, CPU, 0.0), 0)
        return {
            local.name: (local.spec.box.slices(), local.computed.grad.double().numpy())
            for local in engine.local_shards
        }

    (plain,) = run_ranks(1, lambda: gradients(1, "same"))
    (alone,) = run_ranks(1, lambda: gradients(1, "fp8-emulated"))
    parts = run_ranks(2, lambda: gradients(2, "fp8-emulated"))
    plain_parts = run_ranks(2, lambda: gradients(2, "same"))
    for name, (_, exact) in plain.items():
        if not name.startswith("blocks") or exact.ndim < 2:
            continue
        off = [np.linalg.norm(alone[name][1] - exact) / np.linalg.norm(exact)]
        for spread in (parts, plain_parts):
            whole = np.zeros_like(exact)
            for part in spread:
                place, values = part[name]
                whole[place] = values
            off.append(np.linalg.norm(whole - exact) / np.linalg.norm(exact))
        one, cut, cut_plain = off
        assert cut < 1.25 * one and cut > 3 * cut_plain, (name, off)


def tree(**changes: Any) -> dict[str, Any]:
    train = {"steps": 4, "sequence_length": 16, "batch_rows": 4, "matmul": "fp8-emulated", "device": "cpu"}
    overrides = {"layers": 2, "width": 32, "heads": 2, "vocab_size": 61}
    made = {"data": {"train": "tokens"}, "model": {"overrides": overrides}, "train": train, "parallel": {}}
    for key, value in changes.items():
        section, _, field = key.partition("__")
        target = made["model"]["overrides"] if section == "model" else made[section]
        target[field] = value
    return made


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"train__precision": "fp16"}, "train.matmul"),
        ({"model__width": 24}, "model.overrides.width"),
        ({"model__mlp_width": 48, "parallel__tensor": 2}, "model.overrides.mlp_width"),
    ],
)
def test_what_fp8_cannot_do_is_refused_with_the_field(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(WrongUse, match="fp8") as refused:
        build_recipe(tree(**changes), Recipe, RULES)
    assert where in str(refused.value)


def test_auto_precision_is_bf16_where_products_are_fp8() -> None:
    assert resolve(build_recipe(tree(), Recipe, RULES)).train.precision == "bf16"


def test_devices_without_fp8_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongUse, match="a CPU has no fp8 products"):
        check_products("fp8", CPU)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setitem(CAPABILITIES, None, (8, 0))
    with pytest.raises(Refused, match=r"NVIDIA A100 cannot compute in fp8(.|\n)*use bf16"):
        check_products("fp8", torch.device("cuda"))
    monkeypatch.setitem(CAPABILITIES, None, (8, 9))
    check_products("fp8", torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="torchao"):
        check_products("fp8", torch.device("cuda"))


def test_a_run_learns_and_its_checkpoint_is_that_of_any_run(gpt_store: Path, tmp_path: Path) -> None:
    """Half a run and the rest of it have the losses of a whole one; what is saved opens without torchao's layers."""
    from throughline.train.build import plan_run
    from throughline.train.checkpoints.checkpoint import load_model
    from throughline.train.logs.metrics import read_metrics
    from throughline.train.loop import train

    def run(name: str, steps: int) -> list[float]:
        given = tree(
            train__steps=steps, train__batch_rows=8, data__train=str(gpt_store), train__compile="off"
        )
        del given["model"]["overrides"]["vocab_size"]
        given |= {"optimizer": {"learning_rate": 1e-2}, "schedule": {"kind": "constant"}}
        train(plan_run(resolve(build_recipe(given, Recipe, RULES))), tmp_path / name)
        return [record["loss"] for record in read_metrics(tmp_path / name) if "loss" in record]

    whole = run("whole", 8)
    run("halves", 4)
    assert run("halves", 8) == whole and whole[-1] < 0.9 * whole[0], whole
    loaded, _ = load_model(tmp_path / "whole")
    assert not any("Float8" in type(module).__name__ for module in loaded.modules())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
