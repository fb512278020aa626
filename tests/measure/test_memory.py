"""A known allocation is found within 1 %: of a process, and of each framework's pool as it reports it."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstudy.frameworks.base import Launch
from kvstudy.frameworks.vllm import VllmServer
from kvstudy.grid.schema import Deployment, Hardware, Model, Vllm
from kvstudy.measure.memory import Sampler, take

MIB = 1 << 20
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True, end="")
for line in sys.stdin:
    print(line, file=child.stdin, flush=True)
    print(child.stdout.readline(), flush=True, end="")
"""
CHILD = """
import mmap, sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    if line.strip():
        region = mmap.mmap(-1, int(line))
        for at in range(0, int(line), 4096):
            region[at] = 1
        held.append(region)
        print("held", flush=True)
"""


@contextmanager
def metrics(text: str) -> Iterator[str]:
    """A server that answers /metrics with this text; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def rows(watch: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(kind, tier): size for kind, tier, size in take(watch, {})["rows"]}


def test_what_a_servers_child_allocates_is_found() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    watch: dict[str, Any] = {
        "metrics_url": "http://127.0.0.1:9/metrics",
        "pid": server.pid,
        "gauges": [],
        "constants": [],
        "running": None,
        "waiting": None,
        "gpu_process": False,
    }
    try:
        assert server.stdout.readline() == "ready\n"
        before = rows(watch)["process", "host"]
        print(200 * MIB, file=server.stdin, flush=True)
        assert server.stdout.readline() == "held\n"
        assert rows(watch)["process", "host"] - before == pytest.approx(200 * MIB, rel=0.01)
    finally:
        server.kill()
        server.wait()


def test_vllms_live_blocks_are_bytes_of_its_pool(tmp_path: Path) -> None:
    """17 of 40 blocks of 32 tokens are in use: vLLM says the share, the pool and the card say the bytes."""
    block = 32 * 23040
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    deployment = Deployment(
        framework=Vllm(),
        model=Model(name="m", source="folder", path="x", dtype="bfloat16", max_model_len=512),
        hardware=Hardware(name="h", device="cpu", server_cores=(0,), client_cores=(0,)),
        kv_memory_mib=40.5 * block / MIB,
        harness_version=1,
    )
    card = {"kv_bytes_per_token": 23040, "parameters": 1000}
    server = VllmServer(Launch(deployment, tmp_path, card, tmp_path, tmp_path))
    server.process = SimpleNamespace(server_pid=1)  # type: ignore[assignment]
    text = f'vllm:kv_cache_usage_perc{{engine="0"}} {17 / 40}\nvllm:num_requests_running{{engine="0"}} 3\n'
    with metrics(text) as url:
        watch = server.watch().as_json() | {"metrics_url": f"{url}/metrics"}
        found = rows(watch)
    assert found["kv_reserved", "device"] == 40 * block
    assert found["kv_live", "device"] == pytest.approx(17 * block, rel=0.01)
    assert found["weights", "device"] == 2000


def test_the_sampler_runs_beside_and_answers_in_order() -> None:
    with metrics("kvstudy_requests_running 2\n") as url:
        watch = SimpleNamespace(
            as_json=lambda: {
                "metrics_url": f"{url}/metrics",
                "pid": 1,
                "gauges": [],
                "constants": [["weights", "device", 7]],
                "running": "kvstudy_requests_running",
                "waiting": None,
                "gpu_process": False,
            }
        )
        sampler = Sampler(watch, interval_s=0.05)  # type: ignore[arg-type]
        samples = sampler.stop()
    assert samples and all(item["running"] == 2 for item in samples)
    assert [item["t"] for item in samples] == sorted(item["t"] for item in samples)
    assert ["weights", "device", 7] in samples[0]["rows"]
