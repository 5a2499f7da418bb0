"""Engines built by TensorRT (10.15 to 11) and by TensorRT-RTX: strongly typed, with profiles per bucket.

- Precision stands in the graph. TensorRT 11 has no precision flags any more; none is touched here.
- TensorRT needs the GPU that the engine is for. TensorRT-RTX compiles for compute capability 7.5 to 12.0 on a
  CPU alone, and is for consumer GPUs: whether a T4 runs its engines is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.console import warn
from ...core.errors import Failed, WrongUse
from ...core.files import write_atomic
from ...models.config import GPTConfig
from ...models.transformer import TransformerConfig

RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")


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
                found.append((rows, (0, 1, 1 if decode else tokens)[i]))
            elif name.startswith("past."):
                found.append((rows, config.key_value_heads, config.sequence_length, config.head_size))
            else:
                found.append((rows, tokens))
        return found


def buckets(config: TransformerConfig, batches: Sequence[int], lengths: Sequence[int]) -> list[Profile]:
    """A profile for each batch and length bucket, and for a GPT one of decode steps for each batch."""
    profiles = []
    for batch, smaller in zip(batches, (0, *batches)):
        if isinstance(config, GPTConfig):
            profiles.append(Profile((smaller + 1, batch, batch), (1, 1, 1)))
        for length, shorter in zip(lengths, (0, *lengths)):
            profiles.append(Profile((smaller + 1, batch, batch), (shorter + 1, length, length)))
    return profiles


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
            why=logger.error or str(error),
            fix="build on the machine that has the GPU; --to tensorrt-rtx compiles without one",
        ) from error
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # 11 has no other kind
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        problems = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise Failed("the graph could not be read", where=graph, why=problems[:400] or logger.error)
    settings = builder.create_builder_config()
    settings.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    if capability is not None:
        settings.num_compute_capabilities = 1
        member = "SM" + capability.replace(".", "")
        settings.set_compute_capability(getattr(library.ComputeCapability, member), 0)
    for profile in profiles:
        added = builder.create_optimization_profile()
        for name in (network.get_input(i).name for i in range(network.num_inputs)):
            added.set_shape(name, *profile.shapes(name, config))
        if settings.add_optimization_profile(added) < 0:
            raise Failed("the compiler refused a profile", where=str(profile), why=logger.error)
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        if not settings.set_timing_cache(settings.create_timing_cache(known), False):
            warn(f"{timing_cache} is of another GPU or version and is written anew")
            settings.set_timing_cache(settings.create_timing_cache(b""), False)
    engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise Failed("the engine could not be built", where=graph, why=logger.error)
    if timing_cache is not None and (timings := settings.get_timing_cache()) is not None:
        write_atomic(timing_cache, bytes(timings.serialize()))
    return bytes(engine), logger.messages


def _logger(library: Any) -> Any:
    """A logger that keeps every message."""

    class Logger(library.ILogger):
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.messages: list[str] = []
            self.error = ""  # the last one

        def log(self, severity: Any, message: str) -> None:
            self.messages.append(message)
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.error = message

    return Logger()
