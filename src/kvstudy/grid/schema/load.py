"""When requests arrive, and what is expected of the answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from kvstudy.grid.schema.base import Strict, number

#: The shortest window: a request takes milliseconds to be sent and answered, so that less is a slip of a unit.
LEAST_SECONDS = 0.1


class Slo(Strict):
    """A service level: bounds in seconds that a good request meets, all of them."""

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    e2el_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Slo:
        if self.ttft_s is None and self.tpot_s is None and self.e2el_s is None:
            raise ValueError("a service level bounds at least one of ttft_s, tpot_s, e2el_s")
        return self

    def bounds(self) -> dict[str, float]:
        """Those that are set, by the metric they bound."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        return {name: bound for name, bound in values.items() if bound is not None}


class _Timed(Strict):
    slo: Slo | None = None  # what goodput counts by; None: no goodput
    warmup_requests: int = Field(default=4, ge=0)
    duration_s: float = Field(ge=LEAST_SECONDS)
    timeout_s: PositiveFloat = 120.0
    drain_s: PositiveFloat = 60.0


class _Rated(_Timed):
    """Has a mean rate, in requests a second or set by the grid from `token_rate`.

    That is in tokens a second, prompt and output, by the mean of the workload's lengths: workloads of different lengths
    are compared at equal work.
    """

    rate: PositiveFloat
    token_rate: PositiveFloat | None = None


class PoissonLoad(_Rated):
    """Open loop: exponential gaps at `rate` requests a second, drawn ahead at unit rate and divided."""

    name: Literal["poisson"] = "poisson"


class GammaLoad(_Rated):
    """Open loop: gamma gaps with mean 1/`rate` and squared coefficient of variation `burstiness`.

    1 is Poisson, above 1 comes in bursts. (vLLM's `--burstiness` is the shape, 1 over this.) The mean rate does
    not depend on it, so that burstiness is not load in disguise.
    """

    name: Literal["gamma"] = "gamma"
    burstiness: PositiveFloat


class ConstantLoad(_Rated):
    """Open loop: equal gaps of 1/`rate`."""

    name: Literal["constant"] = "constant"


class RampLoad(_Timed):
    """Open loop: Poisson whose rate goes linearly from `rate` to `end_rate` over `duration_s`."""

    name: Literal["ramp"] = "ramp"
    rate: PositiveFloat
    end_rate: PositiveFloat


class BurstLoad(_Timed):
    """All `requests` at once, at time 0 (the rate is infinite): `duration_s`, then until the last of them is done."""

    name: Literal["burst"] = "burst"
    requests: PositiveInt


class TraceLoad(_Timed):
    """Open loop: the arrivals of a recorded trace, `start_s` to `start_s + duration_s x speed` of it.

    `speed` above 1 replays faster. `format` names the columns: `azure` (TIMESTAMP, ContextTokens, GeneratedTokens),
    `mooncake` (timestamp in ms, input_length, output_length, hash_ids), `burstgpt` (Timestamp in s, Request tokens,
    Response tokens). Pinned by the file's hash where it is given.
    """

    name: Literal["trace"] = "trace"
    path: str
    format: Literal["azure", "mooncake", "burstgpt"]
    sha256: str | None = None
    start_s: float = Field(default=0.0, ge=0.0)
    speed: PositiveFloat = 1.0


class KneeLoad(_Timed):
    """Finds the highest Poisson rate between `low` and `high` at which a share `goal` of requests meets `slo`.

    Every probe offers its rate for `duration_s`; at most `probes` of them, until the bracket is within `precision`.
    """

    name: Literal["knee"] = "knee"
    slo: Slo  # not optional: it is what the search is for
    low: PositiveFloat
    high: PositiveFloat
    goal: float = Field(default=0.9, gt=0.0, lt=1.0)
    precision: PositiveFloat = 0.05
    probes: PositiveInt = 12

    @model_validator(mode="after")
    def _ordered(self) -> KneeLoad:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class ClosedLoad(_Timed):
    """Closed loop: `concurrency` requests in flight for `duration_s`."""

    name: Literal["closed"] = "closed"
    concurrency: PositiveInt


Load = Annotated[
    PoissonLoad | GammaLoad | ConstantLoad | RampLoad | BurstLoad | TraceLoad | ClosedLoad | KneeLoad,
    Field(discriminator="name"),
]


def load_label(load: Load) -> str:
    """The part of a load that reads in a cell's name: r2, r2-b4, c8."""
    if isinstance(load, ClosedLoad):
        return f"c{load.concurrency}"
    if isinstance(load, GammaLoad):
        return f"r{number(load.rate)}-b{number(load.burstiness)}"
    if isinstance(load, RampLoad):
        return f"r{number(load.rate)}-{number(load.end_rate)}"
    if isinstance(load, BurstLoad):
        return f"n{load.requests}"
    if isinstance(load, KneeLoad):
        return f"{number(load.low)}-{number(load.high)}"
    if isinstance(load, TraceLoad):
        return f"x{number(load.speed)}"
    return f"r{number(load.rate)}" if load.token_rate is None else f"t{number(load.token_rate)}"
