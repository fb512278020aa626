"""The batch server over HTTP, as our client and OpenAI's see it, over a stand-in loop."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from kvstudy.frameworks import http
from kvstudy.frameworks.upstream.batch_server.serving import BatchServer, Text
from kvstudy.load import client
from kvstudy.load.flights import Request

from .stand_in import StandIn


class Letters:
    """A tokenizer: id n is the letter n."""

    eos_token_id = 90
    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 32) for i in ids)


@pytest.fixture
def served() -> Iterator[tuple[str, StandIn]]:
    loop = StandIn(step_s=0.01)
    config = {"served_model_name": "m", "max_batch": 2, "max_wait_s": 0.5, "kv_memory_bytes": 400}
    server = BatchServer(config, loop, Letters()).listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", loop
    server.shutdown()
    server.server_close()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=20) as answer:
        value: dict[str, Any] = json.loads(answer.read())
    return value


def refused(url: str, body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, body)
    assert caught.value.code == 400
    return str(json.loads(caught.value.read())["error"]["message"])


def test_openai_client_streams_from_it(served: tuple[str, StandIn]) -> None:
    url, _ = served
    with OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        chunks = list(
            openai.completions.create(
                model="m", prompt="AB", max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
        )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "CDE"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


def test_our_client_counts_tokens_and_times_them(served: tuple[str, StandIn]) -> None:
    url, loop = served
    prompts = [np.arange(1, 9), np.arange(1, 9), np.arange(1, 6)]
    bodies = [client.completion_body("m", prompt, 6) for prompt in prompts]
    requests = [Request(i, "short", len(p), 6, b) for i, (p, b) in enumerate(zip(prompts, bodies, strict=True))]
    plan = client.Plan(requests, duration_s=5, timeout_s=10, drain_s=10, times=np.array([0.0, 0.001, 0.002]))
    frame = client.run(plan, url).frame
    assert list(frame["status"]) == ["ok"] * 3 and list(frame["output_tokens"]) == [6, 6, 6]
    assert all(sum(tokens) == 6 for tokens in frame["chunk_tokens"])
    # As the loop yields them: six tokens are five steps apart, whatever the machine does meanwhile.
    assert all(times[-1] - times[0] > 0.9 * 5 * loop.step_s for times in frame["chunk_s"])
    # The third has another length: it waited for the first batch to end, and the server says so.
    assert loop.batches == [[8, 8], [5]]
    assert frame["server_queue_s"].iloc[2] > frame["server_queue_s"].iloc[0]


def test_what_the_fork_cannot_do_is_a_400_with_the_reason(served: tuple[str, StandIn]) -> None:
    url, loop = served
    assert "more than 1000" in refused(url, {"prompt": [1] * 900, "max_tokens": 200})
    assert "stop strings" in refused(url, {"prompt": [1], "stop": "x"})
    assert "does not exist" in refused(url, {"prompt": [1], "model": "other"})
    assert "not empty" in refused(url, {"prompt": []})
    assert "one answer" in refused(url, {"prompt": [1], "n": 2})
    assert "JSON object" in refused(url, [1])
    assert "max_tokens" in refused(url, {"prompt": [1], "max_tokens": 0.5})
    assert loop.batches == []


def test_batches_respect_the_kv_memory(served: tuple[str, StandIn]) -> None:
    url, loop = served
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: post(url, {"prompt": [1] * 200, "max_tokens": 20}), range(2)))
    assert [a["usage"]["completion_tokens"] for a in answers] == [20, 20]
    assert loop.batches == [[200], [200]]  # 2 x 220 bytes are more than 400


def test_metrics_have_the_names_of_our_engine(served: tuple[str, StandIn]) -> None:
    url, _ = served
    post(url, {"prompt": "A", "max_tokens": 5})
    rows = http.parse_metrics(http.request(f"{url}/metrics", timeout=5))
    assert http.total(rows, "kvstudy_generation_tokens_total") == 5
    assert http.total(rows, "kvstudy_kv_live_bytes", tier="device") == 7
    assert http.total(rows, "kvstudy_requests_finished_total", reason="length") == 1
    assert http.total(rows, "kvstudy_workspace_peak_bytes") is None
    assert http.get_json(f"{url}/config")["config"]["max_batch"] == 2
    assert http.is_healthy(url)


def test_a_client_that_leaves_frees_its_batch(served: tuple[str, StandIn]) -> None:
    url, loop = served
    loop.step_s = 0.05
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps({"prompt": "A", "max_tokens": 300, "stream": True}).encode()
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        answer.readline()
    assert post(url, {"prompt": "AB", "max_tokens": 1})["usage"]["completion_tokens"] == 1
    assert loop.steps[0] < 300


def test_a_key_is_asked_for_where_there_is_one() -> None:
    server = BatchServer({"served_model_name": "m", "max_batch": 1, "max_wait_s": 0}, StandIn(), Letters(), "secret")
    listening = server.listen("127.0.0.1", 0)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{listening.server_address[1]}"
    assert http.is_healthy(url)
    for path in ("/metrics", "/config", "/v1/completions"):
        with pytest.raises(OSError, match="401"):
            http.request(url + path, timeout=5, data=b"{}" if "v1" in path else None, key="wrong")
    assert "kvstudy_" in http.request(f"{url}/metrics", timeout=5, key="secret")
    listening.shutdown()
    listening.server_close()


def test_text_holds_back_half_a_character() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    text = Text(Bytes())
    assert [text.add(token) for token in "aé€".encode()] == ["a", "", "é", "", "", "€"]
