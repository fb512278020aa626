"""What machine this is, and where a number came from. Nothing here records secrets.

The *fingerprint* is a digest of the stable part of the hardware: cells of different fingerprints are never
pooled. What changes between visits (governor, clocks, temperature, load) is recorded beside it, not in it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from kvstudy.frameworks.lease import nvidia_smi
from kvstudy.grid.schema import digest
from kvstudy.grid.secrets import redact

_SECRET = re.compile(r"(^|[-_])(token|secret|password|passwd|api[-_]?key|authorization|credentials?)($|[-_])", re.I)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return [flag for flag in wanted if flag in present]
    return []


def _gpus() -> list[dict[str, Any]]:
    rows = nvidia_smi("name", "memory.total", "driver_version")
    return [{"name": name, "memory_mib": memory, "driver": driver} for name, memory, driver in rows]


def stable() -> dict[str, Any]:
    """The part of the machine that does not change between visits."""
    return {
        "cpu": _cpu_model(),
        "cpu_flags": _cpu_flags(),
        "cores": os.cpu_count(),
        # Whole GiB: what the kernel keeps for itself differs a little from boot to boot.
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "architecture": platform.machine(),
        "gpus": _gpus(),
    }


def fingerprint(hardware: dict[str, Any] | None = None) -> str:
    """Digest of `stable()`."""
    return digest(hardware if hardware is not None else stable())


def volatile() -> dict[str, Any]:
    """What can change from visit to visit and explain a difference: governor, clocks, load, kernel."""
    clock = None
    with contextlib.suppress(Exception):  # psutil raises various things in containers
        frequency = psutil.cpu_freq()
        clock = None if frequency is None else {"current_mhz": frequency.current, "max_mhz": frequency.max}
    return {
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "clock": clock,
        "load_average": list(os.getloadavg()),
        "available_gib": round(psutil.virtual_memory().available / (1 << 30), 2),
        "kernel": platform.release(),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def commit() -> dict[str, Any]:
    """Commit and dirty flag of the checkout this package runs from; None when it is not one."""
    found = _git("rev-parse", "HEAD")
    # The package may be installed in an environment inside somebody else's checkout: only a tracked file is
    # ours.
    if found is None or _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": found, "dirty": bool(status)}


def packages() -> dict[str, str]:
    """Versions of all installed distributions."""
    return dict(
        sorted(
            {str(item.metadata["Name"]).lower(): item.version for item in importlib.metadata.distributions()}.items()
        )
    )


def command() -> list[str]:
    """The command line, with what looks like a secret left out."""
    out: list[str] = []
    hide_next = False
    for word in sys.orig_argv:
        if hide_next:
            out.append("***")
            hide_next = False
        elif _SECRET.search(word.partition("=")[0]):
            out.append(f"{word.partition('=')[0]}=***" if "=" in word else word)
            hide_next = "=" not in word and word.startswith("-")
        else:
            out.append(redact(word))
    return out


def now() -> str:
    """The time, UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
