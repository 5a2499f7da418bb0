"""One process: every model, precision and form of batch makes a step on every card, with the attention kernel that is
meant, and the host waits for nothing but the step's figures.
"""

import subprocess
import sys

import pytest
import torch
from cases import CARDS, LLAMA, SMALL_CARD, Seen, card, make, model, rows
from throughline.core.errors import Refused, ThroughlineError
from throughline.train.checkpoints.snapshot import Buffers, take_snapshot
from throughline.train.precision import pick_device, use_deterministic_kernels
from throughline.train.step import launch_step

FORMS = {
    "plain": {},
    "documents": {"documents": True},
    "padded": {"padded": True},
    "unpadded": {"padded": True, "unpad": True},
}
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
LEAST = {"tf32": 80, "bf16": 80}  # the first card whose tensor cores take it
OWN_READ = "step.py"  # where a step reads its figures


def meant(capability: int, family: str, precision: str, form: str) -> str:
    """The kernel for a card. In 32 bits, and before Ampere, the memory-efficient one; on documents by their bounds. In
    64 bits there is only the plain one.
    """
    if precision == "fp64":
        return "math"
    kind = "flash" if capability >= 80 and precision in ("bf16", "fp16") else "efficient"
    return kind if form == "plain" else f"{kind} by bounds"


def cases() -> list:
    found = []
    for capability in CARDS:
        for family in ("gpt", "llama", "bert"):
            for precision in PRECISIONS:
                for form in FORMS if family == "bert" else ("plain", "documents"):
                    if capability < LEAST.get(precision, 0) or (precision == "fp64" and form != "plain"):
                        continue
                    name = f"SM{capability}-{family}-{precision}-{form}"
                    found.append(pytest.param(capability, family, precision, form, id=name))
    return found


@pytest.mark.parametrize(("capability", "family", "precision", "form"), cases())
def test_a_step_runs_with_the_kernel_that_is_meant(capability, family, precision, form):
    case = make(model(family), precision, card(capability), **FORMS[form])
    case.step()
    with Seen() as seen:
        case.step()
    assert seen.attention == {meant(capability, family, precision, form)}
    assert {place.split(":")[0] for place in seen.waits} <= {OWN_READ}
    assert seen.counted["waits"] <= 1 and seen.counted["launches"] > 100


@pytest.mark.parametrize(("capability", "precision"), [(75, "fp16"), (80, "bf16"), (90, "tf32")])
def test_a_step_waits_for_nothing(capability, precision):
    """Nor do the copies of a checkpoint, which go beside the next step."""
    case = make(model("gpt"), precision, card(capability))
    case.step()
    take_snapshot(case.trainer, buffers := Buffers())
    with Seen() as seen:
        launched = launch_step(case.trainer, case.batch, 1.0)
        take_snapshot(case.trainer, buffers)
    assert not seen.waits and not seen.counted["waits"] and not launched.read().skipped


def test_deterministic_kernels_are_there():
    """torch raises at one that has no order of its own."""
    card(80)
    try:
        use_deterministic_kernels()
        for family, form in (("gpt", "documents"), ("llama", "plain"), ("bert", "padded")):
            make(model(family), "bf16", card(80), **FORMS[form]).step()
    finally:
        torch.use_deterministic_algorithms(False)


WINDOW = {"attention_window": 64, "attention_block": 32}
VARIANTS = {  # what else a recipe may ask for: changes of the model, of the engine, and the least capability
    "dropout": ({"dropout": 0.1}, {"documents": True}, 70),
    "window": (WINDOW, {}, 70),
    "sinks and windows": (WINDOW | {"attention_sinks": True, "layer_pattern": "lg"}, {"documents": True}, 70),
    "window and documents": (WINDOW, {"documents": True}, 70),
    "full recomputation": ({}, {"recomputing": "full"}, 70),
    "selective recomputation": ({}, {"recomputing": "selective"}, 70),
    "offload": ({}, {"offload": 2}, 70),
    "fp8 products": (LLAMA | {"kv_heads": 4}, {"matmul": "fp8"}, 90),
}


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_recipe_may_ask_for_runs(name, capability):
    changes, asked, least = VARIANTS[name]
    if capability < least:
        pytest.skip(f"needs SM{least}")
    case = make(model("gpt", **changes), "bf16" if capability >= 80 else "fp16", card(capability), **asked)
    case.step()
    with Seen() as seen:
        case.step()
    # the norm of offloaded gradients is the host's
    assert {place.split(":")[0] for place in seen.waits} <= {
        OWN_READ,
        *(["engine.py"] if name == "offload" else []),
    }


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_validation_waits_once(family):
    config = model(family)
    case = make(config, "bf16", card(80))
    with Seen() as seen:
        figures = case.trainer.engine.evaluate([rows(config, 4)], 0.15)
    assert figures.device.type == "cpu" and sum(seen.waits.values()) == 1, seen.waits


@pytest.mark.parametrize(("capability", "precision"), [(70, "bf16"), (75, "bf16"), (75, "tf32")])
def test_a_precision_that_a_card_lacks_is_refused(capability, precision):
    card(capability)
    with pytest.raises(Refused, match=precision):
        pick_device("cuda", precision)


def test_a_card_without_kernels_in_this_torch_is_refused():
    assert "sm_70" not in torch.cuda.get_arch_list()
    card(70)
    with pytest.raises(ThroughlineError, match="kernel"):
        pick_device("cuda", "fp16")


CHOICE = """
import torch
device = torch.device("cuda", {device})
torch.cuda.set_device(device)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q = torch.empty(2, 4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    print(int(torch._fused_sdp_choice(q, q, q, is_causal=True)))
"""


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(70, "2 2 0"), (75, "2 2 0"), (80, "2 1 1"), (90, "2 3 3"), (100, "2 3 3")],  # fp32, fp16, bf16
)
def test_torch_prefers_the_kernel_that_is_meant(capability, expected):
    """0 is math, 1 flash, 2 memory-efficient, 3 cuDNN's, which torch prefers since Hopper, and so do we. In a process
    of its own: torch remembers the first card's answer.
    """
    words = [sys.executable, "-W", "ignore", "-c", CHOICE.format(device=CARDS[capability])]
    assert (
        subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == expected.split()
    )


def test_a_card_that_is_too_small_says_so():
    torch.cuda.set_device(SMALL_CARD)
    with pytest.raises(torch.OutOfMemoryError):
        make(model("gpt", layers=12, width=1024, heads=16), "bf16", torch.device("cuda", SMALL_CARD)).step()
