"""Matrix products with a weight in every precision: what differs between fp32, fp16, int8 and int4 graphs.

- fp32, fp16: MatMul and Add.
- int8, fixed scales: the input is rounded to int8 by QuantizeLinear with one scale from a calibration, the
  weight is int8 with one scale per output; symmetric, as TensorRT and OpenVINO want it.
- int8 for ONNX Runtime on a CPU: its input is rounded row by row when the graph runs (uint8, measured range);
  int8 x int8 with fixed scales costs it 3.3 times as much.
- int4 for ONNX Runtime, and int8 on CUDA: blocks of 32 weights share a scale; on a CPU the sums are made in int8. The
  output matrix of a GPT is kept in 8 bits.

Letters: I inputs, O outputs of a layer, N blocks along I.
"""

from typing import Any

import numpy as np

from ...core.errors import Refused
from .graph_options import GraphOptions
from .onnx_writer import CONTRIB, Graph

BLOCK = 32  # weights that share a scale in int4
INT8_MAX = 127


class Products:
    """Writes `x @ weight^T + bias` into a graph as its options say; x is in the type of the products."""

    def __init__(self, graph: Graph, options: GraphOptions) -> None:
        self.graph, self.options = graph, options

    def constant(self, name: str, value: np.ndarray) -> str:
        """A weight in the type of the products. Raises Refused when float16 cannot hold it."""
        if not self.graph.half:
            return self.graph.weight(name, value)
        with np.errstate(over="ignore"):
            small = value.astype(np.float16)
        if not np.isfinite(small).all() and np.isfinite(value).all():
            why = f"its largest value is {np.abs(value).max():.3g}, float16 ends at 65504"
            raise Refused("a weight does not fit float16", where=name, why=why, fix="use --precision fp32")
        return self.graph.weight(name, small)

    def linear(
        self,
        x: str,
        name: str,
        weight_OI: np.ndarray,
        bias_O: np.ndarray | None,
        out: str = "",
        bits: int = 4,
    ) -> str:
        """The product over the last dim of x; plain weights are stored (in, out), as MatMul multiplies them."""
        graph, options = self.graph, self.options
        bias = [] if bias_O is None else [self.constant(f"{name}.bias", bias_O)]
        if options.blocks:
            return self._blocks(x, name, weight_OI, bias, out, bits if options.precision == "int4" else 8)
        if options.precision == "int8" and not options.static:
            weight_IO, scale_O = int8_by_output(weight_OI)
            parts = (graph.weight(f"{name}.int8.T", weight_IO), graph.weight(f"{name}.scale", scale_O))
            zero = graph.weight(f"{name}.zero", np.zeros(len(scale_O), np.int8))
            return graph.node("DynamicQuantizeMatMul", x, *parts, zero, *bias, out=out, domain=CONTRIB)
        if options.static:
            x, weight = self._rounded(x, name), self._dequantised(name, weight_OI)
        else:
            weight = self.constant(f"{name}.weight.T", weight_OI.T)
        if not bias:
            return graph.node("MatMul", x, weight, out=out)
        return graph.node("Add", graph.node("MatMul", x, weight), *bias, out=out)

    def _rounded(self, x: str, name: str) -> str:
        """x rounded to the 255 numbers that int8 has within the calibrated range."""
        if name not in self.options.ranges:
            raise Refused(
                "the calibration does not know this layer",
                where=name,
                why="it was made from another model",
                fix="calibrate again: throughline export MODEL --to calibration --text FILE",
            )
        graph, kind = self.graph, np.float16 if self.graph.half else np.float32
        scale = np.array(max(self.options.ranges[name] / INT8_MAX, 1e-6), kind)
        ends = (graph.weight(f"{name}.input_scale", scale), graph.weight("zero_int8", np.array(0, np.int8)))
        return graph.node("DequantizeLinear", graph.node("QuantizeLinear", x, *ends), *ends)

    def _dequantised(self, name: str, weight_OI: np.ndarray) -> str:
        graph = self.graph
        weight_IO, scale_O = int8_by_output(weight_OI)
        parts = (
            graph.weight(f"{name}.int8.T", weight_IO),
            self.constant(f"{name}.scale", scale_O),
            graph.weight(f"zeros_int8_{len(scale_O)}", np.zeros(len(scale_O), np.int8)),
        )
        return graph.node("DequantizeLinear", *parts, axis=1)

    def _blocks(self, x: str, name: str, weight_OI: np.ndarray, bias: list[str], out: str, bits: int) -> str:
        packed, scales = pack_blocks(weight_OI, bits)
        parts = (self.graph.weight(f"{name}.int{bits}", packed), self.constant(f"{name}.scales", scales))
        sizes: dict[str, Any] = {"K": weight_OI.shape[1], "N": weight_OI.shape[0], "bits": bits}
        sizes |= {"block_size": BLOCK, "accuracy_level": 4, "domain": CONTRIB}  # 4: sums of int8 products
        product = self.graph.node("MatMulNBits", x, *parts, out="" if bias else out, **sizes)
        return self.graph.node("Add", product, *bias, out=out) if bias else product


def int8_by_output(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight as int8 (I, O) with one float32 scale per output (O,): weight = int8 x scale, to half a step."""
    scale_O = np.maximum(np.abs(weight_OI).max(axis=1), 1e-12).astype(np.float32) / INT8_MAX
    weight_IO = np.clip(np.rint(weight_OI.T / scale_O), -INT8_MAX, INT8_MAX).astype(np.int8)
    return weight_IO, scale_O


def pack_blocks(weight_OI: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight in blocks of `BLOCK` along its inputs: bytes (O, N, BLOCK x bits / 8) and scales (O x N,).

    The block's value of largest size is given the code at the end of the range that is one longer, and of a
    few scales around that the one with the smallest squared error is kept.
    """
    outputs, inputs = weight_OI.shape
    blocks = -(-inputs // BLOCK)
    padded = np.zeros((outputs, blocks * BLOCK), np.float32)
    padded[:, :inputs] = weight_OI
    values = padded.reshape(outputs, blocks, BLOCK)
    half = 1 << (bits - 1)
    largest = np.take_along_axis(values, np.abs(values).argmax(-1)[..., None], -1)[..., 0]
    best = np.full(largest.shape, np.inf, np.float32)
    scales, codes = np.zeros_like(largest), np.zeros(values.shape, np.uint8)
    for shrink in (1.0, 0.95, 0.9, 0.85) if bits == 4 else (1.0,):
        scale = np.where(largest == 0, 1.0, largest * shrink / -half).astype(np.float32)
        code = np.clip(np.rint(values / scale[..., None]) + half, 0, 2 * half - 1)
        error = (((code - half) * scale[..., None] - values) ** 2).sum(-1)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, scale, scales)
        codes = np.where(better[..., None], code, codes).astype(np.uint8)
    packed = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, scales.reshape(-1)
