"""What a TensorRT compiler made of a graph: its kernels, how many a block has, in which type they multiply.

TensorRT-RTX builds without a GPU but cannot open an engine there, so its verbose log is read; TensorRT's own
engine inspector says the same in JSON. Nodes of block i are called `blocks.i/…`, which both repeat.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...core.errors import Refused
from ...models.config import TransformerConfig

NO_KERNELS = {"shape_call", "signal", "wait", "constant"}
PRODUCTS = {"gemm", "runtime_fusion"}  # of weights; attention has its own kernel, called …_mha_…
LINE = re.compile(
    r"^Name: ([^,]*), LayerType: ([^,]*), Inputs: \[(.*?)\], (?:Constants|Outputs):.*Metadata: (.*)$"
)
TYPE = re.compile(r"Datatype: (\w+)")
BLOCK = re.compile(r"(?:blocks\.|hidden\.|present\.)(\d+)")


@dataclass(frozen=True)
class Kernel:
    """One launch: name, kind, types of its inputs, the first block whose nodes it computes (None: of none)."""

    name: str
    kind: str
    types: tuple[str, ...]
    block: int | None


def kernels_of_log(messages: Iterable[str]) -> list[Kernel]:
    """From a verbose build log with detailed profiling."""
    found = []
    for message in messages:
        for line in message.splitlines():
            if (match := LINE.match(line)) and match[2] not in NO_KERNELS:
                types = tuple(TYPE.findall(match[3]))
                found.append(Kernel(match[1], match[2], types, _block(match[4])))
    return found


def kernels_of_inspector(text: str) -> list[Kernel]:
    """From the JSON of an engine inspector."""
    found = []
    for layer in json.loads(text).get("Layers", []):
        if isinstance(layer, str) or layer.get("LayerType") in NO_KERNELS:
            continue
        formats = [str(given.get("Format/Datatype", "")) for given in layer.get("Inputs", [])]
        types = tuple(text.split(" ")[0] for text in formats)
        where = layer.get("Metadata", "") or layer["Name"]
        found.append(Kernel(layer["Name"], layer.get("LayerType", ""), types, _block(where)))
    return found


def _block(text: str) -> int | None:
    numbers = [int(number) for number in BLOCK.findall(text)]
    return min(numbers) if numbers else None


def engine_facts(
    kernels: list[Kernel], config: TransformerConfig, precision: str, profiles: int = 1
) -> dict[str, Any]:
    """Counts for a manifest, of one profile: kernels in all, of the largest inner block (the first and the last
    share kernels with what stands around them), fused attention; and the types of the blocks' products.

    Raises Refused when the products of the blocks are not in the precision that the graph was written in, or
    an attention block was not fused.
    """
    per_block = Counter(kernel.block for kernel in kernels if kernel.block is not None)
    fused = sum("_mha" in kernel.name for kernel in kernels) // profiles
    products = [kernel for kernel in kernels if kernel.kind in PRODUCTS and kernel.block is not None]
    types = Counter(kernel.types[0] for kernel in products if kernel.types)
    wanted = {"fp16": "Half", "int8": "Int8", "fp32": "Float"}[precision]
    if set(types) != {wanted}:
        why = f"products with inputs of type {dict(types)}, all should be {wanted}"
        fix = "build with another version of TensorRT, or export with another --precision"
        raise Refused("the engine does not multiply in the precision of the graph", why=why, fix=fix)
    if fused < config.layers:
        why = f"{fused} fused attention kernels for {config.layers} layers"
        fix = "build with the version of TensorRT that pyproject.toml names"
        raise Refused("attention was not fused", why=why, fix=fix)
    inner = range(1, config.layers - 1) if config.layers > 2 else range(config.layers)
    return {
        "kernels": len(kernels) // profiles,
        "kernels_per_layer": max(per_block[layer] for layer in inner) / profiles,
        "fused_attention": fused,
        "product_types": dict(types),
    }
