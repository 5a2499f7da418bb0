"""OpenVINO on the CPU: a session with the methods of ONNX Runtime's that `OnnxEncoder` uses."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.errors import Refused, extra

OUTPUTS = {"last_hidden_state", "mlm_logits", "sentence_embedding", "pooler_output", "nsp_logits"}
OUTPUTS |= {"cls_embedding", "logits", "start_logits", "end_logits"}  # of our writer's graphs


class OpenVinoSession:
    """A BERT graph. Raises MissingExtra without the library, Refused for a graph that it cannot compile."""

    def __init__(self, path: Path | str, threads: int | None = None) -> None:
        openvino = extra("openvino", "--backend openvino", "openvino")
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = threads
        try:
            self._compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        except RuntimeError as error:
            why = str(error).strip().splitlines()[-1][:300]
            fix = "use --backend onnxruntime, or export with --opset 20"
            raise Refused("OpenVINO cannot compile this graph", where=path, why=why, fix=fix) from error
        # a port has the names of all tensors that became one in optimisation
        self._outputs = [min(OUTPUTS.intersection(port.get_names())) for port in self._compiled.outputs]
        self._request = self._compiled.create_infer_request()

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=port.get_any_name()) for port in self._compiled.inputs]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._outputs]

    def run(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """These outputs, float32; all of them are on the host anyway."""
        found = self._request.infer(feeds)
        return [np.array(found[self._outputs.index(name)], np.float32) for name in names]
