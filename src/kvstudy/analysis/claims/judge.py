"""Decides claims on a study's cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from kvstudy.analysis.claims.cells import Cells, with_derived
from kvstudy.analysis.claims.estimates import Estimate, NotTestable, all_of
from kvstudy.analysis.claims.predicates import evaluate
from kvstudy.analysis.claims.schema import Claim, Status
from kvstudy.analysis.table import usable


@dataclass
class Decision:
    """What became of a claim."""

    id: str
    statement: str
    source: str
    status: Status
    reason: str
    numbers: list[Estimate] = field(default_factory=list)
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """Ids of the cells that the decision rests on."""
        return list(dict.fromkeys(cell for number in self.numbers for cell in number.cells))


class Judge:
    """Decides claims on one table; cells are sorted into contexts once for all claims."""

    def __init__(self, table: pd.DataFrame, quality: pd.DataFrame | None = None) -> None:
        self.quality = quality
        self.everything = with_derived(table)
        self.rows = self.everything[usable(self.everything)]
        self._cells: dict[tuple[str | None, bool], Cells] = {}

    def cells(self, device: str | None, memory: bool) -> Cells:
        """Cells for a claim: of its device, and for one about memory without simulated ones."""
        if (device, memory) not in self._cells:
            rows = self.rows
            if device is not None:
                rows = rows[rows["device"] == device]
            if memory:
                rows = rows[rows["source"] != "simulated"]
            self._cells[device, memory] = Cells(rows, self.everything, self.quality, device)
        return self._cells[device, memory]

    def decide(self, claim: Claim) -> list[Decision]:
        """Decide a claim; one about memory once on reserved and once on live bytes."""
        return [self._decide(claim, kind) for kind in (claim.bytes or ("",))]

    def _decide(self, claim: Claim, kind: str) -> Decision:
        name = f"{claim.id} ({kind} bytes)" if kind else claim.id
        done = Decision(name, claim.statement, claim.source, "not testable", "", note=claim.note)
        if claim.device is not None and not (self.rows["device"] == claim.device).any():
            done.reason = f"needs a {claim.device.upper()} device; this study has none"
            return done
        cells = self.cells(claim.device, bool(claim.bytes) or _about_memory(claim))
        statuses: list[Status] = []
        lacking: list[str] = []
        for predicate in claim.decide:
            try:
                status, numbers = evaluate(_with_bytes(predicate, kind), cells)
            except NotTestable as reason:
                lacking.append(str(reason))
                continue
            statuses.append(status)
            done.numbers += numbers
        # What is refuted stays refuted, whatever the rest of the claim would need.
        if lacking and "contradicted" not in statuses:
            done.reason = "; ".join(dict.fromkeys(lacking))
            done.numbers = []
            return done
        done.status = all_of(statuses)
        against = sum(number.status == done.status for number in done.numbers)
        if done.status == "supported":
            done.reason = f"all {len(done.numbers)} numbers lie within the bounds"
        else:
            done.reason = f"{against} of {len(done.numbers)} numbers {_REASONS[done.status]}"
        return done


def _about_memory(claim: Claim) -> bool:
    metrics = [str(getattr(predicate, "metric", "")) for predicate in claim.decide]
    metrics += [name for predicate in claim.decide for name in getattr(predicate, "metrics", {})]
    return any("gib" in metric or metric.startswith("memory.") for metric in metrics)


def decide(claim: Claim, table: pd.DataFrame, quality: pd.DataFrame | None = None) -> list[Decision]:
    """Decide one claim on a table, and on the study's quality results where there are any."""
    return Judge(table, quality).decide(claim)


_REASONS = {
    "contradicted": "lie outside their bound",
    "inconclusive": "have an interval that spans the bound",
}


def _with_bytes(predicate: Any, kind: str) -> Any:
    metric = getattr(predicate, "metric", None)
    if not kind or metric is None:
        return predicate
    return predicate.model_copy(update={"metric": metric.replace("{bytes}", kind)})


def decide_all(claims: Sequence[Claim], table: pd.DataFrame, quality: pd.DataFrame | None = None) -> list[Decision]:
    """Decide every claim."""
    court = Judge(table, quality)
    return [decision for claim in claims for decision in court.decide(claim)]


def as_json(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """Decisions as they are stored in claims.json."""
    return [{**asdict(decision), "cells": decision.cells} for decision in decisions]
