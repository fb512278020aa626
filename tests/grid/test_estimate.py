"""The estimate of a plan: its loads' own seconds and a little more, GPU-hours where there are GPUs."""

from __future__ import annotations

import pytest

from kvstudy.grid.estimate import estimate
from kvstudy.grid.plan import make_plan, project_root

CONF = project_root() / "conf"


def test_a_plan_takes_at_least_what_its_loads_last() -> None:
    plan = make_plan(CONF, ["study=tiny"])
    loads = sum(cell.load.duration_s for cell in plan.cells)
    found = estimate(plan)
    assert loads < found.wall_s < 10 * loads and found.gpu_s == 0 and found.cells == len(plan.cells)
    assert "min" in found.text()


@pytest.mark.parametrize("study", ["memory_limited", "long_context"])
def test_a_study_of_one_question_takes_a_coffee_break(study: str) -> None:
    plan = make_plan(CONF, [f"study={study}"])
    assert sum(cell.load.duration_s for cell in plan.cells) < estimate(plan).wall_s < 12.5 * 60


def test_what_is_measured_takes_nothing_more() -> None:
    plan = make_plan(CONF, ["study=tiny"])
    visits = (*plan.visits, *plan.quality)
    one, *rest = (cell.cell_id for visit in visits for cell in visit.cells)
    assert estimate(plan, frozenset(rest)).wall_s < estimate(plan).wall_s
    assert estimate(plan, frozenset([one, *rest])).text() == "nothing to measure"


def test_gpu_hours_count_every_gpu_that_a_visit_holds() -> None:
    plan = make_plan(CONF, ["study=paper", "framework=vllm", "model=llama-3.1-70b", "seed=0", "model.gpus=4"])
    found = estimate(plan)
    assert {visit.gpus for visit in plan.visits} == {4}
    assert found.gpu_s == 4 * found.wall_s > 0
    assert "GPU-hours" in found.text(4)


def test_paper_is_composed_for_four_gpus_and_covers_the_paper_s_axes() -> None:
    plan = make_plan(CONF, ["study=paper"])
    cells = plan.cells
    assert {getattr(cell.load, "concurrency", None) for cell in cells} >= {16, 32, 48, 64, 80, 96}
    lengths = {cell.workload.prompt.tokens for cell in cells if cell.workload.prompt.kind == "fixed"}
    assert max(lengths) > 120_000
    assert {cell.workload.output.tokens for cell in cells if cell.workload.output.kind == "fixed"} >= {512, 8192}
    assert {cell.model.gpus for cell in cells} == {1, 2, 4}
    assert {cell.budget.share for cell in cells} == {1.0, 0.5, 0.3, 0.1}
    assert len({cell.model.name for cell in cells}) == 3


def test_quality_takes_what_it_took() -> None:
    """`study=sparsity` was scored in 885 s (41 deployments of ours, five served as a check) and 469 s (vLLM)."""
    plan = make_plan(CONF, ["study=sparsity"])
    speed = frozenset(cell.cell_id for cell in plan.cells)
    found = estimate(plan, speed)
    assert (found.cells, found.scored, found.tasks) == (0, 42, 0)
    assert 0.85 * (885 + 469) < found.wall_s < 1.25 * (885 + 469)
    assert "score 42 for quality" in found.text() and "measure" not in found.text()
    scored = frozenset(cell.cell_id for asked in plan.quality for cell in asked.cells)
    assert estimate(plan, speed | scored).text() == "nothing to measure"


def test_what_the_plan_cannot_know_of_tasks_is_said() -> None:
    found = estimate(make_plan(CONF, ["study=paper"]))
    assert 0 < found.tasks < found.scored and f"lm-eval's tasks take in {found.tasks} of them" in found.text(4)
