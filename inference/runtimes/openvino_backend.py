"""The OpenVINO backend: BERT graphs of our writer on the CPU, in their own precision."""

from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import Ids, OneCall, Want
from ...core.errors import Refused, extra
from ...models.config import BERTConfig
from .onnx_encoder import encoder_feeds

OUTPUTS = {"last_hidden_state", "mlm_logits", "sentence_embedding", "pooler_output", "nsp_logits"}
OUTPUTS |= {"cls_embedding", "logits", "start_logits", "end_logits"}  # of our writer's graphs


def compile_graph(path: Path | str, threads: int | None) -> Any:
    """A compiled OpenVINO model on the CPU. Raises WrongUse without the library, Refused for a graph that it cannot
    compile.
    """
    openvino = extra("openvino", "--backend openvino", "openvino")
    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    try:
        return openvino.Core().compile_model(str(path), "CPU", settings)
    except RuntimeError as error:
        raise Refused(
            "OpenVINO cannot compile this graph",
            where=path,
            why=str(error).strip().splitlines()[-1][:300],
            fix="use --backend onnxruntime, or export with --opset 20",
        ) from error


class OpenVinoEncoder(OneCall):
    """A BERT graph (`core.backend.EncoderBackend`)."""

    name = "openvino"

    def __init__(
        self, path: Path | str, config: BERTConfig, threads: int | None = None, dtype: str = "fp32"
    ) -> None:
        self.device, self.dtype = "cpu", dtype
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        compiled = compile_graph(path, threads)
        self._inputs = {port.get_any_name() for port in compiled.inputs}
        # a port has the names of all tensors that became one in optimisation
        self._outputs = [min(OUTPUTS.intersection(port.get_names())) for port in compiled.outputs]
        self._request = compiled.create_infer_request()

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`; all of it is on the host anyway."""
        found = self._request.infer(encoder_feeds(ids_BS, types_BS, mask_BS, ask_BN, self._inputs))
        values = (np.array(found[place], np.float32) for place in range(len(self._outputs)))
        return dict(zip(self._outputs, values))
