"""TensorRT's Python interface as its bindings' package has it, without its libraries: names, parameters and enums.

`tensorrt_api.json` was recorded from tensorrt_cu13_bindings 11.4.0.106 (1.3 MB on the index): its .so wants nine C
names of three libraries, which stubs of a line each give. There `python tests/inference/tensorrt_api.py` records it
again.
"""

import enum
import functools
import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("tensorrt_api.json")
CLASSES = "Builder Logger ILogger IBuilderConfig IOptimizationProfile OnnxParser Runtime ICudaEngine IExecutionContext"
CLASSES += " EngineInspector ITimingCache INetworkDefinition ITensor IHostMemory"
ENUMS = "ExecutionContextAllocationStrategy DataType TensorIOMode LayerInformationFormat ProfilingVerbosity"
ENUMS += " NetworkDefinitionCreationFlag"


def record(library: Any) -> dict[str, Any]:
    """Of each class its methods with the parameters of every overload (`=` ends one with a default) and its
    properties; of each enum its members.
    """
    found: dict[str, Any] = {"version": library.__version__, "classes": {}, "enums": {}}
    for name in CLASSES.split():
        own = {key: value for key, value in vars(getattr(library, name)).items() if not key.startswith("__")}
        own["__init__"] = getattr(library, name).__init__
        methods = {key: signatures(value) for key, value in own.items() if callable(value) and value.__doc__}
        properties = sorted(key for key, value in own.items() if isinstance(value, property))
        found["classes"][name] = {
            "methods": {key: kinds for key, kinds in sorted(methods.items()) if kinds},
            "properties": properties,
        }
    for name in ENUMS.split():
        found["enums"][name] = {key: int(one) for key, one in getattr(library, name).__members__.items()}
    severities = library.ILogger.Severity.__members__
    return found | {"severities": {key: int(one) for key, one in severities.items()}}


def signatures(method: Any) -> list[list[str]]:
    """The parameters of each overload, from the docstring that pybind11 writes."""
    kinds = []
    for line in (method.__doc__ or "").splitlines():
        if match := re.match(r"(?:\d+\. )?\w+\(self: [^,)]+,? ?(.*)\) -> ", line.strip()):
            given = [part for part in re.split(r",\s*(?=\w+: )", match[1]) if part]
            kinds.append([part.split(":")[0] + ("=" if " = " in part else "") for part in given])
    return kinds


def module(**behaviours: dict[str, Callable[..., Any]]) -> types.ModuleType:
    """A module of the recorded classes: a call with other arguments, a name that is not there, and what has no
    behaviour here all raise, as the real one would.
    """
    api = json.loads(RECORD.read_text())
    made = types.ModuleType("tensorrt")
    made.__dict__["__version__"] = api["version"]
    for name, members in api["enums"].items():
        setattr(made, name, enum.IntEnum(name, members))
    for name, known in api["classes"].items():
        setattr(made, name, _class(name, known, behaviours.get(name, {})))
    made.__dict__["ILogger"].Severity = enum.IntEnum("Severity", api["severities"])
    made.__dict__["Logger"].ERROR = made.__dict__["ILogger"].Severity.ERROR
    return made


def _class(name: str, known: dict[str, Any], behaviours: dict[str, Callable[..., Any]]) -> type:
    methods, properties = known["methods"], set(known["properties"])
    assert set(behaviours) <= set(methods) | properties, (name, set(behaviours) - set(methods) - properties)

    def refuse(self: Any, key: str, value: Any) -> None:
        if key not in properties and not key.startswith("_") and type(self).__name__ == name:
            raise AttributeError(f"{name} has no attribute {key}")
        object.__setattr__(self, key, value)

    body: dict[str, Any] = {"__setattr__": refuse}
    for key, kinds in methods.items():
        default = (lambda self, *_, **__: None) if key == "__init__" else None
        body[key] = _method(f"{name}.{key}", kinds, behaviours.get(key, default))
    for key in properties & set(behaviours):
        body[key] = property(behaviours[key])
    return type(name, (), body)


def _method(name: str, kinds: list[list[str]], behaviour: Callable[..., Any] | None) -> Any:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        for kind in kinds:
            names = [key.rstrip("=") for key in kind]
            rest = names[len(args) :]
            needed = {key for key in kind if not key.endswith("=")} & set(rest)
            if len(args) <= len(kind) and needed <= set(named) <= set(rest):
                break
        else:
            raise TypeError(f"{name}(): incompatible function arguments {args} {named}; supported: {kinds}")
        assert behaviour is not None, f"{name} has no behaviour in this fake"
        return behaviour(self, *args, **named)

    return functools.wraps(behaviour)(call) if behaviour else call


if __name__ == "__main__":
    import tensorrt_bindings

    text = json.dumps(record(tensorrt_bindings), separators=(",", ":"))
    RECORD.write_text(text.replace('},"', '},\n"') + "\n")
