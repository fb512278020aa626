"""Claims: every predicate is flipped by planted cells; what cannot be tested names what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from planted import FRAMEWORKS, GIB, cell, metric

from kvstudy.analysis import claims
from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.run import CLAIMS


def decide(table: list[dict[str, Any]], **predicate: Any) -> claims.Decision:
    claim = claims.Claim(id="X", statement="s", source="t", decide=(predicate,), **{})  # type: ignore[arg-type]
    return claims.decide(claim, pd.DataFrame(table))[0]


def grid(of: Callable[[str, float], dict[str, Any]], seeds: int = 1) -> list[dict[str, Any]]:
    return [
        cell(name, rate, **{"seed": seed, **of(name, rate)})
        for name in FRAMEWORKS
        for rate in (1.0, 2.0)
        for seed in range(seeds)
    ]


def throughput(values: dict[str, float], spread: float = 0.02) -> list[dict[str, Any]]:
    return grid(lambda name, _: metric("throughput.output", values.get(name, 100.0), spread))


RATIO = {"kind": "ratio", "metric": "throughput.output", "of": {"framework": "h2o"}, "to": {"framework": "vllm"}}


@pytest.mark.parametrize(("value", "status"), [(120, "supported"), (60, "contradicted"), (101, "inconclusive")])
@pytest.mark.parametrize("over", ["all", "any", "highest", "mean", "peak"])
def test_ratio(value: float, status: str, over: str) -> None:
    assert decide(throughput({"h2o": value}), **RATIO, min=1.0, over=over).status == status


def test_ratio_over_all_fails_at_one_load_and_over_any_does_not() -> None:
    table = grid(lambda name, rate: metric("throughput.output", 50.0 if (name, rate) == ("h2o", 2.0) else 200.0))
    assert decide(table, **RATIO, min=0.9, over="all").status == "contradicted"
    assert decide(table, **RATIO, min=0.9, over="any").status == "supported"
    assert decide(table, **RATIO, min=0.9, over="highest").status == "contradicted"


def test_three_seeds_decide_what_one_cannot() -> None:
    def of(name: str, _: float) -> dict[str, Any]:
        return metric("throughput.output", 110.0 if name == "h2o" else 100.0, spread=0.3)

    assert decide(grid(of), **RATIO, min=1.0).status == "inconclusive"
    assert decide(grid(of, seeds=3), **RATIO, min=1.0).status == "supported"


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"vllm": 100, "h2o": 90, "infinigen": 20}, "supported"),
        ({"vllm": 100, "h2o": 20, "infinigen": 90}, "contradicted"),
        ({"vllm": 100, "h2o": 99, "infinigen": 20}, "inconclusive"),
    ],
)
def test_order(values: dict[str, float], status: str) -> None:
    order = [{"framework": name} for name in ("vllm", "h2o", "infinigen")]
    table = throughput(values)
    assert decide(table, kind="order", metric="throughput.output", frameworks=order).status == status


@pytest.mark.parametrize(("second", "status"), [(1.02, "supported"), (3.0, "contradicted"), (1.16, "inconclusive")])
def test_flat(second: float, status: str) -> None:
    table = grid(lambda _, rate: metric("e2el.p50", 1.0 if rate == 1.0 else second))
    of = {"framework": "vllm"}
    assert decide(table, kind="flat", metric="e2el.p50", of=of, spread=0.15).status == status


@pytest.mark.parametrize(("second", "status"), [(2.0, "supported"), (0.5, "contradicted"), (1.01, "inconclusive")])
def test_trend(second: float, status: str) -> None:
    table = grid(lambda _, rate: metric("e2el.p50", 1.0 if rate == 1.0 else second))
    assert decide(table, kind="trend", metric="e2el.p50", of={"framework": "h2o"}, min=1.0).status == status


@pytest.mark.parametrize(
    ("h2o", "status"), [((0.5, 2.0), "supported"), ((0.5, 0.6), "contradicted"), ((0.5, 1.0), "inconclusive")]
)
def test_crossing(h2o: tuple[float, float], status: str) -> None:
    table = grid(lambda name, rate: metric("e2el.p50", h2o[int(rate) - 1] if name == "h2o" else 1.0))
    sides = [{"framework": "vllm"}, {"framework": "h2o"}]
    assert decide(table, kind="crossing", metric="e2el.p50", frameworks=sides).status == status


def test_crossing_over_model_size() -> None:
    def of(size: float) -> list[dict[str, Any]]:
        better = 50.0 if size > 1e8 else 200.0
        extra = {"parameters": size, "model": f"m{size:g}"}
        h2o = cell("h2o", 1.0, **extra, **metric("throughput.output", better))
        return [cell("vllm", 1.0, **extra), h2o]

    sides = [{"framework": "vllm"}, {"framework": "h2o"}]
    predicate = {"kind": "crossing", "metric": "throughput.output", "axis": "parameters", "frameworks": sides}
    done = decide(of(1e8) + of(4e8), **predicate)
    assert done.status == "supported" and "400M" in " ".join(n.what for n in done.numbers)
    assert decide(of(1e8), **predicate).status == "not testable"


def test_crossing_over_mixes_at_equal_tokens_a_second() -> None:
    """Each mix has a rate of its own there, and all are under one load."""
    table = []
    for share, rate in ((0.0, 2.5), (0.5, 0.8)):
        load = {"long_share": share, "token_rate": 300.0}
        better = metric("e2el.mean", 0.5 if share else 2.0)
        table += [cell("vllm", rate, **load), cell("h2o", rate, **load, **better)]
    predicate = {"kind": "crossing", "metric": "e2el.mean", "axis": "long_share"}
    done = decide(table, **predicate, frameworks=[{"framework": "vllm"}, {"framework": "h2o"}])
    assert done.status == "supported" and "300 tokens/s" in done.numbers[0].what


@pytest.mark.parametrize(("latency", "status"), [(0.5, "supported"), (2.0, "contradicted")])
def test_no_winner(latency: float, status: str) -> None:
    def of(name: str, _: float) -> dict[str, Any]:
        best = {"vllm": 200.0}.get(name, 100.0)
        return metric("throughput.output", best) | metric("e2el.p50", latency if name == "h2o" else 1.0)

    sides = [{"framework": "vllm"}, {"framework": "h2o"}]
    metrics = {"throughput.output": "higher", "e2el.p50": "lower"}
    assert decide(grid(of), kind="no_winner", metrics=metrics, frameworks=sides).status == status


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [(("ok", "oom"), "supported"), (("oom", "oom"), "contradicted"), (("ok", "ok"), "not testable")],
)
def test_survives(outcomes: tuple[str, str], status: str) -> None:
    table = [cell("h2o", 1.0, outcome=outcomes[0]), cell("vllm", 1.0, outcome=outcomes[1])]
    others = [{"framework": "vllm"}]
    assert decide(table, kind="survives", of={"framework": "h2o"}, others=others).status == status


def test_a_gated_cell_has_not_failed() -> None:
    table = [cell("h2o", 1.0), cell("vllm", 1.0, verdict="INVALID")]
    others = [{"framework": "vllm"}]
    done = decide(table, kind="survives", of={"framework": "h2o"}, others=others)
    assert done.status == "not testable"


def test_gated_cells_decide_nothing() -> None:
    table = throughput({"h2o": 200})
    for row in table:
        row["verdict"] = "INVALID" if row["framework"] == "h2o" else "VALID"
    done = decide(table, **RATIO, min=1.0)
    assert done.status == "not testable" and "h2o" in done.reason


@pytest.mark.parametrize(("at_2", "status"), [(3.0, "supported"), (1.0, "contradicted"), (2.02, "inconclusive")])
def test_interaction(at_2: float, status: str) -> None:
    """h2o / vllm is 2 at rate 1 and `at_2` at rate 2."""
    table = grid(lambda name, rate: metric("e2el.p50", 1.0 if name == "vllm" else 2.0 if rate == 1.0 else at_2))
    predicate = {"kind": "interaction", "metric": "e2el.p50", "of": {"framework": "h2o"}, "to": {"framework": "vllm"}}
    done = decide(table, **predicate, axis="load", min=1.0)
    assert done.status == status
    assert done.numbers[0].value == pytest.approx(at_2 / 2.0)


@pytest.mark.parametrize(("gain", "status"), [(2.0, "supported"), (0.5, "contradicted")])
def test_variants_of_a_framework_are_told_apart_and_bursts_are_an_axis(gain: float, status: str) -> None:
    table = []
    for load, burstiness, without in (("poisson", None, 1.0), ("gamma", 4.0, gain)):
        at = {"load": load, "burstiness": burstiness}
        table.append(cell("vllm", 1.0, **at, **metric("e2el.p50", without)))
        table.append(cell("vllm", 1.0, variant="prefix caching", **at, **metric("e2el.p50", 1.0)))
    sides = {"of": {"framework": "vllm", "variant": ""}, "to": {"framework": "vllm", "variant": "prefix caching"}}
    predicate = {"kind": "interaction", "metric": "e2el.p50", **sides, "axis": "burstiness"}
    done = decide(table, **predicate, min=1.0)
    assert done.status == status and "prefix caching" in done.numbers[0].what
    # Without a variant the plain one is meant, though the other has as many cells.
    plain = decide(table, kind="flat", metric="e2el.p50", of={"framework": "vllm"}, axis="burstiness", spread=0.1)
    assert plain.numbers[0].value == pytest.approx(max(gain, 1 / gain))


@pytest.mark.parametrize(("dense", "status"), [(0.5, "supported"), (2.5, "contradicted"), (1.0, "inconclusive")])
def test_crossing_over_the_budget(dense: float, status: str) -> None:
    """h2o against infinigen: twice as slow at b=0.1, `dense` times at b=0.5."""
    values = {("h2o", 0.1): 2.0, ("h2o", 0.5): dense}
    table = [
        cell(name, 1.0, budget_share=share, **metric("e2el.p50", values.get((name, share), 1.0)))
        for name in ("h2o", "infinigen")
        for share in (0.1, 0.5)
    ]
    sides = [{"framework": "h2o"}, {"framework": "infinigen"}]
    predicate = {"kind": "crossing", "metric": "e2el.p50", "axis": "budget_share", "frameworks": sides}
    assert decide(table, **predicate).status == status


@pytest.mark.parametrize(
    ("failing", "bounds", "status"),
    [
        (12000.0, {"min": 10000, "max": 12288}, "supported"),
        (8000.0, {"min": 10000, "max": 12288}, "contradicted"),
        (16000.0, {"min": 10000, "max": 12288}, "inconclusive"),
        (None, {"min": 10000}, "supported"),
        (16000.0, {"min": 15000}, "contradicted"),
        (None, {"min": 20000}, "not testable"),
    ],
)
def test_limit(failing: float | None, bounds: dict[str, float], status: str) -> None:
    """Served at 4,000, 10,000 (and below `failing`), out of memory from `failing` on."""
    lengths = sorted({4000.0, 10000.0, *([failing] if failing else [])})
    table = [cell("h2o", 1.0, prompt_tokens=at, outcome="oom" if failing and at >= failing else "ok") for at in lengths]
    done = decide(table, kind="limit", of={"framework": "h2o"}, **bounds)
    assert done.status == status


def test_a_ratio_from_some_length_on_ignores_shorter_ones() -> None:
    table = [
        cell(name, 1.0, prompt_tokens=at, **metric("ttft.p50", 9.0 if (name, at) == ("h2o", 100.0) else 1.0))
        for name in ("h2o", "vllm")
        for at in (100.0, 16000.0)
    ]
    predicate = {**RATIO, "metric": "ttft.p50", "axis": "prompt_tokens", "max": 2.0}
    assert decide(table, **predicate).status == "contradicted"
    assert decide(table, **predicate, at_least=15000).status == "supported"
    done = decide(table, **predicate, at_least=20000)
    assert done.status == "not testable" and "20000" in done.reason


def test_starred_percentiles_decide_nothing() -> None:
    table = [row | {"e2el.p50.starred": True} for row in grid(lambda *_: {})]
    done = decide(table, **{**RATIO, "metric": "e2el.p50"}, min=1.0)
    assert done.status == "not testable" and "samples" in done.reason


def test_budget_that_is_too_far_is_not_taken() -> None:
    table = throughput({"h2o": 200})
    near = {**RATIO, "of": {"framework": "h2o", "budget": 0.25}}
    far = {**RATIO, "of": {"framework": "h2o", "budget": 0.05}}
    assert decide(table, **near, min=1.0).status == "supported"
    done = decide(table, **far, min=1.0)
    assert done.status == "not testable" and "b=0.05" in done.reason


def test_memory_is_decided_twice_and_may_differ() -> None:
    live = {"vllm": 1.0, "h2o": 0.1}
    table = grid(lambda name, _: {"memory.kv_live_peak.device": live.get(name, 1.0) * GIB})
    predicate = {**RATIO, "metric": "kv_gib.{bytes}", "max": 0.5}
    claim = claims.Claim(id="X", statement="s", source="t", bytes=("reserved", "live"), decide=(predicate,))  # type: ignore[arg-type]
    reserved, used = claims.decide(claim, pd.DataFrame(table))
    assert (reserved.status, used.status) == ("contradicted", "supported")
    assert "reserved" in reserved.id and "live" in used.id


def test_missing_hardware_is_named() -> None:
    claim = claims.Claim(id="X", statement="s", source="t", device="cuda", decide=({**RATIO, "min": 1.0},))  # type: ignore[arg-type]
    done = claims.decide(claim, pd.DataFrame(throughput({})))[0]
    assert done.status == "not testable" and "CUDA" in done.reason


def test_what_is_refuted_stays_refuted() -> None:
    needs = {"kind": "needs", "what": "task accuracy"}
    claim = claims.Claim(id="X", statement="s", source="t", decide=({**RATIO, "min": 3.0}, needs))  # type: ignore[arg-type]
    assert claims.decide(claim, pd.DataFrame(throughput({})))[0].status == "contradicted"
    claim = claims.Claim(id="X", statement="s", source="t", decide=({**RATIO, "min": 0.5}, needs))  # type: ignore[arg-type]
    assert claims.decide(claim, pd.DataFrame(throughput({})))[0].status == "not testable"


def test_decisions_carry_numbers_and_cells() -> None:
    done = decide(throughput({"h2o": 120}), **RATIO, min=1.0)
    assert done.numbers[0].value == pytest.approx(1.2) and done.numbers[0].bound == "≥ 1"
    assert set(done.cells) == {row["cell"] for row in throughput({}) if row["framework"] in ("h2o", "vllm")}
    assert claims.as_json([done])[0]["cells"] == done.cells


def test_the_shipped_claims_are_read_and_complete() -> None:
    found = claims.read_claims(CLAIMS)
    assert {f"C{i}" for i in range(1, 20)} | {"C20a", "C20b", "C20c"} <= {claim.id for claim in found}
    assert all(claim.statement and claim.source and claim.decide for claim in found)
    decisions = claims.decide_all(found, pd.DataFrame(grid(lambda *_: {}, seeds=3)))
    assert sum(decision.status != "not testable" for decision in decisions) >= 12
    assert all(decision.reason for decision in decisions)


def test_misspelt_claim_is_refused(tmp_path: Path) -> None:
    entry = "{kind: ratio, metric: m, of: {framework: a}, to: {framework: b}, mni: 1}"
    (tmp_path / "x.yaml").write_text(f"claims:\n  - {{id: A, statement: s, source: t, decide: [{entry}]}}\n")
    with pytest.raises(AnalysisError, match=r"x\.yaml is not a list of claims"):
        claims.read_claims(tmp_path)


def test_a_study_without_cells_decides_nothing() -> None:
    table = pd.DataFrame([cell("vllm", 1.0) | {"outcome": "missing", "verdict": None}])
    assert {d.status for d in claims.decide_all(claims.read_claims(CLAIMS), table)} == {"not testable"}
