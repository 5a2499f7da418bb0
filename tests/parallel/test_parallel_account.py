"""The printed layout is what runs: parameters, collectives and their bytes counted on real processes."""

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.planner import tables  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.planner.memory import device_terms  # noqa: E402
from throughline.planner.tables import Coordinates, is_hidden_matrix  # noqa: E402
from throughline.planner.traffic import StepShape, held, traffic  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import LENGTH, ROWS, SEED, Case, make_trainer, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.compression import (  # noqa: E402
    Bf16Sum,
    OneBitAdam,
    PowerSum,
)
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import (  # noqa: E402  # noqa: E402
    described,
    layout_facts,
    model_config,
    predicted_memory,
    resolve,
)
from throughline.train.recipes.rules import RULES  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "send": "send",
}
KINDS |= {"all_gather_single_": "all-gather", "reduce_scatter_single_": "reduce-scatter"}
KINDS |= {"alltoall_base_": "all-to-all", "allgather_": "all-gather"}
SMALL = 64  # bytes: counts, losses and the norm
FIGURES = 448  # bytes: those, and the figures of four layers' routers


class Collectives(TorchDispatchMode):
    """Counts collectives by kind: calls and the bytes of the largest tensor of each; of an all-to-all what is sent."""

    def __init__(self, small: int = SMALL) -> None:
        super().__init__()
        self.small = small
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        namespace, name = function.name().split("::")
        if namespace == "c10d":
            kind = KINDS.get(name.split(".")[0], name)
            given = args[1] if kind == "all-to-all" else args
            size = max(
                tensor.nbytes
                for tensor in torch.utils._pytree.tree_leaves(given)
                if isinstance(tensor, torch.Tensor)
            )
            if size > self.small and kind != "recv_":
                self.calls[kind] += 1
                self.bytes[kind] += size
        return function(*args, **(kwargs or {}))


def count(case: Case) -> tuple[int, dict[str, int], dict[str, int], int]:
    device = torch.device("cpu")
    start_group(device, 60)
    mesh = make_mesh(case.layout, device, 60)
    engine = Engine(case.config, mesh, case.precision, SEED, case.recompute)
    engine.fill()
    for step in range(2):  # the second is steady: the first may gather what a later one finds gathered
        batch = own_rows(case, engine, step)
        with Collectives(FIGURES if engine.routers.names else SMALL) as seen:
            engine.accumulate(batch, step)
        engine.discard()
    parameters = sum(local.value.numel() for local in engine.local_shards)
    predicted = batch.micro_batches[0].get("predicted", torch.empty(0)).numel()
    return parameters, dict(seen.calls), dict(seen.bytes), predicted


def compressed(case: Case, scheme: str) -> tuple[Counter[str], Counter[str], float, int]:
    """Collectives of the gradients' sum, and of the momentum's, once the warm-up is over; bytes that `Communicator`
    counted; copies.
    """
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    optimizer = torch.optim.AdamW([parameter for _, parameter in engine.named_parameters()])
    if scheme == "one-bit-adam":
        named = list(engine.named_parameters())
        plain = [parameter for name, parameter in named if parameter.dim() < 2 or "table" in name]
        decayed = [parameter for name, parameter in named if not (parameter.dim() < 2 or "table" in name)]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        engine.communication_hook = optimizer = OneBitAdam(
            groups, communicator=engine.communicator, warmup_steps=1
        )
    else:
        engine.communication_hook = (
            Bf16Sum(engine.communicator)
            if scheme == "bf16"
            else PowerSum(engine.communicator, RANK, dense_steps=1)
        )
    for _ in range(2):
        for local in engine.local_shards:
            local.value.grad = torch.ones_like(local.value)
        before = engine.communicator.bytes_sent
        with Collectives() as seen:
            engine.communication_hook.sum_gradients(engine.gradients())
            engine.communication_hook.squared_norm(engine.gradients())
            optimizer.step()
        engine.discard()
    return seen.calls, seen.bytes, engine.communicator.bytes_sent - before, engine.communicator.axis.size


RANK = 3
COMPRESSED = [
    ("bf16", Case("bf16", Layout(data=2), model={"vocab_size": 257})),
    ("bf16", Case("bert bf16 x tensor", Layout(data=2, tensor=2), family="bert")),
    ("powersgd", Case("powersgd", Layout(data=3), family="bert")),
    ("powersgd", Case("powersgd x pipeline", Layout(data=2, pipeline=2))),
    ("one-bit-adam", Case("one-bit", Layout(data=3), family="bert", model={"vocab_size": 257})),
]


