"""Memory and time against plain statements of what a process holds and does, for drawn layouts."""

import random
from dataclasses import replace

import pytest
from throughline.models.config import preset
from throughline.planner.cost import HOST_UPDATE_BYTES_PER_S, step_time
from throughline.planner.hardware import FITTED, find_cluster
from throughline.planner.layout import Layout
from throughline.planner.memory import FRAGMENTATION, device_terms, needed_bytes
from throughline.planner.search import Search, candidate_at, find_layouts, fit_in, why_not
from throughline.planner.serve import PAGE, RUNTIME_BYTES, serve
from throughline.planner.traffic import context_sends, tensor_sends
from throughline.planner.work import Layouts, Work, find_software

GPT = preset("gpt3-1.3b")  # 24 layers, 16 heads of 128
OURS = find_software("throughline", "bf16")
WORK = Work(GPT, 64, 2048)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_process_holds(seed: int) -> None:
    """Bytes of the first process by plain arithmetic: 2 of a weight, 4 of a gradient, 12 of master and moments;
    for each layer and token in flight 34 bytes of the width (Korthikanti et al. 2022, equation 2) without the 2 of
    dropout masks; the logits once; everything divided by what divides it.
    """
    draw = random.Random(seed)
    data, tensor, pipeline, context = (draw.choice(sizes) for sizes in ((1, 2, 4), (1, 2), (1, 2, 4), (1, 2)))
    sharding = draw.choice(("replicated", "zero1", "zero2", "full")) if data * context > 1 else "replicated"
    replicas = 2 if data == 4 and sharding != "replicated" and draw.random() < 0.5 else 1
    rows = draw.choice((1, 2))
    layout = Layout(data, tensor, pipeline, context, sharding, replicas)  # type: ignore[arg-type]
    terms = device_terms(WORK, Layouts.of(layout, rows, "none", False), OURS)
    layer, table = GPT.block_parameters(), GPT.vocab_size * GPT.width
    rest = GPT.parameter_count() - GPT.layers * layer
    held = (GPT.layers // pipeline * layer + (rest if pipeline == 1 else table + rest % GPT.width)) / tensor
    shards = layout.shards
    alone = pipeline == 1
    # the shards are the masters; weights are there while they are gathered
    streamed = sharding == "full" and alone
    assert terms["weights"] == pytest.approx(2 * held * (not streamed), rel=2e-3)
    scattered = sharding in ("zero2", "full") and alone
    assert terms["gradients"] == pytest.approx(4 * held / (shards if scattered else 1), rel=2e-3)
    assert terms["optimizer"] == pytest.approx(
        12 * held / (1 if sharding == "replicated" else shards), rel=2e-3
    )
    assert terms["gathered weights"] == 2 * (rest + 2 * layer) / tensor * streamed
    assert terms["reduced gradients"] == 4 * rest / tensor * (streamed and data * rows < 64)
    tokens = rows * 2048 / context
    flying = min(pipeline, 64 // (data * rows))
    of_a_token = GPT.width * (28 / tensor + 4)  # the inputs of the products stay as they were gathered
    assert terms["activations"] == GPT.layers / pipeline * flying * tokens * of_a_token
    assert terms["layer at work"] == terms["evaluated"] == 0
    logits, sliced, done, worst = (
        tokens * GPT.vocab_size / tensor,
        tokens * GPT.vocab_size / tensor > 2**27,
        0,
        0.0,
    )
    while logits > 0:  # a slice in 16 bits and in fp32, then in 16 bits beside its gradient of the matrix
        part, done = min(logits, 2**27), done + 1
        worst = max(worst, 6 * part + 2 * (done - 1) * table / tensor)
        logits -= part
    worst = max(worst, 2 * part + 2 * done * table / tensor) if sliced else worst
    here = worst + 4 * tokens * GPT.width / tensor
    assert terms["logits"] == (pytest.approx(here, rel=1e-9) if alone else 0)
    last = device_terms(WORK, Layouts.of(layout, rows, "none", False), OURS, -1)
    assert last["logits"] == pytest.approx(here, rel=1e-9) and last["activations"] <= terms["activations"]


def test_moments_of_a_step_are_not_added_up() -> None:
    """Full recomputation keeps inputs and one layer at work; logits and that layer, a validation and an update live
    at different times: the larger of them counts.
    """
    layouts = Layouts.of(Layout(), 4, "full", False)
    software = replace(OURS, evaluated_tokens=2048)
    terms = device_terms(WORK, layouts, software)
    tokens = 4 * 2048
    assert terms["activations"] == GPT.layers * 2 * tokens * GPT.width
    assert terms["layer at work"] == 32 * tokens * GPT.width
    assert terms["evaluated"] == 2048 * (8 * GPT.vocab_size + 2 * (8 * GPT.width + 2 * GPT.feed_forward_size))
    kept = sum(terms[name] for name in ("weights", "gradients", "optimizer", "activations", "runtime"))
    assert needed_bytes(WORK, layouts, software) == kept + max(terms["logits"], terms["layer at work"])
    assert terms["logits"] > terms["layer at work"]
    few = Work(preset("gpt3-1.3b", vocab_size=1024), 64, 2048)
    terms = device_terms(few, layouts, OURS)
    kept = sum(terms[name] for name in ("weights", "gradients", "optimizer", "activations", "runtime"))
    assert needed_bytes(few, layouts, OURS) == kept + terms["layer at work"]


def test_the_hosts_memory_bounds_offload() -> None:
    """What fits a chip with its optimizer on the host is not planned for a node whose memory is too small, for one
    process or for all of them together; and the reason names the host.
    """
    cluster = find_cluster("dgx-1-32gb")
    work, fixed = Work(preset("gpt3-2.7b"), 64, 2048), {"offload": (1,), "sharding": (1,), "pipeline": (1,)}
    asked = Search(work, cluster, find_software("throughline", "fp16"), 8, fixed)
    found = find_layouts(asked)
    assert found.best
    host = min(candidate.host_bytes for candidate in found.best) * 8 / 2**30
    tight = replace(asked, cluster=replace(cluster, host_memory_gib=0.9 * host))
    assert not find_layouts(tight).best
    refused = candidate_at(tight, found.best[0].layouts)
    assert not refused.fits and "host's memory" in why_not(refused, refused, found.capacity)
    assert fit_in(replace(asked, cluster=replace(cluster, host_memory_gib=0)), 0, 1e18)  # not known
    assert found.capacity == 32 * 2**30 * (1 - FRAGMENTATION)


def test_updates_are_of_what_a_process_owns() -> None:
    """Adam reads and writes 36 bytes of a parameter: those of its shard, on the chip or at CPU-Adam's speed."""
    cluster = find_cluster("dgx-a100-80gb")
    count = GPT.parameter_count()
    bandwidth = cluster.chip.bandwidth_gb_s * 1e9 * FITTED.memory_fraction
    for layout, owned in ((Layout(data=4), count), (Layout(data=4, sharding="zero1"), count / 4)):
        for offload, speed in ((False, bandwidth), (True, HOST_UPDATE_BYTES_PER_S)):
            parts = step_time(WORK, Layouts.of(layout, 1, "none", offload), cluster, OURS)
            assert float(parts["optimizer"]) == pytest.approx(36 * owned / speed, rel=1e-9)
            assert (parts["offload exposed"] > 0) == offload


def test_no_more_hides_than_there_is_to_hide_behind() -> None:
    """Gradients hide behind half of a backward at most: one of a micro-batch's two passes, or two of three."""
    slow = replace(find_cluster("dgx-a100-80gb"), node_gb_s=1e-3, chips_per_node=4096)
    for recompute, share in (("none", 1 / 2), ("full", 2 / 3)):
        layouts = Layouts.of(Layout(data=2), 1, recompute, False)
        hidden, bare = (
            step_time(WORK, layouts, replace(slow, constants=replace(FITTED, overlap=overlap)), OURS)
            for overlap in (0.5, 0.0)
        )
        names = ("matrix products", "attention", "memory-bound kernels", "host issue")
        spent = sum(float(bare[name]) for name in names) / 32  # micro-batches
        gain = float(bare["data exposed"]) - float(hidden["data exposed"])
        assert gain == pytest.approx(0.5 * share * spent, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "calls"), [("gpt3-1.3b", (10, 12)), ("llama-8b", (10, 12)), ("llama-7b", (10, 12))]
)
def test_gathers_and_scatters_of_a_layer(name: str, calls: tuple[int, int]) -> None:
    """One gather of each input of matrices that are cut by columns (qkv; up and gate), again for their gradients and
    when it is recomputed, and its scatter; a scatter and a gather for each that is cut by rows.
    """
    for again, count in enumerate(calls):
        sent = tensor_sends(preset(name), OURS, 1, 1, 1, 0, 0, again)
        assert sum(number for kind, number, _ in sent if kind != "all-reduce") == count
        other = tensor_sends(preset(name), find_software("megatron-2022"), 1, 1, 1, 0, 0, again)
        assert sum(number for _, number, _ in other) == (8, 12)[again]
        over = context_sends(preset(name), OURS.precision, 1, 1, 4, again)
        calls_of = {kind: [number for *_, number, _ in sent] for kind, sent in over.items()}
        # round the ring in forwards and once for backward; with a window a gather of each forward and a scatter
        assert calls_of == {"g": [3 * (2 + again), 4], "l": [1 + again, 1]}


def test_an_engine_holds_weights_cache_and_one_layer() -> None:
    """Two bytes of a parameter, keys and values of every position in whole pages, one layer's activations, and the
    runtime's; a generated token is a pass over one more position.
    """
    config, cluster = preset("llama-7b"), find_cluster("a100-80gb")
    first, more = (serve(config, cluster, 4, 512, new, "fp16") for new in (1, 65))
    cache = 2 * 2 * 32 * 4096 * 4
    assert more.bytes - first.bytes == 64 * cache  # 513 positions take nine pages of 64, 577 ten
    layer = 2 * 4 * 512 * (2 * config.width + config.feed_forward_size)
    assert first.bytes == 2 * config.parameter_count() + 9 * PAGE * cache + layer + RUNTIME_BYTES
    assert first.seconds == first.first_token_seconds == more.first_token_seconds
    each = (more.seconds - first.seconds) / 64
    assert (
        2 * config.parameter_count() * 0.95 / (cluster.chip.bandwidth_gb_s * 1e9) < each < first.seconds / 4
    )
    assert more.per_second == 4 / more.seconds
