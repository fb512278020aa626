"""What a job asks of a cluster: by the model's size, bounded, more on a retry."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstudy.grid.plan import make_plan
from kvstudy.grid.resources import cpus, host_memory_mib, minutes, parameters
from kvstudy.grid.schema import Shape, Visit


def visit(checkout: Path, *overrides: str) -> Visit:
    (found,) = make_plan(checkout / "conf", ["study=tiny", "framework=full", *overrides]).visits
    return found


def test_parameters_follow_from_the_shape(checkout: Path) -> None:
    """SmolLM2-135M has 134,515,008 by its own account; norms, which a shape does not count, are 0.03 %."""
    shape = Shape(
        architecture="llama",
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
    )
    model = visit(checkout).deployment.model.model_copy(update={"shape": shape})
    assert parameters(model) == pytest.approx(134_515_008, rel=1e-3)


def test_a_job_asks_for_its_models_size_and_more_on_a_retry(checkout: Path) -> None:
    gpu = ("hardware=gpu", "hardware.cluster.cpus_per_gpu=6", "framework=vllm")
    small = visit(checkout, *gpu, "model=opt-6.7b")
    large = visit(checkout, *gpu, "model=opt-30b")
    assert small.gpus == 1 and large.gpus == 2 and (cpus(small), cpus(large)) == (6, 12)
    # 30 billion parameters in float16 are 57 GiB, twice while they are loaded.
    assert 114 * 1024 < host_memory_mib(large.deployment) < 125 * 1024
    assert host_memory_mib(small.deployment) < host_memory_mib(large.deployment) / 3
    assert host_memory_mib(large.deployment, 3) == pytest.approx(2 * host_memory_mib(large.deployment), abs=1)


def test_time_is_that_of_all_loads_of_the_visit(checkout: Path) -> None:
    timed = ("load.duration_s=600", "load.drain_s=60", "hardware.cluster.spare_minutes=10")
    one = visit(checkout, *timed, "load.rate=1")
    three = visit(checkout, *timed, "load.rate=1,2,3")
    assert minutes(one) == 5 + 11 + 10 + 1 and minutes(three) == 5 + 33 + 10 + 1
    assert minutes(one, 2) == 2 * (5 + 11 + 10) + 1
    knee = visit(checkout, "load=knee", "load.duration_s=60", "load.drain_s=0.1", "load.probes=12")
    assert minutes(knee) >= 5 + 12


def test_what_a_job_asks_for_is_no_part_of_a_cell(checkout: Path) -> None:
    plain, asked = visit(checkout, "hardware=cpu"), visit(checkout, "hardware.cluster.partition=long")
    assert asked.deployment.hardware.cluster.partition == "long" and asked.id == plain.id
