"""A grid through sbatch: the profile, resources of each cell, devices as SLURM assigns them, retries; same cells."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from fake_devices import DEVICES, environment, snakemake, workspace
from kvstudy.grid.store import Layout, read_summary

pytestmark = pytest.mark.slurm

GRID = ["--config", 'overrides=["seed=0,1"]']


def cells_of(results: Path) -> dict[str, int]:
    """Cells of the plan, and the devices that each holds."""
    plan = json.loads(Layout(results).plan("devices").read_text())
    return {cell["id"]: cell["config"]["model"]["gpus"] for cell in plan["cells"]}


def test_a_grid_through_sbatch_gives_the_same_cells_as_locally(
    checkout: Path, tmp_path: Path, slurm: list[str]
) -> None:
    there = workspace(checkout, tmp_path / "slurm")
    here = workspace(checkout, tmp_path / "local")
    env = environment(tmp_path / "locks")
    env.pop("CUDA_VISIBLE_DEVICES", None)
    profile = ["--profile", "workflow/profiles/slurm", *slurm, "--retries", "1"]
    run = snakemake(there, *profile, *GRID, env=env)
    assert run.returncode == 1, run.stdout + run.stderr

    locally = snakemake(
        here, "--cores", "16", "--resources", "gpu=4", *GRID, env=env | {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES)}
    )
    assert locally.returncode == 1, locally.stdout + locally.stderr
    cells = cells_of(there / "results")
    assert cells == cells_of(here / "results") and sorted(cells.values()) == [1, 1, 1, 2, 2]

    for cell, gpus in cells.items():
        folders = [Layout(work / "results").cell(cell) for work in (there, here)]
        if cell.startswith("streaming"):
            assert not any(folder.exists() for folder in folders)
            continue
        assert [read_summary(folder)["outcome"] for folder in folders] == ["ok", "ok"]
        asked = [pd.read_parquet(folder / "requests.parquet") for folder in folders]
        same = ["index", "prompt_tokens", "output_tokens", "status"]
        pd.testing.assert_frame_equal(asked[0][same], asked[1][same])
        held = json.loads((folders[0] / "provenance.json").read_text())["gpu_ids"]
        assert len(held) == gpus and set(held) <= {"0", "1", "2", "3"}

    # The fault was tried a second time, since Snakemake cannot know; that brought nothing up (a retry has a new log).
    (log,) = (there / "results" / "logs" / "visits").glob("streaming*.log")
    said = log.read_text()
    assert said.count("not tried again") == 1 and "bringing up" not in said, said
    # What is shared was made once, where Snakemake runs: jobs of SLURM measure and nothing else.
    logs = {path.name for path in (there / ".snakemake" / "slurm_logs").iterdir()}
    assert logs <= {"rule_measure"}
