"""Answer reported results on this machine: python benchmarks/reproduce.py [NAME ...] [--list].

Runs the commands of each claim in recipes/reproductions/, writes an artifact of kind `bench` for each under
runs/reproductions/, its figures to benchmarks/results/reproductions/, and docs/reproductions.md from all of them.
"""

import argparse
import json
import sys
import time

from common import machine_facts
from reproductions import RESULTS, ROOT, answer, execute, read_claims
from throughline.core.artifact import create_artifact
from throughline.core.hardware import machine


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("names", nargs="*", help="claims to answer (default: all)")
    options.add_argument("--list", action="store_true", help="print the claims and end")
    chosen = options.parse_args()
    claims = read_claims()
    unknown = set(chosen.names) - {claim.name for claim in claims}
    if unknown:
        options.error(f"no claim {', '.join(sorted(unknown))}; --list names them")
    if chosen.list:
        for claim in claims:
            print(f"{claim.name:24} {claim.title}")
        return 0
    here, failed = machine(), []
    name = here.gpus[0].name if here.gpus else f"{here.cpu.name}, {here.cpu.cores} cores"
    for claim in claims:
        if chosen.names and claim.name not in chosen.names:
            continue
        print(f"{claim.name}: {claim.title}", flush=True)
        try:
            outputs = {key: execute(run, bool(here.gpus)) for key, run in claim.runs.items()}
            found = answer(claim, outputs, name, time.strftime("%Y-%m-%d"))
        except (RuntimeError, ValueError, KeyError) as error:
            print(f"  failed: {error}", file=sys.stderr, flush=True)
            failed.append(claim.name)
            continue
        for row in found["rows"]:
            ratio = "" if row["ratio"] is None else f" (x {row['ratio']:.3g})"
            print(
                f"  {row['what']}: reported {row['reported']}, {row['evidence']} {row['ours']} {row['unit']}{ratio}"
            )
        with create_artifact(ROOT / "runs" / "reproductions" / claim.name, "bench", overwrite=True) as draft:
            (draft.path / "outputs.json").write_text(json.dumps(outputs, indent=1))
            (draft.path / "rows.json").write_text(json.dumps(found, indent=1))
            draft.facts.update({"claim": claim.title, "rows": len(found["rows"]), "machine": machine_facts()})
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{claim.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
