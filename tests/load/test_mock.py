"""The mock takes what anybody may send it: an answer or a closed connection, never its end."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstudy.load.mock import Running, Script, main, running

FUZZ = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
BODY = st.dictionaries(st.sampled_from(["prompt", "messages", "max_tokens", "stream", "model"]), VALUE)


@pytest.fixture(scope="module")
def mock() -> Iterator[Running]:
    with running(Script()) as up:
        yield up


def post(mock: Running, path: str, data: bytes) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(mock.url + path, data), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def assert_well(mock: Running) -> None:
    assert mock.process.poll() is None
    status, text = post(mock, "/v1/completions", json.dumps({"prompt": "a b", "max_tokens": 3}).encode())
    assert status == 200 and text.count('" tok"') == 3


@FUZZ
@given(body=BODY | VALUE, chat=st.booleans())
def test_no_json_ends_it(mock: Running, body: Any, chat: bool) -> None:
    status, text = post(mock, "/v1/chat/completions" if chat else "/v1/completions", json.dumps(body).encode())
    assert status in (200, 400), text
    if status == 400:
        assert json.loads(text)["error"]["message"]


@FUZZ
@given(data=st.binary(max_size=200), whole=st.booleans())
def test_no_bytes_end_it(mock: Running, data: bytes, whole: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data) if whole else b""
    port = int(mock.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(head + data)
        raw.settimeout(0.02)
        with contextlib.suppress(TimeoutError):
            raw.recv(65536)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 100_000,
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_what_is_not_http_or_too_large_is_refused(mock: Running, data: bytes) -> None:
    port = int(mock.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(data)
        assert raw.recv(65536).startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))
    assert_well(mock)


def test_after_all_that_it_answers(mock: Running) -> None:
    assert_well(mock)


@pytest.mark.parametrize("text", ["99999999", "65536", "-1", "x", "", "²"])
def test_a_port_is_not_wrapped_around(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--port={text}"])
    assert "a port is a number from 0 to 65535" in capsys.readouterr().err
