"""Private names of torch that the package uses: each is listed here with what happens without it, and is there in the
torch that runs the tests. A new torch that drops one is found here, by name.
"""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "models", "data", "planner", "train", "inference", "eval", "cli")
USED = {
    "torch._C._will_engine_execute_node": "tensor parallel backward; none",
    "torch._fused_adam_": "LAMB's first half; none",
    "torch._dynamo.exc.TorchDynamoException": "a compile that fails is made eager; none",
    "torch.cuda.memory._dump_snapshot": "train --profile on CUDA alone",
    "torch.cuda.memory._record_memory_history": "train --profile on CUDA alone",
    "torch.ops.mkldnn._linear_pointwise": "torch's own product where oneDNN is not built in",
}


FOREACH = "torch._foreach_"  # one launch for many tensors, as torch's own optimizers do it; no fallback


def private_names() -> set[str]:
    """Dotted names below `torch` with a part that begins with one underscore."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = []
            while isinstance(node, ast.Attribute):
                parts, node = [node.attr, *parts], node.value
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if isinstance(node, ast.Name) and node.id == "torch" and private:
                found.add(".".join(["torch", *parts]))
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def test_every_private_name_is_listed() -> None:
    assert {name for name in private_names() if not name.startswith(FOREACH)} <= set(USED)


@pytest.mark.parametrize("name", sorted(private_names() | set(USED)))
def test_it_is_there(name: str) -> None:
    torch = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    value = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
