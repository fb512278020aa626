"""`kvstudy serve`: says when its server has gone, and ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstudy.frameworks import serve
from kvstudy.grid.schema import Deployment, Full, Hardware, Model, Visit

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
