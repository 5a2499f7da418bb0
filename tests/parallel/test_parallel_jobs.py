"""Job files are complete: shells parse them, Kubernetes' fields are where they belong, and the command is in them."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.launch import command
from throughline.core.errors import WrongUse
from throughline.train.parallel.jobs import make_job

RECIPE = """
version = 1
[data]
train = "tokens"
[train]
steps = 10
sequence_length = 1024
batch_rows = 64
[parallel]
tensor = 4
data = 4
"""


def emit(tmp_path: Path, kind: str, *options: str) -> dict:
    recipe = tmp_path / "big.toml"
    recipe.write_text(RECIPE)
    arguments = ["--json", "--emit", kind, *options, "--", "train", str(recipe), "--set", "train.steps=20"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
@pytest.mark.parametrize(("per_machine", "machines"), [(8, 2), (16, 1)])
def test_scripts_are_shell_and_hold_the_command(kind: str, per_machine: int, machines: int, tmp_path: Path) -> None:
    made = emit(tmp_path, kind, "--per-machine", str(per_machine))
    assert (made["machines"], made["processes"]) == (machines, 16)
    subprocess.run(["bash", "-n"], input=made["text"], text=True, check=True)
    assert f"train {tmp_path}/big.toml --set train.steps=20" in made["text"]
    assert ("torchrun" in made["text"].split("exec", 1)[1]) == (machines > 1)
    if kind == "slurm":
        assert f"#SBATCH --nodes={machines}" in made["text"]
        assert "runs/big/events.jsonl" in made["text"]


def test_kubernetes_job_has_a_pod_for_each_machine(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(emit(tmp_path, "kubernetes", "--image", "me/train:1")["text"])
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["job-name"] == service["spec"]["selector"]["job-name"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "me/train:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    script = container["command"][-1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--node-rank=$JOB_COMPLETION_INDEX" in script
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:" in script


def test_machines_are_filled() -> None:
    with pytest.raises(WrongUse, match="do not fill"):
        make_job(["train", "x"], 12, 8, "x", "runs/x", "")
