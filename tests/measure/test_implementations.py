"""Pairs of a fork and its control, and what is said of two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstudy.grid.plan import make_plan
from kvstudy.load.workload import Drawn
from kvstudy.measure.implementations import Run, _upstream_sets, choose_prompts, compare, pairs, sentence


def test_every_fork_of_the_study_has_its_control(checkout: Path) -> None:
    found = pairs(make_plan(checkout / "conf", ["study=forks"]).cells)
    named = {(pair.upstream.framework.label, pair.upstream.budget.share): pair.native for pair in found}
    assert set(named) == {
        ("flexgen", 1.0),
        *((name, share) for name in ("h2o-upstream", "infinigen-upstream") for share in (1.0, 0.4)),
    }
    for (name, share), native in named.items():
        assert native is not None and native.budget.share == share
        assert native.framework.name == {"flexgen": "full"}.get(name, name.removesuffix("-upstream"))


def test_a_control_of_another_rule_is_none(checkout: Path) -> None:
    plan = make_plan(checkout / "conf", ["study=forks", "framework=h2o,h2o-upstream", "budget.share=0.4"])
    (pair,) = pairs(plan.cells)  # our h2o has rule `realdrop`
    assert pair.native is None


def run(tokens: list[list[int]], top: list[list[int]], sets: dict[tuple[int, int, int, int], set[int]]) -> Run:
    logits = np.zeros((len(top), len(top[0]), 8))
    for step, row in np.ndindex(len(top), len(top[0])):
        logits[step, row, top[step][row]] = 1.0
    kept = {key: frozenset(value) for key, value in sets.items()}
    return Run(np.array(tokens), logits, kept, {"device": 1 << 20, "host": 0}, None)


def test_what_agrees_is_counted() -> None:
    theirs = run([[1, 2], [3, 4]], [[1, 3], [2, 4]], {(0, 0, 0, 0): {1, 2}, (1, 0, 0, 0): {2, 3}})
    ours = run([[1, 2], [3, 5]], [[1, 3], [2, 5]], {(0, 0, 0, 0): {2, 1}, (1, 0, 0, 0): {2, 4}, (2, 0, 0, 0): {1}})
    found = compare(theirs, ours)
    assert (found["tokens"], found["tokens_equal"], found["tokens_equal_same_history"]) == (4, 3, 3)
    assert (found["sets"], found["sets_equal"]) == (2, 1)
    assert found["sets_first_difference"] == {"step": 1, "layer": 0, "row": 0, "head": 0}
    assert found["logit_difference"] == 1.0 and found["seconds"] is None
    line = sentence({"upstream": "a", "native": "b", **found})
    assert "3/4 tokens equal, 1/2 sets" in line and "not timed (debug switch" in line


def test_a_forks_arrays_become_sets_by_row_and_head() -> None:
    fetched = np.array([[[[5, 6, 7, 8], [1, -1, 2, -1]]]])  # one step, one layer, two entries, two rows of two heads
    sets = _upstream_sets({"fetched": fetched}, batch=2)
    assert sets[1, 2, 0, 0] == {5, 1} and sets[1, 2, 0, 1] == {6}
    assert sets[1, 2, 1, 0] == {7, 2} and sets[1, 2, 1, 1] == {8}


def test_the_prompts_are_of_one_length() -> None:
    lengths = np.array([4, 6, 6, 5, 6])
    drawn = Drawn(
        length_class=["short"] * 5,
        prompts=[np.arange(n, dtype=np.int32) for n in lengths],
        texts=None,
        prompt_tokens=lengths,
        output_tokens=np.array([1, 9, 7, 2, 8]),
        unit=np.arange(5.0),
        shared=np.zeros(5, dtype=np.int64),
    )
    prompts, steps = choose_prompts(drawn, 2)
    assert [len(p) for p in prompts] == [6, 6] and steps == 7
    assert pytest.approx(choose_prompts(drawn, 9)[1]) == 7
