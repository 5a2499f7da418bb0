"""Clusters and rented machines: what joins the chips of `core/chips.toml`, what of their speed is reached, their price.

A cluster is named by its key in `clusters.toml` (or in a user's TOML file of the same form, which is looked up first),
by the key of a chip (its first machine is meant), or by `here`, this machine.
"""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import WrongUse, did_you_mean
from ..core.files import shipped_table
from ..core.hardware import Chip, chips, machine, read_calibration

# FLOP in a cycle of one core in fp32 (two 16-wide multiply-adds) and a usual clock: a guess that `study` replaces
CORE_GFLOPS = 64 * 2.5
# power of a node at work over that of its chips: 10.2 kW of a DGX H100 (its user guide) over 8 x 700 W
OVER_CHIPS = 1.8


@dataclass(frozen=True)
class Constants:
    """The constants of the time model, the same for every table, model and layout: fractions of peaks, and seconds.

    Three were measured by others; eleven were fitted on one half of the published rows, by a hash of their names, with
    `benchmarks/planner_fit.py` (soft L1 on the log error, every table with the same weight), and rounded within what
    that fit can tell apart. The other half judges (`plan validate`). `throughline study` replaces them for one machine.
    """

    vector_fraction: float = 0.91  # of the peak by products without tensor cores: fp32 and fp64
    product_inner: float = 0.12  # K per TFLOP/s at which filling the chip doubles a product's time; fitted
    attention_fraction: float = 0.38  # of the best product's speed, by the attention core; fitted
    memory_fraction: float = 0.66  # of the memory bandwidth, by element-wise kernels; fitted
    launch_s: float = 21e-6  # of one kernel, with the chip's filling and draining; fitted
    issue_s: float = 0.94e-3  # of the host, to issue one layer forward in eager execution; measured
    start_s: float = 22e-6  # of a collective of two ranks, again for each doubling; measured: 46 us (vTrain)
    pass_s: float = 37e-6  # of a ring's gather for every node that it passes; fitted
    link_fraction: float = 0.757  # of NVLink by collectives; measured: 227 of 300 GB/s (vTrain, A100)
    network_fraction: float = 0.80  # of the adapters by collectives between nodes; fitted
    overlap: float = 0.39  # of the time behind which traffic can hide; fitted
    expert_fraction: float = 0.49  # of a product's speed, by products of several experts one by one; fitted
    expert_issue_s: float = 3.5e-3  # of the host, to issue a layer's experts one by one, forward; fitted
    expert_overlap: float = 0.77  # of another micro-batch, behind which rows of experts can go; fitted


FITTED = Constants()


@dataclass(frozen=True)
class Cluster:
    """Machines (nodes) of one kind. Memory is in GiB (2**30 bytes); bandwidths are GB/s (1e9), one direction.

    Nodes that share their first switches (a scalable unit, a pod of racks) reach one another at `node_network_gb_s`;
    beyond `nodes_per_pod` of them the spine gives each node that divided by `oversubscription`.
    """

    key: str
    chip: Chip
    name: str
    chips_per_node: int = 1
    node_gb_s: float = 0.0  # of a chip, to the others of its node, when not its own NVLink
    node_network_gb_s: float = 0.0  # of a whole node, to other nodes; 0: there is no network
    ports_per_node: int = 0  # network adapters; 0: one for each chip
    nodes_per_pod: int = 0  # 0: all of them
    oversubscription: float = 1.0
    sums: tuple[tuple[float, float, float], ...] = ()  # measured: ranks of a group, seconds to start, GB/s
    host_memory_gib: float = 0.0  # of a node
    host_gb_s: float = 12.0  # between a chip and the host's memory (PCIe 3 x16; 25 for PCIe 4)
    price_per_chip_hour: float = 0.0  # 0: not known
    currency: str = "USD"
    priced: str = ""  # date and kind of the price
    source: str = ""
    constants: Constants = FITTED  # others once `study` has measured the machine

    @property
    def inner_gb_s(self) -> float:
        """Bandwidth between two chips of a node: NVLink, else what the entry says, else the host's bus."""
        return self.node_gb_s or self.chip.nvlink_gb_s or self.host_gb_s

    @property
    def device(self) -> str:
        """cpu or cuda, as a run there computes."""
        return "cpu" if self.chip.key == "cpu" else "cuda"

    @property
    def watts_per_chip(self) -> float:
        """A chip's share of its node's power at work; 0 where the chip's is not known."""
        return OVER_CHIPS * self.chip.watts


