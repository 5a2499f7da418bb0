"""All that needs a GPU, in the order of doubt: python benchmarks/gpu_check.py [--device cuda] [--quick] [--again]
[--parts doubts,tests,road,benchmarks].

1. What the rehearsal on a null GPU cannot see, as checks of seconds (`gpu_doubts.py`); a failure says what it means.
2. The tests in tests/gpu.
3. The road by the command line: text to tokens; a GPT and a BERT trained, stopped and resumed, evaluated, continued or
   embedded; what a run can be asked for, each a few steps whose first loss is that of a plain fp32 run; an engine of
   TensorRT's where that is installed.
4. The benchmarks gpu.py, gpu_decode.py and gpu_scale.py.

Each result is written into build/gpu-check.json as soon as it is there: a second start goes on where the first ended
and tries again what failed, `--again` begins anew. That file is what to send back. With `--device cpu` this shows that
the checks and commands are right and claims nothing of a GPU. Exit code 1 when a check failed.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import claim, finish, machine_facts, parser, versions
from gpu_doubts import DOUBTS, LeftOut

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
PACKAGES = ("onnxruntime-gpu", "tensorrt", "triton")
NEEDED = ("click", "pydantic", "tokenizers", "pyarrow", "tomli_w")
PARTS = ("doubts", "tests", "road", "benchmarks")
SMALL = {"model.overrides.layers": 2, "model.overrides.width": 64, "train.sequence_length": 64}
FP8, PLAIN = "fp8 products", "gpt: plain fp32"
# what a run may be asked for; the largest difference of the first loss from plain fp32, relative: rounding to
# 8 and to 11 bits in a few dozen products; `None` where another model or other rows are trained
VARIANTS: dict[str, tuple[dict[str, object], float | None]] = {
    "bf16": ({"train.precision": "bf16"}, 2e-2),
    "fp16": ({"train.precision": "fp16"}, 5e-3),
    FP8: ({"train.precision": "bf16", "train.matmul": "fp8"}, 2e-2),
    "offload": ({"train.offload": True}, 1e-4),
    "offload in bf16": ({"train.offload": True, "train.precision": "bf16"}, 2e-2),
    "full recomputation": ({"train.recompute": "full"}, 1e-4),
    "selective recomputation": ({"train.recompute": "selective"}, 1e-4),
    "compiled": ({"train.compile": "on"}, 1e-4),
    "offload, compiled blocks": ({"train.offload": True, "train.compile": "on"}, 1e-4),
    "documents kept apart": ({"data.packing": "best_fit"}, None),
    "window": ({"model.overrides.attention_window": 32, "model.overrides.attention_block": 16}, None),
    "llama shape": (
        {
            "model.overrides.positions": "rotary",
            "model.overrides.norm": "rmsnorm",
            "model.overrides.gated": True,
            "model.overrides.kv_heads": 2,
            "model.overrides.tied": False,
        },
        None,
    ),
    "growing batch": (
        {
            "train.batch_ramp.start_rows": 4,
            "train.batch_ramp.step_rows": 4,
            "train.batch_ramp.over_rows": 16,
        },
        None,
    ),
}


class Checks:
    """Runs checks by name, in one directory, and writes down how each went."""

    def __init__(self, place: Path, device: str, steps: int, again: bool) -> None:
        self.place, self.device, self.steps = place, device, steps
        self.file = place.with_suffix(".json")
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.of = {"card": card, "commit": commit, "torch": torch.__version__, "steps": steps}
        known = json.loads(self.file.read_text()) if self.file.is_file() and not again else {}
        self.results: dict[str, dict[str, object]] = (
            known.get("results", {}) if known.get("of") == self.of else {}
        )
        if not self.results:
            shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True, exist_ok=True)

    def check(self, name: str, work: Callable[[], object], meaning: str = "") -> None:
        """Unless it was good before. What `work` returns is kept as what was found."""
        if self.results.get(name, {}).get("result") == "ok":
            return
        start = time.monotonic()
        result: dict[str, object] = {"result": "ok"}
        try:
            result["found"] = work()
        except LeftOut as reason:
            result = {"result": "left out", "found": str(reason)}
        except Exception as error:  # a check that breaks is one that failed: the others go on
            result = {
                "result": "FAILED",
                "found": f"{type(error).__name__}: {error}"[-3000:],
                "means": meaning,
            }
        self.results[name] = result | {"seconds": round(time.monotonic() - start, 2)}
        facts = {
            "of": self.of,
            "machine": machine_facts(),
            "versions": versions(("onnxruntime-gpu", "tensorrt", "triton")),
        }
        self.file.write_text(json.dumps(facts | {"results": self.results}, indent=1, default=str))
        found = str(result.get("found") or "").strip().splitlines()
        print(
            f"{name}: {result['result']} ({self.results[name]['seconds']} s) {found[0][:200] if found else ''}",
            flush=True,
        )
        if result["result"] == "FAILED" and meaning:
            print(f"    {meaning}", flush=True)

    def fresh(self, *names: str) -> None:
        """What a check makes, and left behind when it failed, is not there."""
        for name in names:
            shutil.rmtree(self.place / name, ignore_errors=True)

    def run(self, *words: object) -> str:
        """A command of ours; its output."""
        command = [sys.executable, "-m", "throughline.cli.main", *map(str, words)]
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def train(self, recipe: str, directory: str, tokens: str, **settings: object) -> list[float]:
        """Losses of the run's steps."""
        given = SMALL | {
            "data.train": tokens,
            "train.steps": self.steps,
            "train.batch_rows": 16,
            "train.eval_every_steps": 0,
            "train.device": self.device,
            "train.precision": "fp32",
            "train.compile": "off",
            "schedule.kind": "constant",
            "schedule.warmup_steps": 0,
            "optimizer.name": "adamw",
        }
        changes = [
            word for key, value in (given | settings).items() for word in ("--set", f"{key}={_toml(value)}")
        ]
        self.run("train", recipe, "--run-dir", directory, *changes)
        lines = (self.place / directory / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    def resumed(self, recipe: str, tokens: str, name: str) -> None:
        """A run that ends early and goes on has the losses of one that does not. On CUDA sums are not always in the
        same order: a thousandth.
        """
        self.fresh(name, f"{name}-whole")
        whole = self.train(recipe, f"{name}-whole", tokens)
        self.train(recipe, name, tokens, **{"train.steps": self.steps // 2})
        parts = self.train(recipe, name, tokens)
        assert len(parts) == self.steps and whole[-1] < whole[0], (whole, parts)
        assert all(abs(a - b) <= 1e-3 * a for a, b in zip(whole, parts)), (whole, parts)

    def variant(self, name: str) -> None:
        settings, bound = VARIANTS[name]
        if name == FP8 and (lacking := no_fp8(self.device)):
            raise LeftOut(lacking)
        if name == FP8 and self.device == "cpu":
            settings = settings | {"train.matmul": "fp8-emulated"}
        directory, plain = f"variant-{name.replace(' ', '-')}", self.results[PLAIN]["found"]
        self.fresh(directory)
        losses = self.train("gpt-shakespeare", directory, "gpt-tokens", **settings)
        assert losses[-1] < losses[0], losses
        assert bound is None or abs(losses[0] / float(str(plain)) - 1) <= bound, (losses[0], plain)

    def plain(self) -> float:
        self.fresh("plain")
        return self.train("gpt-shakespeare", "plain", "gpt-tokens")[0]

    def scored(self, run: str) -> None:
        told = json.loads(
            self.run(
                "eval", run, "--tasks", "blimp_transitive", "--limit", 8, "--device", self.device, "--json"
            )
        )
        assert "blimp_transitive" in json.dumps(told)

    def generated(self) -> None:
        told = self.run("generate", "gpt", "--prompt", "ROMEO:", "--max-tokens", 8, "--device", self.device)
        assert told.strip()

    def embedded(self) -> None:
        (self.place / "lines.txt").write_text("To be, or not to be.\nA horse!\n")
        lines = self.run("embed", "bert", "lines.txt", "--device", self.device).splitlines()
        vectors = [json.loads(line)["embedding"] for line in lines]
        assert len(vectors) == 2 and vectors[0] != vectors[1]

    def engine(self) -> str:
        """BERT as an engine of TensorRT, built, compared and timed on this card."""
        if importlib.util.find_spec("tensorrt") is None or self.device == "cpu":
            raise LeftOut("needs a card and TensorRT: pip install 'throughline[tensorrt]'")
        self.fresh("engine")
        self.run("export", "bert", "--to", "tensorrt", "--precision", "fp16", "--out", "engine")
        return self.run("bench", "latency", "engine")

    def outside(self, *words: object) -> str:
        """A test run or a benchmark, in a process of its own: its last line."""
        if self.device == "cpu":
            raise LeftOut("needs a card")
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.strip().splitlines() or [""]
        if done.returncode:
            raise RuntimeError("\n".join(lines[-40:]))
        return lines[-1]


def no_fp8(device: str) -> str:
    """Why fp8 products cannot be checked here; "" where they can."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return "this card has none (compute capability below 8.9)"
    return ""


def _toml(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def doubts(checks: Checks) -> None:
    device = torch.device(checks.device)
    for name, (work, meaning) in DOUBTS.items():
        checks.check(name, lambda work=work: work(device), meaning)


def road(checks: Checks, quick: bool) -> None:
    """By the command line, where its packages are."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"the command line needs {', '.join(missing)} (pip install -e .): its part is left out",
            file=sys.stderr,
        )
        return

    def tokens(family: str, kind: str, *more: str) -> None:
        checks.fresh(kind, f"{family}-tokens")
        checks.run("data", "tokenizer", TEXT, "--type", kind, "--vocab-size", 512, "--out", kind)
        checks.run(
            "data",
            "tokenize",
            TEXT,
            "--documents",
            "block",
            "--tokenizer",
            kind,
            *more,
            "--out",
            f"{family}-tokens",
        )

    checks.check("tokens for a GPT", lambda: tokens("gpt", "bpe"))
    checks.check("tokens for a BERT", lambda: tokens("bert", "wordpiece", "--sentences"))
    for family in ("gpt", "bert"):
        recipe, store = f"{family}-shakespeare", f"{family}-tokens"
        checks.check(
            f"{family}: train, stop, resume", lambda r=recipe, s=store, n=family: checks.resumed(r, s, n)
        )
        checks.check(f"{family}: evaluate", lambda n=family: checks.scored(n))
    checks.check("gpt: generate", checks.generated)
    checks.check("bert: embed", checks.embedded)
    meaning = "engines cannot be built, are refused or are wrong: serve fp16 graphs by ONNX Runtime"
    checks.check("bert: TensorRT", checks.engine, meaning)
    checks.check(PLAIN, checks.plain)
    some = ("bf16", FP8, "offload in bf16", "compiled", "growing batch")
    for name in some if quick else VARIANTS:
        checks.check(f"gpt: {name}", lambda name=name: checks.variant(name))
    layout = ("--set", "parallel.data=2", "--set", "parallel.tensor=2")
    checks.check(
        "prove, in processes forked on the CPU",
        lambda: str(checks.run("prove", "gpt-shakespeare", *layout))[:0],
    )


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--again", action="store_true", help="begin anew instead of going on")
    options.add_argument("--parts", default=",".join(PARTS), help="of these, by comma")
    chosen = options.parse_args()
    parts = chosen.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"--parts: there is no {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing checked (--device cpu rehearses)", file=sys.stderr)
        return 0
    place = ROOT / "build" / ("gpu-check" if chosen.device == "cuda" else "gpu-check-on-cpu")
    checks = Checks(place, chosen.device, 6 if chosen.quick else 40, chosen.again)
    quick = ["--quick"] if chosen.quick else []
    if "doubts" in parts:
        doubts(checks)
    if "tests" in parts:
        checks.check("tests/gpu", lambda: checks.outside("-m", "pytest", "tests/gpu", "-m", "gpu", "-rs"))
    if "road" in parts:
        road(checks, chosen.quick)
    for name in ("gpu", "gpu_decode", "gpu_scale") if "benchmarks" in parts else ():
        checks.check(
            f"benchmarks/{name}.py", lambda name=name: checks.outside(f"benchmarks/{name}.py", *quick)
        )
    rows = [{"check": name} | result for name, result in checks.results.items()]
    tried = [row for row in rows if row["result"] != "left out"]
    good = sum(row["result"] == "ok" for row in tried)
    name = "gpu-check" if chosen.device == "cuda" else "gpu-check-rehearsed-on-cpu"
    made = claim(name, [good], [len(tried)], peer="checks", unit="checks", better="higher", goal=1.0)
    finish("gpu_check", [made], kind="proof", device=chosen.device, rows=rows)
    print(f"to send back: {checks.file}", file=sys.stderr)
    return int(good < len(tried))


if __name__ == "__main__":
    sys.exit(main())
