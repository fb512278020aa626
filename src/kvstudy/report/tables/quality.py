"""The table of quality: a row a deployment, each measure with its paired difference from the full cache."""

from __future__ import annotations

import pandas as pd

from kvstudy.report import style, words
from kvstudy.report.data import StudyData, told_apart
from kvstudy.report.latex import Column, Table
from kvstudy.report.tables.registry import table
from kvstudy.report.words import MIB

#: Measures of the table: header, and how a value is written.
MEASURES = {
    "perplexity": "Perplexity",
    "kl": "KL",
    "top1": "Top-1",
    "first_divergence": "Agrees for",
    "length_drift": "Longer by",
    "retention": "Recall",
    "retention_strict": "Strict",
}
TITLE = "What each budget costs in quality"


@table("quality")
def quality(data: StudyData) -> Table:
    """A row a deployment and context; differences are paired by item, in brackets with their 95 % interval."""
    frame = data.quality
    frame = frame[frame["depth"].isna() & frame["weights"].eq("pretrained")]
    if frame.empty:
        return Table("quality", TITLE, "", [], [], data.quality, "this study scored no quality of pretrained weights")
    names = [name for name in [*MEASURES, *_tasks(frame)] if name in set(frame["measure"])]
    columns = [Column("Deployment", numeric=False), Column("Context"), Column("Attended"), Column("KV", "MiB")]
    columns += [Column(MEASURES.get(name, name.partition(":")[2]), numeric=False) for name in names]
    rows: list[list[str]] = []
    groups: list[str] = []
    bold: set[tuple[int, int]] = set()
    ranks = [style.rank(str(name))[0] for name in frame["framework"]]
    ordered = frame.assign(_rank=ranks, _line=told_apart(frame), _budget=-frame["budget"])
    for key, part in ordered.groupby(["context", "_rank", "_line", "_budget", "deployment"], sort=True, dropna=False):
        first = part.iloc[0]
        row = [_label(first), f"{int(first['context']):,}", words.number(float(part["attended_share"].mean()))]
        row.append(words.number(float(part["kv_bytes"].mean()) / MIB))
        for name in names:
            found = part[part["measure"] == name]
            if len(found) and pd.notna(found["diff_low"].iloc[0]) and not _spans_zero(found.iloc[0]):
                bold.add((len(rows), len(row)))
            row.append(_value(found.iloc[0]) if len(found) else "–")
        rows.append([*row[:-1], row[-1] + ("" if first["verdict"] == "VALID" else " (INVALID)")])
        groups.append(str(key[0]))  # type: ignore[index]
    note = (
        "In brackets the difference from the full cache on the same items, paired, with its 95 % interval; bold: it "
        "excludes 0. Agrees for: tokens of a greedy answer before it leaves the full cache's. Recall: the answer has "
        "the fact; strict: as a word, with no other value beside it. KV: held of a request, both tiers. Scored by "
        "decoding under the policy; docs/quality.md says how."
    )
    return Table("quality", TITLE, note, columns, rows, data.quality, groups=groups, bold=bold)


def _tasks(frame: pd.DataFrame) -> list[str]:
    return sorted({str(name) for name in frame["measure"] if str(name).startswith("accuracy")})


def _label(row: pd.Series) -> str:
    budget = row["budget"]
    return str(row["_line"]) + (f" b={words.plain(budget)}" if pd.notna(budget) and budget < 1 else "")


def _spans_zero(row: pd.Series) -> bool:
    return bool(row["diff_low"] <= 0 <= row["diff_high"])


def _value(row: pd.Series) -> str:
    text = words.number(float(row["value"]))
    if row["framework"] == "full" or pd.isna(row["diff_low"]) or row["measure"] in ("kl", "length_drift", "top1"):
        return text
    low, high = (words.number(float(row[side])) for side in ("diff_low", "diff_high"))
    return f"{text} [{low}, {high}]"
