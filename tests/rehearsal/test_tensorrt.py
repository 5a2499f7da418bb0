"""Every name of TensorRT that the package uses, and every call, against the signatures of the real bindings: a wheel of
1.3 MB without the libraries, of which null/nvinfer.c has the names. What TensorRT makes of a call is not seen.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("exports/export_engine.py", "runtimes/tensorrt_backend.py")
KINDS = {  # what the files call a thing -> its class
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "settings": "IBuilderConfig",
    "added": "IOptimizationProfile",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
}
OTHERS = {  # of TensorRT-RTX alone, and what is asked for with a default
    "ComputeCapability",
    "num_compute_capabilities",
    "set_compute_capability",
    "__name__",
    "__version__",
}


@pytest.fixture(scope="module")
def bindings() -> Any:
    return pytest.importorskip("tensorrt_bindings")


def uses() -> Iterator[tuple[str, str, str, int | None]]:
    """(where, thing, name, arguments of a call; None where it is none, or they are unpacked) of all files."""
    for file in FILES:
        tree = ast.parse((ROOT / "inference" / file).read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        counts = {
            id(call.func): len(call.args)
            for call in calls
            if not any(isinstance(x, ast.Starred) for x in call.args)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                thing = ast.unparse(node.value).removeprefix("self.").lstrip("_")
                yield f"{file}:{node.lineno}", thing, node.attr, counts.get(id(node))


def counts_of(function: Any) -> set[int] | None:
    """How many arguments a bound function takes, from the signatures that pybind writes; None where it says none."""
    found: set[int] = set()
    for line in (function.__doc__ or "").splitlines():
        signature = re.match(r"(?:\d+\. )?\w+\((?:self: [^,)]+)?,? ?(.*)\) -> ", line.strip())
        if signature and not signature[1].startswith("*args"):
            given = re.findall(r"(?:^|, )\w+: ", signature[1])
            optional = len(re.findall(r" = ", signature[1]))
            found.update(range(len(given) - optional, len(given) + 1))
    return found or None


def test_every_name_and_call_is_tensorrts(bindings):
    met, wrong = set(), []
    for where, thing, name, count in uses():
        owner = bindings if thing == "library" else getattr(bindings, KINDS.get(thing, ""), None)
        if thing.startswith("library."):
            owner = bindings
            for part in thing.split(".")[1:]:
                owner = getattr(owner, part, None)
        if owner is None or name in OTHERS or name == "__init__":
            continue
        met.add(thing)
        if not hasattr(owner, name):
            wrong.append(f"{where}: {thing} has no {name}")
            continue
        real = getattr(owner, name)
        taken = None if isinstance(real, type) else counts_of(real)
        if count is not None and taken is not None and count not in taken:
            wrong.append(f"{where}: {thing}.{name} takes {taken} arguments, not {count}")
    assert not wrong, "\n".join(wrong)
    assert {"library", *KINDS} <= met, {"library", *KINDS} - met


def test_no_gpu_is_what_the_build_takes_it_for(bindings):
    with pytest.raises(TypeError, match="nullptr"):
        bindings.Builder(bindings.Logger())


@pytest.mark.parametrize(
    ("name", "count", "fits"),
    [("set_shape", 4, True), ("set_shape", 3, False), ("set_shape_input", 4, True)],
)
def test_a_wrong_count_would_be_found(bindings, name, count, fits):
    assert (count in (counts_of(getattr(bindings.IOptimizationProfile, name)) or ())) == fits
