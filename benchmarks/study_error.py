"""How well a study of this machine predicts a run that it did not see: python benchmarks/study_error.py [--quick]

`throughline study` on a small GPT: probes and two short stretches of training set the planner's constants of this
machine; a third stretch, of half the depth, is left out and says how far the prediction is off. The same error with
the datasheet's constants alone stands beside it.
"""

import json
import sys
import tempfile
from pathlib import Path

from common import claim, finish, parser, settings, throughline

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
SETTINGS = {"train.compile": "off", "train.device": "cpu"}
WITHIN = 0.3  # of the measured step: what a person plans with


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        throughline("data", "tokenizer", TEXT, "--type", "char", "--out", place / "tok")
        throughline("data", "tokenize", TEXT, "--tokenizer", place / "tok", "--out", place / "tokens")
        changes = settings(SETTINGS | {"data.train": str(place / "tokens")})
        steps = ("--steps", 6 if options.quick else 20)
        told = throughline("study", "gpt-shakespeare", *changes, "--out", place / "study", *steps, "--json")
    facts = json.loads(told)
    left_out = next(run for run in facts["runs"] if run["left_out"])
    measured = left_out["measured_seconds"]
    errors = {name: left_out[f"{name}_seconds"] / measured - 1 for name in ("datasheet", "probes", "refit")}
    claims = [
        claim(
            "study-left-out",
            [abs(errors["refit"])],
            [WITHIN],
            peer="bound",
            unit="of the step",
            better="lower",
            goal=1.0,
        )
    ]
    details = {
        "left_out_error": round(errors["refit"], 4),
        "errors": errors,
        "runs": facts["runs"],
        "probes": facts["probes"],
    }
    finish("study_error", claims, kind="proof", details=details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
