"""What a fidelity case compares, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEAR_TIE = 1e-5
"""Two scores closer than this may change places between two kernels (k-th against k + 1-th)."""
TOLERANCE = 1e-3
"""Largest difference of logits that passes."""


def margin(scores: Tensor, k: int) -> Tensor:
    """Gap between the k-th and the k + 1-th largest of scores [..., S]; infinite where all or nothing is taken."""
    if k <= 0 or k >= scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], torch.inf)
    top = scores.topk(k + 1, dim=-1).values
    return top[..., k - 1] - top[..., k]


@dataclass
class Case:
    """One case: a rule with its knobs against one set of the authors' numbers.

    A row is one selection (of one head at one step). Rows that differ where the rule's own margin is below `near_tie`
    are counted apart, and so is what follows from them: a selection changed by a near-tie changes every later layer and
    step of that request, and the logits with it.
    """

    folder: str
    name: str
    path: str
    tolerance: float = TOLERANCE
    near_tie: float = NEAR_TIE
    selections: int = 0
    mismatches: int = 0
    near_ties: int = 0
    after_near_tie: int = 0
    max_dlogit: float = 0.0
    max_dother: float = 0.0
    tainted: bool = False
    note: str = ""
    first: str = ""

    def select(self, got: Tensor, want: Tensor, gaps: Tensor, where: str) -> None:
        """Compare bool sets got, want [rows, S]; gaps [rows] is each row's margin."""
        differ = (got != want).any(dim=-1)
        self.selections += differ.numel()
        if not differ.any():
            return
        near = differ & (gaps < self.near_tie)
        if self.tainted:
            self.after_near_tie += int(differ.sum())
            return
        hard = int((differ & ~near).sum())
        self.near_ties += int(near.sum())
        self.mismatches += hard
        if hard and not self.first:
            self.first = where
        if not hard:
            self.tainted = True

    def number(self, got: Tensor, want: Tensor, where: str, logits: bool = True) -> None:
        """Compare values: logits, or (with `logits=False`) scores and cached keys, under the same tolerance."""
        if self.tainted:
            return
        difference = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
        if difference != difference:
            difference = float("inf")
        if logits:
            self.max_dlogit = max(self.max_dlogit, difference)
        else:
            self.max_dother = max(self.max_dother, difference)
        if difference > self.tolerance and not self.first:
            self.first = where

    @property
    def ok(self) -> bool:
        """Whether nothing disagrees."""
        return self.mismatches == 0 and max(self.max_dlogit, self.max_dother) <= self.tolerance

    def line(self) -> str:
        """One line for a terminal."""
        text = (
            f"{'ok  ' if self.ok else 'FAIL'} {self.folder}/{self.name} [{self.path}]: {self.selections} selections, "
        )
        text += f"{self.mismatches} mismatches, max |dlogit| {self.max_dlogit:.1e}"
        if self.max_dother:
            text += f", max |d other| {self.max_dother:.1e}"
        if self.near_ties or self.after_near_tie:
            text += f", {self.near_ties} near-ties ({self.after_near_tie} rows after one)"
        if self.note:
            text += f" ({self.note})"
        if self.first:
            text += f"; first at {self.first}"
        return text
