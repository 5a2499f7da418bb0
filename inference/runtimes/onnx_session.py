"""Sessions of ONNX Runtime, on the CPU or with its CUDA or TensorRT provider, or of OpenVINO; a BERT's graph in one.

Threads do not spin: on a shared or small machine spinning threads burn several times the CPU that the work needs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.backend import Ids, Limits, Want
from ...core.errors import Refused, WrongUse, extra
from ...models.config import BERTConfig

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
TENSORRT = "TensorrtExecutionProvider"
PROFILE_ROWS = 64  # of a call of TensorRT's provider


def profile_of(graph: Path | str, context: int) -> dict[str, str]:
    """The shapes of a BERT's inputs for which TensorRT builds: at others it would build anew, for minutes."""
    import onnx

    names = [given.name for given in onnx.load(graph, load_external_data=False).graph.input]
    sizes = {"min": "1x1", "opt": f"8x{min(128, context)}", "max": f"{PROFILE_ROWS}x{context}"}
    shapes = {end: ",".join(f"{name}:{size}" for name in names) for end, size in sizes.items()}
    return {f"trt_profile_{end}_shapes": shape for end, shape in shapes.items()}


def providers_of(device: str, tensorrt: Mapping[str, str] | None = None) -> list[Any]:
    """What to ask ONNX Runtime for; `tensorrt`: the settings of its provider. Raises WrongUse if it is not there."""
    import onnxruntime

    kind, _, number = device.partition(":")
    wanted = [PROVIDERS[kind]] if tensorrt is None else [TENSORRT, PROVIDERS[kind]]
    there = onnxruntime.get_available_providers()
    if missing := [name for name in wanted if name not in there]:
        why = f"it was built with {', '.join(there)}"
        fix = "pip uninstall onnxruntime && pip install onnxruntime-gpu, or --device cpu"
        raise WrongUse(f"this ONNX Runtime has no {missing[0]}", where=f"--device {device}", why=why, fix=fix)
    if kind == "cpu":
        return wanted
    settings = {"device_id": number or "0"}
    # fp32 is fp32, as torch has it: with TF32 its errors are those of fp16. A build takes minutes: it is kept.
    kept = dict.fromkeys(("trt_engine_cache_enable", "trt_timing_cache_enable"), "1")
    where = f"{Path.home()}/.cache/throughline/tensorrt"
    kept |= dict.fromkeys(("trt_engine_cache_path", "trt_timing_cache_path"), where)
    of = {PROVIDERS["cuda"]: {"use_tf32": "0"}, TENSORRT: {**kept, **(tensorrt or {})}}
    return [(name, settings | of[name]) for name in wanted]


def check_version(facts: Mapping[str, Any], where: Path) -> None:
    """Refuse a GPT whose graph has the standard Attention over a cache on an ONNX Runtime older than the one that it
    was compared on: versions differ in which end of it the causal triangle stands at, and say nothing.
    """
    import onnxruntime

    made, here = str(facts.get("onnxruntime", "0.0")), onnxruntime.__version__
    older = [int(part) for part in here.split(".")[:2]] < [int(part) for part in made.split(".")[:2]]
    if older and facts["family"] == "gpt" and facts["opset"] >= 24 and facts["variant"] != "onnxruntime":
        fix = f"pip install 'onnxruntime>={made}', or export it with --opset 23"
        why = f"it was compared with torch on {made}, here is {here}"
        raise Refused("this graph is for a newer ONNX Runtime", where=where, why=why, fix=fix)


# int8 products of AVX2 and of AVX-512 without VNNI add pairs up in 16 bits, beyond which they saturate without a word:
# there weights become uint8, whose products are added up in 32 bits
WIDE_SUMS = ("session.x64quantprecision", "1")


def open_session(
    path: Path | str, threads: int | None = None, device: str = "cpu", tensorrt: dict[str, str] | None = None
) -> Any:
    """A session on the device. Raises as `providers_of`, Refused for no graph and where another device would do."""
    import onnxruntime

    wanted = providers_of(device, tensorrt)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(*WIDE_SUMS)
    options.log_severity_level = 3  # its warnings are about choices made here on purpose
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        why = str(error).splitlines()[0][:300]
        fix = "export it again; `throughline verify` says whether the file is damaged"
        raise Refused("ONNX Runtime cannot load this graph", where=path, why=why, fix=fix) from error
    first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
    if session.get_providers()[0] != first:  # it falls back to the CPU with a log line
        why = f"it would run with {session.get_providers()[0]}"
        fix = "install the CUDA and cuDNN (or TensorRT) libraries it was built for, or --device cpu"
        raise Refused(f"ONNX Runtime could not start {first}", where=path, why=why, fix=fix)
    return session


OUTPUTS = {"last_hidden_state", "mlm_logits", "sentence_embedding", "pooler_output", "nsp_logits"}
OUTPUTS |= {"cls_embedding", "logits", "start_logits", "end_logits"}  # of our writer's graphs


class OpenVinoSession:
    """A BERT graph by OpenVINO on the CPU, for `OnnxEncoder`. Raises MissingExtra, Refused where it cannot compile."""

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


class OnnxEncoder:
    """A BERT graph in a session of ONNX Runtime's or one with its methods (`core.backend.EncoderBackend`). `open_lane`
    opens a session of one thread for `lane`, which takes `lanes` calls at once if that is more than one.
    """

    name = "onnxruntime"
    limits = Limits()

    def __init__(
        self,
        session: Any,
        config: BERTConfig,
        dtype: str = "fp32",
        device: str = "cpu",
        lanes: int = 1,
        open_lane: Callable[[], Any] | None = None,
    ) -> None:
        self.session, self.dtype, self.device = session, dtype, device
        self.lanes, self._open_lane = lanes, open_lane
        self.config, self.vocab_size, self.context = config, config.vocab_size, config.sequence_length
        self._lane: OnnxEncoder | None = None
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = [value.name for value in session.get_outputs()]

    def lane(self) -> "OnnxEncoder":
        """See `core.backend.EncoderBackend.lane`: a session of one thread with weights of its own, from here on."""
        if self._lane is None:
            alone = self._open_lane if self.lanes > 1 else None
            self._lane = self if alone is None else OnnxEncoder(alone(), self.config, self.dtype)
        return self._lane

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        asked = set(self._outputs if want is None else want)
        if "cls_embedding" in asked.difference(self._outputs):
            asked.add("last_hidden_state")  # which begins with it
        names = [name for name in self._outputs if name in asked]
        feeds = {"input_ids": ids_BS, "attention_mask": mask_BS, "token_type_ids": types_BS}
        feeds["logit_positions"] = ask_BN
        given = {name: np.ascontiguousarray(feeds[name], np.int64) for name in feeds if name in self._inputs}
        return dict(zip(names, self.run(names, given)))

    def run(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """These outputs, float32 on the host."""
        return self.session.run(names, feeds)
