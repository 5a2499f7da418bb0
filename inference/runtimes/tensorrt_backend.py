"""TensorRT and TensorRT-RTX: an engine runs as a session with the methods of ONNX Runtime's that our backends use.

- A call takes the profile that its shapes fit, on a stream of the session's own: on the default one TensorRT waits
  after every launch. Contexts take memory when a profile is chosen, not that of the largest at once.
- A binding that is run again with the same memory (a decode step, an encoder's bucket) is captured as a CUDA graph at
  its second run, in a context of its own, to whose shapes and addresses the graph belongs: a step of GPT-2 is about a
  hundred launches, and a replay is one. TensorRT-RTX swaps kernels while it runs: it is told to capture by itself.

Tests run no engine: they drive this against a fake module of the recorded interface, which computes with ONNX Runtime.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...core.artifact import Manifest
from ...core.backend import Limits
from ...core.console import warn
from ...core.errors import Refused, WrongUse, extra
from ...core.hardware import machine
from .source import pick_device

LEAST = (10, 15)  # strong typing, Attention, TensorScatter and RotaryEmbedding in the parser


def load_library(name: str) -> Any:
    """The module `tensorrt` or `tensorrt_rtx`. Raises MissingExtra, WrongUse for a version that is too old."""
    library = extra(name, "building an engine", name.replace("_", "-"))
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if name == "tensorrt" and version < LEAST:
        why = f"its parser lacks operators of these graphs; {LEAST[0]}.{LEAST[1]} has them"
        fix = "pip install 'throughline[tensorrt]'"
        raise WrongUse(f"TensorRT {library.__version__} is too old", why=why, fix=fix)
    return library


def check_engine(manifest: Manifest, where: Path, library: Any, capability: Callable[[], str]) -> None:
    """Raise Refused, with the command that builds it again, when an engine is not for this library and GPU."""
    here = {"library": library.__name__, "library_version": library.__version__}
    for what, value in (here | {"compute_capability": capability()}).items():
        if (built := manifest.facts[what]) != value:
            name = what.removeprefix("library_").replace("_", " ")
            why = f"it was built for {built}, here is {value}"
            fix = f"build it again here: {manifest.command}"
            raise Refused(f"this engine was built for another {name}", where=where, why=why, fix=fix)


def gpu_facts(device: str = "cuda:0") -> dict[str, Any]:
    """A GPU's name, compute capability, driver and CUDA version. Raises WrongUse when there is none."""
    if not torch.cuda.is_available():
        fix = "build on the machine that has the GPU; --to tensorrt-rtx compiles without one"
        raise WrongUse("there is no GPU here", why="torch sees no CUDA device", fix=fix)
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    driver = next((gpu.driver for gpu in machine().gpus), "unknown")
    facts = {"gpu": torch.cuda.get_device_name(device), "compute_capability": capability}
    return facts | {"driver": driver, "cuda": torch.version.cuda}


TYPES = {"HALF": "float16", "FLOAT": "float32", "INT64": "int64"}  # TensorRT's names and NumPy's


def open_engine(path: Path, manifest: Manifest, wanted: str = "auto") -> "EngineSession":
    """The engine at `path`, ready to run. Raises WrongUse without a GPU, MissingExtra, and as `check_engine`."""
    if wanted == "cpu":
        fix = "run it on the machine that has the GPU; the model that it was built from runs here"
        raise WrongUse("an engine needs a GPU", where="--device cpu", fix=fix)
    library, device = load_library(manifest.facts["library"]), pick_device(wanted)
    device = "cuda:0" if device == "cpu" else device  # of which gpu_facts says that there is none
    check_engine(manifest, path, library, lambda: gpu_facts(device)["compute_capability"])
    return EngineSession(library, (path / "engine.plan").read_bytes(), path, device)


def captured(run: Callable[[], None], stream: Any = None, pool: Any = None) -> Callable[[], None]:
    """The work of `run` as a CUDA graph; returns its replay. `pool`: memory that several graphs share."""
    graph, clear = torch.cuda.CUDAGraph(), getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()  # cuBLAS shall work in memory of the graph's: anybody in the process may free torch's
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    clear()
    return graph.replay


@dataclass
class Binding:
    """The memory of one call: name -> (shape, address). The graph with its context, when it has been captured."""

    places: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    runs: int = 0
    replay: Callable[[], None] | None = None
    context: Any = None

    def bind_input(self, name: str, kind: str, number: int, element: Any, shape: Any, address: int) -> None:
        self.places[name] = (tuple(shape), address)

    bind_output = bind_input


