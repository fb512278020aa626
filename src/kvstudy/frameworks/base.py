"""What every framework's server answers, and how a server process is started, watched and stopped.

A framework's module gives a command, an environment and the names of its metrics; everything that must be the
same for all is here: own process group, pinned to `hardware.server_cores`, output to a file, a bound on the
time to come up, and the reading of the end of that file when it dies. Faults of the installation
(`Unavailable`) are told from results (`OutOfMemory`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvstudy.frameworks import http
from kvstudy.grid import secrets
from kvstudy.grid.schema import Deployment

MIB = 1 << 20
_TAIL_BYTES = 200_000
#: Seconds that a server may take to end when told to, and to answer what is asked about it.
STOP_S = 10.0
ANSWER_S = 10.0
_KEEPER_S = 12.0

Death = Literal["oom", "port", "model", "crashed"]


class Unavailable(Exception):
    """The installation is at fault (no binary, no model, port in use): one line that says what to do."""


class OutOfMemory(Exception):
    """The deployment does not fit into its memory. That is a result, not a fault."""


@dataclass(frozen=True)
class Gauge:
    """A metric of the server that is a memory of ours: bytes = value x `factor`, summed over its samples.

    `since_start` subtracts the value at the start of the load (counters).
    """

    metric: str
    kind: str
    tier: str
    factor: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
    since_start: bool = False


@dataclass(frozen=True)
class Watch:
    """What the memory sampler must know; plain data, because it runs in a process of its own."""

    metrics_url: str
    pid: int
    gauges: tuple[Gauge, ...]
    constants: tuple[tuple[str, str, int], ...] = ()  # (kind, tier, bytes)
    running: str | None = None  # metric of running requests
    waiting: str | None = None
    gpu_process: bool = False  # ask NVML what the process tree holds
    limit_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For the sampler's standard input."""
        return asdict(self)


@dataclass
class Counters:
    """What a server has counted since it started; None where it does not say. Differences belong to a load."""

    attended_entries: float | None = None
    full_entries: float | None = None
    kept_entries: float | None = None
    preemptions: float | None = None
    moved_h2d: float | None = None
    moved_d2h: float | None = None
    prefix_queries: float | None = None  # prompt tokens looked up in a prefix cache
    prefix_hits: float | None = None
    queue_s: float | None = None  # sum over requests, where the server has only a histogram
    queue_n: float | None = None
    kv_live_peak_device: float | None = None  # since the last reset; not a counter
    kv_live_peak_host: float | None = None
    workspace_peak: float | None = None
    running_peak: float | None = None
    waiting_peak: float | None = None
    queued: float | None = None  # requests that had to wait for admission
    queued_for_memory: float | None = None  # those of them that waited for KV memory


class Server(Protocol):
    """A framework that is up."""

    url: str
    model_name: str

    def asked(self) -> dict[str, Any]:
        """What the effective config must say, by our names."""

    def effective_config(self) -> dict[str, Any]:
        """What the server says it runs with, by our names, and under `raw` in its own."""

    def counters(self) -> Counters:
        """The server's counters now."""

    def watch(self) -> Watch:
        """How to sample its memory."""

    def reset(self) -> None:
        """Forget peaks and cached prefixes of an earlier load."""

    def failure(self) -> str | None:
        """Why it is dead, in one line; None while it lives."""

    def death(self) -> Death:
        """The class of its death."""

    def killed(self) -> bool:
        """Whether SIGKILL ended it, which is never its own doing."""

    def stop(self) -> None:
        """Take it down, whatever state it is in; returns when its processes are gone."""

    def log_size(self) -> int:
        """Bytes it has printed so far."""

    def log_text(self, start: int = 0) -> str:
        """What it has printed from that byte on."""


# --- the end of a log ----------------------------------------------------------------------------

_OOM = re.compile(
    r"CUDA out of memory|OutOfMemoryError|MemoryError|bad_alloc|[Cc]annot allocate memory|can't allocate memory"
    r"|not enough memory|No available memory for the cache|larger than the available KV cache memory"
    r"|is less than desired|less than requested memory for kv|out of memory",
)
_PORT = re.compile(r"[Aa]ddress already in use|Errno 98|cannot listen on", re.DOTALL)
_MODEL = re.compile(
    r"is not a valid model identifier|does not appear to have a file named|no model in|[Mm]odel ?[Mm]issing"
    r"|is not a prepared model|Can't load the (?:model|configuration|tokenizer)|No such file or directory: .*model"
)
_LINE = re.compile(r"^[A-Za-z_.]*(?:Error|Exception|Exit|Interrupt)\b.*|^kvstudy engine: .*|^.*\berror\b.*", re.M)


