"""A server by script: it speaks the OpenAI streaming shape and behaves as it is told, well or badly.

`python -m kvstudy.load.mock --port 0` (or `kvstudy mock`) prints `kvstudy mock ready on
http://127.0.0.1:PORT`. It serves `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health`,
`/metrics`, `/config` and `POST /reset`. Tests measure the client and the gates against it, and users can try
a study without a model. It holds no model: its tokens are `tok`.

Delays are as a server's own clock sees them; `service_s` makes it a single server with a first-in first-out
queue and deterministic service (M/D/1 under Poisson arrivals, capacity 1 / `service_s`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvstudy.arguments import port

MOST_HEAD_BYTES, MOST_BODY_BYTES, MOST_OUTPUT = 64 << 10, 32 << 20, 1_000_000


@dataclass
class Script:
    """How the mock behaves. Times are seconds; shares are of requests, taken evenly by their number."""

    first_s: float = 0.0  # from request to first token
    gap_s: float = 0.0  # between chunks
    tokens_per_chunk: int = 1
    max_output: int | None = None  # shorter answers than asked (0: none at all)
    role_first: bool = False  # an empty chunk with the role alone, at once
    empty_every: int = 0  # an empty delta after every so many chunks
    usage: str = "continuous"  # continuous | final | none
    service_s: float = 0.0  # M/D/1: one server, FIFO
    error_share: float = 0.0  # answered with `error_status`
    error_status: int = 503
    break_share: float = 0.0  # an error event in mid-stream
    cut_share: float = 0.0  # the connection is closed in mid-stream
    hang_share: float = 0.0  # never answered
    hang_path: str = ""  # never answered, whoever asks
    die_after: int = 0  # the process exits while it answers this request (1-based)
    die_status: int = 1
    die_message: str = ""
    freeze_after: int = 0  # from this request (1-based) on it answers nothing any more, not even /health
    deaf_after: int = 0  # from this request (1-based) on it listens no more: the process lives, connections are refused
    ready_after_s: float = 0.0  # /health says 503 until then
    kv_bytes_per_token: int = 1024
    kv_memory_bytes: int = 1 << 20
    prefix_hit_share: float = 0.0
    keep_alive: bool = True


class Mock:
    """The state of a running mock: what it has answered and what it holds."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen = 0
        self.running = 0
        self.waiting = 0
        self.running_peak = 0
        self.live_tokens = 0
        self.live_peak = 0
        self.prompt_tokens = 0
        self.free_at = 0.0  # when the single server is free (M/D/1)
        self.arrivals: list[float] = []
        self.started = 0.0
        self.server: asyncio.Server | None = None
        self.connections: set[_Handler] = set()

    def take(self, share: float) -> bool:
        """Whether this request is one of the share, spread evenly."""
        return int(self.seen * share) > int((self.seen - 1) * share)

    def go_deaf(self) -> None:
        """Listen no more, and close what is open."""
        if self.server is not None:
            self.server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    def reset(self) -> None:
        """Forget the peaks and counts of an earlier load."""
        self.running_peak = self.running
        self.live_peak = self.live_tokens
        self.prompt_tokens = 0
        self.arrivals.clear()

    def metrics(self) -> str:
        """Prometheus text, with the names of our engine."""
        per = self.script.kv_bytes_per_token
        rows = {
            "kvstudy_weights_bytes": 1000,
            'kvstudy_kv_reserved_bytes{tier="device"}': self.script.kv_memory_bytes,
            'kvstudy_kv_live_bytes{tier="device"}': self.live_tokens * per,
            'kvstudy_kv_live_peak_bytes{tier="device"}': self.live_peak * per,
            "kvstudy_workspace_peak_bytes": 0,
            'kvstudy_moved_bytes_total{direction="h2d"}': 0,
            'kvstudy_moved_bytes_total{direction="d2h"}': 0,
            "kvstudy_requests_running": self.running,
            "kvstudy_requests_waiting": self.waiting,
            "kvstudy_requests_running_peak": self.running_peak,
            "kvstudy_preemptions_total": 0,
            "kvstudy_prefix_cache_queries_total": self.prompt_tokens,
            "kvstudy_prefix_cache_hits_total": int(self.prompt_tokens * self.script.prefix_hit_share),
        }
        return "".join(f"{name} {value}\n" for name, value in rows.items())


