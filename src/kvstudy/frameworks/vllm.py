"""vLLM as released, in an environment of its own, given what its own documentation recommends.

The console script of the CPU wheel fails (it asks for a package named `vllm`), so the server is started as a
module. The KV pool is exactly `kv_memory_mib`: `--kv-cache-memory-bytes` with one block more than that,
because vLLM keeps one block for itself (its null block) and both engines should be able to fill the same
bytes.

On a CPU the threads are bound explicitly (`VLLM_CPU_OMP_THREADS_BIND`; left alone it reserves a core), and
libiomp and tcmalloc are preloaded where they are found, in the environment first.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from kvstudy.frameworks import http
from kvstudy.frameworks.base import (
    Counters,
    Gauge,
    Launch,
    ServerProcess,
    Unavailable,
    Watch,
    base_environment,
)
from kvstudy.frameworks.lease import visibility
from kvstudy.grid.schema import Vllm

#: Where tcmalloc lies on common distributions; libiomp5 comes with the CPU wheel's dependencies.
_TCMALLOC = (
    "/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/*-linux-gnu/libtcmalloc.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)

#: Bytes of a number by its type.
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class VllmServer(ServerProcess):
    """`python -m vllm.entrypoints.openai.api_server` of the framework's environment."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        framework = launch.deployment.framework
        if not isinstance(framework, Vllm):
            raise TypeError(f"{framework.name} is not vllm")
        if launch.environment_dir is None:
            raise Unavailable("vllm needs its environment: build it with 'kvstudy environment vllm'")
        self._framework = framework
        self._python = launch.environment_dir / "bin" / "python"
        if not self._python.exists():
            raise Unavailable(f"no vllm environment in {launch.environment_dir}: run 'kvstudy environment vllm'")
        entry = launch.kv_bytes_per_token
        if framework.kv_cache_dtype == "fp8":
            entry //= BYTES[launch.deployment.model.dtype]
        self._block_bytes = framework.block_size * entry
        self._blocks = launch.kv_bytes // self._block_bytes
        if self._blocks < 1:
            raise Unavailable(f"kv_memory_mib holds not one block of {self._block_bytes} bytes: raise it")
        self._info: dict[str, str] = {}

    @property
    def _max_model_len(self) -> int:
        return min(self.deployment.model.max_model_len, self._blocks * self._framework.block_size)

    def process_cores(self) -> tuple[int, ...]:
        """The server's cores and the client's; the worker, which computes, binds itself to the server's.

        vLLM is three processes, and its engine core polls while the worker computes: sharing the worker's core costs it
        about a tenth of its speed. Left to itself vLLM keeps a core free for them.
        """
        hardware = self.deployment.hardware
        return tuple(sorted({*hardware.server_cores, *hardware.client_cores}))

    def command(self) -> list[str]:
        """The server's command line."""
        framework, deployment = self._framework, self.deployment
        command = [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", self.launch.host, "--port", str(self.port)),
            *("--model", str(self.launch.model_dir), "--served-model-name", self.model_name),
            *("--dtype", deployment.model.dtype, "--seed", str(deployment.model.seed)),
            *("--max-model-len", str(self._max_model_len)),
            *("--max-num-seqs", str(framework.max_num_seqs)),
            *("--max-num-batched-tokens", str(max(framework.max_num_batched_tokens, framework.max_num_seqs))),
            *("--block-size", str(framework.block_size)),
            *("--kv-cache-memory-bytes", str((self._blocks + 1) * self._block_bytes)),
            "--enable-prefix-caching" if framework.prefix_caching else "--no-enable-prefix-caching",
            # Our requests ask for their own sampling; a model folder's defaults must not change them.
            *("--generation-config", "vllm"),
            "--disable-uvicorn-access-log",
        ]
        eager = framework.enforce_eager
        if deployment.hardware.device == "cpu" if eager is None else eager:
            command.append("--enforce-eager")
        if framework.kv_cache_dtype != "auto":
            command += ["--kv-cache-dtype", framework.kv_cache_dtype]
        if framework.offload_mib is not None:
            command += [
                "--kv-offloading-backend",
                "native",
                "--kv-offloading-size",
                f"{framework.offload_mib / 1024:g}",
            ]
        if deployment.model.gpus > 1:
            command += ["--tensor-parallel-size", str(deployment.model.gpus)]
        return [*command, *framework.extra_args]

    def environment(self) -> dict[str, str]:
        """Without our own Python path; offline, no telemetry, threads bound."""
        env = base_environment()
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            env.pop(name, None)
        assert self.launch.environment_dir is not None
        env["PATH"] = f"{self._python.parent}{os.pathsep}{env.get('PATH', '')}"
        env["VLLM_NO_USAGE_STATS"] = "1"
        if self.launch.api_key is not None:
            env["VLLM_API_KEY"] = self.launch.api_key
        elif self._framework.prefix_caching:
            # For /reset_prefix_cache. It opens more than that, to anybody: not on a server that is for others.
            env["VLLM_SERVER_DEV_MODE"] = "1"
        work = str(self.launch.work_dir)
        if len(work) < 60:  # sockets go there too, and a socket's path has 107 characters at most
            env["TMPDIR"] = work  # vLLM leaves files behind; these go with the visit
        if self.deployment.hardware.device == "cpu":
            cores = self.deployment.hardware.server_cores
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
            env["OMP_NUM_THREADS"] = str(len(cores))
            preload = self.preloads()
            if preload:
                before = env.get("LD_PRELOAD")
                env["LD_PRELOAD"] = ":".join([*preload, *([before] if before else [])])
        return env | visibility(self.launch.gpu_ids)

    def preloads(self) -> list[str]:
        """Libraries to preload on a CPU, those that are there."""
        assert self.launch.environment_dir is not None
        found: list[str] = []
        for patterns in (_TCMALLOC, (f"{self.launch.environment_dir}/lib/libiomp5.so",)):
            for pattern in patterns:
                paths = sorted(glob.glob(pattern))
                if paths:
                    found.append(paths[0])
                    break
        return found

    def asked(self) -> dict[str, Any]:
        """What `vllm:cache_config_info` and `/v1/models` must say."""
        asked: dict[str, Any] = {
            "block_size": self._framework.block_size,
            "kv_memory_bytes": self._blocks * self._block_bytes,
            "prefix_caching": self._framework.prefix_caching,
            "kv_cache_dtype": self._framework.kv_cache_dtype,
            "max_model_len": self._max_model_len,
        }
        if self.deployment.hardware.device == "cpu":
            asked["threads"] = len(self.deployment.hardware.server_cores)
        return asked

    def effective_config(self) -> dict[str, Any]:
        """From `vllm:cache_config_info`, `/v1/models`, and the threads that its workers run on."""
        info: dict[str, str] = {}
        for name, labels, _ in http.parse_metrics(
            http.request(f"{self.url}/metrics", timeout=10.0), frozenset({"vllm:cache_config_info"})
        ):
            if name == "vllm:cache_config_info":
                info = labels
        models = http.get_json(f"{self.url}/v1/models", key=self.launch.api_key)["data"]
        self._info = info
        blocks = _whole(info.get("num_gpu_blocks"))
        effective: dict[str, Any] = {
            "block_size": _whole(info.get("block_size")),
            "kv_memory_bytes": None if blocks is None else (blocks - 1) * self._block_bytes,
            "prefix_caching": {"True": True, "False": False}.get(info.get("enable_prefix_caching", "")),
            "kv_cache_dtype": info.get("cache_dtype"),
            "max_model_len": models[0].get("max_model_len") if models else None,
        }
        if self.deployment.hardware.device == "cpu":
            effective["threads"] = len(self.deployment.hardware.server_cores) if self._bound() else None
        effective["raw"] = {
            "cache_config": info,
            "models": models,
            "command": self.command(),
            "preload": self.preloads(),
        }
        return effective

    def _bound(self) -> bool:
        """Whether its workers stay on the server's cores."""
        import psutil

        allowed = set(self.deployment.hardware.server_cores)
        try:
            family = psutil.Process(self.pid).children(recursive=True)
            workers = [item for item in family if "VLLM::Worker" in " ".join(item.cmdline())]
            return bool(workers) and all(set(item.cpu_affinity()) <= allowed for item in workers)
        except psutil.Error:
            return False

    def counters(self) -> Counters:
        """From `/metrics`; what vLLM only has as a histogram stays an aggregate."""
        rows = self.samples()

        def one(name: str) -> float | None:
            return http.total(rows, name)

        return Counters(
            preemptions=one("vllm:num_preemptions_total"),
            prefix_queries=one("vllm:prefix_cache_queries_total"),
            prefix_hits=one("vllm:prefix_cache_hits_total"),
            queue_s=one("vllm:request_queue_time_seconds_sum"),
            queue_n=one("vllm:request_queue_time_seconds_count"),
        )

    def watch(self) -> Watch:
        """Live KV is the used share of the pool; vLLM does not say what weights and workspace take."""
        pool = self._blocks * self._block_bytes
        limit, offloaded = self.deployment.hardware.memory_limit_gib, self._framework.offload_mib
        return Watch(
            metrics_url=f"{self.url}/metrics",
            pid=self.pid,
            gauges=(Gauge("vllm:kv_cache_usage_perc", "kv_live", "device", factor=float(pool)),),
            constants=(
                ("kv_reserved", "device", pool),
                ("weights", "device", self._weights()),
                *((("kv_reserved", "host", int(offloaded * (1 << 20))),) if offloaded else ()),
            ),
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
            gpu_process=self.deployment.hardware.device == "cuda",
            limit_bytes=int(limit * (1 << 30)) if limit else None,
        )

    def _weights(self) -> int:
        """Bytes of the weights in the served dtype, from the model's card (vLLM loads all of them)."""
        return int(self.launch.card.get("parameters", 0)) * BYTES[self.deployment.model.dtype]

    def reset(self) -> None:
        """Forget cached prefixes; vLLM keeps no peaks."""
        if self._framework.prefix_caching:
            http.request(f"{self.url}/reset_prefix_cache", timeout=30.0, data=b"")


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def environment_python(folder: Path) -> Path:
    """The interpreter of a built environment."""
    return folder / "bin" / "python"
