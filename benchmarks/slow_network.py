"""Step time of data-parallel training over slow links, with and without compressed gradients.

python benchmarks/slow_network.py [--quick]

Two processes of `throughline train`, each in a network namespace of its own; a pair of virtual interfaces joins
them, and a token bucket holds each direction to 1, 4.1 or 10 Gb/s (4.1 is what the 40 GbE of the 1-bit Adam report
reached in effect). Every scheme takes the same steps; the step time is the median after the warm-up of the scheme.
At 100 Gb/s, which this machine's processors cannot fill, the time is computed: the step without a link plus the
bytes sent at that rate, and labelled so. Needs root, `ip` and `tc`; where namespaces are refused all links are
computed and the result says so.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from common import claim, finish, parser

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "recipes" / "samples"
HOSTS = ("throughline-a", "throughline-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATES_GBIT = (1.0, 4.1, 10.0)
SCHEMES = ("none", "bf16", "powersgd", "one-bit-adam")
WARMUP_STEPS = 3
SETTINGS = {
    "model.overrides.width": 512,
    "model.overrides.layers": 6,
    "model.overrides.heads": 8,
    "train.sequence_length": 64,
    "train.batch_rows": 4,
    "train.eval_every_steps": 0,
    "optimizer.name": '"adamw"',
    "optimizer.learning_rate": 1e-3,
    "parallel.data": 2,
    "train.compile": '"off"',
}


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def hosts():
    """Two namespaces joined by a pair of interfaces; yields whether there are any."""
    made = False
    try:
        if shutil.which("ip") and shutil.which("tc") and os.geteuid() == 0:
            for host in HOSTS:
                sh("ip", "netns", "add", host)
            sh(
                "ip",
                "link",
                "add",
                "tl0",
                "netns",
                HOSTS[0],
                "type",
                "veth",
                "peer",
                "name",
                "tl0",
                "netns",
                HOSTS[1],
            )
            for host, address in zip(HOSTS, ADDRESSES, strict=True):
                sh("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "tl0")
                sh("ip", "-n", host, "link", "set", "tl0", "up")
                sh("ip", "-n", host, "link", "set", "lo", "up")
            limit(RATES_GBIT[0])
            made = True
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"no shaped link on this machine: {getattr(error, 'stderr', error)}", file=sys.stderr)
    try:
        yield made
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def limit(gbit: float | None) -> None:
    """Hold both directions to a rate; None lifts it."""
    for host in HOSTS:
        subprocess.run(
            ["ip", "netns", "exec", host, "tc", "qdisc", "del", "dev", "tl0", "root"], capture_output=True
        )
        if gbit is not None:
            rate = f"{gbit * 1000:.0f}mbit"
            words = ("tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
            sh("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "tl0", "root", *words)


def train(place: Path, name: str, scheme: str, steps: int, linked: bool) -> tuple[float, float, float]:
    """Two processes of `throughline train`: (seconds a step, bytes that a process sends a step, last loss)."""
    words = [
        sys.executable,
        "-m",
        "throughline.cli.main",
        "train",
        str(ROOT / "recipes" / "gpt-shakespeare.toml"),
    ]
    settings = SETTINGS | {"data.train": f'["{place}/tokens"]', "train.steps": steps}
    settings["checkpoint.save_every_steps"] = steps
    settings["schedule.warmup_steps"] = 1
    if scheme != "none":
        settings |= {"compression.scheme": f'"{scheme}"', "compression.warmup_steps": WARMUP_STEPS}
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += ["--run-dir", str(place / name)]
    processes = []
    for rank, host in enumerate(HOSTS):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": ADDRESSES[0] if linked else "127.0.0.1",
            "MASTER_PORT": 29511,
            "OMP_NUM_THREADS": 1,
        } | ({"GLOO_SOCKET_IFNAME": "tl0"} if linked else {})
        inside = ["ip", "netns", "exec", host] if linked else []
        set_ = [f"{key}={value}" for key, value in environment.items()]
        processes.append(subprocess.Popen([*inside, "env", *set_, *words], stdout=subprocess.DEVNULL))
    if any(process.wait(timeout=600) for process in processes):
        raise SystemExit(f"{name} failed")
    records = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    steps_ = [record for record in records if "step_s" in record][WARMUP_STEPS + 2 :]
    sent = statistics.median(record.get("gradient_bytes", 0) for record in steps_)
    return statistics.median(record["step_s"] for record in steps_), sent, steps_[-1]["loss"]


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    steps = 12 if options.quick else 20
    claims, rows = [], []
    with tempfile.TemporaryDirectory() as directory, hosts() as linked:
        place = Path(directory)
        text = SAMPLES / "tinyshakespeare" / "input.txt"
        for words in (
            ("tokenizer", text, "--type", "bpe", "--vocab-size", "4096", "--out", place / "tok"),
            (
                "tokenize",
                text,
                "--documents",
                "block",
                "--tokenizer",
                place / "tok",
                "--out",
                place / "tokens",
            ),
        ):
            done = [sys.executable, "-m", "throughline.cli.main", "data", *map(str, words)]
            subprocess.run(done, check=True, stdout=subprocess.DEVNULL)
        free = {scheme: train(place, f"free-{scheme}", scheme, steps, False) for scheme in SCHEMES}
        for gbit in (*RATES_GBIT, 100.0):
            measured = linked and gbit in RATES_GBIT
            if measured:
                limit(gbit)
            times = {}
            for scheme in SCHEMES:
                seconds, sent, loss = free[scheme]
                if measured:
                    seconds, sent, loss = train(place, f"{gbit}-{scheme}", scheme, steps, True)
                else:
                    seconds += sent * 8 / (gbit * 1e9)
                times[scheme] = seconds
                rows.append(
                    {
                        "gbit_s": gbit,
                        "scheme": scheme,
                        "step_s": round(seconds, 4),
                        "bytes_per_step": sent,
                        "loss": loss,
                        "evidence": "measured" if measured else "computed",
                    }
                )
            for scheme in SCHEMES[1:]:
                kind = "" if measured else "-computed"
                made = claim(
                    f"{scheme}-{gbit:g}-gbit{kind}",
                    [times[scheme]],
                    [times["none"]],
                    peer="fp32 ring all-reduce",
                    unit="s/step",
                    better="lower",
                    goal=None,
                )
                claims.append(made)
    finish("slow_network", claims, kind="proof", details={"rows": rows, "linked": linked})
    return 0


if __name__ == "__main__":
    sys.exit(main())
