"""Servers as processes: pinned, bounded, stopped with all their children, and their ends told apart."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstudy.engine.config import EngineConfig
from kvstudy.frameworks import base, http
from kvstudy.frameworks.base import (
    Launch,
    Unavailable,
    check_port,
    classify,
    free_port,
    last_words,
    start,
    stop_group,
)
from kvstudy.frameworks.native import NativeServer, engine_config
from kvstudy.frameworks.vllm import VllmServer
from kvstudy.grid.schema import Budget, Deployment, Framework, Full, Hardware, Model, Offload, Streaming, Vllm

CORES = sorted(os.sched_getaffinity(0))
CARD = {"kv_bytes_per_token": 23040, "parameters": 134_515_008}


def launch(framework: Framework, tmp_path: Path, **options: Any) -> Launch:
    deployment = Deployment(
        framework=framework,
        model=Model(name="m", source="folder", path="x", dtype="bfloat16", max_model_len=8192),
        hardware=Hardware(name="h", device="cpu", server_cores=CORES[:1], client_cores=CORES[-1:]),
        kv_memory_mib=96,
        harness_version=1,
        **options,
    )
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    (environment / "bin" / "python").touch()
    return Launch(deployment, tmp_path / "model", CARD, environment, tmp_path)


def test_our_config_is_the_engines(tmp_path: Path) -> None:
    config = EngineConfig.model_validate(engine_config(launch(Streaming(sinks=8), tmp_path), 8123))
    assert config.policy == "streaming" and config.policy_options == {"sinks": 8}
    assert config.kv_memory_bytes == 96 << 20 and config.port == 8123
    # No request's whole cache can be longer than the pool: a model's 8,192 tokens would not fit into 96 MiB.
    assert config.max_model_len == (96 << 20) // 23040
    part = engine_config(launch(Streaming(sinks=8), tmp_path, budget=Budget(share=0.3)), 1)
    assert part["max_model_len"] == 8192  # a part of it can: the engine asks the policy what a request needs
    half = engine_config(launch(Full(), tmp_path, budget=Budget(share=0.5, of="current")), 1)
    assert half["budget"] == {"share": 0.5, "of": "current"}
    absolute = engine_config(launch(Full(), tmp_path, budget=Budget(of="tokens", tokens=256)), 1)
    assert EngineConfig.model_validate(absolute).budget.entries(1000) == 256


def test_waiting_for_memory_is_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NativeServer(launch(Full(), tmp_path))
    metrics = [f'kvstudy_requests_queued_total{{short_of="{what}"}} {n}' for what, n in (("memory", 3), ("turn", 4))]
    monkeypatch.setattr(server, "samples", lambda: http.parse_metrics("\n".join(metrics)))
    counters = server.counters()
    assert (counters.queued, counters.queued_for_memory) == (7, 3)
    offload = EngineConfig.model_validate(engine_config(launch(Offload(host_kv_memory_mib=64), tmp_path), 1))
    assert offload.policy == "offload" and offload.host_kv_memory_bytes == 64 << 20


def test_vllm_s_own_answers_hold_the_same_bytes(tmp_path: Path) -> None:
    small = VllmServer(launch(Vllm(kv_cache_dtype="fp8"), tmp_path)).command()
    block = 32 * CARD["kv_bytes_per_token"] // 2
    assert small[small.index("--kv-cache-dtype") + 1] == "fp8"
    assert small[small.index("--kv-cache-memory-bytes") + 1] == str(((96 << 20) // block + 1) * block)
    away = VllmServer(launch(Vllm(prefix_caching=True, offload_mib=512), tmp_path))
    command = away.command()
    assert command[command.index("--kv-offloading-size") + 1] == "0.5" and "--enable-prefix-caching" in command
    assert away.asked()["kv_cache_dtype"] == "auto"


def test_vllm_gets_the_same_pool_and_all_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = VllmServer(launch(Vllm(), tmp_path))
    command, env = server.command(), server.environment()
    block = 32 * CARD["kv_bytes_per_token"]
    blocks = (96 << 20) // block
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str((blocks + 1) * block)
    assert command[command.index("--max-model-len") + 1] == str(blocks * 32)
    assert "--no-enable-prefix-caching" in command and "--enforce-eager" in command
    assert "--kv-cache-dtype" not in command and "--kv-offloading-size" not in command
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == str(CORES[0])
    assert env["VLLM_NO_USAGE_STATS"] == "1" and "PYTHONPATH" not in env
    posted: list[str] = []
    monkeypatch.setattr(http, "request", lambda url, **_: posted.append(url) or "")
    server.reset()
    VllmServer(launch(Vllm(prefix_caching=True), tmp_path)).reset()
    assert [url.rpartition("/")[2] for url in posted] == ["reset_prefix_cache"]
    cached = VllmServer(launch(Vllm(prefix_caching=True, enforce_eager=False), tmp_path)).command()
    assert "--enable-prefix-caching" in cached and "--enforce-eager" not in cached
    here = launch(Vllm(prefix_caching=True), tmp_path)
    for key in (None, "sesame"):  # development endpoints are for who measures, never for a server of others
        guarded = VllmServer(dataclasses.replace(here, api_key=key))
        names = guarded.environment()
        assert names.get("VLLM_API_KEY") == key and ("VLLM_SERVER_DEV_MODE" in names) == (key is None)
        assert "sesame" not in " ".join(guarded.command())
    with pytest.raises(Unavailable, match="no vllm environment"):
        VllmServer(Launch(here.deployment, here.model_dir, CARD, tmp_path / "none", tmp_path))


@pytest.mark.parametrize(
    ("tail", "code", "death"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1, "oom"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
            1,
            "oom",
        ),
        ("ValueError: ... is larger than the available KV cache memory (0.09 GiB).", 1, "oom"),
        ("", -9, "crashed"),  # by whom is not known
        ("OSError: [Errno 98] Address already in use", 1, "port"),
        ("kvstudy engine: cannot listen on 127.0.0.1:1: Address already in use", 2, "port"),
        ("OSError: x is not a valid model identifier listed on 'hub'", 1, "model"),
        ("Traceback (most recent call last):\nKeyError: 'x'", 1, "crashed"),
    ],
)
def test_ends_of_logs(tail: str, code: int, death: str) -> None:
    assert classify(tail, code) == death
    assert last_words(tail, code)


def test_a_kill_is_for_want_of_memory_when_the_kernel_says_so() -> None:
    assert classify("", -9, memory_kill=True) == "oom" and classify("", -15, memory_kill=True) == "crashed"
    assert base.memory_kills() is None or base.memory_kills() >= 0  # type: ignore[operator]


def test_last_words_are_one_telling_line() -> None:
    log = "INFO a\nTraceback (most recent call last):\n  File x\nKeyError: 'weights'\nINFO: shutting down\n"
    assert last_words(log, 1) == "KeyError: 'weights'"
    assert last_words("", -11) == "killed by SIGSEGV"
    assert last_words("hello\n", 3) == "exit code 3; its last line: hello"


def test_a_process_is_pinned_and_its_whole_family_ends(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time, os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
        "print(p.pid, sorted(os.sched_getaffinity(0)), flush=True)\n"
        "time.sleep(99)\n"
    )
    log = tmp_path / "log"
    before = os.sched_getaffinity(0)
    process = start([sys.executable, "-c", code], env=dict(os.environ), log=log, cores=CORES[:1])
    assert os.sched_getaffinity(0) == before
    deadline = time.monotonic() + 10
    while not log.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.05)
    child, _, cores = log.read_text().partition(" ")
    assert cores.strip() == str(CORES[:1])
    stop_group(process, wait_s=0.5)
    assert process.poll() is not None
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def test_cores_that_are_not_there_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="server_cores"):
        start([sys.executable, "-c", ""], env={}, log=tmp_path / "log", cores=[4095])


def test_a_port_in_use_is_a_fault() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Unavailable, match="cannot listen on"):
            check_port("127.0.0.1", taken.getsockname()[1])
    check_port("127.0.0.1", free_port())


def test_a_server_that_is_not_up_in_time_is_stopped(tmp_path: Path) -> None:
    class Slow(NativeServer):
        def command(self) -> list[str]:
            return [
                sys.executable,
                "-m",
                "kvstudy.load.mock",
                "--port",
                str(self.port),
                "--ready-after-s",
                "60",
            ]

    server = Slow(launch(Full(), tmp_path))
    with pytest.raises(Unavailable, match="not up after 1 s"):
        server.bring_up(1.0)
    assert server.failure() is not None


def test_metrics_text() -> None:
    text = '# HELP a b\na{tier="device"} 3\na{tier="host"} 4.5\nb_total 1e3\nab 7\nc{x="q\\"}"} NaN\n'
    rows = http.parse_metrics(text)
    assert http.total(rows, "a") == 7.5 and http.total(rows, "a", tier="host") == 4.5
    assert http.total(rows, "b_total") == 1000 and http.total(rows, "none") is None
    assert len(http.parse_metrics(text, frozenset({"a"}))) == 2


def test_the_callers_thread_counts_do_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snakemake exports OMP_NUM_THREADS=<threads of the job>; on one core that made vLLM five times slower."""
    for name in base.THREAD_COUNTS:
        monkeypatch.setenv(name, "7")
    assert not set(base.THREAD_COUNTS) & set(base.base_environment())
