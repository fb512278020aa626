"""Arrivals: the process that is named, the same from the same seed, and a prefix of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kvstudy.grid.schema import (
    BurstLoad,
    ClosedLoad,
    ConstantLoad,
    GammaLoad,
    Load,
    PoissonLoad,
    RampLoad,
    TraceLoad,
)
from kvstudy.load.arrivals import ArrivalError, read_trace, requests_needed, schedule, unit_arrivals

SEEDS = range(20)
OPEN: list[Load] = [
    PoissonLoad(duration_s=10, rate=5),
    GammaLoad(duration_s=10, rate=5, burstiness=4),
    GammaLoad(duration_s=10, rate=5, burstiness=0.25),
    ConstantLoad(duration_s=10, rate=5),
    RampLoad(duration_s=10, rate=2, end_rate=8),
]


@pytest.mark.parametrize("load", OPEN, ids=lambda load: load.name)
def test_draws_are_seeded_and_prefix_stable(load: Load) -> None:
    many = unit_arrivals(load, 3, 5000)
    assert np.array_equal(many[:100], unit_arrivals(load, 3, 100))
    assert np.all(np.diff(many) >= 0)
    if load.name != "constant":
        assert not np.array_equal(many[:10], unit_arrivals(load, 4, 10))


def test_rates_divide_the_same_unit_draws() -> None:
    unit = unit_arrivals(PoissonLoad(duration_s=10, rate=1), 0, 1000)
    slow = schedule(PoissonLoad(duration_s=10, rate=2), unit)
    fast = schedule(PoissonLoad(duration_s=10, rate=8), unit)
    assert np.allclose(slow / 4.0, fast[: len(slow)])


def test_poisson_is_poisson_over_twenty_seeds() -> None:
    load = PoissonLoad(duration_s=1, rate=1)
    p_values = []
    for seed in SEEDS:
        gaps = np.diff(unit_arrivals(load, seed, 2000), prepend=0.0)
        p_values.append(stats.kstest(gaps, "expon").pvalue)
        assert abs(gaps.mean() - 1.0) < 0.1
        assert abs(gaps.std() / gaps.mean() - 1.0) < 0.1
        assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.08
    # Under the null p-values are uniform: their own distribution is the test, not any one of them.
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 2.0, 4.0])
def test_burstiness_changes_variance_and_not_rate(burstiness: float) -> None:
    load = GammaLoad(duration_s=1, rate=1, burstiness=burstiness)
    gaps = np.concatenate([np.diff(unit_arrivals(load, seed, 4000), prepend=0.0) for seed in SEEDS])
    assert gaps.mean() == pytest.approx(1.0, abs=0.04)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.08)


def test_constant_is_constant() -> None:
    load = ConstantLoad(duration_s=10, rate=4)
    times = schedule(load, unit_arrivals(load, 0, 100))
    assert len(times) == 40
    assert np.allclose(np.diff(times), 0.25)


def test_a_ramp_rises_from_rate_to_end_rate() -> None:
    load = RampLoad(duration_s=100, rate=10, end_rate=30)
    counts = np.zeros(4)
    for seed in SEEDS:
        times = schedule(load, unit_arrivals(load, seed, 4000))
        counts += np.histogram(times, bins=4, range=(0, 100))[0]
    assert np.allclose(counts / 20 / 25, [12.5, 17.5, 22.5, 27.5], rtol=0.05)
    falling = RampLoad(duration_s=100, rate=30, end_rate=10)
    assert len(schedule(falling, unit_arrivals(falling, 0, 8192))) == pytest.approx(2000, rel=0.1)


def test_enough_is_drawn_and_too_little_is_said() -> None:
    for load in OPEN:
        needed = requests_needed(load, 0)
        assert needed & (needed - 1) == 0
        times = schedule(load, unit_arrivals(load, 0, max(needed, 128)))
        assert len(times) <= needed
    with pytest.raises(ArrivalError, match="end before"):
        schedule(PoissonLoad(duration_s=100, rate=10), unit_arrivals(OPEN[0], 0, 10))
    assert requests_needed(BurstLoad(duration_s=1, requests=7), 0) == 7
    assert requests_needed(ClosedLoad(duration_s=10, concurrency=4), 0) >= 64


def test_traces_of_three_formats(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:16:51.2224670,879,0\n"
    )
    load = TraceLoad(duration_s=10, path=str(azure), format="azure", speed=2.0)
    trace = read_trace(load)
    assert trace.times == pytest.approx([0.0, 4.314579, 64.541877])
    assert trace.output_tokens.tolist() == [44, 109, 1]
    assert schedule(load, trace.times) == pytest.approx([0.0, 2.1572895])
    assert requests_needed(load, 0) == 2

    mooncake = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 10, "output_length": 5, "hash_ids": [1]},
    ]
    mooncake.write_text("\n".join(json.dumps(row) for row in rows))
    trace = read_trace(TraceLoad(duration_s=10, path=str(mooncake), format="mooncake", start_s=0.5))
    assert trace.times.tolist() == [0.5, 2.0]
    assert trace.shared == ((1, 2), (1,))

    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    trace = read_trace(TraceLoad(duration_s=10, path=str(burst), format="burstgpt"))
    assert trace.times.tolist() == [0.0, 40.0]
    assert trace.prompt_tokens.tolist() == [472, 1087]


def test_a_wrong_trace_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ArrivalError, match="name your own copy"):
        read_trace(TraceLoad(duration_s=1, path=str(tmp_path / "none.csv"), format="azure"))
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ArrivalError, match=r"format 'azure': no column 'TIMESTAMP' \(its columns: a, b\)"):
        read_trace(TraceLoad(duration_s=1, path=str(path), format="azure"))
    with pytest.raises(ArrivalError, match="cannot read the trace"):
        read_trace(TraceLoad(duration_s=1, path=str(tmp_path), format="azure"))
    with pytest.raises(ArrivalError, match="sha256"):
        read_trace(TraceLoad(duration_s=1, path=str(path), format="azure", sha256="0" * 64))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 3, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("azure", AZURE + "yesterday,5,5\n", "line 2: TIMESTAMP is 'yesterday'"),
        ("azure", AZURE + "2023-11-16 18:15:46.6,5\n", "line 2 is cut short"),
        ("azure", AZURE + "2023-11-16 18:15:46.6,five,5\n", "line 2: ContextTokens is 'five'"),
        ("azure", AZURE + "2023-11-16 18:15:46.6,5,-5\n", "line 2: -5 tokens"),
        ("azure", AZURE, "holds no request"),
        ("azure", "", "no column 'TIMESTAMP' .its columns: none"),
        ("burstgpt", BURST + "1,GPT,5,5,10,log\nnan,GPT,5,5,10,log\n", "line 3: its time is nan"),
        ("burstgpt", BURST.replace("Response", "Reply") + "1,GPT,5,5,10,log\n", "no column 'Response tokens'"),
        ("mooncake", MOONCAKE % (1, 5) + "{not json\n", "line 2: "),
        ("mooncake", '{"timestamp": 1, "output_length": 1}\n', "line 1: no field 'input_length'"),
        ("mooncake", MOONCAKE % (1, -5), "line 1: -5 tokens"),
        ("mooncake", "[1, 2]\n", "line 1: "),
    ],
)
def test_a_broken_trace_is_one_clear_line(tmp_path: Path, form: str, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ArrivalError, match=said) as error:
        read_trace(TraceLoad.model_validate({"duration_s": 1, "path": str(path), "format": form}))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_trace_is_sorted_and_its_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(BURST + "\n45,GPT,7,1,8,log\n   \n5,GPT,6,0,6,log\n" + "9000000000,GPT,99999999,1,1,log\n")
    trace = read_trace(TraceLoad(duration_s=50, path=str(path), format="burstgpt"))
    assert trace.times.tolist() == [0.0, 40.0, 8999999995.0]
    assert trace.prompt_tokens.tolist() == [6, 7, 99999999] and trace.output_tokens.tolist() == [1, 1, 1]
    assert requests_needed(TraceLoad(duration_s=50, path=str(path), format="burstgpt"), 0) == 2


@pytest.mark.parametrize("seed", range(200))
def test_enough_is_drawn_even_when_a_power_of_two_is_due(seed: int) -> None:
    load = PoissonLoad(rate=2.0, duration_s=8.0)
    needed = requests_needed(load, seed)
    assert len(schedule(load, unit_arrivals(load, seed, needed))) < needed
