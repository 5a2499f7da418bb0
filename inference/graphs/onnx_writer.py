"""Writing ONNX graphs node by node from our own weights, without a tracing exporter.

- What is written is what was meant: no traced constants, no specialised sizes, no cache that forgets; a graph
  of a few dozen lines per family that can be read beside its model. `torch.onnx.export` serves as the
  cross-check in the tests.
- Opset 24 by default: Attention, TensorScatter, RotaryEmbedding and RMSNormalization are standard operators
  there, which ONNX Runtime runs on a CPU and TensorRT 10.15+ parses. Older opsets spell them out.
- Weights above `EXTERNAL_BYTES` go to `<name>.data` beside the graph: protobuf ends at 2 GiB. They are
  streamed, so writing takes no second copy of the model in memory.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...core.artifact import version

EXTERNAL_BYTES = 1_800_000_000
ALIGNMENT = 4096  # external tensors start on pages, so that runtimes can map them
BOOL, INT32, INT64 = TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
CONTRIB = "com.microsoft"  # ONNX Runtime's own operators; every other node is standard ONNX


class Graph:
    """An ONNX graph under construction; tensors are named by strings, `node` returns the name of its output.

    `half`: products and the values between them are float16; norms, softmax and outputs stay float32.
    """

    def __init__(self, opset: int = 24, half: bool = False) -> None:
        self.opset, self.half = opset, half
        self.kind = FLOAT16 if half else FLOAT
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
        """Declare a tensor of this name as an output."""
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
        """A constant int64 vector."""
        return self.weight("ints_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant scalar of the products' type."""
        return self.weight(f"number_{value:g}", np.array(value, np.float16 if self.half else np.float32))

    def node(
        self,
        op: str,
        *inputs: str,
        out: str = "",
        outputs: int = 1,
        more: Sequence[str] = (),
        **attributes: Any,
    ) -> str:
        """Append an operator and return the name of its first output; "" among the inputs leaves an optional
        one out. Further outputs are called `<name>:1`, `<name>:2`, or as `more` says.
        """
        out = out or f"{self.scope}{op}_{len(self._nodes)}"
        names = [out, *(f"{out}:{i}" for i in range(1, outputs)), *more]
        self._nodes.append(helper.make_node(op, list(inputs), names, name=out, **attributes))
        return out

    def wide(self, x: str) -> str:
        """x as float32."""
        return self.node("Cast", x, to=FLOAT) if self.half else x

    def narrow(self, x: str) -> str:
        """A float32 tensor in the type of the products."""
        return self.node("Cast", x, to=FLOAT16) if self.half else x

    def split_heads(self, x: str, heads: int, head_size: int) -> str:
        """(batch, sequence, heads * head) to (batch, heads, sequence, head)."""
        apart = self.node("Reshape", x, self.ints(0, 0, heads, head_size))
        return self.node("Transpose", apart, perm=[0, 2, 1, 3])

    def join_heads(self, x: str, width: int) -> str:
        """(batch, heads, sequence, head) to (batch, sequence, heads * head)."""
        return self.node("Reshape", self.node("Transpose", x, perm=[0, 2, 1, 3]), self.ints(0, 0, width))

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
