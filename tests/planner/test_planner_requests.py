"""No request of `plan` is answered in silence with something else: every option of every form is refused with its range
or used, and whatever is asked ends in an answer that obeys the request or in an error of ours.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from throughline.cli.main import main
from throughline.cli.plan import command
from throughline.core.hardware import chips, machine
from throughline.planner.hardware import shipped_clusters
from throughline.planner.work import OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS

LAYOUTS = ["sc21-1.7b", "--on", "dgx-a100-80gb", "--gpus", "8", "--rows", "64"]
RUN = ["--target-tokens", "1e9"]
BASES = {
    "layouts": LAYOUTS,
    "explain": LAYOUTS,
    "checkpoint": LAYOUTS,
    "recommend": ["sc21-1.7b", "--on", "dgx-a100-80gb", "--rows", "64"],
    "compare": [
        "sc21-1.7b",
        "--rows",
        "64",
        *RUN,
        "--option",
        "8:dgx-a100-80gb",
        "--option",
        "16:dgx-a100-40gb:1",
    ],
    "serve": ["sc21-1.7b", "--on", "dgx-a100-80gb"],
    "validate": [],
}
NUMBERS = ("nan", "inf", "-1", "x", "")
BAD = {
    "--on": ("a100-80", ""),
    "--gpus": (*NUMBERS, "0", "1.5", "9999999999"),
    "--rows": (*NUMBERS, "0", "2.5", "99999999999"),
    "--length": (*NUMBERS, "0", "99999999999"),
    "--precision": ("int4", "fp8", "mxfp8", "bfloat16", ""),
    "--predicted": (*NUMBERS, "0", "7", "0.5"),
    "--fill": (*NUMBERS, "0", "3"),
    "--layout": (
        "tensor=0",
        "data=7",
        "data=3,tensor=2",
        "tensor=x",
        "shape=2",
        "tensor",
        "tensor=2,tensor=4",
        "sharding=2",
        "recompute=all",
        "offload=2",
        "turns=25",
        "pipeline=5",
        "micro_rows=0",
        "micro_rows=-1",
        "context=99999999999",
    ),
    "--software": ("pytorch", ""),
    "--optimizer": ("sgd", ""),
    "--set": (
        "nonsense.key=1",
        "train.steps=2",
        "model.overrides.width=no",
        "model.overrides.nothing=1",
        "x",
    ),
    "--target-tokens": (*NUMBERS, "1e300"),
    "--ramp": ("32", "0,1,1", "a,b,c", "1,2,3,4"),
    "--failures": (*NUMBERS, "0", "100"),
    "--grid": ("atlantis", "-1", "nan", "5000", ""),
    "--price": (*NUMBERS, "1e9"),
    "--hardware": ("no-such-file.toml",),
    "--target-days": (*NUMBERS, "3"),
    "--max-gpus": (*NUMBERS, "0"),
    "--save-seconds": (*NUMBERS, "0"),
    "--restart-seconds": NUMBERS,
    "--repair-days": (*NUMBERS, "1e9"),
    "--option": ("8", "x:dgx-h100", "0:dgx-h100", "8:dgx-h100:nan", "8:dgx-h100:-1", "8:nothing", "8::"),
    "--by": ("beauty", ""),
    "--new-tokens": (*NUMBERS, "1.5", "999999"),
    "--tensor": (*NUMBERS, "0", "3", "16"),
    "--p99": (*NUMBERS, "1e-9"),
    "--qps": NUMBERS,
    "--own": ("no-such-folder",),
}
FLAGS = {"--production", "--pareto", "--rows"}  # `--rows` of validate
FILES = {"--write-recipe", "--out", "--json", "--quiet", "--debug"}


def ask(form: str, *words: str) -> tuple[int, str, Any]:
    result = CliRunner().invoke(main, ["plan", form, *words, "--json"])
    text = result.output + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)
    assert "fault in throughline" not in text and "Traceback" not in text, (words, text)
    return result.exit_code, text, json.loads(result.stdout) if result.exit_code == 0 else None


def options_of(form: str) -> list[str]:
    parameters = command.commands[form].params
    return [option.opts[0] for option in parameters if isinstance(option, click.Option)]


def test_every_option_is_crossed_below() -> None:
    for form in command.commands:
        missing = set(options_of(form)) - set(BAD) - FLAGS - FILES
        assert form in BASES and not missing, (form, missing)


@pytest.mark.parametrize("form", BASES)
def test_bad_values_are_refused(form: str) -> None:
    """Exit code 2 and a message that names the option; or 1, where no layout obeys, with the rule that is broken."""
    said_of = {"--set": "model", "--option": "--on", "--own": "no-such-folder"}
    for name in sorted(set(options_of(form)) & set(BAD)):
        if (form, name) == ("validate", "--rows"):
            continue
        for value in BAD[name]:
            if (
                form == "recommend"
                and name == "--layout"
                and value in ("data=7", "pipeline=5", "data=3,tensor=2")
            ):
                continue  # some number of chips has such a layout
            code, text, _ = ask(form, *BASES[form], name, value)
            illegal = "no layout is legal" in text or "not on up to" in text
            assert code == 2 - illegal, (form, name, value, text)
            assert illegal or name in text or said_of.get(name, name) in text, (form, name, value, text)


@pytest.mark.parametrize("form", ["layouts", "explain", "recommend", "checkpoint"])
def test_what_a_whole_run_is_for_needs_its_tokens(form: str) -> None:
    for words in (
        ["--ramp", "1,1,1"],
        ["--grid", "france"],
        ["--failures", "0.1"],
        ["--production"],
        ["--target-days", "3"],
    ):
        if words[0] in options_of(form) and (form, words[0]) != ("checkpoint", "--failures"):
            code, text, _ = ask(form, *BASES[form], *words)
            assert code == 2 and words[0] in text and "--target-tokens" in text


USED = {
    "--rows": "128",
    "--length": "1024",
    "--precision": "fp32",
    "--fill": "0.5",
    "--layout": "tensor=4",
    "--software": "megatron-2022",
    "--optimizer": "muon",
    "--set": "model.overrides.layers=12",
    "--target-tokens": "2e9",
    "--ramp": "8,8,100000",
    "--failures": "0.5",
    "--production": None,
    "--grid": "50",
    "--price": "9",
    "--on": "dgx-h100",
    "--gpus": "16",
    "--max-gpus": "1",
    "--target-days": "0.05",
    "--save-seconds": "60",
    "--restart-seconds": "9000",
    "--repair-days": "30",
    "--by": "days",
    "--new-tokens": "64",
    "--tensor": "2",
    "--p99": "200",
    "--qps": "5000",
    "--predicted": "0.5",
    "--option": "4:dgx-h100:2",
}


@pytest.mark.parametrize("form", [form for form in BASES if form != "validate"])
def test_good_values_change_the_answer(form: str) -> None:
    whole = RUN if "--target-tokens" in options_of(form) and form != "compare" else []
    base = [*BASES[form], *whole]
    if form == "recommend":
        base += ["--target-days", "0.2"]
    _, _, usual = ask(form, *base)
    for name in options_of(form):
        if name in FILES | {"--hardware", "--pareto"} or (form, name) == ("serve", "--precision"):
            continue
        if name == "--predicted":  # a GPT refuses it
            assert ask(form, *base, name, "0.5")[0] == 2
            continue
        if (form, name) == ("compare", "--price"):
            assert ask(form, *base, name, "2")[0] == 2
            continue
        value = USED[name]
        code, text, other = ask(form, *base, name, *([] if value is None else [value]))
        if (form, name) == ("recommend", "--max-gpus"):
            assert code == 1 or other != usual
            continue
        assert code == 0 and other != usual, (form, name, text[-500:])


HARDWARE = {
    "[clusters.x]\nchip = 'h100-80gb'\nchips_per_node = '8'": "chips_per_node",
    "[clusters.x]\nchip = 'h100-80gb'\nnode_network_gb_s = -5": "node_network_gb_s",
    "[clusters.x]\nchip = 'h100-80gb'\nnode_network_gb_s = nan": "node_network_gb_s",
    "[clusters.x]\nchip = 'h100-80gb'\nnetwork_gb_s = 50": "of a whole node",
    "[clusters.x]\nchip = 'h100-80gb'\nchips_per_node = 0": "above 0",
    "[clusters.x]\nchip = 'h100-80gb'\nchips_per_node = 2.5": "whole",
    "[clusters.x]\nchip = 'h100-80gb'\nsums = 3": "no field",
    "[chips.h100-80gb]\nmatch = 3\n[clusters.x]\nchip = 'h100-80gb'": "a list of texts",
    "[clusters.x]\nname = 'x'": "no chip",
    "[clusters.x]\nchip = 3": "no chip",
    "[clusters]\nx = 3": "no table",
    "[clusters.x": "TOML",
    "[computers.x]\nchip = 't4'": "unknown tables",
    "[chips.y]\nname = 'y'\n[clusters.x]\nchip = 'y'": "tflops",
    "[chips.y]\nmemory_gib = 8\nbandwidth_gb_s = 1\ntflops = { bf16 = 'fast' }\n[clusters.x]\nchip = 'y'": "tflops",
    "[chips.y]\nmemory_gib = 8\nbandwidth_gb_s = 1\ntflops = { int8 = 5 }\n[clusters.x]\nchip = 'y'": "no rate",
    "[chips.h100-80gb]\nmemory_gib = -1\n[clusters.x]\nchip = 'h100-80gb'": "memory_gib",
    "\ud800": "",
}


@pytest.mark.parametrize("text", [text for text in HARDWARE if HARDWARE[text]])
def test_a_bad_hardware_file_is_refused_by_field(text: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    words = ["sc21-1.7b", "--rows", "64", "--gpus", "1", "--on", "x", "--hardware", str(file)]
    code, said, _ = ask("layouts", *words)
    assert code == 2 and HARDWARE[text] in said, said
    for raw in (b"\xff\xfe", b"\x00"):
        file.write_bytes(raw)
        assert ask("layouts", *words)[0] == 2
    assert ask("layouts", *words[:-1], str(tmp_path))[0] == 2


def test_rates_and_networks_that_are_not_there(tmp_path: Path) -> None:
    """bf16 on a V100 and fp8 on an A100 are priced as nothing else; chips that nothing joins make no cluster."""
    for on, precision in (("v100-32gb", "bf16"), ("a100-80gb", "fp8"), ("t4", "tf32")):
        code, text, _ = ask("layouts", "sc21-1.7b", "--gpus", "1", "--on", on, "--precision", precision)
        assert code == 2 and "has no rate" in text and "fp16" in text
    code, text, _ = ask("layouts", "sc21-1.7b", "--gpus", "8", "--on", "rtx-4090", "--rows", "64")
    assert code == 2 and "has no network" in text and "node_network_gb_s" in text
    assert ask("layouts", "gpt3-125m", "--gpus", "4", "--on", "rtx-4090", "--rows", "64")[0] == 0


def numbers_of(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_of(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers_of(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


MODELS = (
    "gpt3-125m",
    "gpt3-13b",
    "llama-8b",
    "llama-405b",
    "mixtral-8x7b",
    "olmoe-toy",
    "bert-large",
    "gpt-shakespeare",
    "bert-tiny",
    "nothing",
)
WHOLE = st.integers(-1, 4096).map(str) | st.sampled_from(["1000000", "x", "3.5", "nan"])
REAL = st.floats(allow_nan=True, allow_infinity=True).map(str) | st.sampled_from(["0.5", "1", "1e9", "3e11"])
ON = st.sampled_from([*shipped_clusters(), *chips(), "here", "none"])
AXES = st.fixed_dictionaries(
    {},
    optional={
        "tensor": st.sampled_from(["1", "2", "8", "0", "x"]),
        "pipeline": st.sampled_from(["1", "2", "3", "8"]),
        "data": st.sampled_from(["1", "2", "7", "8"]),
        "context": st.sampled_from(["1", "2", "4"]),
        "expert": st.sampled_from(["1", "2", "4", "16"]),
        "micro_rows": st.sampled_from(["1", "2", "3"]),
        "turns": st.sampled_from(["1", "2", "3"]),
        "sharding": st.sampled_from([*SHARDINGS, "z"]),
        "recompute": st.sampled_from(RECOMPUTES),
        "offload": st.sampled_from(["0", "1"]),
    },
).map(lambda chosen: ",".join(f"{name}={value}" for name, value in chosen.items()))
SHARED = {
    "--rows": WHOLE,
    "--length": WHOLE,
    "--precision": st.sampled_from(PRECISIONS),
    "--predicted": REAL,
    "--fill": REAL,
    "--layout": AXES,
    "--optimizer": st.sampled_from(OPTIMIZERS),
    "--price": REAL,
    "--software": st.sampled_from(
        ["throughline", "nemo", "nemo-moe", "fsdp", "megatron-2019", "deepspeed-2020", "x"]
    ),
    "--target-tokens": REAL,
    "--failures": REAL,
    "--grid": st.sampled_from(["france", "0", "9e9"]),
    "--ramp": st.sampled_from(["8,8,1000", "1,1,1000000000", "4096,1,7", "x"]),
    "--set": st.sampled_from([f"model.overrides.{item}" for item in ("layers=7", "dropout=0.1", "heads=5")]),
}
SERVED = {
    "--length": WHOLE,
    "--new-tokens": WHOLE,
    "--precision": st.sampled_from(["int8", "fp8", "fp16", "bf16", "fp32"]),
    "--tensor": st.sampled_from(["1", "2", "3", "8", "64"]),
    "--p99": REAL,
    "--qps": REAL,
    "--price": REAL,
}


@settings(
    max_examples=int(os.environ.get("THROUGHLINE_REQUESTS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="THROUGHLINE_REQUESTS" not in os.environ,
)
@given(st.data())
def test_random_requests_end_in_an_answer_or_an_error_of_ours(data: st.DataObject) -> None:
    """No traceback, no negative number, no nan; and the layouts obey every degree that was fixed.
    THROUGHLINE_REQUESTS=10000 asks as many.
    """
    form = data.draw(st.sampled_from(["layouts", "explain", "checkpoint", "serve"]))
    words = [data.draw(st.sampled_from(MODELS)), "--on", data.draw(ON)]
    if form != "serve":
        words += ["--gpus", data.draw(WHOLE)]
    pool = SERVED if form == "serve" else SHARED
    for name in data.draw(st.lists(st.sampled_from(sorted(pool)), unique=True, max_size=6)):
        words += [name, data.draw(pool[name])]
    code, text, facts = ask(form, *words)
    assert code in (0, 1, 2), (words, text)
    if facts is None:
        return
    assert all(math.isfinite(number) and number >= 0 for number in numbers_of(facts)), (words, facts)
    if form == "layouts" and "--layout" in words:
        for item in filter(None, words[words.index("--layout") + 1].split(",")):
            axis, _, value = item.partition("=")
            for row in facts["layouts"]:
                parallel = {"data": 1, "tensor": 1, "pipeline": 1, "context": 1, "sharding": "replicated"}
                parallel |= {"stages_per_process": 1} | row["parallel"]
                held = {
                    "turns": parallel["stages_per_process"],
                    "micro_rows": row["micro_batch_rows"],
                    "recompute": row["recompute"],
                    "expert": row["expert"],
                    "offload": int(row["offload"]),
                }
                held = parallel | held
                assert str(held[axis]) == value, (words, row)


@pytest.mark.skipif(bool(machine().gpus), reason="this machine is planned by its GPU")
def test_a_processor_is_planned_for_several_processes() -> None:
    """They are one node: nothing has to join them."""
    code, said, _ = ask("layouts", "gpt-shakespeare", "--gpus", "2", "--on", "here")
    assert code == 0, said
