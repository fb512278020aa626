"""Our own engine: a deployment becomes an `EngineConfig` in JSON and `python -m kvstudy.engine.server`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvstudy.frameworks import base, http
from kvstudy.frameworks.base import Counters, Gauge, Launch, ServerProcess, Watch, base_environment
from kvstudy.frameworks.lease import visibility
from kvstudy.grid.schema import InfiniGen, Offload
from kvstudy.grid.secrets import API_KEY


def engine_config(launch: Launch, port: int) -> dict[str, Any]:
    """The engine's config for a deployment, by the engine's own names (`kvstudy.engine.config.EngineConfig`)."""
    deployment = launch.deployment
    framework = deployment.framework
    if framework.implementation != "native":
        raise TypeError(f"{framework.name} ({framework.implementation}) is not served by our engine")
    budget = deployment.budget
    options = framework.policy_options()
    if isinstance(framework, InfiniGen):
        # Beside the model's folder, as `Layout.skew` says.
        options["skew"] = f"{launch.model_dir}.skew.safetensors"
    host_bytes = int(framework.host_kv_memory_mib * (1 << 20)) if isinstance(framework, InfiniGen | Offload) else 0
    whole = budget.of != "tokens" and budget.share >= 1 and not isinstance(framework, Offload)
    share = float(budget.tokens) if budget.of == "tokens" and budget.tokens is not None else budget.share
    return {
        "model_dir": str(launch.model_dir),
        "served_model_name": deployment.model.name,
        "device": deployment.hardware.device,
        "dtype": deployment.model.dtype,
        "policy": framework.name,
        "policy_options": options,
        "budget": {"share": share, "of": budget.of},
        "kv_memory_bytes": launch.kv_bytes,
        "host_kv_memory_bytes": host_bytes,
        "block_size": framework.block_size,
        "scheduler": framework.scheduler,
        "max_num_seqs": framework.max_num_seqs,
        "max_prefill_tokens": framework.max_prefill_tokens,
        "prefill": framework.prefill,
        "tensor_parallel": deployment.model.gpus if deployment.hardware.device == "cuda" else 1,
        # A policy that keeps a part may hold more than the pool's tokens: what fits is for its `reserve` to say.
        "max_model_len": launch.max_model_len if whole else deployment.model.max_model_len,
        "cores": list(deployment.hardware.server_cores),
        "link_gbps": deployment.hardware.link_gbps,
        "host": launch.host,
        "port": port,
    }


class OwnServer(ServerProcess):
    """A server of ours: it answers `/config`, `/metrics` and `/reset` as our engine does."""

    def effective_config(self) -> dict[str, Any]:
        """`GET /config`."""
        raw: dict[str, Any] = http.get_json(f"{self.url}/config", timeout=base.ANSWER_S)
        flat = raw.get("config", raw)
        return {**{key: flat.get(key) for key in self.asked()}, "raw": raw}

    def counters(self) -> Counters:
        """From `/metrics`."""
        rows = self.samples()

        def one(name: str, **labels: str) -> float | None:
            return http.total(rows, name, **labels)

        return Counters(
            attended_entries=one("kvstudy_attended_entries_total"),
            full_entries=one("kvstudy_full_entries_total"),
            kept_entries=one("kvstudy_kept_entries_total"),
            preemptions=one("kvstudy_preemptions_total"),
            moved_h2d=one("kvstudy_moved_bytes_total", direction="h2d"),
            moved_d2h=one("kvstudy_moved_bytes_total", direction="d2h"),
            prefix_queries=one("kvstudy_prefix_cache_queries_total"),
            prefix_hits=one("kvstudy_prefix_cache_hits_total"),
            kv_live_peak_device=one("kvstudy_kv_live_peak_bytes", tier="device"),
            kv_live_peak_host=one("kvstudy_kv_live_peak_bytes", tier="host"),
            workspace_peak=one("kvstudy_workspace_peak_bytes"),
            running_peak=one("kvstudy_requests_running_peak"),
            waiting_peak=one("kvstudy_requests_waiting_peak"),
            queued=one("kvstudy_requests_queued_total"),
            queued_for_memory=one("kvstudy_requests_queued_total", short_of="memory"),
        )

    def watch(self) -> Watch:
        """Its own gauges, by tier."""
        tiers = [
            Gauge(f"kvstudy_{kind}_bytes", kind, tier, labels={"tier": tier})
            for kind in ("kv_reserved", "kv_live")
            for tier in ("device", "host")
        ]
        moved = [
            Gauge(
                "kvstudy_moved_bytes_total",
                f"moved_{way}",
                "device",
                labels={"direction": way},
                since_start=True,
            )
            for way in ("h2d", "d2h")
        ]
        limit = self.deployment.hardware.memory_limit_gib
        return Watch(
            metrics_url=f"{self.url}/metrics",
            pid=self.pid,
            gauges=(
                Gauge("kvstudy_weights_bytes", "weights", "device"),
                *tiers,
                Gauge("kvstudy_workspace_peak_bytes", "workspace_peak", "device"),
                Gauge("kvstudy_allocated_bytes", "allocated", "device"),
                *moved,
            ),
            running="kvstudy_requests_running",
            waiting="kvstudy_requests_waiting",
            gpu_process=self.deployment.hardware.device == "cuda",
            limit_bytes=int(limit * (1 << 30)) if limit else None,
        )

    def reset(self) -> None:
        """`POST /reset`: peaks start anew."""
        http.request(f"{self.url}/reset", timeout=base.ANSWER_S, data=b"{}", key=self.launch.api_key)


class NativeServer(OwnServer):
    """A policy on our engine."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._config = engine_config(launch, self.port)

    def command(self) -> list[str]:
        """`python -m kvstudy.engine.server --config FILE`, by torchrun once a GPU where there are several."""
        path = self.launch.work_dir / f"engine-{self.port}.json"
        path.write_text(json.dumps(self._config, indent=1), encoding="utf-8")
        processes = self._config["tensor_parallel"]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        launcher = torchrun if processes > 1 else []
        return [sys.executable, "-m", *launcher, "kvstudy.engine.server", "--config", str(path)]

    def environment(self) -> dict[str, str]:
        """Ours, and the leased GPUs."""
        env = base_environment()
        # The package must be found from any folder, installed or not.
        root = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = root + (":" + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
        if self.launch.api_key is not None:
            env[API_KEY] = self.launch.api_key
        return env | visibility(self.launch.gpu_ids)

    def asked(self) -> dict[str, Any]:
        """Everything that was written into its config but where it listens, and cores where it may use any."""
        apart = ["host", "port", "model_dir", *([] if self._config["cores"] else ["cores"])]
        return {key: value for key, value in self._config.items() if key not in apart}
