"""A study of several grids: each replaces what the study says of the same key, overrides replace both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstudy.grid.compose import ConfigError
from kvstudy.grid.plan import make_plan, project_root

CONF = project_root() / "conf"
Study = Callable[[dict[str, Any]], Path]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A conf/ that has one more study, `parted`."""
    import shutil

    import yaml

    def make(text: dict[str, Any]) -> Path:
        shutil.copytree(CONF, tmp_path / "conf", dirs_exist_ok=True)
        shutil.copytree(CONF.parent / "envs", tmp_path / "envs", dirs_exist_ok=True)
        entry = {"name": "parted", "title": "t", "question": "q", **text}
        (tmp_path / "conf" / "study" / "parted.yaml").write_text(yaml.safe_dump(entry))
        return tmp_path / "conf"

    return make


SHARED = {
    "axes": {"framework": ["full"], "model": ["tiny-llama"], "workload": ["tiny"], "load": ["poisson"]},
    "set": {"load.rate": 1.0, "kv_memory_mib": 4},
}
PARTS = [{"axes": {"load.rate": [2.0, 3.0]}}, {"axes": {"seed": [0, 1]}, "set": {"kv_memory_mib": 8}}]


def seen(conf: Path, *overrides: str) -> set[tuple[float, float, int]]:
    plan = make_plan(conf, ["study=parted", *overrides])
    return {(cell.load.rate, cell.kv_memory_mib, cell.seed) for cell in plan.cells}  # type: ignore[union-attr]


def test_a_study_is_the_union_of_its_parts(study: Study) -> None:
    conf = study({**SHARED, "parts": PARTS})
    assert seen(conf) == {(2.0, 4, 0), (3.0, 4, 0), (1.0, 8, 0), (1.0, 8, 1)}


def test_an_override_replaces_what_every_part_says(study: Study) -> None:
    conf = study({**SHARED, "parts": PARTS})
    assert seen(conf, "load.rate=5", "seed=7") == {(5.0, 4, 7), (5.0, 8, 7)}


def test_cells_that_two_parts_hold_are_one(study: Study) -> None:
    conf = study({**SHARED, "parts": [PARTS[0], PARTS[0]]})
    assert seen(conf) == {(2.0, 4, 0), (3.0, 4, 0)}


def test_a_study_leaves_out_combinations_of_its_own(study: Study) -> None:
    rule = {"when": {"load.rate": 3.0}, "reason": "too fast for a test"}
    conf = study({**SHARED, "parts": PARTS, "leave_out": [rule]})
    assert (3.0, 4, 0) not in seen(conf)
    assert {one.reason for one in make_plan(conf, ["study=parted"]).left_out} == {"too fast for a test"}


@pytest.mark.parametrize(
    ("part", "words"),
    [({"axis": {}}, "unknown key 'axis'.*axes, set"), ({"set": {"load.rat": 1}}, "unknown key 'load.rat'")],
)
def test_a_misspelt_part_is_refused(study: Study, part: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(study({**SHARED, "parts": [part]}), ["study=parted"])


def test_vllm_s_own_answers_read_in_a_cell_s_name_and_offloading_is_refused_without_a_gpu() -> None:
    plan = make_plan(CONF, ["study=quick", "framework=vllm", "framework.kv_cache_dtype=fp8", "load.rate=1"])
    assert [cell.cell_id.split("_")[0] for cell in plan.cells] == ["vllm-fp8"]
    with pytest.raises(ConfigError, match="offloads KV to the host from CUDA"):
        make_plan(CONF, ["study=quick", "framework=vllm", "framework.prefix_caching=true", "framework.offload_mib=64"])
    with pytest.raises(ConfigError, match="offload_mib needs prefix_caching"):
        make_plan(CONF, ["study=quick", "framework=vllm", "framework.offload_mib=64"])


def test_paper_cpu_crosses_three_sizes_with_budgets_rates_and_seeds() -> None:
    plan = make_plan(CONF, ["study=paper_cpu"])
    sizes = {cell.model.parameters for cell in plan.cells}
    assert len(sizes) >= 3 and None not in sizes
    assert max(size for size in sizes if size) / min(size for size in sizes if size) >= 4
    policies = [cell for cell in plan.cells if cell.framework.name == "h2o" and cell.load.name == "poisson"]
    crossed = {
        (cell.model.parameters, cell.budget.share, cell.load.rate, cell.seed)  # type: ignore[union-attr]
        for cell in policies
        if cell.workload.long_share == 0 and cell.load.rate in (1.5, 3.0)  # type: ignore[union-attr]
    }
    assert len(crossed) == len(sizes) * 2 * 2 * 3
    assert {cell.workload.long_share for cell in plan.cells} == {0.0, 0.5}


def test_deployments_of_sparsity_have_quality_and_speed_and_paper_cpu_shares_its_scores() -> None:
    plan = make_plan(CONF, ["study=sparsity"])
    scored = {cell.cell_id: cell for visit in plan.quality for cell in visit.cells}
    loaded = {cell.deployment.id for cell in scored.values() if cell.framework.name != "random"}
    assert {cell.deployment.id for cell in plan.cells} == loaded
    nine = dict.fromkeys(("h2o", "infinigen", "streaming", "random"), 9)
    counts = Counter(cell.framework.label for cell in scored.values())
    assert counts == {"vllm": 1, "full": 1, **nine, "infinigen-alpha-none": 4}
    others = [cell for visit in make_plan(CONF, ["study=paper_cpu"]).quality for cell in visit.cells]
    apart = {cell.framework.label for cell in others if cell.cell_id not in scored}
    assert apart == {"h2o-chunked-lossy"} and len(others) > 5
