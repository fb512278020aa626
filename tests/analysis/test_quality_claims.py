"""Claims about quality: planted rows of quality.parquet flip every predicate; what is missing is named."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from planted import cell

from kvstudy.analysis import claims
from kvstudy.analysis.run import CLAIMS

NLL = {"kind": "quality", "measures": ["nll"], "of": {"framework": "h2o", "budget": 0.3}}
TASKS = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")


def row(
    framework: str, measure: str, diff: float, whole: float = 0.8, half: float = 0.005, **other: Any
) -> dict[str, Any]:
    """A planted quality result: `diff` from the whole cache's `whole`, with intervals of `half` either side."""
    value = whole + diff
    found = {"framework": framework, "implementation": "native", "rule": "", "variant": "", "model": "m"}
    found |= {"verdict": "VALID", "weights": "pretrained"}
    found |= {"budget": 1.0 if framework == "full" else 0.3, "budget_of": "prompt", "measure": measure}
    found |= {"context": 2048.0, "depth": float("nan"), "n": 100, "value": value, "low": value - half}
    found |= {"high": value + half, "diff": diff, "diff_low": diff - half, "diff_high": diff + half}
    found |= other
    name = f"{framework}-{found['budget']}-{found['variant']}-{measure}-{found['context']}"
    return found | {"cell": name, "deployment": framework}


def decide(rows: list[dict[str, Any]], **predicate: Any) -> claims.Decision:
    claim = claims.Claim(id="X", statement="s", source="t", decide=(predicate,))  # type: ignore[arg-type]
    return claims.decide(claim, pd.DataFrame([cell("vllm", 1.0)]), pd.DataFrame(rows))[0]


def tasks(framework: str, *diffs: float, **other: Any) -> list[dict[str, Any]]:
    return [row(framework, f"accuracy:{task}", diff, **other) for task, diff in zip(TASKS, diffs, strict=False)]


@pytest.mark.parametrize(("diff", "status"), [(0.1, "supported"), (-0.1, "contradicted"), (0.001, "inconclusive")])
def test_a_difference_to_the_whole_cache(diff: float, status: str) -> None:
    done = decide([row("h2o", "nll", diff)], **NLL, min=0.0)
    assert done.status == status and done.cells == ["h2o-0.3--nll-2048.0"]


@pytest.mark.parametrize(("diff", "status"), [(-0.04, "supported"), (-0.2, "contradicted"), (-0.08, "inconclusive")])
def test_a_share_of_the_whole_cache(diff: float, status: str) -> None:
    assert decide([row("h2o", "nll", diff)], **NLL, column="ratio", min=0.9).status == status


@pytest.mark.parametrize(
    ("diffs", "over", "status"),
    [
        ((0.0, 0.0, -0.3), "all", "contradicted"),
        ((0.0, 0.0, -0.3), "most", "supported"),
        ((0.0, -0.3, -0.3), "most", "contradicted"),
        ((0.0, -0.05, -0.05), "most", "inconclusive"),
        ((0.0, 0.0, -0.3), "several", "supported"),
        ((0.0, -0.3, -0.3), "several", "contradicted"),
        ((-0.09, 0.0, 0.0), "mean", "supported"),
        ((-0.3, -0.3, 0.0), "mean", "contradicted"),
    ],
)
def test_over_several_measures(diffs: tuple[float, ...], over: str, status: str) -> None:
    predicate = NLL | {"measures": ["accuracy:*"], "over": over, "min": -0.05}
    assert decide(tasks("h2o", *diffs), **predicate).status == status


def test_the_level_of_chance_is_taken_off() -> None:
    rows = tasks("h2o", -0.3, -0.3, whole=0.8)  # 0.5 is chance for the first, not for the second
    predicate = NLL | {"measures": ["accuracy:*"], "column": "value", "min": -0.05, "max": 0.05}
    minus = {"accuracy:piqa": 0.5, "accuracy:hellaswag": 0.25}
    statuses = [number.status for number in decide(rows, **predicate, minus=minus).numbers]
    assert statuses == ["supported", "contradicted"]