class _Handler(asyncio.Protocol):
    """One connection, requests one after another."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.buffer = b""
        self.transport: asyncio.Transport
        self.busy = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.mock.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.mock.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.busy:
            self._next()

    def _next(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self.buffer) > MOST_HEAD_BYTES:
                self._refuse(400, "the headers are too long")
            return
        head = self.buffer[:end]
        at = head.lower().find(b"content-length:")
        said = head[at + 15 :].split(b"\r\n", 1)[0].strip() if at >= 0 else b"0"
        line = head.split(b"\r\n", 1)[0].split(b" ")
        if not said.isdigit() or len(line) != 3:
            self._refuse(400, "that is not HTTP")
            return
        length = int(said[:20])
        if length > MOST_BODY_BYTES:
            self._refuse(413, f"the body is over {MOST_BODY_BYTES:,} bytes")
            return
        if len(self.buffer) < end + 4 + length:
            return
        body = self.buffer[end + 4 : end + 4 + length]
        self.buffer = self.buffer[end + 4 + length :]
        method, path, _ = line
        if method == b"POST" and path.endswith(b"completions"):
            self._complete(body, path.endswith(b"chat/completions"))
        else:
            self._plain(path.decode("latin-1"))

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be read on from, and close."""
        self._answer(status, json.dumps({"error": {"message": message, "type": "invalid_request_error"}}))
        self.buffer = b""
        self.transport.close()

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        self.transport.write(
            b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (status, kind.encode(), len(body), body)
        )

    def _plain(self, path: str) -> None:
        mock = self.mock
        loop = asyncio.get_running_loop()
        if path == mock.script.hang_path:
            self.busy = True
            return
        if path == "/health":
            self._answer(200 if loop.time() - mock.started >= mock.script.ready_after_s else 503, "{}")
        elif path == "/metrics":
            self._answer(200, mock.metrics(), "text/plain")
        elif path == "/config":
            self._answer(200, json.dumps(asdict(mock.script)))
        elif path == "/reset":
            mock.reset()
            self._answer(200, "{}")
        elif path == "/v1/models":
            self._answer(200, json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]}))
        elif path == "/arrivals":
            self._answer(200, json.dumps(mock.arrivals))
        else:
            self._answer(404, json.dumps({"error": {"message": f"no {path}", "type": "not_found"}}))
        self._next()

    # --- completions -----------------------------------------------------------------------------

    def _complete(self, body: bytes, chat: bool) -> None:
        mock, script = self.mock, self.mock.script
        loop = asyncio.get_running_loop()
        try:
            prompt_tokens, output = _asked(json.loads(body))
        except (ValueError, RecursionError) as error:
            self._answer(400, json.dumps({"error": {"message": str(error)[:300], "type": "invalid_request_error"}}))
            self._next()
            return
        mock.seen += 1
        mock.arrivals.append(loop.time())
        if script.die_after and mock.seen >= script.die_after:
            print(script.die_message, file=sys.stderr, flush=True)
            os._exit(script.die_status)
        if script.freeze_after and mock.seen >= script.freeze_after:
            time.sleep(1e6)  # a deadlock: the process lives, its loop does not
        if script.deaf_after and mock.seen >= script.deaf_after:
            mock.go_deaf()
            return
        if mock.take(script.error_share):
            self._answer(script.error_status, json.dumps({"error": {"message": "by script", "type": "error"}}))
            self._next()
            return
        if mock.take(script.hang_share):
            self.busy = True
            return
        if script.max_output is not None:
            output = min(output, script.max_output)
        mock.prompt_tokens += prompt_tokens
        self.busy = True
        answer = _Answer(self, chat, prompt_tokens, output, mock.take(script.break_share), mock.take(script.cut_share))
        if script.service_s:
            now = loop.time()
            start = max(now, mock.free_at)
            mock.free_at = start + script.service_s
            answer.queue_s = start - now
            mock.waiting += 1
            loop.call_at(start, answer.admit)
            loop.call_at(mock.free_at, answer.begin)
        else:
            mock.waiting += 1
            answer.admit()
            if script.first_s:
                loop.call_later(script.first_s, answer.begin)
            else:
                answer.begin()


def _asked(request: Any) -> tuple[int, int]:
    """Prompt and output tokens of a request. Raises `ValueError`."""
    if not isinstance(request, dict):
        raise ValueError("the body is not a JSON object")
    prompt, messages = request.get("prompt"), request.get("messages") or []
    if prompt is None:
        if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
            raise ValueError("messages is not a list of objects")
        prompt = " ".join(str(item.get("content", "")) for item in messages)
    output = request.get("max_tokens") or 16
    if not isinstance(output, int) or not 1 <= output <= MOST_OUTPUT:
        raise ValueError(f"max_tokens is not a number from 1 to {MOST_OUTPUT:,}")
    return len(prompt) if isinstance(prompt, list) else len(str(prompt).split()), output


