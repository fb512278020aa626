"""Keeps a server's processes together: none outlives the measurement, however that ends (Linux).

`python -I -S keeper.py COMMAND...` runs the command as its child and ends as it ended. As the *subreaper* of everything
that descends from the command, whatever sessions they opened and whatever they call themselves, it is given those whose
parent has died; it ends only when all of them have. Closing its standard input kills them at once: the measuring
process holds the other end, so that its death by SIGKILL is enough. vLLM's engine core is why: killed with its
measurement, its API server left it and its workers behind for good, computing beside whoever measured next.

The pid of the command's process is the first line on descriptor `KVSTUDY_KEEPER_PID`. `KVSTUDY_KEEPER_SCRATCH` names a
folder to remove when standard input closes without a word having come through it: nobody else will then.
Standard library only, and run by its path: it must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_KILL_S = 10.0
CANNOT_START = 127


def run(command: list[str]) -> int:
    """Keep the command until it ends or standard input closes; answers its status, as `waitpid` gives it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    report = int(os.environ.pop("KVSTUDY_KEEPER_PID"))
    scratch = os.environ.pop("KVSTUDY_KEEPER_SCRATCH", "")
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.close(report)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            if os.getppid() == me:
                os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(CANNOT_START)
    # Those who stop a server signal its whole group: the keeper ends when the server has.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.write(report, b"%d\n" % child)
    os.close(report)
    status, told, alone = None, False, False
    while status is None and not alone:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 512)
            status = _reap(child)
        if 0 in ready:
            word = os.read(0, 64)
            told |= bool(word)
            alone = not word
    last = _end_family(child)
    if scratch and alone and not told:
        shutil.rmtree(scratch, ignore_errors=True)
    return status if status is not None else last if last is not None else int(signal.SIGKILL)


def _reap(child: int) -> int | None:
    """Wait for all that have ended; the command's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = ended
    return status


def _end_family(child: int) -> int | None:
    """Kill every descendant; those of the killed come to us and are killed in the next turn."""
    status = None
    until = time.monotonic() + _KILL_S
    while time.monotonic() < until:
        family = _descendants(os.getpid())
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended = _reap(child)
        status = ended if ended is not None else status
        if not family:
            break
        time.sleep(0.01)
    return status


def _descendants(root: int) -> list[int]:
    """Pids below a process, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as handle:
                parent = int(handle.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    ended = run(sys.argv[1:])
    if os.WIFSIGNALED(ended):
        # As the server ended, so that who waits for us reads its signal.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(ended)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(ended))
