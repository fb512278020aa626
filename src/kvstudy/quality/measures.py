"""From items to measures: means with intervals, and paired differences from the full cache on the same items."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from kvstudy.statistics import mean_interval, paired_shares, wilson

#: Measures that are a yes or no of each item, by how their names begin.
SHARES = ("retention", "accuracy:")


def summarise(items: pd.DataFrame) -> pd.DataFrame:
    """One row a measure, context and depth; where a measure has depths, one more over all of them (depth NaN).

    `items` has the columns of `records.ITEM_COLUMNS`. Items are independent: they are drawn apart. Perplexity is
    exp of the mean negative log-likelihood of a token; its interval is that of the mean, carried through exp, and its
    difference is that of the two perplexities, the full cache's taken as it is.
    """
    rows = []
    for key, part in items.groupby(["measure", "context"], sort=True):
        measure, context = str(key[0]), int(str(key[1]))  # type: ignore[index]
        depths = sorted(part["depth"].dropna().unique())
        groups = [(math.nan, part)] + [(depth, part[part["depth"] == depth]) for depth in depths]
        for depth, group in groups:
            # An item that is asked at several depths is one item: its mean over them.
            rows += list(_measured(measure, context, float(depth), group))
    return pd.DataFrame(rows)


def _measured(measure: str, context: int, depth: float, group: pd.DataFrame) -> Iterator[dict[str, Any]]:
    by_item = group.groupby("item")[["value", "reference"]].mean()
    value = by_item["value"].to_numpy(dtype=float)
    reference = by_item["reference"].to_numpy(dtype=float)
    row: dict[str, Any] = {
        "measure": measure,
        "context": context,
        "depth": depth,
        "n": len(group) if measure.startswith(SHARES) else len(value),
        "kept_share": float(group["kept"].mean()),
        "attended_share": float(group["attended"].mean()),
        "kv_device_bytes": float(group["kv_device_bytes"].mean()),
        "kv_host_bytes": float(group["kv_host_bytes"].mean()),
    }
    row["kv_bytes"] = row["kv_device_bytes"] + row["kv_host_bytes"]
    mean, (low, high) = _mean(value)
    moved = _difference(value, reference)
    if measure.startswith(SHARES):
        low, high = wilson(float(value.sum()), len(value))
        if not np.isnan(reference).any():
            moved["diff_low"], moved["diff_high"] = paired_shares(value, reference)
    yield row | {"value": mean, "low": low, "high": high} | moved
    if measure == "nll":
        full = float(np.exp(reference.mean()))
        yield row | {
            "measure": "perplexity",
            "value": math.exp(mean),
            "low": None if low is None else math.exp(low),
            "high": None if high is None else math.exp(high),
            **{name: None if d is None else full * math.expm1(d) for name, d in moved.items()},
        }


def _mean(values: np.ndarray) -> tuple[float, tuple[float | None, float | None]]:
    return float(values.mean()), mean_interval(values, size=float(len(values)))


def _difference(value: np.ndarray, reference: np.ndarray) -> dict[str, float | None]:
    """Paired, item by item. A measure that is itself a comparison with the full cache has none."""
    if np.isnan(reference).any():
        return {"diff": None, "diff_low": None, "diff_high": None}
    mean, (low, high) = _mean(value - reference)
    return {"diff": mean, "diff_low": low, "diff_high": high}


def chance_corrected(accuracy: float, choices: float) -> float:
    """(accuracy - chance) / (1 - chance): 0 is guessing among `choices` answers, 1 is all right."""
    chance = 1.0 / choices
    return (accuracy - chance) / (1.0 - chance)
