"""Scores items on our engine: each context is read once, its state forked for every deployment, all decoded together.

The full cache is always among them: it is what the others are compared with. Rows have the columns of
`records.ITEM_COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from kvstudy.engine.config import Budget
from kvstudy.engine.core import Engine
from kvstudy.engine.fork import Branches
from kvstudy.engine.request import Request, SamplingParams
from kvstudy.quality.items import Item, retained

REFERENCE = "reference"
#: Bytes of both pools that the items of one batch may take.
BATCH_BYTES = 3 << 30

Wanted = tuple[str, dict[str, Any], Budget]
Row = dict[str, Any]


@dataclass
class Run:
    """One item under one deployment."""

    item: Item
    request: Request
    device_bytes: int
    host_bytes: int
    logp: list[float] = field(default_factory=list)
    """Of each scored token."""
    best: list[int] = field(default_factory=list)
    """The likeliest token in each one's place."""
    kl: float = 0.0
    reply: str = ""


@dataclass
class Scorer:
    """An engine with every deployment in it, by label."""

    engine: Engine
    wanted: Mapping[str, Wanted]
    branches: Branches = field(init=False)
    only: set[str] | None = None
    """The labels that are scored now; None: all."""

    def __post_init__(self) -> None:
        self.branches = Branches(self.engine, {REFERENCE: ("full", {}, Budget()), **self.wanted})

    @property
    def labels(self) -> list[str]:
        """The reference, and what is scored now."""
        return [x for x in self.branches.labels if x == REFERENCE or self.only is None or x in self.only]

    # --- the three parts -------------------------------------------------------------------------

    def perplexity(self, items: Sequence[Item], context: int) -> dict[str, list[Row]]:
        """`nll`, `kl` and `top1` of each item's continuation."""
        runs = self.forced(items)
        rows: dict[str, list[Row]] = {}
        for label, mine in runs.items():
            rows[label] = []
            for run, full in zip(mine, runs[REFERENCE], strict=True):
                tokens = len(run.logp)
                agreed = sum(a == b for a, b in zip(run.best, full.best, strict=True))
                base = self._row(label, run, context) | {"weight": float(tokens)}
                rows[label] += [
                    base | {"measure": "nll", "value": -sum(run.logp) / tokens, "reference": -sum(full.logp) / tokens},
                    base | {"measure": "kl", "value": run.kl / tokens, "reference": 0.0},
                    base | {"measure": "top1", "value": agreed / tokens, "reference": 1.0},
                ]
        return rows

    def greedy(self, items: Sequence[Item], context: int, output: int) -> dict[str, list[Row]]:
        """Where each answer leaves the full cache's (tokens that agree, at most its length), and how long it is."""
        runs = self.said(items, output)
        return {
            label: [
                row
                for run, full in zip(mine, runs[REFERENCE], strict=True)
                for row in divergence(self._row(label, run, context), run.request.output, full.request.output)
            ]
            for label, mine in runs.items()
        }

    def retention(self, items: Sequence[Item], context: int, output: int) -> dict[str, list[Row]]:
        """Whether the fact is in the answer."""
        rows: dict[str, list[Row]] = {label: [] for label in self.labels}
        for label, mine in (runs := self.said(items, output)).items():
            for run, full in zip(mine, runs[REFERENCE], strict=True):
                rows[label] += recall(self._row(label, run, context), run.item, run.reply, full.reply)
        return rows

    # --- decoding --------------------------------------------------------------------------------

    def forced(self, items: Sequence[Item]) -> dict[str, list[Run]]:
        """Decode each item's continuation as it is given, under every deployment.

        Its first token is predicted by the prompt's last, whose logits are prefill's and the same for all: it is forced
        and not scored.
        """
        params = {
            item: SamplingParams(max_tokens=len(item.forced), forced_tokens=item.forced, return_logits=True)
            for item in items
        }
        return self._decode(params, compare=True)

    def said(self, items: Sequence[Item], output: int) -> dict[str, list[Run]]:
        """Let every deployment answer each item, after what is forced of it, until it ends or has said `output`."""
        runs = self._decode(
            {i: SamplingParams(max_tokens=len(i.forced) + output, forced_tokens=i.forced or None) for i in items}
        )
        for run in chain.from_iterable(runs.values()):
            run.reply = self.engine.tokenizer.decode(
                run.request.output[len(run.item.forced) :], skip_special_tokens=True
            )
        return runs

    def _decode(self, params: Mapping[Item, SamplingParams], compare: bool = False) -> dict[str, list[Run]]:
        """Read each item's prompt once and decode it under every deployment; by label, in the order of the items."""
        self.engine.reset()
        runs: dict[str, list[Run]] = {label: [] for label in self.labels}
        for batch in self._batches(params):
            with ExitStack() as held:
                reads = [(item, held.enter_context(self.branches.read(list(item.prompt)))) for item in batch]
                mine = [
                    {label: self._fork(item, read, label, params[item]) for label in self.labels}
                    for item, read in reads
                ]
            for of in mine:
                for label, run in of.items():
                    runs[label].append(run)
                    run.request.logits.clear()  # the first token's: prefill's
            while self.engine.has_work():
                self.engine.step()
                if compare:
                    for of in mine:
                        _compare(of)
        return runs

    def _fork(self, item: Item, read: Request, label: str, params: SamplingParams) -> Run:
        before = self._held()
        request = self.branches.fork(read, label, params)
        device, host = (after - was for after, was in zip(self._held(), before, strict=True))
        return Run(item, request, device, host)

    def _held(self) -> tuple[int, int]:
        device, host = self.engine.device_pool, self.engine.host_pool
        return device.live_bytes + device.aux_bytes, host.live_bytes + host.aux_bytes

    def _batches(self, params: Mapping[Item, SamplingParams]) -> Iterator[list[Item]]:
        """As many items at once as the memory allows, in their order."""
        batch: list[Item] = []
        used = 0
        for item in params:
            size = (len(item.prompt), params[item].max_tokens)
            needs = [self.branches.policy(label).reserve(*size) for label in self.labels]
            mine = sum(need.device_bytes + need.host_bytes for need in needs) + 2 * needs[0].device_peak_bytes
            if batch and used + mine > BATCH_BYTES:
                yield batch
                batch, used = [], 0
            batch.append(item)
            used += mine
        if batch:
            yield batch

    def _row(self, label: str, run: Run, context: int) -> Row:
        counted = self.branches.policy(label).counted
        full = float(counted.full.sum())
        return {
            "context": context,
            "depth": run.item.depth,
            "item": run.item.number,
            "reference": math.nan,
            "weight": 1.0,
            "kept": float(counted.kept.sum()) / full if full else 1.0,
            "attended": run.request.attended_entries / run.request.full_entries if run.request.full_entries else 1.0,
            "kv_device_bytes": float(run.device_bytes),
            "kv_host_bytes": float(run.host_bytes),
        }