def require_network(cluster: Cluster, chips: int) -> None:
    """Raise WrongUse when so many chips are several nodes and nothing joins them."""
    most = cluster.chips_per_node
    if chips > most and not cluster.node_network_gb_s:
        what = f"{cluster.name} has no network: {chips:,} chips are {-(-chips // most):,} nodes"
        own = "--hardware with node_network_gb_s, the bytes a second of a whole node"
        raise WrongUse(what, where="--on", fix=f"at most {most:,} chips, or {own}")


def shipped_clusters() -> dict[str, Any]:
    """The rows of `clusters.toml` by key."""
    return shipped_table(__file__, "clusters.toml")


def find_cluster(name: str, overrides: Path | None = None) -> Cluster:
    """The cluster of that name; what the file `overrides` says of it comes before the shipped. Raises WrongUse."""
    own = _read_overrides(overrides) if overrides else {}
    known = _chips(own.get("chips", {}), overrides)
    shipped = shipped_clusters()
    rows = shipped | {key: shipped.get(key, {}) | fields for key, fields in own.get("clusters", {}).items()}
    if name == "here" and name not in rows:
        return this_machine()
    key = name if name in rows else next((k for k, row in rows.items() if row.get("chip") == name), "")
    if not key and name in known:
        return Cluster(name, known[name], known[name].name)
    if not key:
        names = sorted({*rows, *known, "here"})
        fix = did_you_mean(name, names, f"known: {', '.join(names)}", limit=3)
        raise WrongUse(f"no chip or cluster {name!r}", where="--on", fix=fix)
    chip, where = rows[key].get("chip", ""), f"{overrides or 'clusters.toml'}: clusters.{key}"
    if not isinstance(chip, str) or chip not in known:
        raise WrongUse(f"no chip {chip!r}", where=where, fix=", ".join(sorted(known)))
    return _make(Cluster, {"name": key} | rows[key] | {"key": key, "chip": known[chip]}, where)


def _read_overrides(file: Path) -> dict[str, dict[str, dict]]:
    """A user's tables of chips and clusters. Raises WrongUse on what is no TOML file of that form."""
    fix = "the tables are [chips.KEY] and [clusters.KEY]"
    try:
        own = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a folder, no UTF-8, no TOML
        raise WrongUse("cannot be read as TOML", where=file, why=str(error), fix=fix) from None
    if unknown := set(own) - {"chips", "clusters"}:
        raise WrongUse(f"unknown tables: {', '.join(sorted(unknown))}", where=file, fix=fix)
    for name, table in own.items():
        for key, row in table.items() if isinstance(table, dict) else [("", table)]:
            if not isinstance(row, dict):
                raise WrongUse(f"{name}.{key} is no table", where=file, fix=fix)
    return own


