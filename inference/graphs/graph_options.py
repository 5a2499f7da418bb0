"""Which graph to write: for whom, in which precision, in which opset, under which names. No torch, no onnx."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import WrongUse
from ...models.sentence import Pooling

Variant = Literal["portable", "onnxruntime", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8", "int4"]
Names = Literal["throughline", "optimum"]
OPSETS = range(17, 25)  # 17 brought LayerNormalization; 24 has TensorScatter


@dataclass(frozen=True)
class GraphOptions:
    """`ranges`: largest absolute input of each linear layer that int8 shall represent, from a calibration.

    portable: standard operators alone. onnxruntime: its fused operators and dynamic int8. tensorrt: the
    form that it fuses best, every type written out (strong typing). Names: `throughline` has a slot cache;
    `optimum` has the inputs and outputs that optimum and onnxruntime-genai look for, with a cache that grows.
    """

    variant: Variant = "portable"
    precision: Precision = "fp32"
    opset: int = OPSETS[-1]
    names: Names = "throughline"
    pooling: Pooling | None = None  # as the directory says, else the mean
    ranges: Mapping[str, float] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        """Whether products that are not quantised are float16."""
        return self.precision == "fp16" or (self.variant == "tensorrt" and self.precision == "int8")

    @property
    def static(self) -> bool:
        """int8 with scales from a calibration, written as QuantizeLinear and DequantizeLinear."""
        return self.precision == "int8" and self.variant != "onnxruntime"

    def check(self, family: str) -> None:
        """Raise WrongUse for what cannot be written."""
        least = 19 if self.half and self.static else OPSETS[0]  # 19: QuantizeLinear with float16 scales
        if self.opset not in OPSETS or self.opset < least:
            why = f"graphs of this precision can be written in opset {least} to {OPSETS[-1]}"
            raise WrongUse(f"opset {self.opset} is not supported", where="--opset", why=why)
        if self.precision == "int4" and (family != "gpt" or self.variant != "onnxruntime"):
            why = (
                "4-bit weights are an operator of ONNX Runtime, worth it where each token reads every weight"
            )
            fix = "use --precision int8, or --variant onnxruntime"
            raise WrongUse("int4 is for a GPT and ONNX Runtime", why=why, fix=fix)


PLAIN = GraphOptions()