def _compare(of: Mapping[str, Run]) -> None:
    """Take up the logits of one step: each deployment's forced token, and its distribution against the full cache's."""
    if not of[REFERENCE].request.logits:
        return
    logp = torch.stack([run.request.logits.pop() for run in of.values()]).log_softmax(-1)
    full = logp[list(of).index(REFERENCE)]
    kl = torch.nn.functional.kl_div(logp, full.expand_as(logp), reduction="none", log_target=True).sum(-1)
    for run, mine, far, best in zip(of.values(), logp, kl.tolist(), logp.argmax(-1).tolist(), strict=True):
        run.logp.append(float(mine[run.request.output[-1]]))
        run.best.append(best)
        run.kl += far


def divergence(row: Row, output: Sequence[Any], full: Sequence[Any]) -> list[Row]:
    """Rows of a greedy answer beside the full cache's."""
    pairs = enumerate(zip(output, full, strict=False))
    agreed = next((at for at, (a, b) in pairs if a != b), min(len(output), len(full)))
    return [
        row | {"measure": "first_divergence", "value": float(agreed), "reference": float(len(full))},
        row | {"measure": "length_drift", "value": float(len(output) - len(full)), "reference": 0.0},
    ]


def recall(row: Row, item: Item, reply: str, full: str) -> list[Row]:
    """Rows of a retention item: the paper's substring test, and the strict one."""
    mine, theirs = retained(item, reply), retained(item, full)
    return [
        row | {"measure": name, "value": float(a), "reference": float(b)}
        for name, a, b in zip(("retention", "retention_strict"), mine, theirs, strict=True)
    ]
