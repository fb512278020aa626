"""How numbers and names read in figures, tables and sentences: one place, so that they agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20

FRAMEWORKS = {
    "vllm": "vLLM",
    "full": "full (ours)",
    "offload": "full, on the host (ours)",
    "h2o": "H2O",
    "infinigen": "InfiniGen",
    "streaming": "StreamingLLM",
    "random": "random eviction",
    "adaptive": "adaptive (ours)",
    "flexgen": "FlexGen",
}

#: Texts that prompts are cut from, as a caption says it.
TEXTS = {
    "pydoc": "prompts cut from the Python documentation (a stand-in for user text)",
    "hub": "prompts from the workload's own data set",
    "jsonl": "prompts from a local file",
}

ARRIVALS = {
    "poisson": "Poisson arrivals (open loop, burstiness 1)",
    "gamma": "gamma arrivals (open loop, bursty)",
    "constant": "equal gaps (open loop)",
    "ramp": "a rising Poisson rate (open loop)",
    "burst": "all requests at once",
    "trace": "arrivals of a recorded trace",
    "closed": "closed loop",
    "knee": "a search for the highest rate within a service level",
}

OUTCOMES = {
    "oom": "out of memory",
    "timeout": "timed out",
    "crashed": "crashed",
    "unsupported": "unsupported",
}


@dataclass(frozen=True)
class Display:
    """How a metric is shown: its name, the unit shown and the factor from the stored unit."""

    label: str
    unit: str
    factor: float = 1.0

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "icl": "ICL",
    "e2el": "E2EL",
    "throughput.output": "output throughput",
    "throughput.requests": "completed requests",
    "rate.offered": "offered rate",
    "rate.achieved": "achieved rate",
    "throughput.total": "total throughput",
    "queue.client": "wait at the client",
    "queue.server": "wait at the server",
    "goodput": "goodput",
    "failures": "failed share",
}

#: Short latencies read in milliseconds.
_MILLI = ("tpot", "itl", "icl")


def display(metric: str, unit: str, largest: float | None = None) -> Display:
    """How `metric`, stored in `unit`, is shown; times below a second (`largest`) read in milliseconds."""
    family = next((m for m in sorted(_NAMES, key=len, reverse=True) if f"{metric}.".startswith(f"{m}.")), metric)
    name = _NAMES.get(family, metric)
    group, _, part = metric[len(family) + 1 :].rpartition(".")
    if group:
        name = f"{name} of {group} requests"
    if part.startswith("p") and part[1:].isdigit():
        name = f"median {name}" if part == "p50" else f"{part[1:]}th percentile of {name}"
    elif part == "mean":
        name = f"mean {name}"
    brief = largest is not None and largest < 1
    if unit == "s" and (family in _MILLI or brief):
        return Display(name, "ms", 1000.0)
    shown = "" if unit == "share" else unit
    return Display(name, shown)


def framework(name: str) -> str:
    """A framework's name as people write it."""
    return FRAMEWORKS.get(name, name)


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits and no exponent; an en dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))  # after rounding: 99.96 is 100, not 100.0
    return f"{rounded:,.{min(max(0, decimals), 6)}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def integer(value: float | None) -> str:
    """A count; an en dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{round(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def plain(value: float) -> str:
    """A setting as it was typed: 0.5, 2, 96."""
    return f"{value:g}"


def bracketed(value: float, low: float, high: float, scale: float = 1.0) -> str:
    """A value with its interval, `0.95 [0.93, 0.97]`; alone where there is none."""
    text = number(float(value) * scale)
    if math.isnan(float(low)) or math.isnan(float(high)):
        return text
    return f"{text} [{number(float(low) * scale)}, {number(float(high) * scale)}]"


def interval(low: float | None, high: float | None, scale: float = 1.0) -> str:
    """`low–high` to the digits of the larger, or an en dash."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return "–"
    return f"{number(low * scale)}–{number(high * scale)}"


def listed(items: Iterable[str], last: str = "and") -> str:
    """a, b and c."""
    words = list(items)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def level(rate: Any, concurrency: Any) -> float:
    """The number that orders loads of a kind: the rate of an open loop, the concurrency of a closed one."""
    known = rate is not None and not math.isnan(float(rate))
    found = rate if known else concurrency
    return math.nan if found is None else float(found)


def load(row: Any) -> str:
    """A row's load as a sentence names it.

    1 request/s, 3 requests/s of burstiness 4, 160 tokens/s offered, 16 requests in flight, 60 requests at once.
    """
    tokens = level(row.get("token_rate"), None)
    if not math.isnan(tokens):
        return f"{plain(tokens)} tokens/s offered"
    value = level(row["rate"], row["concurrency"])
    if math.isnan(value):
        return "as drawn"  # a recorded trace, or a search for the highest rate
    noun = "request" if value == 1 else "requests"
    if math.isnan(level(row["rate"], None)):
        return f"{plain(value)} {noun} {'at once' if row['load'] == 'burst' else 'in flight'}"
    burstiness = level(row.get("burstiness"), None)
    return f"{plain(value)} {noun}/s" + ("" if math.isnan(burstiness) else f" of burstiness {plain(burstiness)}")


def workload(row: Any, frame: Any) -> str:
    """A workload's name, and what tells it from those of the same name in a frame."""
    parts = [str(row["workload"])]
    alike = frame[frame["workload"] == row["workload"]]
    if alike["long_share"].nunique() > 1:
        parts.append(f"{plain(100 * float(row['long_share']))}\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}long")
    if alike["shared_share"].nunique() > 1 and row["shared_share"] > 0:
        parts.append(f"{plain(100 * float(row['shared_share']))}\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}shared")
    if alike["turns"].notna().any() and not math.isnan(float(row["turns"])):
        parts.append(f"{plain(float(row['turns']))}\N{NO-BREAK SPACE}turns")
    for column, way in (("prompt_tokens", "in"), ("output_tokens", "out")):
        if alike[column].nunique() > 1:
            parts.append(f"{plain(float(row[column]))}\N{NO-BREAK SPACE}tokens\N{NO-BREAK SPACE}{way}")
    return ", ".join(parts)


def span(values: Sequence[float]) -> str:
    """All values when few, else the ends."""
    distinct = sorted(set(values))
    if len(distinct) <= 4:
        return listed(plain(value) for value in distinct)
    return f"{plain(distinct[0])} to {plain(distinct[-1])}"


def count(n: int, noun: str, plural: str = "") -> str:
    """1 cell, 2 cells."""
    return f"{integer(n)} {noun if n == 1 else plural or noun + 's'}"


def mib(value: float | None) -> str:
    """Bytes as MiB."""
    return number(None if value is None else value / MIB)


def machine(hardware: Mapping[str, Any]) -> str:
    """One line for the machine, from the detected hardware in the provenance."""
    cpu = hardware.get("cpu")
    if not cpu:
        return "machine not recorded"
    parts = [str(cpu)]
    if hardware.get("cores"):
        parts.append(count(int(hardware["cores"]), "core"))
    if hardware.get("memory_gib"):
        parts.append(f"{plain(round(float(hardware['memory_gib']), 1))} GiB")
    gpus = hardware.get("gpus") or []
    names = [str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus]
    parts.append(f"{len(names)} × {names[0]}" if names else "no GPU")
    return ", ".join(parts)
