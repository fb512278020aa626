"""What the server refuses, and that no input ends it: each answer has OpenAI's shape, and the next is right."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as fuzzed_with
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from test_server import Server
from transformers import AutoTokenizer

from kvstudy.engine import intake

CONTEXT = 64
LONGEST = len("<bos>")  # the tiny tokenizer's longest token
PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def server(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "model_dir": str(llama_dir),
        "served_model_name": "tiny",
        "dtype": "float32",
        "kv_memory_bytes": 1 << 22,
        "max_model_len": CONTEXT,
        "other_policies": {"streaming": {"sinks": 2}},
    }
    running = Server(tmp_path_factory.mktemp("server"), config).wait()
    yield running
    assert running.stop() < 2.0


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def refused(answer: httpx.Response) -> str:
    """The message of a refusal, which is in OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"], error
    assert len(error["message"]) < 1000
    return str(error["message"])


def still_right(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    ask = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=ask)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", ["[]", '"x"', "3", "null", "true", "[{}]"])
def test_a_body_that_is_no_object(http: httpx.Client, path: str, body: str) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400 and refused(answer) == "the body is not a JSON object"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"{'a':1}", b'{"prompt":NaN}', b"[" * 100_000])
def test_a_body_that_is_not_json(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400 and "not JSON" in refused(answer)


def test_null_is_the_default(http: httpx.Client) -> None:
    names = ["temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs", "max_tokens", "model"]
    ask: dict[str, Any] = {"prompt": "abc"} | dict.fromkeys(names)
    answer = http.post("/v1/completions", json=ask)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16
    chat = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2, "temperature": None}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert "prompt" in refused(http.post("/v1/completions", json={"prompt": None}))


def test_content_in_parts_is_the_same_as_text(http: httpx.Client) -> None:
    def say(content: Any) -> httpx.Response:
        ask = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
        return http.post("/v1/chat/completions", json=ask)

    text = say("one\ntwo").json()
    parts = say([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]).json()
    assert parts["choices"] == text["choices"] and parts["usage"] == text["usage"]
    for wrong in ([{"type": "image_url", "image_url": {"url": "http://x"}}], [{"type": "text"}], ["x"], 3, {"a": 1}):
        answer = say(wrong)
        assert answer.status_code == 400 and "messages[0]" in refused(answer)
    assert http.post("/v1/chat/completions", json={"messages": [{"content": "x"}]}).status_code == 400
    assert http.post("/v1/chat/completions", json={"messages": [{"role": "assistant", "content": None}]}).is_success


def test_a_chat_template_is_run_in_a_sandbox(llama_dir: Path) -> None:
    """A model folder is others' data, and its template a program."""
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    ask = [{"role": "user", "content": "x"}]
    for template in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.getcwd() }}"):
        tokenizer.chat_template = template
        with pytest.raises(SecurityError):
            tokenizer.apply_chat_template(ask, tokenize=False)


def test_too_large_is_413_before_it_is_read(http: httpx.Client) -> None:
    declared = http.post("/v1/completions", content=b"x" * (3 << 20))
    assert declared.status_code == 413 and "bytes" in refused(declared)
    chunked = http.post("/v1/completions", content=(b"x" * (1 << 16) for _ in range(64)))
    assert chunked.status_code == 413 and refused(chunked)
    still_right(http)


