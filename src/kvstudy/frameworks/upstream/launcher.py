"""Brings an author's fork up: writes the batch server's config and starts it on the fork's own Python.

Without a GPU the batch server runs under its debug switch (`device=cpu`): the fork's real loop, for correctness only.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from kvstudy.engine.skew import calibration_text
from kvstudy.frameworks import environments
from kvstudy.frameworks.base import MIB, Launch, Unavailable, base_environment
from kvstudy.frameworks.native import OwnServer
from kvstudy.frameworks.upstream.arguments import fork_arguments, on_host, upstream_of
from kvstudy.grid.schema import H2OUpstream, InfiniGenUpstream
from kvstudy.grid.secrets import API_KEY

#: The folder that holds the package `batch_server`.
HERE = Path(__file__).parent


def pinned_commit(name: str) -> str:
    """The commit that `envs/<name>/fork.toml` pins."""
    fork = tomllib.loads((environments.PINS / name / environments.FORK).read_text(encoding="utf-8"))
    return str(fork["commit"])


def batch_config(launch: Launch, port: int) -> dict[str, Any]:
    """The batch server's config of a deployment. Writes the text that InfiniGen warms up with into the work folder.

    Raises
    ------
    Unavailable
        The model is not converted, or the environment is not built.
    """
    deployment = launch.deployment
    framework = upstream_of(deployment)
    name = str(framework.environment)
    if launch.environment_dir is None:
        raise Unavailable(f"{name} needs its environment: build it with 'kvstudy environment {name}'")
    # Beside the model's folder, as `Layout.converted` says.
    weights = Path(f"{launch.model_dir}.flexgen")
    if framework.weights == "converted" and not weights.is_dir():
        raise Unavailable(
            f"no converted weights in {weights}: run 'kvstudy convert --model {launch.model_dir} --out {weights} "
            f"--card {weights}.json'"
        )
    calibration = launch.work_dir / "calibration.txt"
    if isinstance(framework, InfiniGenUpstream):
        calibration.write_text(calibration_text(), encoding="utf-8")
    card, hf = launch.card, json.loads((launch.model_dir / "config.json").read_text(encoding="utf-8"))
    kv_bytes = launch.kv_bytes
    if on_host(framework) and not isinstance(framework, H2OUpstream):
        kv_bytes = int(framework.host_kv_memory_mib * MIB)
    budget = deployment.budget
    return {
        "fork": name,
        "fork_dir": str(environments.fork_folder(launch.environment_dir)),
        "arguments": fork_arguments(deployment, weights, launch.work_dir / "offload", calibration),
        "model_dir": str(launch.model_dir),
        "served_model_name": deployment.model.name,
        "model": {
            "name": "opt",
            "layers": card["layers"],
            "heads": card["heads"],
            "hidden_size": card["hidden_size"],
            "vocab_size": card["vocab_size"],
            "max_positions": card["max_position_embeddings"],
            "pad_token_id": hf.get("pad_token_id", 1),
        },
        "device": deployment.hardware.device,
        "prefill": framework.prefill,
        "first_token": "when the prefill of the whole batch ends",
        "serving": framework.serving,
        "weights": framework.weights,
        "budget": {"share": float(budget.tokens) if budget.tokens is not None else budget.share, "of": budget.of},
        "max_batch": framework.max_batch,
        "max_wait_s": framework.max_wait_s,
        "kv_memory_bytes": kv_bytes,
        "offload_dir": str(launch.work_dir / "offload"),
        "cores": list(deployment.hardware.server_cores) if deployment.hardware.device == "cpu" else [],
        "host": launch.host,
        "port": port,
    }


def fork_environment(gpu_ids: tuple[str, ...]) -> dict[str, str]:
    """Without our own Python path; the batch server on it; the leased GPU and no other."""
    env = base_environment()
    for name in ("PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    return env | {"PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}


class UpstreamServer(OwnServer):
    """`python -m batch_server` of the fork's environment."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._config = batch_config(launch, self.port)
        assert launch.environment_dir is not None
        self._python = environments.python_of(launch.environment_dir)
        if not self._python.exists():
            name = self._config["fork"]
            raise Unavailable(f"no {name} environment in {launch.environment_dir}: run 'kvstudy environment {name}'")

    def command(self) -> list[str]:
        """`python -m batch_server --config FILE`."""
        path = self.launch.work_dir / f"batch-{self.port}.json"
        path.write_text(json.dumps(self._config, indent=1), encoding="utf-8")
        return [str(self._python), "-m", "batch_server", "--config", str(path)]

    def environment(self) -> dict[str, str]:
        """The fork's, with its interpreter first on the path."""
        env = fork_environment(self.launch.gpu_ids)
        env.pop(API_KEY, None)
        if self.launch.api_key is not None:
            env[API_KEY] = self.launch.api_key
        env["PATH"] = f"{self._python.parent}{os.pathsep}{env.get('PATH', '')}"
        return env

    def asked(self) -> dict[str, Any]:
        """Everything but where files lie and where it listens; the pinned commit."""
        apart = ("host", "port", "model_dir", "fork_dir", "offload_dir")
        asked = {key: value for key, value in self._config.items() if key not in apart}
        return asked | {"commit": pinned_commit(self._config["fork"])}