@pytest.mark.parametrize(("infinigen", "status"), [(-0.05, "supported"), (-0.3, "contradicted")])
def test_one_framework_against_another(infinigen: float, status: str) -> None:
    rows = tasks("h2o", -0.2, -0.2) + tasks("infinigen", infinigen, infinigen)
    predicate = NLL | {"measures": ["accuracy:*"], "to": {"framework": "infinigen"}, "over": "mean", "max": 0.0}
    done = decide(rows, **predicate)
    assert done.status == status and len(done.cells) == 4


@pytest.mark.parametrize(("long", "status"), [(-0.3, "supported"), (-0.1, "contradicted")])
def test_a_change_over_the_context(long: float, status: str) -> None:
    rows = [row("h2o", "retention", -0.2, context=1024.0), row("h2o", "retention", long, context=8192.0)]
    predicate = NLL | {"measures": ["retention"], "contexts": [1000, 8192], "change": True, "max": 0.0}
    assert decide(rows, **predicate).status == status
    assert decide(rows[:1], **predicate).status == "not testable"


def test_a_variant_is_another_thing() -> None:
    rows = [row("h2o", "nll", 0.1), row("h2o", "nll", 0.4, variant="chunked lossy")]
    lossy = NLL | {"of": {"framework": "h2o", "variant": "chunked lossy"}, "to": {"framework": "h2o"}, "min": 0.0}
    done = decide(rows, **lossy)
    assert done.status == "supported" and done.numbers[0].value == pytest.approx(0.3)
    missing = decide(rows[:1], **lossy)
    assert missing.status == "not testable" and "chunked lossy" in missing.reason


def test_what_is_missing_is_named() -> None:
    for rows, words in (
        ([], "no quality result"),
        ([row("h2o", "kl", 0.1)], "quality was measured, but not nll"),
        ([row("infinigen", "nll", 0.1)], "no nll of h2o near b=0.3"),
        ([row("h2o", "nll", 0.1, budget=0.05)], "no nll of h2o near b=0.3"),
    ):
        done = decide(rows, **NLL, min=0.0)
        assert done.status == "not testable" and words in done.reason
    done = decide([row("h2o", "nll", 0.1)], **NLL, contexts=[4000, 8192], min=0.0)
    assert done.status == "not testable" and "4000 to 8192" in done.reason


def test_the_paper_s_claims_about_quality_are_decided_by_its_numbers() -> None:
    """Rows as the paper reports them support C14 to C18; with the policies exchanged they refute them."""

    def rows(h2o: str, infinigen: str) -> list[dict[str, Any]]:
        found = []
        for budget, drops in {
            0.5: {h2o: (-0.01,) * 6, infinigen: (-0.005,) * 6},
            0.1: {h2o: (-0.1, -0.23, -0.1, -0.1, -0.1, -0.16), infinigen: (-0.06,) * 6},
            0.3: {h2o: (-0.02,) * 6, infinigen: (-0.02,) * 6},
        }.items():
            for name, diffs in drops.items():
                found += tasks(name, *diffs, budget=budget)
        for name in (h2o, infinigen):
            found += [
                row(name, "accuracy:piqa", 0.0, whole=0.5, budget=0.03),
                row(name, "accuracy:hellaswag", 0.0, whole=0.25, budget=0.03),
            ]
        for context, loss in ((1024.0, -0.17), (8192.0, -0.26)):
            found.append(row("full", "retention", 0.0, whole=0.95, context=context))
            found.append(row(infinigen, "retention", -0.02, whole=0.95, context=context))
            found.append(row(h2o, "retention", loss, whole=0.95, context=context))
        return found

    shipped = [one for one in claims.read_claims(CLAIMS) if one.id in {f"C{i}" for i in range(14, 19)}]
    table = pd.DataFrame([cell("vllm", 1.0)])
    done = claims.decide_all(shipped, table, pd.DataFrame(rows("h2o", "infinigen")))
    assert {one.id: one.status for one in done} == {f"C{i}": "supported" for i in range(14, 19)}
    swapped = {one.id: one.status for one in claims.decide_all(shipped, table, pd.DataFrame(rows("infinigen", "h2o")))}
    assert swapped["C15"] == swapped["C17"] == "contradicted"
