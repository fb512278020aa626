"""Local GPUs as users fill them: `snakemake --cores 16 --resources gpu=4`, on devices that exist in name only."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from fake_devices import DEVICES, command, environment, workspace
from kvstudy.cli import main
from kvstudy.grid.store import Layout, read_summary


class Watcher(threading.Thread):
    """Looks at the servers of one run, over and over, at which devices each may use."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark = mark
        self.over = threading.Event()
        self.seen: list[list[tuple[str, ...]]] = []

    def run(self) -> None:
        while not self.over.wait(0.05):
            found: dict[str, tuple[psutil.Process, tuple[str, ...]]] = {}
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                if "kvstudy.engine.server" not in words:
                    continue
                try:
                    env = process.environ()
                except psutil.Error:
                    continue
                if env.get("KVSTUDY_TEST") == self.mark:
                    # A server is known by its configuration: what started it may have the same words.
                    found[words[-1]] = (process, tuple(env["CUDA_VISIBLE_DEVICES"].split(",")))
            # Only what lived at one time counts: one of them may have ended while the others were looked at.
            if found and all(process.is_running() for process, _ in found.values()):
                self.seen.append([ids for _, ids in found.values()])


def test_twelve_cells_on_four_devices(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = workspace(checkout, tmp_path / "work")
    mark = tmp_path.name
    env = environment(tmp_path / "locks", CUDA_VISIBLE_DEVICES=",".join(DEVICES), KVSTUDY_TEST=mark)
    env.pop("SLURM_JOB_ID", None)
    watcher = Watcher(mark)
    watcher.start()
    run = subprocess.Popen(
        command("--cores", "16", "--resources", "gpu=4"),
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.stdout is not None
    output = run.stdout.read()
    watcher.over.set()
    watcher.join()
    assert run.wait(10) == 1, output

    layout = Layout(folder / "results")
    plan = json.loads(layout.plan("devices").read_text())
    assert len(plan["cells"]) == 12 and sorted(visit["gpus"] for visit in plan["visits"]) == [1] * 10 + [2] * 2
    late = [cell["id"] for cell in plan["cells"] if cell["id"].startswith("streaming")]
    for cell in plan["cells"]:
        if cell["id"] in late:
            assert not layout.cell(cell["id"]).exists()
            continue
        assert read_summary(layout.cell(cell["id"]))["outcome"] == "ok"
        held = json.loads((layout.cell(cell["id"]) / "provenance.json").read_text())["gpu_ids"]
        assert len(held) == cell["config"]["model"]["gpus"] and set(held) <= set(DEVICES)

    for servers in watcher.seen:
        together = [device for ids in servers for device in ids]
        assert len(together) == len(set(together)), servers
    busy = max(len({device for ids in servers for device in ids}) for servers in watcher.seen)
    assert busy == 4, "never were all four devices in use"
    assert {device for servers in watcher.seen for ids in servers for device in ids} == set(DEVICES)
    assert main(["status", "study=devices", "--results", str(folder / "results")]) == 1
    said = capsys.readouterr().out
    assert "12 cells: 11 done, 0 running, 1 failed, 0 left" in said
    assert "was not up after 0.01 s" in said and "results/logs/visits/streaming" in said
    left = [p for p in psutil.process_iter(["cmdline"]) if "kvstudy.engine.server" in (p.info["cmdline"] or [])]
    assert not [p for p in left if str(tmp_path) in str(p.environ())], "a server was left behind"
