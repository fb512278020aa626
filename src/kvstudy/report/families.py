"""Points by what varies between them: the panels of a figure, and what a study is about."""

from __future__ import annotations

import pandas as pd

from kvstudy.analysis.table import with_offered

#: What a line may run along, and the words on its axis. The load is first.
AXES = {
    "rate": "offered rate (requests/s)",
    "concurrency": "requests in flight (closed loop)",
    "long_share": "share of long requests",
    "shared_share": "share of a prompt that is shared",
    "burstiness": "burstiness (squared coefficient of variation of the gaps)",
    "prompt_tokens": "prompt length (tokens)",
    "output_tokens": "output length (tokens)",
    "kv_memory_mib": "KV memory (MiB)",
}
#: What makes one point another's equal, but for the axis.
_SETTING = (
    "model",
    "workload",
    "prompt_tokens",
    "output_tokens",
    "long_share",
    "shared_share",
    "turns",
    "loop",
    "offered",
    "concurrency",
    "burstiness",
    "kv_memory_mib",
    "hardware",
)
#: Axes of the workload; along the others the workload is one.
OF_WORKLOAD = ("long_share", "shared_share", "prompt_tokens", "output_tokens")


def families(frame: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    """The points by panel: what its axis is (None: a single load without a number), and its points.

    Points that differ in the load alone make a panel along it; those that are left, along the first axis in which alone
    they differ from others (which may be shown twice, as the beginning of several lines); the rest stand by themselves.
    """
    frame = with_offered(frame)
    found: list[tuple[str | None, pd.DataFrame]] = []
    left = pd.Series(True, index=frame.index)
    for axis in AXES:
        keys = [key for key in _SETTING if key != ("offered" if axis == "rate" else axis)]
        keys += [] if axis in OF_WORKLOAD else ["workload_key"]
        for _, part in frame[frame[axis].notna()].groupby(keys, sort=True, dropna=False):
            alone = part[axis].nunique() < 2 or not left[part.index].any()
            # Two workloads may share their name and their means, and must not share a line.
            if not alone and (part.groupby(axis)["workload_key"].nunique() == 1).all():
                found.append((axis, part))
                left[part.index] = False
    for _, part in frame[left].groupby([*_SETTING, "workload_key", "load"], sort=True, dropna=False):
        first = part.iloc[0]
        found.append((next((axis for axis in ("rate", "concurrency") if pd.notna(first[axis])), None), part))
    return found