def this_machine(processes: int = 1) -> Cluster:
    """Its first GPU's chip, or its processor shared by `processes`, guessed until `throughline study` measures."""
    here = machine()
    memory = here.cpu.memory_bytes / 2**30
    if here.gpus and here.gpus[0].chip:
        chip = here.gpus[0].chip
        return _calibrated(Cluster("here", chip, chip.name, len(here.gpus), host_memory_gib=memory))
    peak = here.cpu.cores * CORE_GFLOPS / 1e3
    tflops = {dtype: peak * (2 if dtype != "fp32" else 1) for dtype in here.cpu.dtypes if dtype != "int8"}
    tflops = {"bf16": peak / 2, "fp16": peak / 2} | tflops
    chip = Chip("cpu", here.cpu.name, memory, 10.0 * here.cpu.cores, tflops)
    whole = Cluster("here", chip, here.cpu.name, processes, node_gb_s=4.0, host_memory_gib=memory)
    found, share = _calibrated(whole), 1 / processes
    tflops = {dtype: value * share for dtype, value in found.chip.tflops.items()}
    memory, bandwidth = found.chip.memory_gib * share, found.chip.bandwidth_gb_s * share
    part = dataclasses.replace(found.chip, memory_gib=memory, bandwidth_gb_s=bandwidth, tflops=tflops)
    return dataclasses.replace(found, chip=part)


def _calibrated(cluster: Cluster) -> Cluster:
    measured = read_calibration()
    if not measured:
        return cluster
    tflops, bandwidth = cluster.chip.tflops | measured["tflops"], measured["bandwidth_gb_s"]
    chip = dataclasses.replace(cluster.chip, tflops=tflops, bandwidth_gb_s=bandwidth, achieved=1.0)
    constants = dataclasses.replace(FITTED, **measured.get("constants", {}))
    sums = tuple(map(tuple, measured.get("sums", ())))
    node = {"node_gb_s": measured["node_gb_s"], "sums": sums, "constants": constants}
    return dataclasses.replace(cluster, chip=chip, **node)


def _chips(own: dict[str, dict], where: Path | None) -> dict[str, Chip]:
    known = dict(chips())
    for key, fields in own.items():
        base: dict[str, Any] = {"name": key, "tflops": {}}
        base |= dataclasses.asdict(known[key]) if key in known else {}
        rates = fields.get("tflops", {})
        merged = base | fields | {"key": key}
        merged["tflops"] = base["tflops"] | rates if isinstance(rates, dict) else rates
        known[key] = _make(Chip, merged, f"{where}: chips.{key}")
    return known


RENAMED = {"network_gb_s": "node_network_gb_s, the bytes a second of a whole node (not of a chip)"}
ABOVE_ZERO = ("memory_gib", "bandwidth_gb_s", "chips_per_node", "host_gb_s", "oversubscription", "achieved")
MEASURED = ("sums", "constants")  # by `study`, and in no file of a user


def _make(kind: type, fields: dict[str, Any], where: str):  # type: ignore[no-untyped-def]
    """The record of these fields. Raises WrongUse on one that is unknown, missing or that no machine can have."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.name not in MEASURED}
    for key, value in fields.items():
        if key not in known:
            fix = RENAMED.get(key) or did_you_mean(key, list(known), ", ".join(known))
            raise WrongUse(f"no field {key!r}", where=where, fix=fix)
        if wanted := _wrong(known[key], value):
            raise WrongUse(f"{key} is {value!r}", where=where, fix=wanted)
    try:
        return kind(**fields)
    except TypeError as error:
        raise WrongUse("a field is missing", where=where, why=str(error), fix=", ".join(known)) from None


def _wrong(field: dataclasses.Field, value: Any) -> str:
    """What a field's value must be, "" when it is that."""
    if field.name == "tflops":
        rates = value.values() if isinstance(value, dict) else ()
        good = bool(rates) and all(_is_number(rate) and rate > 0 for rate in rates)
        return "" if good else "a table of TFLOP/s above 0 by dtype, { bf16 = 312 }"
    if field.name == "match":
        texts = isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
        return "" if texts else "a list of texts"
    if field.type is str:
        return "" if isinstance(value, str) else "a text"
    if field.type not in (int, float):
        return ""
    least = "above 0" if field.name in ABOVE_ZERO else "0 or more"
    whole = field.type is int
    good = _is_number(value) and (value > 0 or (value == 0 and least != "above 0"))
    return "" if good and not (whole and value != int(value)) else f"a {'whole ' * whole}number, {least}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