class EngineSession:
    """An engine on the device."""

    def __init__(self, library: Any, plan: bytes, where: Path | str = "", device: str = "cuda:0") -> None:
        self.device, self._where, self._library = device, where, library
        self._strategies = getattr(library, "CudaGraphStrategy", None)  # of TensorRT-RTX alone
        self._capture = captured if self._strategies is None and device != "cpu" else None
        self.capture_failures = 0
        self._stream: Any = torch.cuda.Stream(device) if device != "cpu" else None
        self._handle = self._stream.cuda_stream if self._stream else 0
        with torch.cuda.stream(self._stream):
            self._runtime = library.Runtime(library.Logger(library.Logger.ERROR))
            loaded = self._runtime.deserialize_cuda_engine(plan)
            self._engine = engine = self._done(loaded, "load this engine")
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        reads = library.TensorIOMode.INPUT
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == reads]
        self._outputs = [name for name in names if name not in self._inputs]
        self._contexts: dict[int, Any] = {}
        profiles = range(engine.num_optimization_profiles)
        most = [engine.get_tensor_profile_shape("input_ids", profile)[2] for profile in profiles]
        # Each length has been built for all rows. Of a prompt a GPT takes so many tokens in a call, and goes on.
        self.limits = Limits(max(rows for rows, _ in most), max(tokens for _, tokens in most))

    def get_inputs(self) -> list[Any]:
        return [self._described(name) for name in self._inputs]

    def get_outputs(self) -> list[Any]:
        return [self._described(name) for name in self._outputs]

    def _described(self, name: str) -> Any:
        """As ONNX Runtime's: name, type and shape; dims that change are strings."""
        shape = [dim if dim >= 0 else "any" for dim in self._engine.get_tensor_shape(name)]
        return SimpleNamespace(name=name, type=TYPES[self._engine.get_tensor_dtype(name).name], shape=shape)

    def get_modelmeta(self) -> Any:
        return SimpleNamespace(custom_metadata_map={})

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        """Run on the bound memory and wait for it; from the third run on as a CUDA graph."""
        with torch.cuda.stream(self._stream):
            if binding.replay is not None:
                binding.replay()
            else:
                self._launch(binding)
            if self._stream is not None:
                self._stream.synchronize()

    def _launch(self, binding: Binding) -> None:
        """Enqueue a call; the second of a binding is captured behind it."""
        shapes = {name: binding.places[name][0] for name in self._inputs}
        profile = self._profile(shapes)
        binding.runs += 1
        capture = self._capture if binding.runs == 2 else None
        if capture is not None:
            context = binding.context = self._new_context(profile)
        else:
            context = self._contexts[profile] = self._contexts.get(profile) or self._new_context(profile)
        for name, (shape, address) in binding.places.items():
            if name in shapes:
                self._done(context.set_input_shape(name, shape), f"take {name} {shape}")
            self._done(context.set_tensor_address(name, address), f"use the memory of {name}")

        def run() -> None:
            self._done(context.execute_async_v3(self._handle), f"run shapes {shapes}")

        run()  # before a capture too: what a context does once is then done
        if capture is not None:
            try:
                binding.replay = capture(run, self._stream)
            except Exception as error:  # torch's and the driver's own kinds
                self.capture_failures += 1
                self._capture = binding.context = None
                warn(f"CUDA graphs are left out: a call could not be captured ({error}); calls are launched")

    def _profile(self, shapes: dict[str, Any]) -> int:
        """The first profile that all shapes fit. Raises WrongUse when none does."""
        for profile in range(self._engine.num_optimization_profiles):
            ends = [self._engine.get_tensor_profile_shape(name, profile) for name in shapes]
            dims = (zip(least, shape, most) for (least, _, most), shape in zip(ends, shapes.values()))
            if all(low <= dim <= high for low, dim, high in chain(*dims)):
                return profile
        why = f"input_ids {tuple(shapes['input_ids'])}"
        fix = "build it with a bucket that holds them: --batches, --lengths"
        raise WrongUse("the engine has no profile for these shapes", where=self._where, why=why, fix=fix)

    def _new_context(self, profile: int) -> Any:
        how = self._library.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        if self._strategies is not None:
            wanted = self._engine.create_runtime_config()
            wanted.set_execution_context_allocation_strategy(how)
            wanted.cuda_graph_strategy = self._strategies.WHOLE_GRAPH_CAPTURE
            how = wanted
        context = self._done(self._engine.create_execution_context(how), "make an execution context")
        self._done(context.set_optimization_profile_async(profile, self._handle), f"use profile {profile}")
        return context

    def _done(self, answer: Any, what: str) -> Any:
        """What TensorRT answered; None and False are its only sign that it failed."""
        if answer is None or answer is False:
            fix = "see what it printed; a GPU with too little free memory is the usual reason, else build it again here"
            raise Refused(f"TensorRT could not {what}", where=self._where, fix=fix)
        return answer
