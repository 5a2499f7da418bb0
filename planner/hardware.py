"""Clusters and rented machines: what joins the chips of `core/chips.toml`, and what an hour of them costs.

A cluster is named by its key in `clusters.toml`, by the key of a chip (then the usual machine of that chip is
meant), by `here` (this machine), or comes from a user's TOML file of the same form, which is looked up first.
"""

import dataclasses
import json
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..core.artifact import read_manifest
from ..core.errors import WrongUse, did_you_mean
from ..core.hardware import Chip, chips, machine

# FLOP in a cycle of one core in fp32 (two 16-wide multiply-adds) and a usual clock: a guess that `study` replaces
CORE_GFLOPS = 64 * 2.5


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind. Memory is in GiB (2**30 bytes); bandwidths are GB/s (1e9), one direction, per chip."""

    key: str
    chip: Chip
    name: str
    chips_per_node: int = 1
    node_gb_s: float = 0.0  # between the chips of a node, when not the chip's own NVLink
    network_gb_s: float = 0.0  # per chip, between nodes: all adapters of the node divided by its chips
    ports_per_node: int = 1  # network adapters that carry this traffic
    sums: tuple[tuple[float, float, float], ...] = ()  # measured: ranks of a group, seconds to start, GB/s
    host_memory_gib: float = 0.0  # of a node
    host_gb_s: float = 12.0  # between a chip and the host's memory (PCIe 3 x16; 25 for PCIe 4)
    price_per_chip_hour: float = 0.0  # 0: not known
    currency: str = "USD"
    priced: str = ""  # date and kind of the price
    source: str = ""

    @property
    def inner_gb_s(self) -> float:
        """Bandwidth between two chips of a node: NVLink, else what the entry says, else the host's bus."""
        return self.node_gb_s or self.chip.nvlink_gb_s or self.host_gb_s


def find_cluster(name: str, overrides: Path | None = None) -> Cluster:
    """The cluster of that name. Raises WrongUse naming the nearest ones.

    `overrides` is a TOML file with tables `[chips.KEY]` and `[clusters.KEY]`; an entry there replaces fields of
    the shipped one of the same key, or makes a new one.
    """
    own = tomllib.loads(overrides.read_text(encoding="utf-8")) if overrides else {}
    if unknown := set(own) - {"chips", "clusters"}:
        raise WrongUse(
            f"unknown tables: {', '.join(sorted(unknown))}",
            where=overrides,
            fix="the tables are [chips.KEY] and [clusters.KEY]",
        )
    known = _chips(own.get("chips", {}), overrides)
    shipped = shipped_clusters()
    rows = shipped | {key: shipped.get(key, {}) | fields for key, fields in own.get("clusters", {}).items()}
    if name == "here":
        return this_machine()
    key = name if name in rows else next((k for k, row in rows.items() if row.get("chip") == name), "")
    if not key and name in known:
        return Cluster(name, known[name], known[name].name)
    if not key:
        names = sorted({*rows, *known, "here"})
        fix = did_you_mean(name, names, "known: " + ", ".join(names), limit=3)
        raise WrongUse(f"no chip or cluster {name!r}", where="--on", fix=fix)
    chip = rows[key].get("chip", "")
    if chip not in known:
        raise WrongUse(
            f"no chip {chip!r}", where=f"{overrides}: clusters.{key}", fix=", ".join(sorted(known))
        )
    return _make(Cluster, {"name": key} | rows[key] | {"key": key, "chip": known[chip]}, f"clusters.{key}")


def this_machine(processes: int = 1) -> Cluster:
    """The machine this runs on: its first GPU's chip, or its processor shared by `processes`.

    A processor's peaks are guessed from its cores until `throughline study` has measured them; the calibration
    that THROUGHLINE_CALIBRATION names (a directory that study wrote) replaces the guess.
    """
    here = machine()
    memory = here.cpu.memory_bytes / 2**30
    if here.gpus and here.gpus[0].chip:
        chip = here.gpus[0].chip
        return _calibrated(Cluster("here", chip, chip.name, len(here.gpus), host_memory_gib=memory))
    peak = here.cpu.cores * CORE_GFLOPS / 1e3
    tflops = {dtype: peak * (2 if dtype != "fp32" else 1) for dtype in here.cpu.dtypes if dtype != "int8"}
    chip = Chip(
        "cpu", here.cpu.name, memory, 10.0 * here.cpu.cores, {"bf16": peak / 2, "fp16": peak / 2} | tflops
    )
    found = _calibrated(
        Cluster("here", chip, here.cpu.name, processes, node_gb_s=4.0, host_memory_gib=memory)
    )
    chip, share = found.chip, 1 / processes
    part = dataclasses.replace(
        chip,
        memory_gib=chip.memory_gib * share,
        bandwidth_gb_s=chip.bandwidth_gb_s * share,
        tflops={dtype: value * share for dtype, value in chip.tflops.items()},
    )
    return dataclasses.replace(found, chip=part)


def read_calibration() -> dict[str, Any]:
    """What study measured on this machine: chip, constants, provenance; empty without THROUGHLINE_CALIBRATION."""
    place = os.environ.get("THROUGHLINE_CALIBRATION")
    if not place:
        return {}
    read_manifest(place, "calibration")
    return json.loads((Path(place) / "calibration.json").read_text(encoding="utf-8"))


def _calibrated(cluster: Cluster) -> Cluster:
    measured = read_calibration()
    if not measured:
        return cluster
    chip = dataclasses.replace(
        cluster.chip,
        tflops=cluster.chip.tflops | measured["tflops"],
        bandwidth_gb_s=measured["bandwidth_gb_s"],
        achieved=1.0,
    )
    sums = tuple(tuple(row) for row in measured.get("sums", ()))
    return dataclasses.replace(cluster, chip=chip, node_gb_s=measured["node_gb_s"], sums=sums)


@cache
def shipped_clusters() -> dict[str, dict]:
    """The rows of `clusters.toml` by key."""
    return tomllib.loads(Path(__file__).with_name("clusters.toml").read_text(encoding="utf-8"))


def _chips(own: dict[str, dict], where: Path | None) -> dict[str, Chip]:
    known = dict(chips())
    for key, fields in own.items():
        base = dataclasses.asdict(known[key]) if key in known else {"name": key, "tflops": {}}
        merged = base | fields | {"key": key, "tflops": base["tflops"] | fields.get("tflops", {})}
        known[key] = _make(Chip, merged, f"{where}: chips.{key}")
    return known


def _make(kind: type, fields: dict, where: str):  # type: ignore[no-untyped-def]
    names = [field.name for field in dataclasses.fields(kind)]
    for key in fields:
        if key not in names:
            raise WrongUse(f"no field {key!r}", where=where, fix=did_you_mean(key, names, ", ".join(names)))
    try:
        return kind(**fields)
    except TypeError as error:
        raise WrongUse("a field is missing", where=where, why=str(error), fix=", ".join(names)) from None
