"""What each precision of an export costs trained models, on text that they have not seen.

    python benchmarks/precision.py [--bert runs/bert-toy/seed-0] [--gpt RUN] [--quick]

The BERT is the one of `make bert-toy`, judged on the two novels held out there. The GPT is trained here for half a
minute on nine tenths of tiny Shakespeare and judged on the last tenth. For each form of graph: the mean KL divergence
from torch of the predictions (every next token; 15 % of masked tokens), and how often the arg-max stays where torch is
right with a probability below 0.9. Half of the text calibrates int8, the other half judges. Greedy ids of the fp32
graph are compared for 128 tokens. GGUF is judged likewise through llama.cpp where that is installed.
"""

import bz2
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from common import Claim, claim, finish, parser, throughline
from throughline.core.errors import WrongUse
from throughline.inference.exports.export import Judging, export_onnx
from throughline.inference.exports.gguf_export import export_gguf
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.parity import Bounds
from throughline.inference.runtimes.source import open_model

SAMPLES = Path(__file__).resolve().parents[1] / "recipes" / "samples"
HELD_OUT = ("Doyle_Hound_1902.txt.bz2", "Trollope_Warden_1855.txt.bz2")
LOOSE = Bounds(1e9, 0.0, 1e9, 0.0, 1e9)  # figures are wanted, not a refusal
KL, AGREEMENT = 0.01, {"fp32": 0.999, "fp16": 0.999, "int8": 0.98}
FORMS = [
    ("portable", "fp32"),
    ("portable", "fp16"),
    ("onnxruntime", "int8"),
    ("portable", "int8"),
    ("tensorrt", "int8"),
    ("onnxruntime", "int4"),
]
GGUF = {"f16": "fp16", "q8_0": "int8", "q4_0": "int4"}
Figures = dict[str, Any]


def train_gpt(folder: Path, text: str, steps: int) -> Path:
    """The shipped recipe for Shakespeare with biases, as GPT-2 has them; returns the run."""
    (folder / "train.txt").write_text(text)
    vocabulary = ("--type", "bpe", "--vocab-size", 2048)
    throughline("data", "tokenizer", folder / "train.txt", *vocabulary, "--out", folder / "tok")
    store = ("--tokenizer", folder / "tok", "--out", folder / "tokens")
    throughline("data", "tokenize", folder / "train.txt", "--documents", "block", *store)
    values = {
        "data.train": folder / "tokens",
        "model.overrides.bias": "true",
        "model.overrides.sequence_length": 256,
        "train.steps": steps,
        "train.eval_every_steps": steps,
        "checkpoint.save_every_steps": steps,
    }
    changes = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    throughline("train", "gpt-shakespeare", "--run-dir", folder / "run", *changes)
    return folder / "run"


def figures(report: Figures) -> Figures:
    """What is kept of one form's report."""
    kept = ("kl", "top1_agreement", "contested", "contested_predictions", "predictions")
    return {key: report[key] for key in kept} | {
        "loss": report["exported_loss"],
        "torch_loss": report["torch_loss"],
    }


def judged(name: str, path: Path, text: Path, folder: Path) -> dict[str, Figures]:
    """Figures of every form of a model, and of its GGUF files."""
    found = {}
    for variant, precision in FORMS if name == "gpt" else FORMS[:-1]:
        options = GraphOptions(variant, precision)  # type: ignore[arg-type]
        judging = Judging(text=text, bench=False, bounds=LOOSE)
        report = export_onnx(path, folder / "out", options, judging=judging, overwrite=True)
        found[f"{precision} {variant}"] = figures(report["text"])
        if precision == "fp32" and "greedy_tokens" in report:
            found["fp32 portable"]["greedy"] = report["greedy_tokens"]["equal"]
        print(f"{name} {precision} {variant}: {found[f'{precision} {variant}']}", flush=True)
    if name == "gpt" and importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
        for kind in GGUF:
            judging = Judging(text=text, bench=False, bounds=LOOSE)
            report = export_gguf(path, folder / "gguf", kind, judging=judging, overwrite=True)  # type: ignore[arg-type]
            found[f"{kind} llama.cpp"] = figures(report["text"])
            print(f"{name} {kind} llama.cpp: {found[f'{kind} llama.cpp']}", flush=True)
    return found


def claims_of(name: str, found: dict[str, Figures]) -> list[Claim]:
    """Bounds of fp16 and int8; int4 is reported without."""
    claims = []
    for form, row in found.items():
        precision = GGUF.get(form.split()[0], form.split()[0])
        if precision not in AGREEMENT:
            continue
        title = f"{name}-{form.replace(' ', '-')}"
        divergence = ([max(row["kl"], 1e-12)], [KL])
        claims.append(claim(f"{title}-kl", *divergence, peer="bound", unit="nats", better="lower", goal=1.0))
        agreement = ([row["contested"]], [AGREEMENT[precision]])
        claims.append(
            claim(f"{title}-agreement", *agreement, peer="bound", unit="share", better="higher", goal=1.0)
        )
        if "greedy" in row:
            equal = ([row["greedy"]], [128])
            claims.append(
                claim(f"{title}-greedy", *equal, peer="torch", unit="ids", better="higher", goal=1.0)
            )
    return claims


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--bert", type=Path, default=Path("runs/bert-toy/seed-0"), help="run of make bert-toy"
    )
    options.add_argument(
        "--gpt", type=Path, help="run of a GPT that has not seen the last tenth of Shakespeare"
    )
    chosen = options.parse_args()
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = (SAMPLES / "tinyshakespeare" / "input.txt").read_text()
        cut = len(words) * 9 // 10
        (folder / "play.txt").write_text(words[cut:])
        novels = [bz2.decompress((SAMPLES / "novels" / file).read_bytes()).decode() for file in HELD_OUT]
        (folder / "novels.txt").write_text("\n".join(novels))
        gpt = chosen.gpt or train_gpt(folder, words[:cut], 50 if chosen.quick else 500)
        for name, path, text in (("gpt", gpt, "play.txt"), ("bert", chosen.bert, "novels.txt")):
            try:
                opened = open_model(path)
            except WrongUse as error:
                print(f"{name}: left out, {error}")
                continue
            details[f"{name}_parameters"] = opened.model.config.parameter_count()
            details[name] = judged(name, path, folder / text, folder)
            claims += claims_of(name, details[name])
    finish("precision", claims, packages=["onnxruntime", "llama-cpp-python"], details=details)


if __name__ == "__main__":
    main()
