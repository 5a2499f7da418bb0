"""Steps of each two-process layout against a plain torch script of the same layout: python
benchmarks/layouts.py [--quick].

A GPT as wide as GPT-2 124M (768, 12 heads) with 4 layers, its vocabulary and a head of its own, fp32, 4 rows
of 256 tokens a step, one thread a process. Ours is `throughline launch --nproc 2 -- train`, theirs `torchrun
layouts_peers.py`; both clip the gradients, move with fused AdamW and read the loss at every step. Of two ways
to write tensor parallelism the faster one is the peer.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import claim, finish, paired, parser
from train_gpt import SAMPLES, step_seconds_ours, throughline

PEERS = Path(__file__).parent / "layouts_peers.py"
ROWS, LENGTH = 4, 256
LAYOUTS: dict[str, dict[str, object]] = {
    "ddp2": {"parallel.data": 2},
    "fsdp2": {"parallel.data": 2, "parallel.sharding": "full"},
    "tp2": {"parallel.tensor": 2},
    "pp2": {"parallel.pipeline": 2, "parallel.schedule": "1f1b", "train.micro_batch_rows": 1},
}
RECIPE = f"""version = 1
[data]
train = "tokens"
validation_fraction = 0
[model]
preset = "gpt2-124m"
[model.overrides]
layers = 4
tied = false
[train]
sequence_length = {LENGTH}
batch_rows = {ROWS}
precision = "fp32"
compile = "off"
[optimizer]
name = "adamw"
learning_rate = 3e-4
[log]
every_steps = 1
"""


def last_number(words: Sequence[object], cwd: Path) -> float:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=os.environ, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{words}\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=sorted(LAYOUTS), action="append", help="measure this layout")
    chosen = options.parse_args()
    pairs, steps, skip = (1, 6, 2) if chosen.quick else (3, 12, 3)
    os.environ["OMP_NUM_THREADS"] = "1"
    claims = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "recipe.toml").write_text(RECIPE)
        throughline("data", "tokenizer", SAMPLES / "gpt2-bpe", "--type", "import", "--out", "tok", cwd=place)
        text = SAMPLES / "tinyshakespeare" / "input.txt"
        throughline("data", "tokenize", text, "--tokenizer", "tok", "--out", "tokens", cwd=place)
        for name in chosen.only or LAYOUTS:
            count = iter(range(1000))

            def ours(name=name, count=count) -> float:
                directory = f"{name}-{next(count)}"
                settings = LAYOUTS[name] | {"train.steps": steps, "schedule.warmup_steps": 1}
                changed = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
                throughline(
                    "launch",
                    "--nproc",
                    2,
                    "--",
                    "train",
                    "recipe.toml",
                    "--run-dir",
                    directory,
                    *changed,
                    cwd=place,
                )
                return step_seconds_ours(place / directory, skip)

            def theirs(kind: str) -> float:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
                return last_number([*torchrun, PEERS, kind, ROWS, LENGTH, steps, skip], place)

            best = min(("tp2", "tp2-sequence"), key=theirs) if name == "tp2" else name
            mine, peer = paired(ours, lambda best=best: theirs(best), pairs)
            what = f"plain torch script, {best}, fp32, fused AdamW"
            claims.append(claim(name, mine, peer, peer=what, unit="s/step", better="lower", goal=0.95))
    finish("layouts", claims)


if __name__ == "__main__":
    main()
