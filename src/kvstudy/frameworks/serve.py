"""`kvstudy serve --visit VISIT.json --port 8000`: bring one deployment up and leave it running until Ctrl-C.

The same server, configuration and pinning that a measurement would use, in the foreground, to talk to by hand
or to point another load generator at. It holds the same lease as a measurement, so it waits for one that
runs. Others can reach it only where `--host` says so and KVSTUDY_API_KEY holds the key that they must send.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvstudy.arguments import port
from kvstudy.frameworks.base import OutOfMemory, Unavailable
from kvstudy.frameworks.launch import environment_folder, make_server, model_folder, read_visit
from kvstudy.frameworks.lease import lease
from kvstudy.grid.secrets import API_KEY
from kvstudy.grid.store import Layout


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: stopped by the user; 1: it died or does not fit; 2: one line says what is missing."""
    parser = argparse.ArgumentParser(prog="kvstudy serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--visit", type=Path, required=True, help="a visit of the plan: its deployment is served")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--freeze", type=Path, help="freeze file of the framework's environment")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    options = parser.parse_args(arguments)
    key = os.environ.get(API_KEY) or None
    if key is None and not _is_loopback(options.host):
        _say(
            f"kvstudy serve: --host {options.host} can be reached by others: set {API_KEY} to a key that they must "
            "send (Authorization: Bearer KEY)"
        )
        return 2

    def stop(signum: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: shells start background jobs with it ignored
        signal.signal(number, stop)
    try:
        deployment = read_visit(options.visit).deployment
        layout = Layout(options.results)
        model_dir = model_folder(deployment, layout)
        named = options.freeze.with_suffix("") if options.freeze is not None else None
        environment = named if named is not None and named.is_dir() else environment_folder(deployment, layout)
        with tempfile.TemporaryDirectory(prefix="kvstudy-serve-") as work, lease(deployment.devices, say=_say) as held:
            server = make_server(
                deployment, model_dir, environment, Path(work), held, host=options.host, port=options.port, api_key=key
            )
            _say(f"bringing up {deployment.slug}")
            try:
                server.bring_up(deployment.framework.bring_up_s)
                print(f"{deployment.slug} ready on {server.url} (model {server.model_name})", flush=True)
                _say(json.dumps({k: v for k, v in server.effective_config().items() if k != "raw"}))
                _say(f"its output: {server.log}")
                reason = None
                while reason is None:
                    time.sleep(0.5)
                    reason = server.failure()
                _say(f"kvstudy serve: the server is gone: {reason}")
                return 1
            finally:
                server.stop()
    except KeyboardInterrupt:
        return 0
    except OutOfMemory as error:
        _say(f"kvstudy serve: it does not fit: {error}")
        return 1
    except (Unavailable, OSError) as error:
        _say(f"kvstudy serve: {' '.join(str(error).split())}")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
