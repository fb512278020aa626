"""A checkout whose `conf/` has devices that exist in name only: CPU cells that hold fake GPUs while they are up.

Nothing of it ships: the cells say `device: cpu` and a hardware of their own name. What is tested is who gets which
device, by the real Snakefile, leases and servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

#: Four devices, called by index, UUID and MIG slice.
DEVICES = ("0", "1", "GPU-7c1f", "MIG-a2e0")

HARDWARE: dict[str, Any] = {
    "name": "fake-gpus",
    "title": "four devices in name only",
    "device": "cpu",
    "gpus": 4,
    "server_cores": "auto",
    "client_cores": "auto",
    "memory_limit_gib": None,
    "link_gbps": None,
    "cluster": {"partition": "gpu", "gpu_model": None, "cpus_per_gpu": 2, "spare_memory_mib": 1500, "spare_minutes": 5},
}

#: Nine cells of one device, two of two, and one whose server is never up in time.
STUDY: dict[str, Any] = {
    "name": "devices",
    "title": "Who gets which device",
    "question": "Are devices shared, idle or leaked?",
    "axes": {
        "framework": ["full", "late"],
        "model": ["tiny-llama", "tiny-pair"],
        "workload": ["tiny"],
        "load": ["poisson"],
        "hardware": ["fake-gpus"],
        "seed": list(range(9)),
    },
    "set": {
        "kv_memory_mib": 4,
        "load.rate": 4.0,
        "load.duration_s": 3,
        "load.warmup_requests": 1,
        "load.timeout_s": 30,
        "load.drain_s": 30,
    },
}
LEAVE_OUT = [
    {"when": {"model.name": "tiny-pair", "seed": {"above": 1}}, "reason": "two such cells are enough"},
    {"when": {"framework.name": "streaming", "seed": {"above": 0}}, "reason": "one such cell is enough"},
    {"when": {"framework.name": "streaming", "model.name": "tiny-pair"}, "reason": "one such cell is enough"},
]


def workspace(checkout: Path, folder: Path) -> Path:
    """Make `folder` a checkout of its own: links to the real one, but for `conf/`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("Snakefile", "workflow", "profiles", "envs", "reports", "src"):
        (folder / name).symlink_to(checkout / name)
    for path in (checkout / "conf").rglob("*.yaml"):
        copy = folder / path.relative_to(checkout)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    conf = folder / "conf"

    def write(name: str, value: dict[str, Any]) -> None:
        (conf / name).write_text(yaml.safe_dump(value, sort_keys=False))

    write("hardware/fake-gpus.yaml", HARDWARE)
    write("study/devices.yaml", STUDY)
    tiny = yaml.safe_load((conf / "model/tiny-llama.yaml").read_text())
    write("model/tiny-pair.yaml", tiny | {"name": "tiny-pair", "title": "tiny Llama on two devices", "gpus": 2})
    streaming = yaml.safe_load((conf / "framework/streaming.yaml").read_text())
    write("framework/late.yaml", streaming | {"title": "never up in time", "sinks": 5, "bring_up_s": 0.01})
    config = yaml.safe_load((conf / "config.yaml").read_text())
    kept = [rule for rule in config["leave_out"] if "model.gpus" not in rule["when"]]
    write("config.yaml", config | {"leave_out": kept + LEAVE_OUT})
    return folder


def command(*arguments: str, study: str = "devices") -> list[str]:
    """Snakemake as users call it; `--config` values come last."""
    split = arguments.index("--config") + 1 if "--config" in arguments else None
    extra = list(arguments[split:]) if split else []
    before = list(arguments[: split - 1]) if split else list(arguments)
    return [sys.executable, "-m", "snakemake", *before, "--config", f"study={study}", *extra]


def environment(locks: Path, **more: str) -> dict[str, str]:
    """Of a run whose leases are its own."""
    locks.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(locks), **more}


def snakemake(
    folder: Path, *arguments: str, env: dict[str, str], study: str = "devices", timeout_s: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run it to its end in a workspace."""
    return subprocess.run(
        command(*arguments, study=study),
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
