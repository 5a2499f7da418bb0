"""TensorRT as its recorded interface has it (`tensorrt_api`), whose engines compute with ONNX Runtime on the memory
that they are given. A plan is the graph with its profiles.
"""

import ctypes
import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tensorrt_api

DTYPES = {"tensor(float16)": "HALF", "tensor(float)": "FLOAT", "tensor(int64)": "INT64"}
NUMPY = {"HALF": np.float16, "FLOAT": np.float32, "INT64": np.int64}
HALF = {"Inputs": [{"Name": "x", "Format/Datatype": "Half"}]}


def engines(calls: dict[str, Any], new: Callable[..., Any], module: Callable[[], Any]) -> dict[str, Any]:
    """A plan opened and run: `new` makes an object of a class of the `module`, which is made of this."""

    def deserialize(self: Any, serialized_engine: bytes) -> Any:
        graph, profiles = pickle.loads(serialized_engine)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(graph, options)
        values = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
        reads = {value.name for value in session.get_inputs()}
        return new("ICudaEngine", _session=session, _values=values, _reads=reads, _profiles=profiles)

    def shape_of(self: Any, name: str) -> list[int]:
        return [dim if isinstance(dim, int) else -1 for dim in self._values[name].shape]

    def context(self: Any, strategy: Any = 0) -> Any:
        assert (
            module().ExecutionContextAllocationStrategy(strategy)
            in module().ExecutionContextAllocationStrategy
        )
        made_now = new("IExecutionContext", _engine=self, _profile=0, _shapes={}, _addresses={})
        calls.setdefault("contexts", []).append(made_now)
        return made_now

    def use_profile(self: Any, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return profile_index < len(self._engine._profiles)

    def set_input_shape(self: Any, name: str, shape: Any) -> bool:
        least, _, most = self._engine._profiles[self._profile][name]
        self._shapes[name] = tuple(shape)
        return len(shape) == len(least) and all(a <= dim <= b for a, dim, b in zip(least, shape, most))

    def set_address(self: Any, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._engine._values and memory != 0

    def execute(self: Any, stream_handle: int) -> bool:
        engine = self._engine
        if self._shapes.keys() != engine._reads or self._addresses.keys() != engine._values.keys():
            return False
        calls["executed"].append((self._profile, self._shapes["input_ids"]))

        def at(name: str, shape: Any) -> np.ndarray:
            kind = np.dtype(NUMPY[DTYPES[engine._values[name].type]])
            size = max(1, int(np.prod(shape))) * kind.itemsize
            memory = (ctypes.c_char * size).from_address(self._addresses[name])
            return np.frombuffer(memory, kind, int(np.prod(shape))).reshape(shape)

        feeds = {name: at(name, self._shapes[name]) for name in engine._reads}
        names = [name for name in engine._values if name not in engine._reads]
        for name, value in zip(names, engine._session.run(names, feeds)):
            at(name, value.shape)[...] = value
        return True

    return {
        "Runtime": {"deserialize_cuda_engine": deserialize},
        "ICudaEngine": {
            "num_io_tensors": lambda self: len(self._values),
            "num_optimization_profiles": lambda self: len(self._profiles),
            "get_tensor_name": lambda self, index: list(self._values)[index],
            "get_tensor_mode": lambda self, name: module().TensorIOMode[
                "INPUT" if name in self._reads else "OUTPUT"
            ],
            "get_tensor_dtype": lambda self, name: module().DataType[DTYPES[self._values[name].type]],
            "get_tensor_shape": shape_of,
            "get_tensor_profile_shape": lambda self, name, profile_index: self._profiles[profile_index][name],
            "create_execution_context": context,
            "create_engine_inspector": lambda self: new("EngineInspector"),
        },
        "IExecutionContext": {
            "set_optimization_profile_async": use_profile,
            "set_input_shape": set_input_shape,
            "set_tensor_address": set_address,
            "execute_async_v3": execute,
        },
    }


def fake(gpu: bool = True, product: dict[str, Any] = HALF, mha: str = "_gemm_mha_v2") -> types.ModuleType:
    """`product`: how the inspector describes a product of weights; `mha`: what it calls attention."""
    calls: dict[str, Any] = {"profiles": [], "cache": None, "cache_fits": True, "executed": []}

    def new(name: str, **fields: Any) -> Any:
        one = object.__new__(getattr(made, name))
        for key, value in fields.items():
            object.__setattr__(one, key, value)
        return one

    def builder(self: Any, logger: Any) -> None:
        calls["profiles"] = []
        if not gpu:
            logger.log(made.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def network(self: Any, flags: int = 0) -> Any:
        calls["network_flags"] = flags
        return new("INetworkDefinition", _path=None, _inputs=[])

    def parse(self: Any, model: str) -> bool:
        inputs = onnx.load(model, load_external_data=False).graph.input
        self._network._path, self._network._inputs = model, list(inputs)
        return True

    def set_shape(self: Any, input: str, *shapes: Any) -> None:
        self._shapes[input] = shapes

    def add(self: Any, profile: Any) -> int:
        calls["profiles"].append(profile._shapes)
        return len(calls["profiles"]) - 1

    def timing_cache(self: Any, serialized_timing_cache: bytes) -> Any:
        calls["cache"] = serialized_timing_cache
        return new("ITimingCache")

    def set_timing_cache(self: Any, cache: Any, ignore_mismatch: bool) -> bool:
        self._cache = cache if calls["cache_fits"] or not calls["cache"] else None
        return self._cache is not None

    def build(self: Any, network: Any, config: Any) -> Any:
        graph = Path(network._path).read_bytes()
        return memoryview(pickle.dumps((graph, calls["profiles"])))

    def information(self: Any, format: Any) -> str:
        layers = []
        for layer in [0, 1] * len(calls["profiles"]):  # every profile has kernels of its own
            where = f"[ONNX Layer: blocks.{layer}/MatMul_1]"
            layers.append({"Name": f"MatMul_{layer}", "LayerType": "gemm", "Metadata": where} | product)
            layers.append({"Name": f"{mha}_{layer}", "LayerType": "kgen", "Metadata": where} | HALF)
        return json.dumps({"Layers": layers})

    made = tensorrt_api.module(
        Builder={
            "__init__": builder,
            "create_network": network,
            "create_builder_config": lambda self: new("IBuilderConfig", _cache=None),
            "create_optimization_profile": lambda self: new("IOptimizationProfile", _shapes={}),
            "build_serialized_network": build,
        },
        INetworkDefinition={
            "num_inputs": lambda self: len(self._inputs),
            "get_input": lambda self, index: types.SimpleNamespace(name=self._inputs[index].name),
        },
        OnnxParser={
            "__init__": lambda self, network, logger: object.__setattr__(self, "_network", network),
            "parse_from_file": parse,
        },
        IBuilderConfig={
            "add_optimization_profile": add,
            "create_timing_cache": timing_cache,
            "set_timing_cache": set_timing_cache,
            "get_timing_cache": lambda self: self._cache,
        },
        IOptimizationProfile={"set_shape": set_shape},
        ITimingCache={"serialize": lambda self: b"timings"},
        **engines(calls, new, lambda: made),
        EngineInspector={"get_engine_information": information},
    )
    made.calls = calls
    return made
