"""The proof that the rehearsal can fail: faults of every kind that it is there for, planted one by one, are found."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from cases import SMALL_CARD, Seen, card, make, model
from test_compiled import compile_and_step, spilled_bytes
from throughline.models import attention_cuda
from throughline.train import loss
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def on_card(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def heads(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return on_card(1, 2, 8, 64, dtype=dtype)


def flash_alone(dtype: torch.dtype = torch.bfloat16, mask: torch.Tensor | None = None) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(heads(dtype), heads(dtype), heads(dtype), attn_mask=mask)


def varlen() -> None:
    bounds, x = torch.zeros(3, dtype=torch.int32, device="cuda"), on_card(16, 2, 64, dtype=torch.float16)
    varlen_attn(x, x, x, bounds, bounds, 8, 8)


def fp8() -> None:
    x, one = on_card(16, 16, dtype=torch.float8_e4m3fn), torch.ones((), device="cuda")
    torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16)


def fused_adamw_with_its_count_on_the_host() -> None:
    weight = torch.nn.Parameter(on_card(4, 4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    for _ in range(2):
        weight.grad = on_card(4, 4)
        optimizer.step()
        optimizer.state[weight]["step"] = torch.zeros(())


def captured_wait() -> None:
    torch.cuda.set_sync_debug_mode("default")  # the capture itself waits, for what was before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            torch.cuda.current_stream().synchronize()
        finally:
            graph.capture_end()


HALF, WIDE, HOST = torch.float16, torch.float32, torch.zeros(2, dtype=torch.long)
PLANTED: dict[str, tuple[int, Callable[[], object]]] = {  # the card, and what is wrong on it
    "a CPU's tensor beside a GPU's": (80, lambda: on_card(4) + torch.zeros(4)),
    "a CPU's ids into a table": (80, lambda: F.embedding(HOST, on_card(8, 8))),
    "a CPU's index of gather": (80, lambda: on_card(4, 4).gather(1, HOST[:, None])),
    "a CPU's index": (80, lambda: on_card(4, 4)[HOST]),
    "item": (80, lambda: on_card(4).sum().item()),
    "a branch on a value": (80, lambda: bool(on_card(1) > 0)),
    "tolist": (80, lambda: on_card(4).tolist()),
    "numpy": (80, lambda: on_card(4, dtype=WIDE).numpy()),
    "nonzero": (80, lambda: on_card(4).nonzero()),
    "a mask as an index": (80, lambda: on_card(4, 4)[on_card(4, 4) > 0]),
    "a list made into a tensor": (80, lambda: torch.tensor([1.0], device="cuda")),
    "bf16 times fp16": (80, lambda: on_card(4, 4) @ on_card(4, 4, dtype=HALF)),
    "fp32 activations of a bf16 layer": (80, lambda: F.linear(on_card(4, 4, dtype=WIDE), on_card(4, 4))),
    "attention of two dtypes": (80, lambda: F.scaled_dot_product_attention(heads(), heads(WIDE), heads())),
    "flash in fp32": (80, lambda: flash_alone(WIDE)),
    "flash with a mask": (80, lambda: flash_alone(mask=on_card(8, 8) > 0)),
    "flash's operator in fp32": (
        80,
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(heads(WIDE), heads(WIDE), heads(WIDE)),
    ),
    "fp8 before Ada": (80, fp8),
    "bounds before Ampere": (75, varlen),
    "a CPU's generator": (80, lambda: torch.randn(4, device="cuda", generator=torch.Generator())),
    "an optimizer's count on the CPU": (80, fused_adamw_with_its_count_on_the_host),
    "shapes": (80, lambda: on_card(4, 5) @ on_card(4, 5)),
    "more memory than there is": (75, lambda: on_card(17, 2**29)),
    "a wait in a CUDA graph": (80, captured_wait),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    capability, fault = PLANTED[name]
    card(capability)
    on_card(4).sum()  # what happens once is not the fault
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        fault()


def test_a_kernel_that_the_card_lacks_is_found_in_a_step(monkeypatch):
    monkeypatch.setattr(attention_cuda, "AMPERE", (0, 0))
    with pytest.raises(RuntimeError, match="Ampere"):
        make(model("llama"), "fp16", card(75), documents=True).step()


def test_a_wait_is_found_in_a_step(monkeypatch):
    sums = loss.gpt_sums

    def impatient(*given):
        result = sums(*given)
        result.item()
        return result

    monkeypatch.setattr("throughline.train.objective.gpt_sums", impatient)
    case = make(model("llama"), "bf16", card(80))
    with Seen() as seen:
        case.step()
    assert {place.split(":")[0] for place in seen.waits} == {"test_faults.py"}
    # of two micro-batches, and of the reading of the figures after the step
    assert seen.counted["waits"] == 3


def test_a_break_and_a_second_compilation_are_found(monkeypatch, tmp_path):
    sums, calls = loss.gpt_sums, []

    def broken(*given):
        calls.append(None)
        if len(calls) > 2:  # another graph from the third call on
            torch._dynamo.graph_break()
        return sums(*given)

    monkeypatch.setattr("throughline.train.objective.gpt_sums", broken)
    case = make(model("llama"), "bf16", card(80), compiling="auto")
    found = compile_and_step(case, tmp_path)
    assert found["breaks"] and found["again"], found


@triton.jit
def greedy(x, y, size: tl.constexpr):
    places = tl.arange(0, size)
    values = tl.load(x + places)
    tl.store(y + places, values - tl.sum(values, 0))  # all of them are wanted again


def test_a_spill_is_found(tmp_path):
    types, target = {"x": "*fp32", "y": "*fp32", "size": "constexpr"}, GPUTarget("cuda", 80, 32)
    for size, spills in (
        (1024, False),
        (16384, True),
    ):  # 32 and 512 values to each of 32 threads, of 255 registers
        source = ASTSource(fn=greedy, signature=types, constexprs={"size": size})
        made = triton.compile(source, target=target, options={"num_warps": 1})
        cubin = tmp_path / "greedy.cubin"
        cubin.write_bytes(made.asm["cubin"])
        assert bool(spilled_bytes(cubin)) == spills


def test_too_small_a_card_is_found():
    torch.cuda.set_device(SMALL_CARD)
    with pytest.raises(torch.OutOfMemoryError):
        make(model("llama", layers=8, width=1024, heads=16), "bf16", torch.device("cuda", SMALL_CARD)).step()
