"""Private names of torch that the package uses: each is listed here with what happens without it, is there in the torch
that runs the tests, and its absence is tried.
"""

import ast
import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "models", "data", "planner", "train", "prove", "inference", "eval", "cli")
USED = {
    "torch.ops.aten._efficient_attention_forward": "attention within documents on CUDA takes a dense mask",
    "torch.ops.aten._flash_attention_backward": "as the forward",
    "torch.ops.aten._flash_attention_forward": "attention on CUDA in other kernels (tests of attention_cpu.py)",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "plain products (tests of models/attention_cpu.py)",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "as the forward",
    "torch.ops.aten._softmax_backward_data": "three passes (tests of models/attention_cpu.py)",
    "torch._C._will_engine_execute_node": "tensor parallel backward computes both gradients",
    "torch.cuda.memory._dump_snapshot": "train --profile writes no snapshot of memory",
    "torch.cuda.memory._record_memory_history": "train --profile writes no snapshot of memory",
    "torch.ops._c10d_functional.all_gather_into_tensor": "no compiling over a tensor axis (tests of compiled blocks)",
    "torch.ops._c10d_functional.all_reduce": "as the gather",
    "torch.ops._c10d_functional.reduce_scatter_tensor": "as the gather",
    "torch.ops._c10d_functional.wait_tensor": "as the gather",
    "torch.ops.mkldnn._linear_pointwise": "products are torch's own",
}
NAMED = {"TorchDynamoException", "_cuda_clearCublasWorkspaces"}  # asked for by getattr
FOREACH = (
    "torch._foreach_"  # documented by torch (as beta), and what its own optimizers are made of: no fallback
)


def private_names() -> set[str]:
    """Dotted names below `torch` with a part that begins with one underscore; an import of such a module is none."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = []
            while isinstance(node, ast.Attribute):
                parts, node = [node.attr, *parts], node.value
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            start = {"torch": "torch", "aten": "torch.ops.aten"}.get(getattr(node, "id", ""))
            if start and private:
                found.add(".".join([start, *parts]))
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def test_every_private_name_is_listed() -> None:
    modules = {"torch._dynamo.exc"}  # whose only name that is used, in NAMED, is asked for with a default
    assert {name for name in private_names() if not name.startswith(FOREACH)} == set(USED) | modules


@pytest.mark.parametrize("name", sorted(private_names() | set(USED)))
def test_it_is_there(name: str) -> None:
    torch = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    value = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)


def test_without_the_engines_answer_both_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from throughline.train.parallel.tensor import _wanted

    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    asked = SimpleNamespace(next_functions=((node, 0), (node, 0)), needs_input_grad=(True, False))
    assert _wanted(asked, 0) and not _wanted(asked, 1)


def test_without_onednns_product_torchs_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from throughline.models.linear import _ask

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not _ask()


def test_without_the_compilers_error_a_failed_compile_is_still_made_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dynamo = pytest.importorskip("torch._dynamo")
    from throughline.train.parallelize import _compiled

    def fails(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.delattr(dynamo.exc, "TorchDynamoException")
    monkeypatch.setattr("torch.compile", lambda *_, **__: fails)
    guarded = _compiled(lambda *_: ("loss", "parts"), "auto", lambda: ())
    assert guarded(None, {}, None) == ("loss", "parts")  # type: ignore[arg-type]


def test_without_the_memory_history_a_profile_has_a_trace_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from throughline.train.logs import profile as profiles

    plan: Any = SimpleNamespace(config=None, recipe=None, device=torch.device("cuda"))
    monkeypatch.setattr(profiles, "predicted_kernels", lambda config, recipe: {})
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be no CUDA to profile
        profile = profiles.Profile(tmp_path, plan)
        for _ in range(8):
            profile.step()
        profile.close()
    assert (tmp_path / "trace.json").is_file() and not (tmp_path / "memory.pickle").exists()
