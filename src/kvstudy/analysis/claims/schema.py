"""What a claim is, as `conf/claims/*.yaml` says it: a statement, its source, and the predicates that decide it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from kvstudy.analysis.plan import AnalysisError

Status = Literal["supported", "contradicted", "inconclusive", "not testable"]


#: Metrics that claims derive, as a reader names them; those that the cells have keep their ids.
DERIVED = {
    "kv_gib": "KV on the device",
    "device_gib": "device memory (weights and KV)",
    "throughput_per_gib": "tokens/s a GiB of device memory (weights and KV)",
    "memory.process_peak.host": "host memory of the server process, peak",
    "memory.workspace_peak.device": "workspace on the device, peak",
}


def metric_words(metric: str) -> str:
    """A metric as a reader names it: `device_gib.live` is "device memory (weights and KV), live"."""
    stem, _, kind = metric.partition(".")
    if metric in DERIVED:
        return DERIVED[metric]
    return f"{DERIVED[stem]}, {kind}" if stem in DERIVED else metric


class Strict(BaseModel):
    """A record that refuses unknown keys: a misspelt bound must not be ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Side(Strict):
    """Whose number: a framework, at the measured budget nearest to `budget`, within a factor of two.

    `variant` is that of the table (`prefix caching`); without it the plain one is meant where there is one.
    """

    framework: str
    budget: float | None = None
    variant: str | None = None


class _Bound(Strict):
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> _Bound:
        if self.min is None and self.max is None:
            raise ValueError("min or max is needed")
        return self


Axis = Literal[
    "load",
    "parameters",
    "prompt_tokens",
    "output_tokens",
    "long_share",
    "kv_memory_mib",
    "burstiness",
    "budget_share",
]


class Ratio(_Bound):
    """`of` / `to`, bounded; `over` all values of the axis, any, the highest, their mean, or the peaks.

    `at_least`: only at values of the axis from there on.
    """

    kind: Literal["ratio"]
    metric: str
    of: Side
    to: Side
    axis: Axis = "load"
    over: Literal["all", "any", "highest", "mean", "peak"] = "all"
    values: int = 1
    at_least: float | None = None


class Interaction(_Bound):
    """`of` / `to` at the highest value of the axis over the same ratio at the lowest, bounded."""

    kind: Literal["interaction"]
    metric: str
    of: Side
    to: Side
    axis: Axis
    values: int = 2


class Order(Strict):
    """The metric falls (or stays) from each framework to the next, at all values of the axis."""

    kind: Literal["order"]
    metric: str
    frameworks: tuple[Side, ...]
    axis: Axis = "load"
    tolerance: float = 0.0
    values: int = 2


class Flat(Strict):
    """The metric's largest over its smallest value along the axis is at most 1 + `spread`."""

    kind: Literal["flat"]
    metric: str
    of: Side
    axis: Axis = "load"
    spread: float
    values: int = 2


class Trend(_Bound):
    """The metric at the highest over that at the lowest value of the axis, bounded."""

    kind: Literal["trend"]
    metric: str
    of: Side
    axis: Axis = "load"
    values: int = 2


class Crossing(Strict):
    """Two of the frameworks change places along the axis, each time with intervals apart."""

    kind: Literal["crossing"]
    metric: str
    frameworks: tuple[Side, ...]
    axis: Axis = "load"
    values: int = 2


class NoWinner(Strict):
    """No framework has the best value in every context and metric. `metrics` maps to higher or lower."""

    kind: Literal["no_winner"]
    metrics: dict[str, Literal["higher", "lower"]]
    frameworks: tuple[Side, ...]


class Survives(Strict):
    """At the smallest KV memory where another fails, this one still gives a valid result."""

    kind: Literal["survives"]
    of: Side
    others: tuple[Side, ...]


class Limit(_Bound):
    """The shortest prompt at which every cell of a side fails, bounded; `min` alone: it serves one of that length."""

    kind: Literal["limit"]
    of: Side


class Quality(_Bound):
    """A quality measure, bounded, of a framework near a budget (`results/<study>/quality.parquet`).

    `measures` are names or patterns (`accuracy:*`). `column`: the value itself, its difference to the whole cache, or
    its ratio to the whole cache's. `minus` is taken from the value (the chance level of a task). `to`: the difference
    of two frameworks' numbers. `change`: the number at the longest context less that at the shortest. `contexts`: only
    within. `over`: all numbers, their mean, most of them, or several (two).
    """

    kind: Literal["quality"]
    measures: tuple[str, ...]
    of: Side
    to: Side | None = None
    column: Literal["value", "diff", "ratio"] = "diff"
    minus: dict[str, float] = {}
    change: bool = False
    contexts: tuple[float, float] | None = None
    over: Literal["all", "mean", "most", "several"] = "all"


class Needs(Strict):
    """Something this program does not measure yet, or a machine cannot: the claim waits for it."""

    kind: Literal["needs"]
    what: str


Predicate = Annotated[
    Ratio | Interaction | Order | Flat | Trend | Crossing | NoWinner | Survives | Limit | Quality | Needs,
    Field(discriminator="kind"),
]


class Claim(Strict):
    """A statement with its source and what decides it.

    `bytes`: memory claims are decided twice, on reserved and on live bytes; `{bytes}` in a metric stands for
    it. `device`: the claim means something on that device only.
    """

    id: str
    statement: str
    source: str
    decide: tuple[Predicate, ...]
    bytes: tuple[Literal["reserved", "live"], ...] = ()
    device: Literal["cuda"] | None = None
    note: str = ""


def read_claims(folder: Path) -> list[Claim]:
    """All claims of a folder, in order of file and entry.

    Raises
    ------
    AnalysisError
        A file is not a list of claims, or two have the same id.
    """
    adapter = TypeAdapter(list[Claim])
    claims: list[Claim] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            claims += adapter.validate_python(yaml.safe_load(path.read_text(encoding="utf-8"))["claims"])
        except (ValidationError, TypeError, KeyError, yaml.YAMLError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            where = ".".join(map(str, first["loc"])) + ": " + first["msg"] if first else repr(error)
            raise AnalysisError(f"{path} is not a list of claims: {where}") from None
    ids = [claim.id for claim in claims]
    twice = {name for name in ids if ids.count(name) > 1}
    if twice:
        raise AnalysisError(f"claims with the same id: {', '.join(sorted(twice))}")
    return claims
