"""A measurement killed at any moment: nothing half, nothing leaked, and running again completes it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from trial import Zygote, assert_complete, assert_nothing_leaked, whole_cells

#: Seconds that the visit of a trial takes, and a little more.
SPAN_S = 4.0
MOMENTS = [random.Random(seed).uniform(0.0, SPAN_S) for seed in range(50)]


def killed_and_run_again(zygote: Zygote, results: Path, **kill: float | str) -> int:
    """The exit code of the killed visit, which may have been faster than its killer."""
    ended = zygote.run(results, **kill)
    assert ended.code in (-9, 0), ended.said
    assert_nothing_leaked(results)
    before = whole_cells(results)
    again = zygote.run(results)
    assert again.code == 0 and "Traceback" not in again.said, again.said
    assert_complete(results)
    after = whole_cells(results)
    assert {name: after[name] for name in before} == before, "a finished cell was measured again"
    assert ("nothing to measure" in again.said) == (len(before) == 2)
    assert_nothing_leaked(results)
    return ended.code


@pytest.mark.parametrize("seed", range(5))
def test_at_a_random_moment(zygote: Zygote, results: Path, seed: int) -> None:
    killed_and_run_again(zygote, results, after_s=MOMENTS[seed])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_at_fifty_random_moments(zygote: Zygote, tmp_path: Path) -> None:
    codes = [
        killed_and_run_again(zygote, tmp_path / str(number) / "results", after_s=moment)
        for number, moment in enumerate(MOMENTS)
    ]
    assert codes.count(-9) > 25


@pytest.fixture(scope="session")
def writes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many writes a visit makes that nothing disturbs."""
    ended = zygote.run(tmp_path_factory.mktemp("whole") / "results")
    assert ended.code == 0 and ended.writes > 20
    return ended.writes


@pytest.mark.parametrize("how", ["before", "in"])
def test_at_a_random_write(zygote: Zygote, results: Path, writes: int, how: str) -> None:
    at = random.Random(how).randint(writes // 2, writes)
    assert killed_and_run_again(zygote, results, at=at, how=how) == -9


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["before", "in"])
def test_at_every_write(zygote: Zygote, tmp_path: Path, writes: int, how: str) -> None:
    """After a write is before the next."""
    for at in range(1, writes + 1):
        assert killed_and_run_again(zygote, tmp_path / str(at) / "results", at=at, how=how) == -9
