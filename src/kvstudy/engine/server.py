"""`python -m kvstudy.engine.server --config FILE`: bring one engine up behind an OpenAI-compatible URL.

With `tensor_parallel` N it is started N times, by `torchrun --nproc-per-node N -m kvstudy.engine.server`; the first
process answers clients.

Prints `kvstudy engine ready on http://HOST:PORT` when it answers. Exit codes: 0 stopped, 1 the engine failed,
2 wrong config, missing model or port in use (one last line on stderr each).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from pydantic import ValidationError

from kvstudy.engine.config import EngineConfig
from kvstudy.grid.secrets import API_KEY


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvstudy.engine.server", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args(argv)
    try:
        config = EngineConfig.read(arguments.config)
    except FileNotFoundError:
        return _refuse(f"no config file {arguments.config}")
    except ValidationError as error:
        return _refuse(f"{arguments.config}: {_first_line(error)}")
    # By the environment, because a file or a command line is there for others to read; and not for our own children.
    key = os.environ.pop(API_KEY, None)
    if config.api_key is None and key:
        config = config.model_copy(update={"api_key": key})
    if not (config.model_dir / "config.json").is_file():
        return _refuse(f"no model in {config.model_dir}: config.json is missing")
    leads = config.tensor_parallel == 1 or os.environ.get("RANK", "0") == "0"
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if leads:
            listener.bind((config.host, config.port))
    except OSError as error:
        return _refuse(f"cannot listen on {config.host}:{config.port}: {error.strerror}")
    _set_threads(config)
    # Only now: torch reads the thread settings when it is loaded.
    from kvstudy.engine import api

    try:
        if leads:
            api.serve(config, listener)
        else:
            api.join_others(config)
    except (api.ModelMissing, api.ModelUnsupported, api.NotShared, api.UnknownPolicy, api.WrongOptions) as error:
        return _refuse(str(error))
    except api.EngineFailed as error:
        _refuse(str(error))
        return 1
    return 0


def _set_threads(config: EngineConfig) -> None:
    """Pin to the cores, one OpenMP thread each.

    Idle OpenMP threads wait by spinning, for far longer than the gap between two layers; where client or
    server code wants the same core that costs whole milliseconds a step, so they spin for microseconds only.
    """
    if config.cores:
        os.sched_setaffinity(0, config.cores)
        os.environ["OMP_NUM_THREADS"] = str(len(config.cores))
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    choices = f" (there are: {', '.join(EngineConfig.model_fields)})" if first["type"] == "extra_forbidden" else ""
    return f"{where}: {first['msg']}{choices}"


def _refuse(line: str) -> int:
    print(f"kvstudy engine: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the engine's thread may be in the middle of a long step: it is not waited for
