"""Writing ONNX graphs node by node from our own weights, without a tracing exporter; products in each precision.

- Opset 24 by default: Attention, TensorScatter, RotaryEmbedding and RMSNormalization are standard operators
  there, which ONNX Runtime runs on a CPU and TensorRT 10.15+ parses. Older opsets spell them out.
- Weights above `EXTERNAL_BYTES` go to `<name>.data` beside the graph: protobuf ends at 2 GiB. They are
  streamed, so writing takes no second copy of the model in memory.

The forms of a product:

- int8 with fixed scales: QuantizeLinear rounds the input with one scale from a calibration, the weight has one scale
  per output; symmetric, as TensorRT and OpenVINO want it.
- int8 for ONNX Runtime on a CPU: its input is rounded row by row when the graph runs (uint8, measured range);
  int8 x int8 with fixed scales costs it 3.3 times as much.
- int4 for ONNX Runtime, and int8 on CUDA: blocks of 32 weights share a scale; on a CPU the sums are made in int8. The
  output matrix of a GPT is kept in 8 bits.

Letters: I inputs, O outputs of a layer, N blocks along I.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...core.artifact import version
from ...core.errors import Refused
from .graph_options import PLAIN, GraphOptions

EXTERNAL_BYTES = 1_800_000_000
ALIGNMENT = 4096  # external tensors start on pages, so that runtimes can map them
BOOL, INT32, INT64 = TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
BLOCK = 32  # weights that share a scale in int4
INT8_MAX = 127
CONTRIB = "com.microsoft"  # ONNX Runtime's own operators; every other node is standard ONNX


class Graph:
    """An ONNX graph under construction; tensors are named by strings, `node` returns the name of its output. `half`:
    products and the values between them are float16; norms, softmax and outputs stay float32.
    """

    def __init__(self, options: GraphOptions = PLAIN) -> None:
        self.options, self.opset, self.half = options, options.opset, options.half
        self.kind = FLOAT16 if self.half else FLOAT
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._weights: dict[str, np.ndarray] = {}
        self.metadata: dict[str, str] = {}  # what whoever runs the graph has to know
        self.scope = ""  # put before the names of nodes: reports say by it to which block a node belongs

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        """Declare an input; strings in `shape` are dynamic sizes."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def result(self, x: str, name: str, shape: list[int | str]) -> None:
        """Give x as the float32 output `name`."""
        self.node("Cast", x, to=FLOAT, out=name) if self.half else self.node("Identity", x, out=name)
        self.output(name, FLOAT, shape)

    def weight(self, name: str, value: np.ndarray) -> str:
        """A constant tensor; the same name again is the same tensor."""
        self._weights.setdefault(name, value)
        return name

    def ints(self, *values: int) -> str:
        return self.weight("ints_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant scalar of the products' type."""
        return self.weight(f"number_{value:g}", np.array(value, np.float16 if self.half else np.float32))

    def node(
        self, op: str, *inputs: str, out: str = "", outputs: int = 1, more: Sequence[str] = (), **how: Any
    ) -> str:
        """Append an operator with its attributes and return the name of its first output; "" among the inputs leaves an
        optional one out. Further outputs are called `<name>:1`, `<name>:2`, or as `more` says.
        """
        out = out or f"{self.scope}{op}_{len(self._nodes)}"
        names = [out, *(f"{out}:{i}" for i in range(1, outputs)), *more]
        self._nodes.append(helper.make_node(op, list(inputs), names, name=out, **how))
        return out

    def wide(self, x: str) -> str:
        return self.node("Cast", x, to=FLOAT) if self.half else x

    def narrow(self, x: str) -> str:
        """A float32 tensor in the type of the products."""
        return self.node("Cast", x, to=FLOAT16) if self.half else x

    def reshape(self, x: str, *sizes: int) -> str:
        return self.node("Reshape", x, self.ints(*sizes))

    def split(self, x: str, *sizes: int) -> list[str]:
        """Parts of the last dim."""
        first = self.node("Split", x, self.ints(*sizes), outputs=len(sizes), axis=-1)
        return [first, *(f"{first}:{i}" for i in range(1, len(sizes)))]

    def split_heads(self, x: str, heads: int, head_size: int) -> str:
        """(batch, sequence, heads * head) to (batch, heads, sequence, head)."""
        apart = self.reshape(x, 0, 0, heads, head_size)
        return self.node("Transpose", apart, perm=[0, 2, 1, 3])

    def take(self, x: str, at: str) -> str:
        """Rows `at` (batch, asked) of x (batch, sequence, H): (batch, asked, H)."""
        return self.node("GatherND", x, self.node("Unsqueeze", at, self.ints(-1)), batch_dims=1)

    def length(self, x: str, dim: int) -> str:
        """The size of one dim as an int64 vector of one number."""
        return self.node("Shape", x, start=dim, end=dim + 1)

    def steps(self, length: str) -> str:
        """0, 1, … length - 1 as an int64 vector; `length` is a vector of one number."""
        return self.node("Range", self.scalar(0), self.node("Squeeze", length), self.scalar(1))

    def scalar(self, value: int) -> str:
        return self.weight(f"scalar_{value}", np.array(value, np.int64))

    def constant(self, name: str, value: np.ndarray) -> str:
        """A weight in the type of the products. Raises Refused when float16 cannot hold it."""
        if not self.half:
            return self.weight(name, value)
        with np.errstate(over="ignore"):
            small = value.astype(np.float16)
        if not np.isfinite(small).all() and np.isfinite(value).all():
            why = f"its largest value is {np.abs(value).max():.3g}, float16 ends at 65504"
            raise Refused("a weight does not fit float16", where=name, why=why, fix="use --precision fp32")
        return self.weight(name, small)

    def product(self, x: str, name: str, weight_OI: np.ndarray, bias_O: np.ndarray | None) -> str:
        """`x @ weight^T + bias` as the options say, x in the type of the products; plain weights are stored (I, O)."""
        options = self.options
        bias = [] if bias_O is None else [self.constant(f"{name}.bias", bias_O)]
        if options.blocks:
            bits = 4 if options.precision == "int4" and name != "output" else 8
            packed, scales = pack_blocks(weight_OI, bits)
            weight = (self.weight(f"{name}.int{bits}", packed), self.constant(f"{name}.scales", scales))
            sizes: dict[str, Any] = {"K": weight_OI.shape[1], "N": weight_OI.shape[0], "bits": bits}
            sizes |= {"block_size": BLOCK, "accuracy_level": 4, "domain": CONTRIB}  # 4: sums of int8 products
            x = self.node("MatMulNBits", x, *weight, **sizes)
        elif options.precision != "int8":
            x = self.node("MatMul", x, self.constant(f"{name}.weight.T", weight_OI.T))
        else:
            x = self._rounded(x, name) if options.static else x
            weight_IO, scale_O = int8_by_output(weight_OI)
            small, scale = self.weight(f"{name}.int8.T", weight_IO), self.constant(f"{name}.scale", scale_O)
            # zeros of each weight's own: where int8 becomes uint8, ONNX Runtime makes them anew for each
            parts = scale, self.weight(f"{name}.zero", np.zeros(len(scale_O), np.int8))
            if not options.static:
                return self.node("DynamicQuantizeMatMul", x, small, *parts, *bias, domain=CONTRIB)
            x = self.node("MatMul", x, self.node("DequantizeLinear", small, *parts, axis=1))
        return self.node("Add", x, *bias) if bias else x

    def _rounded(self, x: str, name: str) -> str:
        """x rounded to the 255 numbers that int8 has within the calibrated range."""
        if name not in self.options.ranges:
            why = "it was made from another model"
            fix = "calibrate again: throughline export MODEL --to calibration --text FILE --out DIR"
            raise Refused("the calibration does not know this layer", where=name, why=why, fix=fix)
        kind = np.float16 if self.half else np.float32
        scale = np.array(max(self.options.ranges[name] / INT8_MAX, 1e-6), kind)
        ends = (self.weight(f"{name}.input_scale", scale), self.weight("zero_int8", np.array(0, np.int8)))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *ends), *ends)

    def save(self, path: Path, metadata: dict[str, str], external_bytes: int = EXTERNAL_BYTES) -> int:
        """Write the model, its weights to `<path>.data` if they are larger, and check it; its number of nodes."""
        external = sum(value.nbytes for value in self._weights.values()) > external_bytes
        with open(path.with_name(path.name + ".data"), "wb") if external else nullcontext() as file:
            tensors = [self._tensor(name, value, file) for name, value in self._weights.items()]
        graph = helper.make_graph(self._nodes, "throughline", self._inputs, self._outputs, tensors)
        opsets = [helper.make_opsetid("", self.opset)]
        contrib = any(node.domain == CONTRIB for node in self._nodes)
        model = helper.make_model(
            graph,
            opset_imports=opsets + [helper.make_opsetid(CONTRIB, 1)] * contrib,
            ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="throughline",
            producer_version=version(),
        )
        helper.set_model_props(model, metadata | self.metadata)
        onnx.save_model(model, str(path))
        onnx.checker.check_model(str(path), full_check=not external and not contrib)
        return len(self._nodes)

    def _tensor(self, name: str, value: np.ndarray, file: BinaryIO | None) -> onnx.TensorProto:
        """A weight in the graph, or its place in the file of large ones; shape inference needs the small here."""
        value = np.asarray(value, order="C")
        if file is None or value.nbytes < ALIGNMENT:
            return numpy_helper.from_array(value, name)
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        tensor = TensorProto(name=name, dims=value.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        place = {"location": Path(file.name).name, "offset": file.tell(), "length": value.nbytes}
        for key, entry in place.items():
            tensor.external_data.add(key=key, value=str(entry))
        value.tofile(file)
        return tensor


def int8_by_output(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight as int8 (I, O) with one float32 scale per output (O,): weight = int8 x scale, to half a step."""
    scale_O = np.maximum(np.abs(weight_OI).max(axis=1), 1e-12).astype(np.float32) / INT8_MAX
    weight_IO = np.clip(np.rint(weight_OI.T / scale_O), -INT8_MAX, INT8_MAX).astype(np.int8)
    return weight_IO, scale_O


def pack_blocks(weight_OI: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight in blocks of `BLOCK` along its inputs: bytes (O, N, BLOCK x bits / 8) and scales (O x N,). A block's
    largest value has the code at the longer end of the range; of a few scales around that the one with the smallest
    squared error is kept.
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
