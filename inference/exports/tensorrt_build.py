"""Engines built by TensorRT (10.15 to 11) and by TensorRT-RTX: strongly typed, with profiles per bucket.

- Precision stands in the graph. TensorRT 11 has no precision flags any more; none is touched here.
- TensorRT needs the GPU that the engine is for. TensorRT-RTX compiles for compute capability 7.5 to 12.0 on a
  CPU alone, and is for consumer GPUs: whether a T4 runs its engines is not known.
- An engine belongs to one library version and one compute capability; `check_engine` says so before loading.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.artifact import Manifest
from ...core.errors import Failed, MissingExtra, Refused, WrongUse
from ...models.config import GPTConfig, TransformerConfig

RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")
LEAST = (10, 15)  # strong typing, Attention, TensorScatter and RotaryEmbedding in the parser
EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}


@dataclass(frozen=True)
class Profile:
    """The shapes that one optimisation profile of an engine serves; `best` is what it is tuned for."""

    batch: tuple[int, int, int]  # least, best, most rows
    tokens: tuple[int, int, int]  # of a call; a GPT decodes with (1, 1, 1)

    def shapes(self, name: str, config: TransformerConfig) -> list[tuple[int, ...]]:
        """Least, best and largest shape of the graph's input `name`."""
        found: list[tuple[int, ...]] = []
        for i in range(3):
            rows, tokens = self.batch[i], self.tokens[i]
            if name == "past_length":
                found.append((rows,))
            elif name == "logit_positions":
                decode = isinstance(config, GPTConfig) and self.tokens[2] == 1
                found.append((rows, 1 if decode else (0, 1, tokens)[i]))
            elif name.startswith("past."):
                found.append((rows, config.key_value_heads, config.sequence_length, config.head_size))
            else:
                found.append((rows, tokens))
        return found


def buckets(config: TransformerConfig, batches: Sequence[int], lengths: Sequence[int]) -> list[Profile]:
    """A profile for each batch and length bucket, and for a GPT one of decode steps for each batch."""
    if bad := [length for length in lengths if not 1 <= length <= config.sequence_length]:
        why = f"the model's longest input is {config.sequence_length} tokens"
        raise WrongUse(f"a bucket of {bad[0]} tokens", where="--lengths", why=why)
    profiles = []
    for batch, smaller in zip(batches, (0, *batches)):
        if isinstance(config, GPTConfig):
            profiles.append(Profile((smaller + 1, batch, batch), (1, 1, 1)))
        for length, shorter in zip(lengths, (0, *lengths)):
            least = shorter + 1 if shorter or not isinstance(config, GPTConfig) else min(2, length)
            profiles.append(Profile((smaller + 1, batch, batch), (least, length, length)))
    return profiles


def load_library(name: str) -> Any:
    """The module `tensorrt` or `tensorrt_rtx`. Raises MissingExtra, WrongUse for a version that is too old."""
    try:
        library = import_module(name)
    except (ImportError, OSError) as error:
        raise MissingExtra(name, "building an engine", f"throughline[{EXTRAS[name]}]") from error
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if name == "tensorrt" and version < LEAST:
        raise WrongUse(
            f"TensorRT {library.__version__} is too old",
            why=f"its parser lacks operators of these graphs; {LEAST[0]}.{LEAST[1]} has them",
            fix="pip install 'throughline[tensorrt]'",
        )
    return library


def build_engine(
    library: Any,
    graph: Path,
    config: TransformerConfig,
    profiles: Sequence[Profile],
    capability: str | None = None,
    timing_cache: Path | None = None,
) -> tuple[bytes, list[str]]:
    """Compile a graph; returns the engine and the messages of the build.

    `capability` (TensorRT-RTX alone): the compute capability to compile for. `timing_cache` (TensorRT alone):
    a file of kernel timings that is read if it exists and written. Raises WrongUse without a GPU where one is
    needed, Failed with the library's last error when it cannot build.
    """
    logger = _logger(library)
    try:
        builder = library.Builder(logger)
    except TypeError as error:  # "pybind11::init(): factory function returned nullptr"
        raise WrongUse(
            "TensorRT found no GPU",
            why=logger.last_error() or str(error),
            fix="build on the machine that has the GPU; --to tensorrt-rtx compiles without one",
        ) from error
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # 11 has no other kind
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        problems = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise Failed("the graph could not be read", where=graph, why=problems[:400] or logger.last_error())
    settings = builder.create_builder_config()
    settings.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    if capability is not None:
        settings.num_compute_capabilities = 1
        member = "SM" + capability.replace(".", "")
        settings.set_compute_capability(getattr(library.ComputeCapability, member), 0)
    for profile in profiles:
        _add_profile(builder, settings, network, profile, config)
    cache = _read_cache(settings, timing_cache)
    engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise Failed("the engine could not be built", where=graph, why=logger.last_error())
    if cache is not None and timing_cache is not None:
        timing_cache.write_bytes(bytes(settings.get_timing_cache().serialize()))
    return bytes(engine), logger.messages


def _add_profile(
    builder: Any, settings: Any, network: Any, profile: Profile, config: TransformerConfig
) -> None:
    added = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        name = network.get_input(i).name
        added.set_shape(name, *profile.shapes(name, config))
    settings.add_optimization_profile(added)


def _read_cache(settings: Any, path: Path | None) -> Any:
    if path is None:
        return None
    cache = settings.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    settings.set_timing_cache(cache, False)
    return cache


def _logger(library: Any) -> Any:
    """A logger that keeps every message."""

    class Logger(library.ILogger):
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.messages: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.messages.append(message)
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

        def last_error(self) -> str:
            return self.errors[-1] if self.errors else (self.messages[-1] if self.messages else "")

    return Logger()


def check_engine(manifest: Manifest, where: Path, library: Any, capability: Callable[[], str]) -> None:
    """Raise Refused, with the command that builds it again, when an engine is not for this library and GPU."""
    facts = manifest.facts
    fix = f"build it again here: {manifest.command}"
    for what, built, here in (
        ("library", facts["library"], library.__name__),
        ("version", facts["library_version"], library.__version__),
        ("compute capability", facts["compute_capability"], capability()),
    ):
        if built != here:
            raise Refused(
                f"this engine was built for another {what}",
                where=where,
                why=f"it was built for {built}, here is {here}",
                fix=fix,
            )


def gpu_facts() -> dict[str, Any]:
    """The first GPU: name, compute capability, driver and CUDA version. Raises WrongUse when there is none."""
    import torch

    if not torch.cuda.is_available():
        fix = "build on the machine that has the GPU; --to tensorrt-rtx compiles without one"
        raise WrongUse("there is no GPU here", why="torch sees no CUDA device", fix=fix)
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    import subprocess

    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
