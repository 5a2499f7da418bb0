"""Train a small GPT for many passes over little text until its validation loss turns: python benchmarks/overfitting.py

Megatron-LM reports that its 8.3B model begins to overfit after about six epochs of its 174 GB. The twin shows the same
turn at a size that a laptop trains in minutes: the recipe's model on the first 45,000 characters of a shipped novel,
judged on the text that follows. The curves and the epoch of the lowest validation loss are the result.
"""

import bz2
import json
import sys
import tempfile
from pathlib import Path

from common import claim, finish, parser, throughline

ROOT = Path(__file__).resolve().parents[1]
NOVELS = ROOT / "recipes" / "samples" / "novels"
CHARACTERS = 50_000  # of which the last tenth is for validation
EPOCHS, ROWS, LENGTH = 16, 16, 128
SHAPE = {  # changes of gpt-shakespeare
    "model.overrides.width": 256,
    "model.overrides.heads": 8,
    "train.batch_rows": ROWS,
    "train.sequence_length": LENGTH,
}


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        text = bz2.decompress((NOVELS / "Doyle_Hound_1902.txt.bz2").read_bytes()).decode()
        (place / "text.txt").write_text(text[:CHARACTERS])
        throughline(
            "data",
            "tokenizer",
            place / "text.txt",
            "--type",
            "char",
            "--documents",
            "file",
            "--out",
            place / "tok",
        )
        tokenise = (
            "--tokenizer",
            place / "tok",
            "--documents",
            "file",
            "--no-eos",
            "--out",
            place / "tokens",
        )
        throughline("data", "tokenize", place / "text.txt", *tokenise)
        epoch_steps = int(CHARACTERS * 0.9) // (ROWS * LENGTH)
        settings = SHAPE | {
            "data.train": f'["{place}/tokens"]',
            "data.validation_fraction": 0.1,
            "train.steps": epoch_steps * (6 if options.quick else EPOCHS),
            "train.eval_every_steps": epoch_steps,
            "schedule.kind": '"constant"',
            "checkpoint.save_every_steps": epoch_steps * EPOCHS,
            "log.every_steps": epoch_steps,
        }
        changed = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        throughline("train", ROOT / "recipes" / "gpt-shakespeare.toml", "--run-dir", place / "run", *changed)
        records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = {r["step"] / epoch_steps: r["validation"]["loss"] for r in records if "validation" in r}
    train = {r["step"] / epoch_steps: r["loss"] for r in records if "loss" in r}
    best = min(validation, key=validation.__getitem__)
    last = max(validation)
    gap = claim(
        "overfitting-turn",
        [validation[last]],
        [validation[best]],
        peer=f"lowest validation loss, after {best:.1f} epochs",
        unit="nats",
        better="higher",
        goal=1.0,
    )
    details = {
        "epoch_of_lowest_validation_loss": round(best, 2),
        "validation": {f"{epoch:.2f}": round(value, 4) for epoch, value in validation.items()},
        "train": {f"{epoch:.2f}": round(value, 4) for epoch, value in train.items()},
    }
    finish("overfitting", [gap], kind="proof", details=details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
