"""A grid through sbatch: the profile, resources of each cell, devices as SLURM assigns them, retries; same cells."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from fake_devices import DEVICES, command, environment, snakemake, workspace
from kvstudy.grid.store import Layout, read_summary

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

#: One cell of one device, one of two, one whose server is never up in time.
GRID = ["--config", 'overrides=["seed=0"]']


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
    # Beside SLURM's, which waits for its controller most of the time.
    with (tmp_path / "said").open("w+") as said_locally:
        locally = subprocess.Popen(
            command("--cores", "16", "--resources", "gpu=4", *GRID),
            cwd=here,
            env=env | {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES)},
            stdout=said_locally,
            stderr=said_locally,
        )
        profile = ["--profile", "workflow/profiles/slurm", *slurm, "--retries", "1"]
        run = snakemake(there, *profile, *GRID, env=env)
        assert run.returncode == 1, run.stdout + run.stderr
        assert locally.wait(120) == 1, (tmp_path / "said").read_text()
    cells = cells_of(there / "results")
    assert cells == cells_of(here / "results") and sorted(cells.values()) == [1, 1, 2]

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

    # The fault was tried a second time, since Snakemake cannot know; that brought nothing up.
    (log,) = (there / "results" / "logs" / "visits").glob("streaming*.log")
    said = log.read_text()
    assert said.count("not tried again") == 1 and said.count("bringing up streaming") < 2, said
    # What is shared was made once, where Snakemake runs: jobs of SLURM measure and nothing else.
    logs = {path.name for path in (there / ".snakemake" / "slurm_logs").iterdir()}
    assert logs <= {"rule_measure"}
