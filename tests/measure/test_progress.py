"""What a person is told of how far a study is."""

from __future__ import annotations

from pathlib import Path

from kvstudy.grid.plan import make_plan, write_plan
from kvstudy.grid.store import SUMMARY, Layout, staged, write_json
from kvstudy.measure.progress import of_study


def test_cells_done_and_time_left_by_the_pace_so_far(checkout: Path, results: Path) -> None:
    plan = make_plan(checkout / "conf", ["study=tiny", "load.duration_s=60", "sweep=cell"])
    write_plan(plan, results)
    layout = Layout(results)
    assert of_study("tiny", layout).startswith(f"study tiny: 0 of {len(plan.cells)} cells done, about 10 min")
    with staged(layout.cell(plan.cells[0].cell_id)) as folder:
        visit = {"bring_up_s": 20.0, "warm_up_s": 0.0, "load_s": 60.0, "drain_s": 40.0}
        write_json(folder / SUMMARY, {"visit": visit})
    assert of_study("tiny", layout) == f"study tiny: 1 of {len(plan.cells)} cells done, about 10 min left"


def test_no_plan_says_nothing(results: Path) -> None:
    assert of_study("tiny", Layout(results)) == ""
