"""Running an engine: a session with the four methods of ONNX Runtime's that our backends use.

- A call takes the profile that its shapes fit. Every profile has an execution context of its own.
- A binding that is run again with the same memory (a decode step, an encoder's bucket) is captured as a CUDA
  graph at its second run: a step of GPT-2 is about a hundred launches, and a replay is one.
- The manifest is checked before anything is loaded: an engine belongs to one library version and one GPU kind.

No engine has been run by the tests here: they drive this against a fake module that computes with ONNX Runtime.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.artifact import Manifest
from ...core.errors import Refused, WrongUse
from .tensorrt_library import check_engine, gpu_facts, load_library

TYPES = {"HALF": np.float16, "FLOAT": np.float32, "INT64": np.int64}


def open_engine(path: Path, manifest: Manifest) -> "EngineSession":
    """The engine artifact at `path`, ready to run on the first GPU.

    Raises Refused, with the command that builds it again, when it is for another library version or compute
    capability, WrongUse without a GPU, MissingExtra without the library.
    """
    library = load_library(manifest.facts["library"])
    check_engine(manifest, path, library, lambda: gpu_facts()["compute_capability"])
    return EngineSession(library, (path / "engine.plan").read_bytes(), path)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The work of `run` as a CUDA graph; returns its replay."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Binding:
    """The memory of one call: name -> (shape, address). The graph, when it has been captured."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[tuple[int, ...], int]] = {}
        self.runs = 0
        self.replay: Callable[[], None] | None = None

    def bind_input(self, name: str, kind: str, number: int, element: Any, shape: Any, address: int) -> None:
        """As ONNX Runtime's."""
        self.places[name] = (tuple(shape), address)

    bind_output = bind_input


class EngineSession:
    """An engine on the device; `capture` makes a CUDA graph of a call (None: calls are only ever launched)."""

    def __init__(
        self,
        library: Any,
        plan: bytes,
        where: Path | str = "",
        device: str = "cuda:0",
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = captured,
    ) -> None:
        self.device, self._capture, self._where = device, capture, where
        self._runtime = library.Runtime(library.Logger(library.Logger.ERROR))
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            fix = "build it again on this machine"
            raise Refused(
                "the engine could not be loaded", where=where, why="TensorRT returned none", fix=fix
            )
        self._engine = engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        reads = library.TensorIOMode.INPUT
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == reads]
        self._outputs = [name for name in names if name not in self._inputs]
        self._types = {name: TYPES[engine.get_tensor_dtype(name).name] for name in names}
        self._contexts: dict[int, Any] = {}
        profiles = range(engine.num_optimization_profiles)
        most = [engine.get_tensor_profile_shape("input_ids", profile)[2] for profile in profiles]
        self.rows, self.tokens = max(rows for rows, _ in most), max(tokens for _, tokens in most)

    def get_inputs(self) -> list[Any]:
        """As ONNX Runtime's: name, type and shape of each; dims that change are strings."""
        return [self._described(name) for name in self._inputs]

    def get_outputs(self) -> list[Any]:
        """As ONNX Runtime's."""
        return [self._described(name) for name in self._outputs]

    def _described(self, name: str) -> Any:
        shape = [dim if dim >= 0 else "any" for dim in self._engine.get_tensor_shape(name)]
        return SimpleNamespace(name=name, type=np.dtype(self._types[name]).name, shape=shape)

    def get_modelmeta(self) -> Any:
        """As ONNX Runtime's."""
        return SimpleNamespace(custom_metadata_map={})

    def io_binding(self) -> Binding:
        """As ONNX Runtime's."""
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        """Run on the bound memory and wait for it; from the second run on as a CUDA graph."""
        if binding.replay is not None:
            binding.replay()
            self._wait()
            return
        shapes = {name: binding.places[name][0] for name in self._inputs}
        context = self._context(self._profile(shapes))

        def run() -> None:
            if not context.execute_async_v3(self._stream()):
                raise Refused("the engine failed", where=self._where, why=f"shapes {shapes}")

        for name, shape in shapes.items():
            context.set_input_shape(name, shape)
        for name, (_, address) in binding.places.items():
            context.set_tensor_address(name, address)
        run()
        self._wait()
        binding.runs += 1
        if binding.runs == 2 and self._capture is not None:
            binding.replay = self._capture(run)

    def run(self, names: Sequence[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """As ONNX Runtime's: outputs on the host."""
        import torch

        kept = {
            name: torch.from_numpy(np.ascontiguousarray(value)).to(self.device)
            for name, value in feeds.items()
        }
        spare = torch.zeros(1, device=self.device)  # empty tensors have no address, and one is asked for
        binding = Binding()
        for name, value in kept.items():
            place = value.data_ptr() or spare.data_ptr()
            binding.bind_input(name, self.device, 0, self._types[name], value.shape, place)
        context = self._context(self._profile({name: value.shape for name, value in kept.items()}))
        for name, value in kept.items():
            context.set_input_shape(name, tuple(value.shape))
        outputs = {}
        for name in self._outputs:
            kind = torch.from_numpy(np.empty(0, self._types[name])).dtype
            outputs[name] = torch.empty(tuple(context.get_tensor_shape(name)), dtype=kind, device=self.device)
            place = outputs[name].data_ptr() or spare.data_ptr()
            binding.bind_output(name, self.device, 0, self._types[name], outputs[name].shape, place)
        self.run_with_iobinding(binding)
        return [outputs[name].cpu().numpy() for name in names or self._outputs]

    def _profile(self, shapes: dict[str, Any]) -> int:
        """The first profile that all shapes fit. Raises WrongUse when none does."""
        for profile in range(self._engine.num_optimization_profiles):
            ends = {name: self._engine.get_tensor_profile_shape(name, profile) for name in shapes}
            if all(
                all(low <= dim <= high for low, dim, high in zip(ends[name][0], shape, ends[name][2]))
                for name, shape in shapes.items()
            ):
                return profile
        raise WrongUse(
            "the engine has no profile for these shapes",
            where=self._where,
            why=f"input_ids {tuple(shapes['input_ids'])}",
            fix="build it with a bucket that holds them: --batches, --lengths",
        )

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._engine.create_execution_context()
            context.set_optimization_profile_async(profile, self._stream())
            self._contexts[profile] = context
        return self._contexts[profile]

    def _stream(self) -> int:
        if self.device == "cpu":
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.current_stream().synchronize()