class _Answer:
    """One answer on its way out."""

    def __init__(
        self, handler: _Handler, chat: bool, prompt_tokens: int, output: int, breaks: bool, cuts: bool
    ) -> None:
        self.handler = handler
        self.chat = chat
        self._object = "chat.completion.chunk" if chat else "text_completion"
        self.prompt_tokens = prompt_tokens
        self.output = output
        self.breaks = breaks
        self.cuts = cuts
        self.queue_s = 0.0
        self.sent = 0
        self.chunks = 0
        self.head = True

    def admit(self) -> None:
        """From the queue into the batch."""
        mock = self.handler.mock
        mock.waiting -= 1
        mock.running += 1
        mock.running_peak = max(mock.running_peak, mock.running)
        mock.live_tokens += self.prompt_tokens
        mock.live_peak = max(mock.live_peak, mock.live_tokens)
        if mock.script.role_first and self.chat:
            self._write(self._event({"role": "assistant", "content": ""}, None))

    def _event(self, delta: Any, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "") if isinstance(delta, dict) else delta
        event: dict[str, Any] = {"id": "m", "object": self._object, "model": "mock", "choices": [choice]}
        if self.handler.mock.script.usage == "continuous":
            event["usage"] = self._usage()
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sent,
            "total_tokens": self.prompt_tokens + self.sent,
        }

    def _write(self, *events: bytes, last: bool = False) -> None:
        if self.handler.lost:
            return
        parts = []
        if self.head:
            self.head = False
            parts.append(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            parts.append(b"%x\r\n%b\r\n" % (len(event), event))
        if last:
            parts.append(b"0\r\n\r\n")
        self.handler.transport.write(b"".join(parts))

    def begin(self) -> None:
        """First token's time."""
        if self.output == 0:
            self._end(b"")
        else:
            self._chunk()

    def _chunk(self) -> None:
        script = self.handler.mock.script
        if self.handler.lost:
            self._over()
            return
        tokens = min(script.tokens_per_chunk, self.output - self.sent)
        self.sent += tokens
        self.chunks += 1
        self.handler.mock.live_tokens += tokens
        self.handler.mock.live_peak = max(self.handler.mock.live_peak, self.handler.mock.live_tokens)
        if self.breaks and self.sent >= self.output // 2:
            self._write(b'data: {"error":{"message":"by script","type":"server_error"}}\n\n', last=True)
            self._over()
            return
        if self.cuts and self.sent >= self.output // 2:
            self._write(self._event({"content": " tok" * tokens}, None))
            self.handler.transport.close()
            self._over()
            return
        last = self.sent >= self.output
        event = self._event({"content": " tok" * tokens}, "length" if last else None)
        if last:
            self._end(event)
            return
        if script.empty_every and self.chunks % script.empty_every == 0:
            self._write(event, self._event({"content": ""}, None))
        else:
            self._write(event)
        asyncio.get_running_loop().call_later(script.gap_s, self._chunk)

    def _end(self, event: bytes) -> None:
        events = [event] if event else [self._event({"content": ""}, "length")]
        if self.handler.mock.script.usage != "none":
            total = {
                "id": "m",
                "object": self._object,
                "model": "mock",
                "choices": [],
                "usage": self._usage(),
                "kvstudy": {"queue_s": self.queue_s},
            }
            events.append(b"data: " + json.dumps(total, separators=(",", ":")).encode() + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        self._write(*events, last=True)
        self._over()
        if not self.handler.mock.script.keep_alive:
            self.handler.transport.close()

    def _over(self) -> None:
        mock = self.handler.mock
        mock.running -= 1
        mock.live_tokens -= self.prompt_tokens + self.sent
        self.handler.busy = False
        if not self.handler.lost:
            self.handler._next()


async def serve(script: Script, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
    """Start a mock on the running loop; its address is `server.sockets[0].getsockname()`."""
    loop = asyncio.get_running_loop()
    mock = Mock(script)
    mock.started = loop.time()
    mock.server = await loop.create_server(lambda: _Handler(mock), host, port, backlog=4096)
    return mock.server


@dataclass
class Running:
    """A mock in a process of its own."""

    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def running(script: Script | None = None, *, port: int = 0) -> Iterator[Running]:
    """Run a mock as a process for as long as the block lasts."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvstudy.load.mock",
            "--port",
            str(port),
            "--script",
            json.dumps(asdict(script or Script())),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "ready on" not in line:
            raise RuntimeError(f"the mock did not come up on port {port}")
        yield Running(line.split()[-1], process)
    finally:
        process.kill()
        process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvstudy mock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=0)
    parser.add_argument("--script", default=None, help="JSON object of the options below")
    for item in fields(Script):
        name = f"--{item.name.replace('_', '-')}"
        if isinstance(item.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
        else:
            kind: Callable[[str], Any] = int if item.default is None else type(item.default)
            parser.add_argument(name, type=kind, default=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a mock until it is stopped."""
    given = vars(_parser().parse_args(arguments))
    host, number, text = given.pop("host"), given.pop("port"), given.pop("script")
    try:
        values: dict[str, Any] = json.loads(text) if text else {}
        script = Script(**(values | {name: value for name, value in given.items() if value is not None}))
    except (ValueError, TypeError, RecursionError) as error:
        raise SystemExit(f"kvstudy mock: --script is not a JSON object of the options: {error}") from None

    async def forever() -> None:
        try:
            server = await serve(script, host, number)
        except OSError as error:
            raise SystemExit(f"kvstudy mock: cannot listen on {host}:{number}: {error.strerror}") from error
        address = server.sockets[0].getsockname()
        print(f"kvstudy mock ready on http://{address[0]}:{address[1]}", flush=True)
        await asyncio.Event().wait()  # not serve_forever, which ends when the script has it listen no more

    factory: Callable[[], asyncio.AbstractEventLoop]
    try:
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(forever())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
