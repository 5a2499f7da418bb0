"""One process trains to the same bits as a committed record: six short runs on shipped text, their losses and the
hash of every weight.

    python benchmarks/prove_bits.py            # compare with benchmarks/results/bits/<machine>.json
    python benchmarks/prove_bits.py --record   # write it, before a change of structure alone

Bits belong to a processor, a torch and a thread count, so each record names them and is compared with its own alone.
Dropout is 0: which random numbers it takes is an engine's choice, not arithmetic.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from run_all import machine_name
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "recipes" / "samples"
RECORDS = ROOT / "benchmarks" / "results" / "bits"
SMALL = [
    "model.overrides.layers=2",
    "model.overrides.width=64",
    "model.overrides.heads=4",
    "model.overrides.dropout=0",
]
SHORT = [
    "train.steps=8",
    "train.sequence_length=64",
    "train.batch_rows=8",
    "train.compile=off",
    "train.eval_every_steps=0",
    "checkpoint.save_every_steps=0",
    "schedule.warmup_steps=2",
]
LLAMA = ["norm=rmsnorm", "positions=rotary", "gated=true", "activation=silu", "kv_heads=2", "tied=false"]

CASES: dict[str, list[str]] = {
    "gpt, fp32, Muon": ["gpt"],
    "gpt, bf16, AdamW, 4 micro-batches, clipped": [
        "gpt",
        "train.precision=bf16",
        "train.micro_batch_rows=2",
        "optimizer.name=adamw",
        "train.clip_norm=0.1",
    ],
    "llama shape, fp16, full recomputation": [
        "gpt",
        "train.precision=fp16",
        "train.recompute=full",
        "optimizer.name=adamw",
        *(f"model.overrides.{field}" for field in LLAMA),
    ],
    "gpt, documents kept apart, fp32, LAMB": [
        "gpt",
        "data.separate_documents=true",
        "optimizer.name=lamb",
        "train.micro_batch_rows=4",
    ],
    "bert, packed, bf16, LAMB": ["bert", "train.precision=bf16", "optimizer.name=lamb"],
    "bert, padded pairs, fp32, AdamW": ["bert", "objective.packing=false", "optimizer.name=adamw"],
}


def throughline(*arguments: str) -> None:
    """A command in a process of its own, on one thread."""
    code = "from throughline.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    if done.returncode:
        sys.exit(done.stderr.decode())


def trained(name: str, overrides: list[str], home: Path) -> dict[str, Any]:
    """Losses of every step and the hash of each weight after the last, of its published shape."""
    family, *more = overrides
    settings = [f"data.train={home / family}", *SMALL, *SHORT, "log.every_steps=1", *more]
    run = home / hashlib.sha256(name.encode()).hexdigest()[:8]
    sets = [part for setting in settings for part in ("--set", setting)]
    throughline("train", f"{family}-shakespeare", *sets, "--run-dir", str(run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    table = json.loads((checkpoint / "tensors.json").read_text())["weights"]
    hashes = {}
    for weight, facts in sorted(table.items()):
        (chunk,) = facts["chunks"]
        with safe_open(checkpoint / chunk["file"], "np") as tensors:
            hashes[weight] = hashlib.sha256(tensors.get_tensor(chunk["key"]).tobytes()).hexdigest()[:16]
    return {"losses": losses, "weights": hashes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the record instead of comparing with it")
    options = parser.parse_args()
    machine, versions = common.machine_facts(), common.versions([])
    versions.pop("throughline", None)
    file = RECORDS / f"{machine_name()}.json"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        text = str(SAMPLES / "tinyshakespeare" / "input.txt")
        for family, kind, more in (("gpt", "bpe", []), ("bert", "wordpiece", ["--sentences"])):
            made = home / f"{family}-tokenizer"
            throughline("data", "tokenizer", text, "--type", kind, "--vocab-size", "1000", "--out", str(made))
            throughline(
                "data",
                "tokenize",
                text,
                "--documents",
                "block",
                "--tokenizer",
                str(made),
                *more,
                "--out",
                str(home / family),
            )
        found = {name: trained(name, overrides, home) for name, overrides in CASES.items()}
    if options.record:
        RECORDS.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps({"machine": machine, "versions": versions, "runs": found}, indent=1) + "\n"
        )
        print(f"recorded {len(found)} runs in {file}")
        return
    if not file.is_file():
        sys.exit(f"no record of this machine: {file}")
    record = json.loads(file.read_text())
    if record["versions"] != versions:
        sys.exit(f"the record is of {record['versions']}, here are {versions}")
    differing = [name for name in CASES if found[name] != record["runs"][name]]
    for name in CASES:
        print(f"{'differs' if name in differing else 'same bits'}  {name}")
    print(json.dumps({"proof": "bits", "runs": len(CASES), "same": len(CASES) - len(differing)}))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
