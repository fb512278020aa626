"""Leases: who may measure on what, for as long as any process of the measurement lives.

A lease is a locked file (`flock`). The descriptor is inherited by the server, so the lock outlives a
measuring process that was killed while its server still runs. Without a GPU a measurement has the machine to
itself: one lock. With GPUs there is one lock a device, and a job takes as many as it needs or none, so that
two jobs never wait for each other. Under SLURM devices are assigned by SLURM, which may number them from 0 in every
job: locks are then the job's own, and keep apart what one job runs side by side (Snakemake's grouped jobs).
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstudy.frameworks.base import Unavailable

_POLL_S = 0.2
_SAY_S = 10.0


@dataclass(frozen=True)
class Lease:
    """GPU ids for `CUDA_VISIBLE_DEVICES` (none on a CPU) and the descriptors that a server must inherit."""

    gpu_ids: tuple[str, ...]
    fds: tuple[int, ...]


def lock_folder() -> Path:
    """A folder of this user on this machine, never on a shared file system."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) if base and Path(base).is_dir() else Path(tempfile.gettempdir())
    folder = root / f"kvstudy-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def nvidia_smi(*fields: str) -> list[list[str]]:
    """What the driver says of each GPU, a value a field; nothing where there is no driver."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def visible_gpus() -> list[str]:
    """Ids of the GPUs this process may use: those of CUDA_VISIBLE_DEVICES, else all that the driver shows.

    Ids are as they were given: an index, a UUID or the start of one, or the name of a MIG slice.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [item.strip() for item in named.split(",") if item.strip() and item.strip() != "-1"]
    return [index for (index,) in nvidia_smi("index")]


def visibility(gpu_ids: tuple[str, ...]) -> dict[str, str]:
    """Environment that shows a server exactly these GPUs, counted as `nvidia-smi` counts them."""
    if not gpu_ids:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids),
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    }


def _lock_names(ids: list[str]) -> dict[str, str]:
    """Lock of each id. A GPU that one job names by its index and another by its UUID has one lock all the same."""
    known = nvidia_smi("index", "uuid")
    job = os.environ.get("SLURM_JOB_ID")
    names = {}
    for item in ids:
        same = [uuid for index, uuid in known if item == index or (not item.isdigit() and uuid.startswith(item))]
        device = (same[0] if len(same) == 1 else item).replace("/", "_")
        names[item] = f"slurm-{job}-gpu-{device}" if job else f"gpu-{device}"
    return names


@contextmanager
def lease(gpus: int, *, bound_s: float = 6 * 3600.0, say: Callable[[str], None] | None = None) -> Iterator[Lease]:
    """Hold `gpus` devices, or the machine if `gpus` is 0; waits its turn.

    Raises
    ------
    Unavailable
        There are fewer GPUs than asked for, or the turn did not come within `bound_s`.
    """
    if gpus == 0:
        names = {"": "machine"}
        wanted = 1
    else:
        ids = visible_gpus()
        if len(ids) < gpus:
            raise Unavailable(f"the model needs {gpus} GPU(s) and {len(ids)} can be seen (CUDA_VISIBLE_DEVICES)")
        names = _lock_names(ids)
        wanted = gpus
    folder = lock_folder()
    held: dict[str, int] = {}
    began = said = time.monotonic()
    try:
        while True:
            for item, name in names.items():
                fd = _try_lock(folder / f"{name}.lock")
                if fd is not None:
                    held[item] = fd
                if len(held) == wanted:
                    break
            if len(held) == wanted:
                break
            # Not enough: give back before waiting, so that two jobs never hold half of what each needs.
            _release(held)
            now = time.monotonic()
            if now - began > bound_s:
                what = f"all but {wanted - 1} of the GPUs" if gpus else "the machine"
                raise Unavailable(f"other measurements held {what} for {bound_s:g} s ({folder})")
            if say is not None and now - said > _SAY_S:
                said = now
                say(f"waiting for another measurement to end ({now - began:.0f} s; locks in {folder})")
            time.sleep(_POLL_S)
        yield Lease(tuple(held) if gpus else (), tuple(held.values()))
    finally:
        _release(held)


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _release(held: dict[str, int]) -> None:
    # Only closed, never unlocked: a server that still lives shares the lock and keeps it.
    for fd in held.values():
        os.close(fd)
    held.clear()
