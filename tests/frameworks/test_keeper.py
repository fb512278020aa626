"""A server's whole family ends with the process that started it, and a server's end is passed on as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstudy.frameworks.base import Kept, start, stop_group
from kvstudy.frameworks.lease import lease

#: A server like vLLM: a child that opens a session of its own, whose own child loses its parent at once.
FAMILY = """
import os, sys, time
def write(name): open(sys.argv[1] + "/" + name, "w").write(str(os.getpid()))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        write("orphan")
        time.sleep(60)
    write("session")
    os._exit(0) if len(sys.argv) > 2 else time.sleep(60)
write("server")
time.sleep(60)
"""

MEASURING = """
import os, sys, time
from pathlib import Path
from kvstudy.frameworks.base import start
from kvstudy.frameworks.lease import lease
folder = Path(sys.argv[1])
with lease(0) as held:
    command = [sys.executable, "-c", {family!r}, str(folder)]
    work = folder / "work"
    work.mkdir()
    start(command, env=dict(os.environ), log=work / "log", cores=(), pass_fds=held.fds, scratch=work)
    time.sleep(60)
"""


def wait_for(folder: Path, *names: str) -> list[int]:
    until = time.monotonic() + 20
    while not all((folder / name).is_file() and (folder / name).read_text() for name in names):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int((folder / name).read_text()) for name in names]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def run(code: str, tmp_path: Path, *arguments: str) -> Kept:
    return start(
        [sys.executable, "-c", code, str(tmp_path), *arguments], env=dict(os.environ), log=tmp_path / "log", cores=()
    )


def test_a_killed_measurement_leaves_no_process_lease_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = MEASURING.format(family=FAMILY)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    measuring = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env)
    family = wait_for(tmp_path, "server", "session", "orphan")
    measuring.kill()
    measuring.wait()
    with lease(0, bound_s=10):  # free once the last of the family has ended
        assert all(map(gone, family))
    assert not (tmp_path / "work").exists()


def test_stopping_ends_those_who_left_the_group_and_lost_their_parent(tmp_path: Path) -> None:
    process = run(FAMILY, tmp_path, "orphaned")
    server, session, orphan = wait_for(tmp_path, "server", "session", "orphan")
    assert process.server_pid == server != process.pid
    stop_group(process)
    assert process.returncode == -signal.SIGTERM
    assert all(map(gone, (server, session, orphan))) and tmp_path.exists()
    stop_group(process)  # twice does no harm


def test_a_server_that_dies_takes_its_family_along(tmp_path: Path) -> None:
    process = run(FAMILY, tmp_path)
    family = wait_for(tmp_path, "server", "session", "orphan")
    os.kill(process.server_pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL and all(map(gone, family))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("pass", 0),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_an_end_is_passed_on_as_it_was(tmp_path: Path, code: str, status: int) -> None:
    assert run(code, tmp_path).wait(10) == status


def test_a_server_that_hears_nothing_is_killed(tmp_path: Path) -> None:
    code = "import os, signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\n" + FAMILY
    process = run(code, tmp_path)
    family = wait_for(tmp_path, "server", "session", "orphan")
    os.kill(family[0], signal.SIGSTOP)  # and one that is stopped
    begun = time.monotonic()
    stop_group(process, wait_s=0.3)
    assert time.monotonic() - begun < 5 and all(map(gone, family))