@pytest.mark.parametrize(
    ("scheme", "case"), COMPRESSED, ids=lambda given: getattr(given, "name", "").replace(" ", "-")
)
def test_compressed_gradients_are_printed_as_they_are_sent(
    scheme: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls and bytes of every collective, several buckets to a sum; and what a ring sends of them is what
    the metrics say.
    """
    monkeypatch.setattr(tables.bucket_slices, "__defaults__", (100_000,))
    warm()
    layout = case.layout
    for rank, (calls, sizes, sent, copies) in enumerate(
        run_ranks(layout.world, lambda: compressed(case, scheme))
    ):
        pipeline = rank // (layout.tensor * layout.context * layout.data)
        batch = StepShape(1, 2, LENGTH, 0, case.precision, scheme=scheme, rank=RANK)
        printed = [entry for entry in traffic(case.config, layout, batch, pipeline) if entry.axis == "data"]
        by_kind: dict[str, list[int]] = {}
        for entry in printed:
            known = by_kind.setdefault(entry.kind, [0, 0])
            by_kind[entry.kind] = [known[0] + entry.calls, known[1] + entry.bytes]
        assert dict(calls) == {kind: count for kind, (count, _) in by_kind.items()}
        # what goes through the mode is a part of each gathered vector
        found = {kind: size * (copies if kind == "all-gather" else 1) for kind, size in sizes.items()}
        assert found == {kind: size for kind, (_, size) in by_kind.items()}
        ring = (copies - 1) / copies
        assert sent == pytest.approx(
            sum(size * ring * (2 if kind == "all-reduce" else 1) for kind, (_, size) in by_kind.items())
        )
        assert scheme == "powersgd" or len(printed) >= 2


def muons_sends(case: Case) -> tuple[dict[str, int], int]:
    """Bytes of the collectives of one of Muon's updates, and those of this process's parts of cut matrices."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    optimizer = make_trainer(case, engine).optimizer
    for local in engine.local_shards:
        local.value.grad = torch.ones_like(local.value)
    with Collectives() as seen:
        optimizer.step()
    own = [local for local in engine.local_shards if is_hidden_matrix(local.name, len(local.spec.shape))]
    return dict(seen.bytes), sum(local.value.nbytes for local in own)


def test_muon_puts_each_matrix_together_on_one_process() -> None:
    """A part of a matrix goes to one process and a part of its direction comes back, over each of two axes: no process
    is sent the others' matrices.
    """
    warm()
    layout = Layout(data=2, tensor=2, sharding="full")
    case = Case("muon", layout, optimizer="muon", micro_rows=8)
    for sent, owned in run_ranks(4, lambda: muons_sends(case)):
        assert sent == {"all-to-all": 2 * 2 * owned}


def test_numbers_of_the_optimizer_are_those_of_the_recipe() -> None:
    """Muon keeps one number for each of a matrix, AdamW two."""
    tree = {
        "data": {"train": "tokens"},
        "model": {"overrides": {"layers": 2, "width": 64, "heads": 4, "vocab_size": 257}},
        "train": {"steps": 1, "sequence_length": 32, "batch_rows": 16},
        "parallel": {"data": 2},
    }
    sizes = {}
    for name in ("adamw", "muon"):
        recipe = resolve(build_recipe(tree | {"optimizer": {"name": name}}, Recipe, RULES))
        facts, _ = layout_facts(recipe, model_config(recipe))
        sizes[name] = facts["processes"][0]["optimizer"]
        assert sizes[name] == predicted_memory(model_config(recipe), recipe)["optimizer"]
    assert sizes["muon"] < sizes["adamw"]


EXPERTS = {"bias": False, "gated": True, "experts": 8, "shared_experts": 1, "balance_bias": True}
LATENT = {"bias": False, "positions": "rotary", "kv_latent": 24}
LATENT |= {"head_width": 20, "rope_width": 8, "value_width": 12}
CASES = [
    Case("tensor", Layout(tensor=2)),
    Case("bert tensor", Layout(tensor=2), family="bert", micro_rows=16),
    Case(
        "llama context x tensor",
        Layout(context=2, tensor=2),
        model={"gated": True, "kv_heads": 2, "positions": "rotary"},
    ),
    Case("recomputed llama tensor", Layout(tensor=2), recompute="full", model={"gated": True, "kv_heads": 2}),
    Case("bf16 bert tensor", Layout(tensor=2), family="bert", micro_rows=16, precision="bf16"),
    Case(
        "bf16 llama context",
        Layout(context=2),
        model={"kv_heads": 2, "positions": "rotary"},
        precision="bf16",
    ),
    Case(
        "windows recomputed context",
        Layout(context=2),
        model={"kv_heads": 2, "attention_window": 7, "layer_pattern": "llg"},
        recompute="full",
    ),
    Case("full", Layout(data=2, sharding="full")),
    Case("zero2 odd", Layout(data=3, sharding="zero2"), model={"vocab_size": 257}),
    Case("zero1 hybrid", Layout(data=4, sharding="zero1", replicas=2)),
    Case("pipeline x replicated", Layout(pipeline=2, data=2)),
    Case("v x tensor", Layout(pipeline=2, tensor=2, schedule="zero-bubble-v", stages_per_process=2)),
    Case("latent x tensor", Layout(tensor=2), model=LATENT | {"q_latent": 20}),
    Case("latent x recomputed tensor", Layout(tensor=2), recompute="full", model=LATENT),
    Case("experts", Layout(data=4, expert=2), model=EXPERTS),
    Case("experts x tensor x full", Layout(data=2, expert=2, tensor=2, sharding="full"), model=EXPERTS),
    Case(
        "bf16 experts x hybrid",
        Layout(data=8, expert=2, sharding="zero1", replicas=2),
        model=EXPERTS,
        precision="bf16",
    ),
]


@pytest.mark.parametrize(("recompute", "calls"), [("none", 10), ("full", 12)])
def test_a_llama_layer_gathers_each_input_once(recompute: str, calls: int) -> None:
    """Eight collectives a layer, four of them in the forward, as many as there are with one matrix for queries, keys
    and values; four more where the forward is repeated, else two gathers again, behind products.
    """
    warm()
    model = {"gated": True, "kv_heads": 2, "positions": "rotary"}
    found = []
    for layers in (1, 3):
        case = Case(
            "", Layout(tensor=2), recompute=recompute, model=model | {"layers": layers}, micro_rows=16
        )
        found.append(sum(sum(seen.values()) for _, seen, *_ in run_ranks(2, lambda case=case: count(case))))
    assert (found[1] - found[0]) / 2 / 2 == calls  # of two ranks, two layers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_counted_is_printed(case: Case) -> None:
    warm()
    layout, config = case.layout, case.config
    if ROWS // layout.data % case.micro_rows or layout.data == 3:
        case = Case(**{**case.__dict__, "micro_rows": 1})
    ranks = run_ranks(layout.world, lambda: count(case))
    exchanged = 0  # what a process sends of the rows of experts is up to the router, what all send is not
    micro_batches = ROWS // layout.data // case.micro_rows
    for rank, (parameters, calls, sizes, predicted) in enumerate(ranks):
        tensor, data = rank % layout.tensor, rank // (layout.tensor * layout.context) % layout.data
        pipeline = rank // (layout.tensor * layout.context * layout.data)
        shard = 0 if layout.shards == 1 else data % (layout.data // layout.replicas)
        assert parameters == held(config, layout, Coordinates(pipeline, tensor, 0, shard))
        printed_calls: Counter[str] = Counter()
        printed_bytes: Counter[str] = Counter()
        for entry in traffic(
            config,
            layout,
            StepShape(micro_batches, case.micro_rows, LENGTH, predicted, case.precision, case.recompute),
            pipeline,
        ):
            printed_calls[entry.kind] += entry.calls
            printed_bytes[entry.kind] += entry.bytes
        if (
            layout.schedule == "zero-bubble-v"
        ):  # split backwards gather gradients again: at most one for each row-cut matrix
            split = calls["all-gather"] - printed_calls["all-gather"]
            assert 0 < split <= micro_batches * config.layers
            printed_calls["all-gather"] += split
            printed_bytes["all-gather"] += split * case.micro_rows * LENGTH * config.width * 8
        exchanged += sizes.pop("all-to-all", 0) - printed_bytes.pop("all-to-all", 0)
        assert (calls, sizes) == (dict(printed_calls), dict(printed_bytes))
    assert exchanged == 0


def test_memory_falls_with_every_axis_that_cuts() -> None:
    """The estimate by which a run is refused: more processes on an axis never need more, and each cuts what
    it is for.
    """

    def terms(**parallel: Any) -> dict[str, Any]:
        train = {"steps": 1, "sequence_length": 256, "batch_rows": 4}
        tree = {
            "data": {"train": "tokens"},
            "model": {"preset": "gpt2-124m"},
            "train": train,
            "parallel": parallel,
        }
        recipe = resolve(build_recipe(tree, Recipe, RULES))
        return device_terms(*described(model_config(recipe), recipe, "cpu"))

    one = terms()
    assert terms(data=2)["optimizer"] == one["optimizer"]
    assert terms(data=2, sharding="zero1")["optimizer"] == pytest.approx(one["optimizer"] / 2, rel=0.01)
    assert terms(data=2, sharding="zero2")["gradients"] < 0.9 * one["gradients"]
    assert terms(data=4, sharding="full")["weights"] < 0.9 * terms(data=4, sharding="zero2")["weights"]
    assert terms(tensor=2)["weights"] == pytest.approx(one["weights"] / 2, rel=0.01)
    assert terms(tensor=2)["logits"] == one["logits"] / 2
    assert terms(context=2)["activations"] == one["activations"] / 2
    assert terms(pipeline=2)["weights"] < 0.75 * one["weights"]
