"""The server as clients see it: driven by the `openai` client, and by hand where that cannot go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_tiny import random_prompt

from kvstudy.frameworks.base import classify, last_words

MODULE = ("-m", "kvstudy.engine.server")
BREAKS_DOWN = """
import os, sys
from kvstudy.engine import core, server
step = core.Engine.step
def failing(engine):
    outputs = step(engine)
    if engine.counters.steps == 5:
        raise RuntimeError("the fifth\\nstep")
    return outputs
core.Engine.step = failing
os._exit(server.main(sys.argv[1:]))
"""
"""The server, but its engine fails in its fifth step."""
Launch = Callable[..., "Server"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}


class Server:
    def __init__(self, folder: Path, config: dict[str, Any], program: tuple[str, ...] = MODULE) -> None:
        file = folder / "engine.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, *program, "--config", str(file)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def wait(self) -> Server:
        assert self.process.stdout and self.process.stderr
        line = self.process.stdout.readline()
        ready = re.fullmatch(r"kvstudy engine ready on (http://127\.0\.0\.1:\d+)\n", line)
        assert ready, line + self.process.stderr.read()
        self.url = ready[1]
        return self

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}

    def stop(self) -> float:
        """Seconds it takes to stop."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10) == 0
        return time.monotonic() - begin


@pytest.fixture(scope="module")
def server(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "model_dir": str(llama_dir),
        "served_model_name": "tiny",
        "dtype": "float32",
        "kv_memory_bytes": 3 * 2 * 2 * 16 * 4 * 8000,  # entries
        "other_policies": {"streaming": {"sinks": 2}},
        "budget": {"share": 0.5},
    }
    running = Server(tmp_path_factory.mktemp("server"), config).wait()
    yield running
    assert running.stop() < 2.0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


FREE = {"ignore_eos": True}


def test_completion(client: openai.OpenAI) -> None:
    prompt = random_prompt(12)
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, extra_body=FREE)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 6, 18)


def test_text_and_token_prompts_are_the_same(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, extra_body=FREE)
        .choices[0]
        .text
        for prompt in ("hello", list(b"hello"), ["hello"])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_chat_uses_the_template(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0, extra_body=FREE
    )
    plain = client.completions.create(
        model="tiny", prompt="<user>hi<assistant>", max_tokens=5, temperature=0, extra_body=FREE
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage is not None and chat.usage.prompt_tokens == len("<user>hi<assistant>")


def test_streaming_gives_a_chunk_a_token_with_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    ask: Any = {"model": "tiny", "prompt": "stream", "max_tokens": 9, "temperature": 0, "extra_body": FREE}
    *chunks, last = client.completions.create(**ask, stream=True, stream_options=options)
    assert [chunk.usage.completion_tokens for chunk in chunks] == list(range(1, 10))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert "".join(chunk.choices[0].text for chunk in chunks) == client.completions.create(**ask).choices[0].text
    assert last.choices == [] and last.usage.total_tokens == 6 + 9
    extension = last.model_extra["kvstudy"]
    assert extension["queue_s"] >= 0 and extension["prefill_s"] > 0 and extension["decode_s"] > 0
    assert extension["attended_share"] == 1.0


def test_chat_streaming_begins_with_the_role(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_body=FREE,
    )
    first, *chunks = stream
    assert first.choices[0].delta.role == "assistant"
    assert len(chunks) == 4
    assert all(chunk.usage is None for chunk in chunks)


def test_stop_strings_end_it_and_are_not_shown(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "prompt": "stop here", "temperature": 0, "max_tokens": 24, "extra_body": FREE}
    free = client.completions.create(**ask).choices[0].text
    stop = free[5:7]
    ended = client.completions.create(**ask, stop=[stop]).choices[0]
    streamed = list(client.completions.create(**ask, stop=stop, stream=True))
    assert ended.finish_reason == "stop"
    assert ended.text == free[: free.index(stop)]
    assert "".join(chunk.choices[0].text for chunk in streamed) == ended.text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=3, temperature=0, logprobs=2, extra_body=FREE
    )
    got = answer.choices[0].logprobs
    assert got is not None and got.token_logprobs is not None
    assert len(got.token_logprobs) == 3 and all(p <= 0 for p in got.token_logprobs)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=FREE,
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None
    assert content.content[0].top_logprobs[0].logprob == pytest.approx(content.content[0].logprob)


def test_a_request_may_name_its_policy(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=random_prompt(40), max_tokens=5, extra_body=FREE | {"kvstudy_policy": "streaming"}
    )
    assert answer.model_extra is not None
    assert answer.model_extra["kvstudy"]["policy"] == "streaming"
    assert answer.model_extra["kvstudy"]["attended_share"] < 0.5


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 20000}, 400, "maximum context length is 16384"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [5, 100000]}, 400, "outside"),
        ({"prompt": ["a", "b"]}, 400, "one prompt"),
        ({"n": 2}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"extra_body": {"kvstudy_policy": "nonsense"}}, 400, "full, streaming"),
        ({"prompt": [1] * 450, "max_tokens": 9000}, 400, "device KV memory"),
    ],
)
def test_errors_are_openais(change: dict[str, Any], status: int, says: str, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**(ask | change))
    assert caught.value.status_code == status
    assert says in caught.value.body["message"]  # type: ignore[index, operator, call-overload]
    assert {"message", "type", "param", "code"} <= set(caught.value.body)  # type: ignore[arg-type]


