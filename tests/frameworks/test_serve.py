"""`kvstudy serve`: asks for a key from end to end, says when its server has gone, and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvstudy.frameworks import serve
from kvstudy.frameworks.base import free_port
from kvstudy.grid.schema import Deployment, Full, Hardware, Model, Visit
from kvstudy.load import client

CORES = sorted(os.sched_getaffinity(0))


class Dying:
    """A server that is up, and dead at the second look."""

    url, model_name, log = "http://127.0.0.1:1", "m", "log"

    def __init__(self) -> None:
        self.looks, self.stopped = 0, False

    def bring_up(self, bound_s: float) -> None:
        pass

    def effective_config(self) -> dict[str, Any]:
        return {}

    def failure(self) -> str | None:
        self.looks += 1
        return "kvstudy engine: the engine failed: KeyError: 3" if self.looks > 1 else None

    def stop(self) -> None:
        self.stopped = True


def test_a_server_that_dies_ends_serve_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    deployment = Deployment(
        framework=Full(),
        model=Model(name="m", source="folder", path="x", max_model_len=64),
        hardware=Hardware(name="cpu", device="cpu", server_cores=CORES[:1], client_cores=CORES[-1:]),
        kv_memory_mib=1,
        harness_version=1,
    )
    visit = tmp_path / "visit.json"
    visit.write_text(Visit(id="v", study="s", deployment=deployment, cells=()).model_dump_json())
    dying = Dying()
    monkeypatch.setattr(serve, "make_server", lambda *_, **__: dying)
    monkeypatch.setattr(serve, "model_folder", lambda *_: tmp_path)
    assert serve.main(["--visit", str(visit), "--results", str(tmp_path)]) == 1
    assert dying.stopped
    assert capsys.readouterr().err.splitlines()[-1] == (
        "kvstudy serve: the server is gone: kvstudy engine: the engine failed: KeyError: 3"
    )


KEY = "sesame-open-0123"


@pytest.fixture(
    params=[
        pytest.param(("study=tiny", "framework=full"), id="engine"),
        pytest.param(("study=quick", "framework=vllm"), id="vllm", marks=pytest.mark.long),
    ]
)
def served(
    request: pytest.FixtureRequest, checkout: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`kvstudy serve` with a key in its environment; its process, URL and model."""
    results: Path = request.getfixturevalue("vllm_results" if "framework=vllm" in request.param else "results")
    arguments = [*request.param, "--results", str(results), "--port", str(free_port())]
    path = os.pathsep.join(item for item in sys.path if item)
    env = os.environ | {"KVSTUDY_API_KEY": KEY, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": path}
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, "-m", "kvstudy.cli", "serve", *arguments]
        process = subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=said, text=True)
    try:
        assert process.stdout is not None
        line = next((text for text in process.stdout if " ready on " in text), "")
        ready = re.search(r" ready on (http://127\.0\.0\.1:\d+) \(model (.+)\)$", line)
        assert ready, (tmp_path / "said").read_text()
        yield process, ready[1], ready[2]
        assert KEY not in (tmp_path / "said").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_key_is_asked_for_and_sent(served: tuple[subprocess.Popen[str], str, str]) -> None:
    process, url, model = served
    plan = client.Plan(
        [client.Request(at, "short", 4, 3, client.completion_body(model, [5, 6, 7, 8], 3)) for at in range(4)],
        duration_s=60.0,
        timeout_s=60.0,
        drain_s=60.0,
        concurrency=2,
    )
    for key in (None, "wrong"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert httpx.post(f"{url}{path}", json={"prompt": "x"}, headers=headers).status_code == 401
        refused = client.run(plan, url, api_key=key).frame
        assert (refused["status"] == "error").all() and refused["error"].str.contains("401").all()
    found = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert found.status_code == 200 and found.json()["data"][0]["id"] == model
    answered = client.run(plan, url, api_key=KEY).frame
    assert list(answered["status"]) == ["ok"] * 4 and list(answered["output_tokens"]) == [3] * 4
    assert httpx.get(f"{url}/health").status_code == 200

    family = psutil.Process(process.pid).children(recursive=True)
    assert not [item for item in family if KEY in " ".join(item.cmdline())], "everybody can read command lines"
    listening = {at.laddr.ip for item in family for at in item.net_connections("tcp") if at.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
