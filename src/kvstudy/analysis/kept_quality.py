"""How much of the whole cache's quality a deployment keeps at a context, from a study's quality results.

The share is the smallest over the measures that have a whole cache to be held against: perplexity (the whole cache's
over the deployment's), retention and task accuracies (the deployment's over the whole cache's). Between two measured
contexts the worse of them counts; outside of what was measured there is no answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

#: Measures that are better when they are larger; of perplexity the smaller is better.
_LARGER = ("retention", "accuracy:")
#: Columns in which a row of quality.parquet is of the same deployment, whatever its memory.
OF = ("framework", "implementation", "rule", "variant", "model")


@dataclass(frozen=True)
class Kept:
    """A share of the whole cache's quality with its interval, the measure that decided, and its cells."""

    value: float
    low: float
    high: float
    measure: str
    cells: tuple[str, ...]


class Unmeasured(Exception):
    """The quality at this budget and context has not been measured; the text says what was."""


def kept(quality: pd.DataFrame, line: pd.Series, context: float) -> Kept:
    """The share of quality that the deployment of `line` (a row of the cells' points) keeps at `context` tokens.

    Raises
    ------
    Unmeasured
        There is no quality result of it there.
    """
    if line["budget_share"] >= 1 and not line["variant"]:
        return Kept(1.0, 1.0, 1.0, "the whole cache", ())
    rows = quality[quality["depth"].isna() & (quality["verdict"] == "VALID") & (quality["weights"] != "random")]
    for name in OF:
        rows = rows[rows[name].fillna("") == line[name]]
    rows = rows[(rows["budget"] - line["budget_share"]).abs() < 1e-9]
    known = sorted({float(at) for at in rows["context"]})
    if not known:
        raise Unmeasured("its quality at this budget has not been measured")
    below, above = [at for at in known if at <= context], [at for at in known if at >= context]
    if not below or not above:
        span = f"{known[0]:g} to {known[-1]:g}" if len(known) > 1 else f"{known[0]:g}"
        raise Unmeasured(f"its quality was measured at contexts of {span} tokens, not at {context:g}")
    shares = [
        share
        for row in rows[rows["context"].isin({below[-1], above[0]})].to_dict("records")
        if (share := _share(row)) is not None
    ]
    if not shares:
        raise Unmeasured("none of its quality measures is held against the whole cache")
    return min(shares, key=lambda share: share.value)


def _share(row: dict[str, Any]) -> Kept | None:
    """A measure as a share of the whole cache's; None where it is none, or the whole cache's is 0."""
    measure = str(row["measure"])
    value, diff = float(row["value"]), float(row["diff"])
    if not math.isfinite(diff):
        return None
    whole = value - diff
    ends = [whole + float(row[end]) for end in ("diff_low", "diff_high")]
    if measure == "perplexity" and min(whole, value) > 0:
        shares = [whole / value, *(whole / end if end > 0 else math.nan for end in reversed(ends))]
    elif measure.startswith(_LARGER) and whole > 0:
        shares = [value / whole, *(end / whole for end in ends)]
    else:
        return None
    low, high = (shares[0] if math.isnan(end) else end for end in shares[1:])
    return Kept(shares[0], low, high, f"{measure} at {float(row['context']):g} tokens", (str(row["cell"]),))