def test_bad_json_bad_path_and_large_body(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.get(f"{server.url}/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.post(url, content=b"x" * (33 << 20)).status_code == 413
    assert httpx.post(f"{server.url}/v1/chat/completions", json={"messages": []}).status_code == 400


def test_a_client_that_leaves_is_forgotten(server: Server) -> None:
    ask = {"prompt": [1] * 20, "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as response:
        lines = response.iter_lines()  # kept: dropping the iterator closes the connection
        next(lines)
        assert server.metrics()["kvstudy_requests_running"] == 1
    until = time.monotonic() + 5
    while server.metrics()["kvstudy_requests_running"] and time.monotonic() < until:
        time.sleep(0.01)
    metrics = server.metrics()
    assert metrics["kvstudy_requests_running"] == 0
    assert metrics['kvstudy_kv_live_bytes{tier="device"}'] == 0
    assert metrics['kvstudy_requests_finished_total{reason="abort"}'] >= 1


def test_requests_overlap(client: openai.OpenAI, server: Server) -> None:
    streams = [
        client.completions.create(
            model="tiny", prompt=random_prompt(10, n), max_tokens=40, stream=True, extra_body=FREE
        )
        for n in range(3)
    ]
    assert [sum(1 for _ in stream) for stream in streams] == [40, 40, 40]
    assert server.metrics()["kvstudy_requests_running_peak"] >= 2


def test_models_health_config_metrics_and_reset(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    config = httpx.get(f"{server.url}/config").json()
    assert config["config"]["budget"] == {"share": 0.5, "of": "prompt"}
    assert config["model"]["kv_heads"] == 2
    assert "api_key" not in config["config"]
    client.completions.create(model="tiny", prompt="count", max_tokens=3, extra_body=FREE)
    before = server.metrics()
    assert before["kvstudy_generation_tokens_total"] >= 3
    assert before["kvstudy_weights_bytes"] > 0
    assert before['kvstudy_kv_reserved_bytes{tier="device"}'] == config["kv"]["device"]["bytes"]
    httpx.post(f"{server.url}/reset")
    after = server.metrics()
    assert after["kvstudy_generation_tokens_total"] == 0
    assert after['kvstudy_kv_live_peak_bytes{tier="device"}'] == 0


def test_api_key_queue_limit_and_stopping_with_open_streams(llama_dir: Path, tmp_path: Path) -> None:
    config = {
        "model_dir": str(llama_dir),
        "dtype": "float32",
        "kv_memory_bytes": 1 << 25,
        "api_key": "secret",
        "max_num_seqs": 1,
        "max_queue": 1,
    }
    server = Server(tmp_path, config).wait()
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, json={"prompt": "x"}).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    ask = {"prompt": "x", "max_tokens": 16000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=ask, headers=headers) as first:
        lines = first.iter_lines()
        next(lines)
        with httpx.stream("POST", url, json=ask, headers=headers):
            refused = httpx.post(url, json={"prompt": "x"}, headers=headers)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert server.stop() < 2.0


def test_a_failing_engine_ends_its_streams_and_the_process(llama_dir: Path, tmp_path: Path) -> None:
    config = {"model_dir": str(llama_dir), "dtype": "float32"}
    server = Server(tmp_path, config, ("-c", BREAKS_DOWN)).wait()
    ask = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(events) == 4 + 2 and "the fifth" in json.loads(events[-2][6:])["error"]["message"]
    _, stderr = server.process.communicate(timeout=10)
    assert server.process.returncode == 1
    assert stderr.splitlines()[-1] == "kvstudy engine: the engine failed: RuntimeError: the fifth step"
    # What a visit and `kvstudy serve` make of it.
    assert (classify(stderr, 1), last_words(stderr, 1)) == ("crashed", stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"port": "busy"}, "cannot listen on 127.0.0.1"),
        ({"model_dir": "/nowhere"}, "no model in /nowhere"),
        ({"polcy": "full"}, "polcy: Extra inputs are not permitted"),
        ({"policy": "nonsense"}, "unknown policy 'nonsense'; there are: full"),
        (
            {"policy": "streaming", "policy_options": {"sink": 3}},
            "sink: Extra inputs are not permitted (its options: sinks)",
        ),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(
    change: dict[str, Any], says: str, llama_dir: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = {"model_dir": str(llama_dir), "dtype": "float32"} | change
        if config.get("port") == "busy":
            config["port"] = taken.getsockname()[1]
        server = Server(tmp_path, config)
        _, stderr = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert stderr.startswith("kvstudy engine: ") and stderr.count("\n") == 1, stderr
    assert says in stderr
