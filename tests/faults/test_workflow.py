"""What a user may meet around a study: two at once, a kill, a full disk, damaged files, a folder with a space."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from trial import MARK, assert_nothing_leaked, family, whole_cells

from kvstudy import cli
from kvstudy.grid import store
from kvstudy.grid.store import Layout


def checkout_at(folder: Path, checkout: Path) -> Path:
    """A checkout of links, its `conf` a copy to be damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("Snakefile", "workflow", "profiles", "envs", "reports", "src"):
        (folder / name).symlink_to(checkout / name)
    shutil.copytree(checkout / "conf", folder / "conf")
    return folder


@pytest.fixture
def work(checkout: Path, tmp_path: Path) -> Path:
    return checkout_at(tmp_path / "a study", checkout)


ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(item for item in sys.path if item),
}


def kvstudy(work: Path, *arguments: str, env: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstudy.cli", *arguments]
    return subprocess.run(command, cwd=work, env=env, text=True, capture_output=True, timeout=300, check=False)


class Here:
    """The command in this process: starting Python costs more than most of what is tested."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(work)
            code = cli.main(arguments)
        said = self.capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


def snakemake_command(*config: str) -> list[str]:
    return [sys.executable, "-m", "snakemake", "--cores", "2", "--config", "study=tiny", *config]


def snakemake(work: Path, *config: str, xdg: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = ENVIRONMENT | ({"XDG_RUNTIME_DIR": str(xdg)} if xdg else {})
    return subprocess.run(
        snakemake_command(*config), cwd=work, env=env, text=True, capture_output=True, timeout=560, check=False
    )


def one_line(run: subprocess.CompletedProcess[str], *says: str) -> None:
    """It failed, said so in one line of ours, and showed no trace."""
    lines = [line for line in run.stderr.splitlines() if line.startswith("kvstudy")]
    assert run.returncode != 0 and len(lines) == 1 and "Traceback" not in run.stderr, run.stderr
    for word in says:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("load/poisson.yaml", b"rate: [1, 2", "poisson.yaml"),
        ("study/tiny.yaml", b"name: tiny\n\ttitle: x\n", "tiny.yaml"),
        ("study/tiny.yaml", b"\xff\xfe\x00", "not UTF-8"),
        ("study/tiny.yaml", b"", "name is missing"),
        ("study/tiny.yaml", b"- a\n- b\n", "not a mapping"),
        ("study/tiny.yaml", b"name: tiny\ntitle: x\nquestion: y\naxes: 3\n", "axes is not a mapping"),
        ("study/tiny.yaml", b"name: tiny\ntitle: x\nquestion: y\nparts: [3]\n", "parts is not a list"),
        ("study/tiny.yaml", b"name: [1]\ntitle: x\nquestion: y\n", "name is missing or not a text"),
        ("study/tiny.yaml", b"name: ../up\ntitle: x\nquestion: y\n", "study.name"),
    ],
)
def test_a_damaged_configuration_is_one_line(here: Here, work: Path, path: str, content: bytes, says: str) -> None:
    (work / "conf" / path).write_bytes(content)
    one_line(here(work, "grid", "study=tiny"), says)
    assert not (work / "results").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("load.rate=1e9", "load.rate x load.duration_s"),
        ("seed=99999999999999999999", "seed"),
        ("kv_memory_mib=1e12", "kv_memory_mib"),
        ("load.rate=nan", "rate"),
    ],
)
def test_absurd_values_are_refused_when_the_plan_is_made(here: Here, work: Path, override: str, says: str) -> None:
    one_line(here(work, "grid", "study=tiny", "framework=full", override), says)


def test_a_damaged_plan_is_made_anew(here: Here, work: Path) -> None:
    assert here(work, "grid", "study=tiny").returncode == 0
    path = Layout(work / "results").plan("tiny")
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"\xff"):
        path.write_bytes(broken)
        done = here(work, "grid", "study=tiny")
        assert done.returncode == 0, done.stderr
        assert path.read_bytes() == whole


def test_a_results_folder_that_cannot_be_written_is_one_line(here: Here, work: Path) -> None:
    """In /sys nobody may make a folder, not even root."""
    one_line(here(work, "grid", "study=tiny", "--results", "/sys/kvstudy"), "cannot write", "name another folder")
    one_line(snakemake(work, "results=/sys/kvstudy"), "cannot write", "name another folder")


def test_a_second_snakemake_on_the_same_results_is_refused(work: Path, checkout: Path) -> None:
    """Also one that was started elsewhere, which snakemake's own lock does not see; a dry run is not."""
    results = work / "results"
    first = psutil.Popen(
        snakemake_command(f"results={results}"),
        cwd=work,
        env=ENVIRONMENT | {"XDG_RUNTIME_DIR": str(work)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lock = Layout(results).lock
    until = time.monotonic() + 60
    while not (lock.is_file() and f"pid {first.pid}" in lock.read_text()):
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    elsewhere = checkout_at(work.parent / "elsewhere", checkout)
    for folder in (work, elsewhere):
        one_line(snakemake(folder, f"results={results}"), f"study tiny (pid {first.pid}", "wait until")
    dry = subprocess.run([*snakemake_command(f"results={results}"), "-n"], cwd=work, env=ENVIRONMENT, check=False)
    assert dry.returncode == 0
    assert first.poll() is None
    jobs = first.children(recursive=True)
    first.kill()
    first.wait()
    again = store.hold(lock, "me")
    assert not isinstance(again, str)
    again.close()
    for job in jobs:
        with contextlib.suppress(psutil.Error):
            job.kill()


@pytest.mark.long
def test_a_killed_study_is_taken_up_by_the_same_command(work: Path, tmp_path: Path) -> None:
    """First snakemake and its job, then snakemake alone, whose job goes on: the same command, and no unlocking."""
    results = work / "results"
    env = ENVIRONMENT | {"XDG_RUNTIME_DIR": str(tmp_path), MARK: str(results)}
    kept: dict[str, bytes] = {}
    for kill_job in (True, False):
        with (tmp_path / "said").open("a") as said:
            running = subprocess.Popen(snakemake_command(), cwd=work, env=env, stdout=said, stderr=said)
        until = time.monotonic() + 300
        jobs: list[psutil.Process | None] = []
        while not jobs:  # a load runs when its sampler does
            assert running.poll() is None and time.monotonic() < until, (tmp_path / "said").read_text()
            time.sleep(0.1)
            with contextlib.suppress(psutil.Error):
                jobs = [item.parent() for item in family(results) if "kvstudy.measure.memory" in item.cmdline()]
        running.kill()
        running.wait(60)
        if kill_job and jobs[0] is not None:
            jobs[0].kill()
            assert_nothing_leaked(results)
        found = whole_cells(results)
        assert {name: found[name] for name in kept} == kept
        kept = found
    again = snakemake(work, xdg=tmp_path)
    assert again.returncode == 0, again.stderr
    cells = whole_cells(results)
    assert len(cells) == 6 and {name: cells[name] for name in kept} == kept
    assert (results / "tiny" / "report.pdf").is_file()
    assert not list(results.rglob("*.half"))
    assert_nothing_leaked(results)
    nothing = snakemake(work, xdg=tmp_path)
    assert "Nothing to be done" in nothing.stdout + nothing.stderr


def small_tmpfs(folder: Path, size: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    return made.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("size", ["200k", "3m", "5m"])
def test_a_disk_that_fills_is_one_line_and_the_study_goes_on_when_there_is_room(
    work: Path, tmp_path: Path, size: str
) -> None:
    """While the model is made, figures are drawn, runs are tracked."""
    results = work / "results"
    if not small_tmpfs(results, size):
        pytest.skip("needs the right to mount a file system")
    try:
        full = snakemake(work, xdg=tmp_path)
        said = full.stderr + full.stdout
        assert full.returncode != 0 and "Traceback" not in said, said
        assert any(word in said for word in ("make room and run again", "No space left", "disk is full")), said
        kept = whole_cells(results)
        subprocess.run(["mount", "-o", "remount,size=500m", str(results)], check=True)
        done = snakemake(work, xdg=tmp_path)
        assert done.returncode == 0, done.stderr
        cells = whole_cells(results)
        assert len(cells) == 6 and {name: cells[name] for name in kept} == kept
    finally:
        subprocess.run(["umount", "--lazy", str(results)], check=True)  # who is interrupted leaves it busy


def test_yaml_of_others_is_data(here: Here, work: Path) -> None:
    """A tag that would make an object, or an interpolation that would call something, is refused."""
    for text in ("name: !!python/object/apply:os.system [touch owned]\n", "name: ${python:os.getcwd()}\n"):
        (work / "conf" / "study" / "tiny.yaml").write_text(text + "title: x\nquestion: y\n")
        one_line(here(work, "grid", "study=tiny"))
    assert not (work / "owned").exists()
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load("!!python/object/apply:os.system [true]")
