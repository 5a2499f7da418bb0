"""What a TensorRT compiler made of a graph: its kernels, how many a block has, in which type they multiply.

TensorRT-RTX builds without a GPU but cannot open an engine there, so its verbose log is read; TensorRT's own
engine inspector says it in JSON, whose fields differ by version. Both repeat the names of nodes, which are `blocks.i/…`
in block i.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...core.errors import Refused
from ...models.transformer import TransformerConfig

NO_KERNELS = {"shape_call", "signal", "wait", "constant"}
PRODUCTS = {"gemm", "runtime_fusion"}  # of weights; attention has its own kernel, called …_mha_…
LINE = re.compile(
    r"^Name: ([^,]*), LayerType: ([^,]*), Inputs: \[(.*?)\], (?:Constants|Outputs):.*Metadata: (.*)$"
)
TYPE = re.compile(r"Datatype: (\w+)")
TYPES = {  # by the words for them, in layers and in names of tactics
    "BFloat16": r"bf16|bfloat16",
    "Half": r"half|fp16|float16|f16f16|h\d{3,}",
    "Int8": r"int8|i8i8|imma",
    "Float": r"float|fp32|f32f32|tf32",
}
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
    """From the JSON of an engine inspector, of which layers have details only where the build was asked for them."""
    found = []
    for layer in json.loads(text).get("Layers", []):
        if not isinstance(layer, str) and layer.get("LayerType") not in NO_KERNELS:
            where = layer.get("Metadata", "") or layer["Name"]
            kind = type_of_layer(layer)
            found.append(
                Kernel(layer["Name"], layer.get("LayerType", ""), (kind,) * bool(kind), _block(where))
            )
    return found


def type_of_layer(layer: dict[str, Any]) -> str:
    """The type in which a layer computes, as the first of these says it: its inputs' Datatype, their
    Format/Datatype ("N/A due to dynamic shapes" where a profile is a range), its weights' type, its tactic's name;
    "" when none does.
    """
    given, weights = layer.get("Inputs") or [{}], layer.get("Weights")
    said = [given[0].get("Datatype"), given[0].get("Format/Datatype")]
    said += [weights.get("Type") if isinstance(weights, dict) else None, layer.get("TacticName")]
    found = (
        name for text in said if text for name, words in TYPES.items() if re.search(words, str(text), re.I)
    )
    return next(found, "")


def _block(text: str) -> int | None:
    numbers = [int(number) for number in BLOCK.findall(text)]
    return min(numbers) if numbers else None


def engine_facts(
    kernels: list[Kernel], config: TransformerConfig, precision: str, profiles: int = 1, whole: bool = True
) -> dict[str, Any]:
    """Counts for a manifest, of one profile: kernels in all, of the largest inner block (the first and the last
    share kernels with what stands around them), fused attention; and the types of the blocks' products.

    Raises Refused when products of the blocks are in another precision than the graph was written in, and, where
    the list is `whole` (an inspector may leave out anything), when it names no type or an attention block was
    not fused. What is not known is said as such.
    """
    per_block = Counter(kernel.block for kernel in kernels if kernel.block is not None)
    fused = sum("_mha" in kernel.name for kernel in kernels) // profiles
    products = [kernel for kernel in kernels if kernel.kind in PRODUCTS and kernel.block is not None]
    types = Counter(kernel.types[0] for kernel in products if kernel.types)
    wanted = {"fp16": "Half", "int8": "Int8", "fp32": "Float"}[precision]
    if set(types) != {wanted} and (whole or types):
        why = f"products with inputs of type {dict(types)}, all should be {wanted}"
        fix = "build with another version of TensorRT, or export with another --precision"
        raise Refused("the engine does not multiply in the precision of the graph", why=why, fix=fix)
    if fused < config.layers and whole:
        why = f"{fused} fused attention kernels for {config.layers} layers"
        fix = "build with the version of TensorRT that pyproject.toml names"
        raise Refused("attention was not fused", why=why, fix=fix)
    inner = range(1, config.layers - 1) if config.layers > 2 else range(config.layers)
    return {
        "kernels": len(kernels) // profiles,
        "kernels_per_layer": max(per_block[layer] for layer in inner) / profiles,
        "fused_attention": fused if fused >= config.layers else "not known",
        "product_types": dict(types) or "not known",
    }
