"""Which graph to write: for whom, in which precision, in which opset, under which names. No torch, no onnx."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import WrongUse
from ...models.sentence import Pooling

Variant = Literal["portable", "onnxruntime", "cuda", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8", "int4"]  # of graphs
Names = Literal["throughline", "optimum"]
Outputs = Literal["all", "embedding"]
OPSETS = range(17, 25)  # 17 brought LayerNormalization; 24 has TensorScatter


@dataclass(frozen=True)
class GraphOptions:
    """`ranges`: largest absolute input of each linear layer that int8 shall represent, from a calibration.

    portable: standard operators alone. onnxruntime: its fused operators and dynamic int8, for a CPU. cuda: operators
    for which ONNX Runtime has CUDA kernels, int8 and int4 as weights of float16 products. tensorrt: the form that
    it fuses best, every type written out (strong typing). Names: `throughline` has a slot cache; `optimum` has the
    inputs and outputs that optimum and onnxruntime-genai look for, with a cache that grows. Opset 0: the newest that
    the readers of these names know (Triton's and TEI's containers lag). Outputs: `embedding` leaves a BERT's heads out.
    """

    variant: Variant = "portable"
    precision: Precision = "fp32"
    opset: int = 0
    names: Names = "throughline"
    pooling: Pooling | None = None  # as the directory says, else the mean
    outputs: Outputs | None = None
    ranges: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.opset:
            object.__setattr__(self, "opset", self.least_opset if self.names == "optimum" else OPSETS[-1])

    @property
    def least_opset(self) -> int:
        """The oldest that such a graph can be written in: QuantizeLinear with float16 scales came in 19."""
        return 19 if self.half and self.static else OPSETS[0]

    @property
    def half(self) -> bool:
        """Whether products that are not quantised are float16."""
        rounded = {"tensorrt": ("int8",), "cuda": ("int8", "int4")}.get(self.variant, ())
        return self.precision == "fp16" or self.precision in rounded

    @property
    def blocks(self) -> bool:
        """Weights of 8 or 4 bits in blocks that share a scale."""
        return self.precision == "int4" or (self.precision == "int8" and self.variant == "cuda")

    @property
    def static(self) -> bool:
        """int8 with scales from a calibration, written as QuantizeLinear and DequantizeLinear."""
        return self.precision == "int8" and self.variant not in ("onnxruntime", "cuda")

    def check(self, family: str) -> None:
        """Raise WrongUse for what cannot be written."""
        if self.opset not in OPSETS or self.opset < self.least_opset:
            why = f"graphs of this precision can be written in opset {self.least_opset} to {OPSETS[-1]}"
            raise WrongUse(f"opset {self.opset} is not supported", where="--opset", why=why)
        if self.precision == "int4" and (family != "gpt" or self.variant not in ("onnxruntime", "cuda")):
            why = "4-bit weights are ONNX Runtime's, and worth it where each token reads every weight"
            fix = "use --precision int8, or --variant onnxruntime"
            raise WrongUse("int4 is for a GPT and ONNX Runtime", why=why, fix=fix)


PLAIN = GraphOptions()
