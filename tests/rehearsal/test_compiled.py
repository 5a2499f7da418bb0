"""Compiled training with real vocabularies: one graph for all blocks and one for head and loss, no break, no second
compilation, and Inductor's kernels as machine code for each card, without spilled registers.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Seen, card, make, model
from test_steps import OWN_READ
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from triton.backends import nvidia

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
# two layers of GPT-2 124M, of a Llama of 1B and of BERT-Base
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"width": 768, "heads": 12, "sequence_length": 1024},
    "llama": {"width": 2048, "heads": 32, "kv_heads": 8, "sequence_length": 512},
    "bert": {"width": 768, "heads": 12, "sequence_length": 512},
}
# that a block of threads may have (CUDA programming guide)
SHARED_BYTES = {75: 65536, 80: 166912, 90: 232448}
# generated kernels of a block, and of head and loss, forward and backward together; matrix products and attention are
# libraries' kernels. Fewer are welcome; more mean that something no longer fuses.
MOST_KERNELS = {"gpt": 22, "llama": 25, "bert": 44}


def spilled_bytes(cubin: Path) -> int:
    """Bytes of stack and local memory of a thread: where registers go that do not fit."""
    told = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    return sum(int(value) for value in re.findall(r"\b(?:STACK|LOCAL):(\d+)", told.stdout))


def compile_and_step(case: Case, place: Path, steps: int = 3) -> dict[str, int]:
    """The compiler's counts over some steps, with caches in `place`: nothing was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache(dir=str(place), delete=False):
        case.step()
        frames = counters["frames"]["total"]
        for _ in range(steps - 1):
            case.step()
    return {
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "again": counters["frames"]["total"] - frames,
    }


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("family", SIZES)
def test_blocks_head_and_loss_are_two_graphs_of_kernels_without_spills(family, capability, tmp_path):
    precision = "bf16" if capability >= 80 else "fp16"
    case = make(model(family, **SIZES[family]), precision, card(capability), compiling="on")
    found = compile_and_step(case, tmp_path)
    assert found == {"breaks": 0, "graphs": 2, "again": 0}
    with Seen() as seen:
        case.step()
    assert {place.split(":")[0] for place in seen.waits} <= {OWN_READ}
    generated = [text.count("async_compile.triton(") for text in map(Path.read_text, tmp_path.rglob("*.py"))]
    cubins = sorted(tmp_path.rglob("*.cubin"))
    print(family, capability, "kernels by graph:", sorted(filter(None, generated)), "cubins:", len(cubins))
    assert 4 < sum(generated) <= MOST_KERNELS[family]
    for cubin in cubins:
        facts = json.loads(cubin.with_suffix(".json").read_text())
        assert facts["target"]["arch"] == capability, cubin.name
        assert facts["shared"] <= SHARED_BYTES[capability], cubin.name
        assert not spilled_bytes(cubin), cubin.name


@pytest.mark.parametrize(("capability", "documents"), [(80, True), (90, False)])
def test_capped_scores_are_kernels_of_the_graph(capability, documents, tmp_path):
    """Gemma 2's attention, every second layer with a window: no array of scores, no break, no spills of ours."""
    shape = SIZES["llama"] | {"attention_softcap": 50.0, "attention_window": 128, "layer_pattern": "lg"}
    case = make(model("llama", **shape), "bf16", card(capability), compiling="on", documents=documents)
    found = compile_and_step(case, tmp_path)
    assert found == {"breaks": 0, "graphs": 3, "again": 0}  # of either kind of layer, and of the loss
    text = "".join(map(Path.read_text, tmp_path.rglob("*.py")))
    assert "flex_attention" in text and "flex_attention_backward" in text
    for cubin in tmp_path.rglob("*.cubin"):
        facts = json.loads(cubin.with_suffix(".json").read_text())
        assert facts["shared"] <= SHARED_BYTES[capability], cubin.name
        # torch's template for its backward on Hopper: a word of a thread
        assert spilled_bytes(cubin) <= (8 if "flex_attention_backward" in cubin.name else 0), cubin.name
