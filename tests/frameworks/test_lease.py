"""Who may measure on what: leases of devices by many processes at once, some of them killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstudy.frameworks import lease as leases
from kvstudy.frameworks.base import Unavailable
from kvstudy.frameworks.lease import lease, lock_folder, nvidia_smi, visibility, visible_gpus

#: Takes a lease, says which ids under a time of the machine's one clock, holds it, says when it lets go.
HOLDER = """
import subprocess, sys, time
from kvstudy.frameworks.lease import lease
count, hold, server = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
with lease(count) as held:
    if server:
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({server})"], pass_fds=held.fds)
    print("took", time.monotonic(), *held.gpu_ids, flush=True)
    time.sleep(hold)
    print("gave", time.monotonic(), flush=True)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test only, and no GPU but those it names."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@contextlib.contextmanager
def holder(count: int, hold: float, server: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(count), str(hold), str(server)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def took(process: subprocess.Popen[str]) -> list[str]:
    """Ids that a holder has got, once it has."""
    assert process.stdout is not None
    return process.stdout.readline().split()[2:]


def test_many_processes_never_share_a_gpu_and_keep_all_busy(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    counts = [1] * 9 + [2] * 3
    random.Random(0).shuffle(counts)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(holder(count, 0.3)) for count in counts]
        said = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    spans = []
    for count, (first, last) in zip(counts, said, strict=True):
        _, start, *ids = first.split()
        assert len(ids) == count
        spans += [(float(start), float(last.split()[1]), gpu) for gpu in ids]
    for gpu in "0123":
        own = sorted(span for span in spans if span[2] == gpu)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own)), own
    assert max(sum(start <= t < end for start, end, _ in spans) for t, _, _ in spans) == 4


def test_a_lease_dies_with_its_holder_and_not_before_its_server(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    with holder(2, 60) as process:
        assert took(process) == ["MIG-a", "MIG-b"]
        with pytest.raises(Unavailable, match="all but 0 of the GPUs"), lease(1, bound_s=0.3):
            pass
        process.send_signal(signal.SIGKILL)
        with lease(2, bound_s=5) as held:
            assert held.gpu_ids == ("MIG-a", "MIG-b")
    with holder(1, 60, server=3.0) as process:
        (gpu,) = took(process)
        begun = time.monotonic()
        process.send_signal(signal.SIGKILL)
        with lease(1, bound_s=5) as held:  # the other one is free at once
            assert held.gpu_ids != (gpu,)
        with lease(2, bound_s=20):  # its server sleeps on for what is left of three seconds
            assert time.monotonic() - begun > 2.0


def run_jobs(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_one_measurement_at_a_time_without_gpus(machine: Path) -> None:
    inside = 0
    most = 0

    def job() -> None:
        nonlocal inside, most
        with lease(0) as held:
            assert held.gpu_ids == () and len(held.fds) == 1
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            inside -= 1

    run_jobs([job] * 4)
    assert most == 1 and lock_folder().parent == machine


def test_two_gpu_jobs_do_not_deadlock(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert visible_gpus() == ["2", "3", "5"]
    done: list[tuple[str, ...]] = []

    def job(count: int) -> Callable[[], None]:
        def run() -> None:
            with lease(count) as held:
                assert len(held.gpu_ids) == count == len(held.fds)
                time.sleep(0.05)
                done.append(held.gpu_ids)

        return run

    run_jobs([job(2), job(2), job(2), job(1), job(2), job(1)])
    assert len(done) == 6 and {gpu for ids in done for gpu in ids} <= {"2", "3", "5"}
    with pytest.raises(Unavailable, match="needs 4 GPU"), lease(4):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Unavailable, match="0 can be seen"), lease(1):
        pass


@pytest.fixture
def two_gpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows two GPUs."""
    script = machine / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\ncase $1 in\n*=index) printf '0\\n1\\n';;\n"
        "*=index,uuid) printf '0, GPU-aa11\\n1, GPU-bb22\\n';;\n*) exit 6;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine}:{os.environ['PATH']}")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_has_one_lock_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia_smi("nonsense") == [] and visible_gpus() == ["0", "1"]
    with lease(1) as first:
        assert first.gpu_ids == ("0",)
        for name in ("GPU-aa11", "GPU-aa"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
            with pytest.raises(Unavailable, match="other measurements"), lease(1, bound_s=0.0):
                pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb22")
        with lease(1) as second:
            assert visibility(second.gpu_ids) == {
                "CUDA_VISIBLE_DEVICES": "GPU-bb22",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }
    assert visibility(()) == {}


def test_what_slurm_assigned_is_taken_and_shared_by_no_two_of_one_job(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs may each see their GPUs as 0, 1, ...: only a job's own processes can be in each other's way."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with lease(2):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with lease(1) as first, lease(1) as second:
            assert {*first.gpu_ids, *second.gpu_ids} == {"0", "1"}
            monkeypatch.setenv("SLURM_JOB_ID", "8")
            with lease(2) as other:
                assert other.gpu_ids == ("0", "1")


def test_a_lease_without_gpus_lasts_as_long_as_the_server_that_inherited_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who waits for it says so, over and over."""
    said: list[str] = []
    monkeypatch.setattr(leases, "_SAY_S", 0.02)
    with lease(0) as held:
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=held.fds)
    try:
        with pytest.raises(Unavailable, match="held the machine"), lease(0, bound_s=0.5, say=said.append):
            pass
        assert len(said) > 1 and all("waiting for another measurement to end" in line for line in said)
    finally:
        orphan.send_signal(signal.SIGKILL)
        orphan.wait()
    with lease(0, bound_s=5):
        pass
