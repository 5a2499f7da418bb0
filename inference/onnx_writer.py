"""Writing ONNX graphs node by node from our own weights, without a tracing exporter.

- What is written is what was meant: no traced constants, no specialised sizes, no cache that forgets; a graph of a few
  dozen lines per family that can be read beside its model. `torch.onnx.export` serves as the cross-check in the tests.
- Opset 24: Attention, TensorScatter, RotaryEmbedding and RMSNormalization are standard operators that ONNX Runtime runs
  on a CPU and TensorRT 10.15+ parses.
- Weights above `EXTERNAL_BYTES` go to `<name>.data` beside the graph: protobuf ends at 2 GiB. They are streamed, so
  writing takes no second copy of the model in memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..core.version import version

OPSET = 24
EXTERNAL_BYTES = 1_800_000_000
ALIGNMENT = 4096  # external tensors start on pages, so that runtimes can map them
BOOL, INT64, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT


class Graph:
    """An ONNX graph under construction; tensors are named by strings, `node` returns the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._weights: dict[str, np.ndarray] = {}

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        """Declare an input; strings in `shape` are dynamic sizes."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[int | str]) -> None:
        """Declare a tensor of this name as an output."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def weight(self, name: str, value: np.ndarray) -> str:
        """A constant tensor; the same name again is the same tensor."""
        self._weights.setdefault(name, value)
        return name

    def ints(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.weight("ints_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def node(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Append an operator with one output and return its name; "" among the inputs leaves an optional one out."""
        out = out or f"{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def linear(
        self, x: str, name: str, weight_OI: np.ndarray, bias_O: np.ndarray | None, out: str = ""
    ) -> str:
        """x @ weight^T + bias over the last dim of x; the weight is stored (in, out), as MatMul multiplies it."""
        if bias_O is None:
            return self.node("MatMul", x, self.weight(name + ".weight.T", weight_OI.T), out=out)
        product = self.node("MatMul", x, self.weight(name + ".weight.T", weight_OI.T))
        return self.node("Add", product, self.weight(name + ".bias", bias_O), out=out)

    def split_heads(self, x: str, heads: int, head_size: int) -> str:
        """(batch, sequence, heads * head) to (batch, heads, sequence, head)."""
        apart = self.node("Reshape", x, self.ints(0, 0, heads, head_size))
        return self.node("Transpose", apart, perm=[0, 2, 1, 3])

    def join_heads(self, x: str, width: int) -> str:
        """(batch, heads, sequence, head) to (batch, sequence, heads * head)."""
        return self.node("Reshape", self.node("Transpose", x, perm=[0, 2, 1, 3]), self.ints(0, 0, width))

    def vocabulary_logits(
        self, hidden: str, at: str, table_VH: str, sizes: tuple[int, int], bias: str, out: str
    ) -> None:
        """Logits (batch, asked, V) of the hidden states (batch, asked, H); `at` (batch, asked) gives their shape.

        Gemm with a transposed second operand reads the token table as it is stored, so a tied table is stored once.
        """
        vocab_size, width = sizes
        flat = self.node("Reshape", hidden, self.ints(-1, width))
        logits = self.node("Gemm", flat, table_VH, *([bias] if bias else []), transB=1)
        shape = self.node("Concat", self.node("Shape", at), self.ints(vocab_size), axis=0)
        self.node("Reshape", logits, shape, out=out, allowzero=1)  # nothing asked gives (batch, 0, V)
        self.output(out, FLOAT, ["batch", "asked", vocab_size])

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
        """A constant int64 scalar."""
        return self.weight(f"scalar_{value}", np.array(value, np.int64))

    def save(self, path: Path, metadata: dict[str, str], external_bytes: int = EXTERNAL_BYTES) -> int:
        """Write the model, check it with ONNX's own checker, and return its opset's node count.

        Weights of more than `external_bytes` together are written to `<path>.data`.
        """
        total = sum(value.nbytes for value in self._weights.values())
        if total > external_bytes:
            tensors = self._write_external(path.with_name(path.name + ".data"))
        else:
            tensors = [
                numpy_helper.from_array(np.asarray(value, order="C"), name)
                for name, value in self._weights.items()
            ]
        graph = helper.make_graph(self._nodes, "throughline", self._inputs, self._outputs, tensors)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="throughline", producer_version=version(),
        )  # fmt: skip
        helper.set_model_props(model, metadata)
        onnx.save_model(model, str(path))
        onnx.checker.check_model(str(path), full_check=total <= external_bytes)
        return len(self._nodes)

    def _write_external(self, path: Path) -> list[onnx.TensorProto]:
        """Stream large weights into one file; small ones stay in the graph, where shape inference needs them."""
        tensors = []
        with open(path, "wb") as file:
            for name, value in self._weights.items():
                value = np.asarray(value, order="C")
                if value.nbytes < ALIGNMENT:
                    tensors.append(numpy_helper.from_array(value, name))
                    continue
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                tensor = TensorProto(name=name, dims=value.shape, data_location=TensorProto.EXTERNAL)
                tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
                for key, entry in (
                    ("location", path.name),
                    ("offset", file.tell()),
                    ("length", value.nbytes),
                ):
                    tensor.external_data.add(key=key, value=str(entry))
                value.tofile(file)
                tensors.append(tensor)
        return tensors