def classify(tail: str, returncode: int | None, memory_kill: bool = False) -> Death:
    """Why a server died, from the end of what it printed and its exit code.

    SIGKILL is the kernel's way to end what takes too much memory, and anybody's way to end anything: `memory_kill`
    says that the kernel has killed a process for that since the server was started.
    """
    if _OOM.search(tail) or (returncode == -signal.SIGKILL and memory_kill):
        return "oom"
    if _PORT.search(tail):
        return "port"
    if _MODEL.search(tail):
        return "model"
    return "crashed"


def last_words(tail: str, returncode: int | None) -> str:
    """The line of a log that says most about a death, without secrets."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    for pattern in (_OOM, _PORT, _MODEL, _LINE):
        for line in reversed(lines):
            if pattern.search(line):
                return secrets.redact(re.sub(r"\x1b\[[0-9;]*m", "", line))[:300]
    ended = f"exit code {returncode}" if returncode is not None else "no exit code"
    if returncode is not None and returncode < 0:
        ended = f"killed by {signal.Signals(-returncode).name}"
    return ended if not lines else f"{ended}; its last line: {secrets.redact(lines[-1])[:250]}"


# --- a server process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Everything a framework's module needs to bring a deployment up."""

    deployment: Deployment
    model_dir: Path
    card: dict[str, Any]  # model.json of the prepared model
    environment_dir: Path | None  # of frameworks that have one
    work_dir: Path  # for the log and generated config
    gpu_ids: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()  # leases, which must live as long as the server
    port: int = 0
    host: str = "127.0.0.1"
    api_key: str | None = None  # what clients must send; handed on by the environment alone

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return int(self.deployment.kv_memory_mib * MIB)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return int(self.card["kv_bytes_per_token"])

    @property
    def max_model_len(self) -> int:
        """What the model takes, or what the pool can hold of one request's whole cache, whichever is less."""
        return min(self.deployment.model.max_model_len, self.kv_bytes // self.kv_bytes_per_token)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise `Unavailable` if something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror} (choose another --port)") from error


KEEPER = Path(__file__).with_name("keeper.py")


class Kept(subprocess.Popen[bytes]):
    """A server's keeper: it ends when the server and all its descendants have, and as the server ended."""

    server_pid: int


def start(
    command: Sequence[str],
    *,
    env: dict[str, str],
    log: Path,
    cores: Sequence[int],
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
    scratch: Path | None = None,
) -> Kept:
    """Start a command under a keeper, in a process group of its own, pinned to `cores`, printing to `log`.

    Nothing of it outlives this process, which may be killed; `scratch` is removed then too.

    Raises
    ------
    Unavailable
        The command or a core is not there.
    """
    if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
        raise Unavailable(f"cannot start {command[0]}: there is no such program")
    mine = os.sched_getaffinity(0)
    told, report = os.pipe()
    env = env | {"KVSTUDY_KEEPER_PID": str(report)}
    if scratch is not None:
        env["KVSTUDY_KEEPER_SCRATCH"] = str(scratch)
    with open(told, "rb") as answer:
        try:
            if cores:
                try:
                    # Inherited by the child, so that it is pinned from its first instruction.
                    os.sched_setaffinity(0, cores)
                except OSError as error:
                    raise Unavailable(
                        f"hardware.server_cores names cores {list(cores)}, of which this machine lacks some "
                        f"(it has {os.cpu_count()}): correct conf/hardware"
                    ) from error
            with log.open("ab") as out:
                process = Kept(
                    [sys.executable, "-I", "-S", str(KEEPER), *command],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(*pass_fds, report),
                    cwd=cwd,
                )
        finally:
            os.close(report)
            os.sched_setaffinity(0, mine)
        process.server_pid = int(answer.readline() or process.pid)
    return process


def stop_group(process: Kept, wait_s: float = STOP_S) -> None:
    """Stop a server: SIGTERM to its group, and after `wait_s` SIGKILL to all that descends from it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    assert process.stdin is not None
    if not process.stdin.closed:
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), b"end")
        process.stdin.close()
    try:
        process.wait(_KEEPER_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def memory_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it booted; None where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


class ServerProcess(ABC):
    """A server run as a process of ours. Subclasses give the command and the names of its metrics."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.deployment = launch.deployment
        self.port = launch.port or free_port()
        self.url = f"http://{launch.host}:{self.port}"
        self.model_name = launch.deployment.model.name
        self.log = launch.work_dir / f"server-{self.port}.log"
        self.process: Kept | None = None
        self.bring_up_s = 0.0
        self._memory_kills = memory_kills()

    @property
    def pid(self) -> int:
        """The server's own process; its parent is the keeper."""
        assert self.process is not None
        return self.process.server_pid

    def process_cores(self) -> Sequence[int]:
        """Cores that its processes may run on; what computes is always bound to `hardware.server_cores`."""
        return self.deployment.hardware.server_cores

    @abstractmethod
    def command(self) -> list[str]:
        """The command line."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Environment variables of the process."""

    @abstractmethod
    def asked(self) -> dict[str, Any]:
        """What the effective config must say, by our names."""

    @abstractmethod
    def effective_config(self) -> dict[str, Any]:
        """What the server says it runs with."""

    @abstractmethod
    def counters(self) -> Counters:
        """The server's counters now."""

    @abstractmethod
    def watch(self) -> Watch:
        """How to sample its memory."""

    @abstractmethod
    def reset(self) -> None:
        """Forget peaks and cached prefixes."""

    def bring_up(self, bound_s: float, waiting: Callable[[float], None] | None = None) -> None:
        """Start and wait until it is healthy.

        Raises
        ------
        Unavailable
            It ended, or did not answer within `bound_s`; the message has its last words.
        OutOfMemory
            It ended for want of memory.
        """
        check_port(self.launch.host, self.port)
        begun = time.monotonic()
        self.process = start(
            self.command(),
            env=self.environment(),
            log=self.log,
            cores=self.process_cores(),
            pass_fds=self.launch.pass_fds,
            cwd=self.launch.work_dir,
            scratch=self.launch.work_dir,
        )
        while True:
            elapsed = time.monotonic() - begun
            if self.process.poll() is not None:
                words = last_words(self.log_tail(), self.process.returncode)
                kind = self.death()
                self.stop()
                if kind == "oom":
                    raise OutOfMemory(words)
                name = self.deployment.framework.name
                raise Unavailable(f"{name} did not come up: {words}")
            if http.is_healthy(self.url):
                break
            if elapsed > bound_s:
                self.stop()
                raise Unavailable(
                    f"{self.deployment.framework.name} was not up after {bound_s:g} s "
                    f"(framework.bring_up_s); it said last: {last_words(self.log_tail(), None)}"
                )
            if waiting is not None:
                waiting(elapsed)
            time.sleep(0.1)
        self.bring_up_s = time.monotonic() - begun

    def failure(self) -> str | None:
        """Why it is dead; None while it lives."""
        if self.process is None:
            return "not started"
        code = self.process.poll()
        if code is None:
            return None
        return last_words(self.log_tail(), code)

    def killed(self) -> bool:
        """Whether SIGKILL ended it, which is never its own doing."""
        return self.process is not None and self.process.poll() == -signal.SIGKILL

    def death(self) -> Death:
        """The class of its death."""
        now, before = memory_kills(), self._memory_kills
        killed = now is not None and before is not None and now > before
        return classify(self.log_tail(), self.process.returncode if self.process else None, killed)

    def stop(self) -> None:
        """Take it down."""
        if self.process is not None:
            stop_group(self.process, STOP_S)

    def log_size(self) -> int:
        """Bytes printed so far."""
        return self.log.stat().st_size if self.log.exists() else 0

    def log_text(self, start: int = 0) -> str:
        """What it has printed from that byte on."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as handle:
            handle.seek(start)
            return handle.read().decode(errors="replace")

    def log_tail(self) -> str:
        """The end of what it has printed."""
        return self.log_text(max(0, self.log_size() - _TAIL_BYTES))

    def samples(self) -> list[http.Sample]:
        """Its metrics now."""
        return http.parse_metrics(http.request(f"{self.url}/metrics", timeout=ANSWER_S))


#: Thread counts that the caller's environment may hold. Snakemake sets all of them to a job's `threads`, which is the
#: whole machine here: a server bound to one core would run two threads on it, each spinning while the other works.
THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def base_environment() -> dict[str, str]:
    """The environment a server inherits: ours without thread counts and secrets, told to stay offline and quiet."""
    env = {name: value for name, value in secrets.without(os.environ).items() if name not in THREAD_COUNTS}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    return env
