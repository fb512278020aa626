"""A model shared by processes over gloo gives what one process gives, with every policy and through the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_tiny import random_prompt
from sharing import generate
from transformers import LlamaConfig, LlamaForCausalLM

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.model import ModelUnsupported, load
from kvstudy.engine.skew import calibrate, write_skew
from kvstudy.frameworks.base import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
Policies = list[tuple[str, dict[str, Any]]]
HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def test_two_processes_generate_what_one_does(llama_dir: Path, tmp_path: Path) -> None:
    write_skew(calibrate(llama_dir, random_prompt(64)), tmp_path / "skew.safetensors")
    skew = str(tmp_path / "skew.safetensors")
    policies: Policies = [
        ("full", {}),
        ("offload", {}),
        ("streaming", {}),
        ("random", {}),
        ("h2o", {}),
        ("h2o", {"rule": "flexgen"}),
        ("h2o", {"rule": "masked"}),
        ("infinigen", {"skew": skew, "alpha": 2.0}),
        ("infinigen", {"skew": skew, "rule": "speed", "alpha": 2.0}),
    ]
    check_shared(llama_dir, policies, 2)


@pytest.mark.long
def test_four_processes_generate_what_one_does(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = tmp_path / "four-kv-heads"
    shape = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.3,
        eos_token_id=None,
    )
    LlamaForCausalLM(shape).save_pretrained(model)
    skew = tmp_path / "skew.safetensors"
    write_skew(calibrate(model, random_prompt(64)), skew)
    infinigen = {"skew": str(skew), "alpha": 2.0}
    check_shared(model, [("full", {}), ("offload", {}), ("h2o", {}), ("infinigen", infinigen)], 4)


def check_shared(model: Path, policies: Policies, processes: int) -> None:
    """That so many processes give the tokens of one, and hold their share of what it holds."""
    common = {
        "model_dir": str(model),
        "dtype": "float32",
        "kv_memory_bytes": 1 << 22,
        "host_kv_memory_bytes": 1 << 20,
        "max_prefill_tokens": 32,
        "budget": {"share": 0.3},
    }
    configs = [common | {"policy": policy, "policy_options": options} for policy, options in policies]
    whole = [json.dumps(c | {"tensor_parallel": processes}) for c in configs]
    command = [*TORCHRUN, str(processes), str(HERE / "sharing.py"), *whole]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    shared = json.loads(ended.stdout.splitlines()[-1])
    for config, found in zip(configs, shared, strict=True):
        alone = Engine(EngineConfig.model_validate(config))
        assert generate(alone) == found["outputs"], config["policy"]
        # A share of the KV heads, that share of the bytes; what no plan shards (embeddings, norms) all have.
        assert found["pools"] == [
            alone.device_pool.peak_live_bytes // processes,
            alone.host_pool.peak_live_bytes // processes,
            0,
        ]
        assert alone.model.weight_bytes / processes < found["weights"] < alone.model.weight_bytes


def test_the_server_shares_a_model_and_ends_with_all_its_processes(llama_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    config = {
        "model_dir": str(llama_dir),
        "dtype": "float32",
        "tensor_parallel": 2,
        "kv_memory_bytes": 1 << 22,
        "port": port,
    }
    (tmp_path / "engine.json").write_text(json.dumps(config))
    command = [*TORCHRUN, "2", "-m", "kvstudy.engine.server", "--config", str(tmp_path / "engine.json")]
    server = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        printed = []
        while "engine ready on" not in (line := server.stdout.readline()):
            printed.append(line)
            assert line, "".join(printed)
        ask = {"prompt": random_prompt(20), "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stop": ["~~~"]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ask, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 6
        assert httpx.post(f"http://127.0.0.1:{port}/reset", timeout=30).status_code == 200
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        pool = 16 * 2 * 2 * 16 * 4  # a block of both processes
        assert f'kvstudy_kv_reserved_bytes{{tier="device"}} {(1 << 22) // pool * pool}' in metrics
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    finally:
        server.kill()


def test_what_cannot_be_shared_is_one_line(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"model_dir": str(llama_dir), "tensor_parallel": 2}))
    command = [sys.executable, "-m", "kvstudy.engine.server", "--config", str(tmp_path / "engine.json")]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvstudy engine: tensor_parallel is 2 and torchrun started 1 processes")
    assert ended.stderr.count("\n") == 1


def test_a_model_without_a_plan_is_refused(opt_dir: Path) -> None:
    config = EngineConfig.model_validate({"model_dir": str(opt_dir), "dtype": "float32", "tensor_parallel": 2})
    with pytest.raises(ModelUnsupported, match="no tensor-parallel plan for tiny-opt"):
        load(config, torch.float32)