def test_a_long_text_is_refused_before_it_is_tokenised(http: httpx.Client) -> None:
    begun = time.monotonic()
    for path, body in (
        (PATHS[0], {"prompt": "x" * (CONTEXT * LONGEST + 1)}),
        (PATHS[0], {"prompt": "x" * 900_000}),
        (PATHS[1], {"messages": [{"role": "user", "content": "x" * 100}] * 4}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and "maximum context length is 64 tokens" in refused(answer)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - begun < 2
    # One character less may fit by its characters, and is judged by its tokens.
    edge = http.post("/v1/completions", json={"prompt": "x" * (CONTEXT * LONGEST), "max_tokens": 1})
    assert edge.status_code == 400 and f"{CONTEXT * LONGEST} in the prompt" in refused(edge)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": [{}] * 100_000}, "one prompt a request"),
        ({"prompt": ["x"] * 100_000}, "one prompt a request"),
        ({"prompt": [True]}, "one prompt a request"),
        ({"prompt": [1.5]}, "one prompt a request"),
        ({"prompt": [2**63]}, "outside"),
        ({"prompt": [-1]}, "outside"),
        ({"prompt": [[1], [2]]}, "one prompt a request"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": "a" * 257}, "stop"),
        ({"prompt": "x", "max_tokens": 2**70}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2**62}, "maximum context length"),
        ({"prompt": "x", "temperature": 1e400}, "not JSON"),
        ({"prompt": "x", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "x", "model": "m" * 500_000}, "does not exist"),
    ],
)
def test_counts_and_lengths_are_bounded(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    begun = time.monotonic()
    answer = http.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code in (400, 404) and says in refused(answer)
    assert time.monotonic() - begun < 2


def test_messages_are_counted(http: httpx.Client) -> None:
    many = {"messages": [{"role": "user", "content": ""}] * (intake.MOST_MESSAGES + 1)}
    assert "messages" in refused(http.post("/v1/chat/completions", json=many))


def test_wrong_paths_and_methods(http: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v2/completions", 404),
        ("GET", "/" + "x" * 5000, 404),
        ("GET", "/v1/../etc/passwd", 404),
    ):
        answer = http.request(method, path)
        assert answer.status_code == status and refused(answer)
        if status == 405:
            assert answer.headers["allow"]


def test_headers_without_end_are_cut(server: Server, http: httpx.Client) -> None:
    port = int(server.url.rpartition(":")[2])
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, contextlib.suppress(OSError):
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        while sent < 64 << 20:
            raw.sendall(b"y" * 65536)
            sent += 65536
    assert sent < 16 << 20
    still_right(http)


def test_clients_that_leave_in_the_middle_of_a_body(server: Server, http: httpx.Client) -> None:
    port = int(server.url.rpartition(":")[2])
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            raw.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 500\r\n\r\n{"prompt"')
    still_right(http)


#: A request whose body does not come.
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer sesame\r\nContent-Length: 500\r\n\r\n{"
#: Seconds that the guarded server waits for a body, and the server with that bound.
BODY_S = 3.0
HURRIED = f"""
import os, sys
from kvstudy.engine import intake, server
intake.BODY_S = {BODY_S}
os._exit(server.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def guarded(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a key, lets three wait and waits for none's body for long."""
    config = {"model_dir": str(llama_dir), "dtype": "float32", "kv_memory_bytes": 1 << 22, "max_queue": 3}
    running = Server(tmp_path_factory.mktemp("guarded"), config | {"api_key": "sesame"}, ("-c", HURRIED)).wait()
    yield running
    running.stop()


def test_a_body_that_does_not_come_is_408_and_keeps_nobody_waiting(guarded: Server) -> None:
    """Also one of which a byte comes now and then; its place in the queue is free again."""
    port = int(guarded.url.rpartition(":")[2])
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(3):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.2))
            raw.sendall(UNFINISHED)
            slow.append(raw)
        for raw in slow:
            answer = b""
            while b'"error"' not in answer:
                assert time.monotonic() - begun < 10 * BODY_S
                with contextlib.suppress(TimeoutError):
                    answer += raw.recv(65536)
                if not answer:
                    raw.sendall(b" ")
            assert answer.startswith(b"HTTP/1.1 408") and b"the body was not there after 3 s" in answer
        assert time.monotonic() - begun >= BODY_S
        ask = {"prompt": "x", "max_tokens": 1}
        key = {"Authorization": "Bearer sesame"}
        assert httpx.post(f"{guarded.url}/v1/completions", json=ask, headers=key).status_code == 200


def test_bodies_on_their_way_count_as_waiting(guarded: Server) -> None:
    """A crowd that sends slowly must not hold memory without bound."""
    port = int(guarded.url.rpartition(":")[2])
    key = {"Authorization": "Bearer sesame"}

    def until(status: int) -> httpx.Response:
        end = time.monotonic() + 5
        while True:
            answer = httpx.post(f"{guarded.url}/v1/completions", json={"prompt": "x"}, headers=key)
            if answer.status_code == status:
                return answer
            assert time.monotonic() < end, answer.text

    with contextlib.ExitStack() as stack:
        for _ in range(3):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            raw.sendall(UNFINISHED)
        assert "waiting already" in refused(until(429))
    until(200)


def test_the_key_is_asked_for_before_a_body_is_read(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for method, path in (("POST", PATHS[0]), ("POST", PATHS[1]), ("GET", "/v1/models"), ("POST", "/reset")):
            for given in (None, b"Bearer wrong", b"\xfc", b"sesam"):
                headers = {} if given is None else {"Authorization": given}
                answer = http.request(method, path, headers=headers)  # type: ignore[arg-type]
                assert answer.status_code == 401 and "sesame" not in refused(answer)
            assert http.request(method, path, headers={"Authorization": "Bearer sesame"}).status_code != 401
        assert http.post(PATHS[0], content=b"x" * (4 << 20)).status_code == 401
        for path in ("/health", "/config", "/metrics"):
            answer = http.get(path)
            assert answer.status_code == 200 and "sesame" not in answer.text


# --- fuzzed ---------------------------------------------------------------------------------------

JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = {
    "prompt": st.text(max_size=40) | st.lists(st.integers(-5, 400), max_size=40),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=20)}
        ),
        max_size=3,
    ),
    "max_tokens": st.integers(-1, 80),
    "temperature": st.floats(0, 12),
    "top_p": st.floats(-1, 2),
    "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 25) | st.booleans(),
    "top_logprobs": st.integers(-1, 25),
    "n": st.integers(0, 3),
    "model": st.just("tiny"),
    "kvstudy_policy": st.sampled_from(["full", "streaming", "none"]),
}
BODY = st.fixed_dictionaries({}, optional={name: kind | JSON_VALUE for name, kind in FIELDS.items()})
FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        refused(answer)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    else:
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


@FUZZ
@fuzzed_with(path=st.sampled_from(PATHS), body=BODY)
def test_no_object_ends_it(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    text = json.dumps(body)  # NaN, infinities and lone surrogates too: that is not JSON, and it is sent
    check(http.post(path, content=text))


@FUZZ
@fuzzed_with(body=JSON_VALUE, path=st.sampled_from([*PATHS, "/reset", "/v1/models", "/metrics", "/budget", "/config"]))
def test_no_json_ends_it(http: httpx.Client, path: str, body: Any) -> None:
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code < 500
    if answer.status_code != 200:
        refused(answer)


@FUZZ
@fuzzed_with(data=st.binary(max_size=200), whole=st.booleans())
def test_no_bytes_end_it(server: Server, data: bytes, whole: bool) -> None:
    port = int(server.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) if whole else b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(head + data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass


def test_after_all_that_it_answers_right_and_holds_nothing(server: Server, http: httpx.Client) -> None:
    still_right(http)
    until = time.monotonic() + 5
    while server.metrics()["kvstudy_requests_running"] and time.monotonic() < until:
        time.sleep(0.05)
    metrics = server.metrics()
    assert metrics["kvstudy_requests_running"] == metrics["kvstudy_requests_waiting"] == 0
    assert metrics['kvstudy_kv_live_bytes{tier="device"}'] == 0
