"""The shape of what is measured: columns of the parquet files and the fields of `summary.json`.

`measure` writes these records, `tracking`, `analysis` and `report` read them; neither imports the other.
Times are seconds; those in `requests.parquet` and `memory.parquet` count from the cell's own zero, the
start of its load, on one monotonic clock.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

Outcome = Literal["ok", "oom", "timeout", "crashed", "unsupported"]
#: `debug`: an author's fork without its GPU, for correctness only; in no figure and no claim.
Source = Literal["measured", "emulated", "simulated", "debug"]
RequestStatus = Literal["ok", "error", "timeout", "censored"]

#: Columns of requests.parquet and their pandas dtypes (list columns are object).
REQUEST_COLUMNS: dict[str, str] = {
    "index": "int64",  # position in the drawn workload; the key of paired comparisons
    "length_class": "string",  # "short" or "long"
    "scheduled_s": "float64",  # when the drawn schedule wanted it sent (closed loop: when the slot was free)
    "sent_s": "float64",  # when the request's bytes were handed to the socket
    "first_token_s": "float64",  # first non-empty token; NaN if none
    "last_token_s": "float64",
    "finished_s": "float64",  # end of the stream, or the moment it failed or was given up
    "chunk_s": "object",  # list[float]: arrival of every chunk that carries tokens
    "chunk_tokens": "object",  # list[int]: tokens in it, differences of the server's own usage
    "prompt_tokens_asked": "int64",
    "prompt_tokens": "Int64",  # as the server counted; NA if it never said
    "output_tokens_asked": "int64",
    "output_tokens": "Int64",
    "server_queue_s": "float64",  # submission to admission where the server reports it per request; else NaN
    "status": "string",  # RequestStatus
    "error": "string",  # class and text, NA if none
    "in_window": "bool",  # scheduled inside the steady window
}

#: Kinds of memory, never mixed (DESIGN, "Words"). `tier` is "device" or "host".
MEMORY_KINDS: dict[str, str] = {
    "weights": "bytes of the model's weights",
    "kv_reserved": "bytes of the KV pool, used or not",
    "kv_live": "entries in use x bytes an entry",
    "workspace_peak": "largest temporary of prefill and decode since the last reset",
    "allocated": "bytes of tensors that torch's allocator holds on a CUDA device, weights and pool included",
    "process": "resident memory of the server's process tree (tier device on CUDA: NVML)",
    "moved_h2d": "bytes moved from host to device since the load began",
    "moved_d2h": "bytes moved from device to host since the load began",
}
MEMORY_COLUMNS: dict[str, str] = {
    "t_s": "float64",
    "kind": "string",
    "tier": "string",
    "bytes": "int64",
}


#: Columns of a quality cell's items.parquet, a row an item and measure. `reference` is the full cache's value on the
#: same item (NaN where the measure is itself a comparison with it); `weight` is what a mean over items weighs it by.
ITEM_COLUMNS: dict[str, str] = {
    "measure": "string",
    "context": "int64",
    "depth": "float64",
    "item": "int64",
    "value": "float64",
    "reference": "float64",
    "weight": "float64",
    "kept": "float64",  # share of entries kept over the item's decode steps
    "attended": "float64",  # share of entries that they attended to
    "kv_device_bytes": "float64",  # held of the item when its prompt had ended
    "kv_host_bytes": "float64",
}

#: Columns of `quality.parquet`, a row a quality cell, measure, context and depth: what claims, tables, figures and
#: `recommend` read. `deployment` joins it with the cells of the same study.
QUALITY_COLUMNS: dict[str, str] = {
    "cell": "string",
    "deployment": "string",
    "framework": "string",
    "implementation": "string",
    "rule": "string",
    "variant": "string",  # options that make the framework another thing to compare; empty where there are none
    "model": "string",
    "weights": "string",
    "budget": "float64",  # nominal share; NaN where it is absolute
    "budget_of": "string",
    "quality": "string",  # name of the suite
    "seed": "int64",
    "verdict": "string",
    "source": "string",
    "measure": "string",
    "context": "int64",  # tokens
    "depth": "float64",  # NaN, or 0 (start) .. 1 (end)
    "n": "int64",  # items
    "value": "float64",
    "low": "float64",
    "high": "float64",
    "diff": "float64",  # mean difference from the full cache on the same items (perplexity: ratio - 1)
    "diff_low": "float64",
    "diff_high": "float64",
    "kept_share": "float64",  # measured: entries kept over those of the full cache
    "attended_share": "float64",  # measured: entries that a decode step attends to
    "kv_bytes": "float64",  # device and host, an item
    "kv_device_bytes": "float64",
    "kv_host_bytes": "float64",
}


class Record(BaseModel):
    """A record that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")


class Metric(Record):
    """A number with what it needs to be believed. `value` None is NA: undefined, never 0.

    `infinite` marks a percentile that failures push to +inf (JSON has no infinity).
    """

    value: float | None
    unit: str
    n: int
    low: float | None = None
    high: float | None = None
    infinite: bool = False
    starred: bool = False


class Verdict(Record):
    """VALID, or INVALID with the reasons (`client_bound`, ...)."""

    status: Literal["VALID", "INVALID"]
    reasons: list[str] = []


class Summary(Record):
    """`summary.json`: what the cell says, in one page."""

    schema_version: int = SCHEMA_VERSION
    cell: str
    deployment: str
    outcome: Outcome
    cause: str | None = None  # one line when the outcome is not ok
    verdict: Verdict
    flags: list[str] = []  # "saturated", ...
    metrics: dict[str, Metric] = {}  # by id of the registry measure.metrics
    memory: dict[str, int | None] = {}  # e.g. "kv_live_peak.device": bytes
    budget: dict[str, float | None] = {}  # nominal, attended share, kept share
    counts: dict[str, int] = {}  # offered, sent, ok, error, timeout, censored, in_window
    window: dict[str, float | None] = {}  # start_s, end_s of the steady window
    visit: dict[str, float | None] = {}  # bring_up_s, warm_up_s, load_s, drain_s, teardown_s
    checks: dict[str, Any] = {}  # each gate's own numbers
    source: Source = "measured"
    fingerprint: str  # digest of the hardware fingerprint; cells of different ones are never pooled
