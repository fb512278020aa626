"""MLflow as a person browses it: its own pages in a real Chromium show what a person looks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from fabricate import Spec, fabricate

from kvstudy.analysis.plan import read_plan
from kvstudy.tracking import mlflow_sync as tracking

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

SPECS = [Spec("vllm", 10.0), Spec("vllm", 9.0), Spec("full", 9.0), Spec("h2o", 9.0, budget=0.3)]
#: Text of a page of MLflow (the fragment after #/experiments/) once it shows some words.
Page = Callable[[str, str], str]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A made-up study in MLflow, with a figure and a report on its parent run."""
    root = tmp_path_factory.mktemp("browsed")
    plan = fabricate(root, "study", SPECS)
    (root / "study" / "figures").mkdir(parents=True)
    (root / "study" / "figures" / "ttft_vs_rate.png").write_bytes(b"\x89PNG made up")
    (root / "study" / "report.pdf").write_bytes(b"%PDF made up")
    out = root / "tracking.json"
    arguments = ["--plan", str(plan), "--results", str(root), "--uri", f"sqlite:///{root}/mlflow.db", "--out", str(out)]
    assert tracking.main(arguments) == 0
    assert len(read_plan(plan).cells) == len(SPECS)
    return root, json.loads(out.read_text())


@pytest.fixture(scope="module")
def page(tracked: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Open a page of `mlflow ui` (as `make ui` starts it) in Chromium; returns its text once it shows some words."""
    root, _ = tracked
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{root}/mlflow.db"]
    profile = tmp_path_factory.mktemp("chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1600,1200"]
    flags += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with (root / "ui.log").open("w") as log:
        server = subprocess.Popen([*command, "--port", str(port), "--workers", "1"], stdout=log, stderr=log)
        browser = subprocess.Popen([str(CHROMIUM), *flags], stdout=log, stderr=log)
    try:
        _await(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close(), root / "ui.log")
        _await(lambda: (profile / "DevToolsActivePort").read_text().splitlines()[1], root / "ui.log")
        debugging = (profile / "DevToolsActivePort").read_text().splitlines()[0]

        def text(fragment: str, words: str) -> str:
            url = f"http://127.0.0.1:{port}/#/experiments/{fragment}"
            return asyncio.run(_text_of(f"http://127.0.0.1:{debugging}", url, words))

        yield text
    finally:
        for process in (browser, server):
            process.terminate()
            process.wait(20)


def _await(ready: Callable[[], object], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(OSError, IndexError):
            ready()
            return
        time.sleep(0.3)
    pytest.fail(f"it did not come up: {log.read_text()[-500:]}")


async def _text_of(devtools: str, url: str, words: str, bound_s: float = 120.0) -> str:
    """What a person reads on a page, as soon as it shows `words` (or after `bound_s`), over Chromium's own protocol."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{devtools}/json/new?{quote(url, safe='')}") as answer:
            target = await answer.json(content_type=None)
        asked = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": "document.body.innerText"}}
        shown = ""
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket_:
            until = time.monotonic() + bound_s
            while words not in shown and time.monotonic() < until:
                await asyncio.sleep(0.5)
                await socket_.send_json(asked)
                shown = str((await socket_.receive_json())["result"]["result"].get("value", ""))
        async with session.get(f"{devtools}/json/close/{target['id']}"):
            return shown


NAME = "smollm2-135m-instruct · chat-small"


#: Runs by offered rate, the largest first: sorted by a metric, MLflow lists cells beside their study, not below it.
ORDER = "orderByKey=metrics.%60axis%2Frate%60&orderByAsc=false"


def test_runs_read_like_the_study_and_sort_by_an_axis_as_numbers(
    page: Page, tracked: tuple[Path, dict[str, Any]]
) -> None:
    """As text, 10 would come after 9 when the largest is asked for first."""
    text = page(f"{tracked[1]['experiment_id']}/runs?{ORDER}", f"vllm · {NAME} 9/s")
    assert text.index(f"vllm · {NAME} 10/s") < text.index(f"vllm · {NAME} 9/s")
    for name in ("full", "h2o b=0.3", "vllm"):
        assert f"{name} · {NAME} 9/s · seed 0" in text, name
    assert f"{len(SPECS) + 1} matching runs" in text and "A made-up study" in text


def test_a_run_shows_its_metrics_params_and_cell(page: Page, tracked: tuple[Path, dict[str, Any]]) -> None:
    cell, run = next((cell, run) for cell, run in tracked[1]["runs"].items() if cell.startswith("h2o"))
    text = page(f"{tracked[1]['experiment_id']}/runs/{run}", "budget_share")
    for word in (cell, "budget_share", "0.3", "axis/"):
        assert word in text, word


def test_the_parent_run_holds_figures_and_report(page: Page, tracked: tuple[Path, dict[str, Any]]) -> None:
    _, found = tracked
    text = page(f"{found['experiment_id']}/runs/{found['parent_run_id']}/artifacts", "report.pdf")
    assert "figures" in text and "report.pdf" in text
