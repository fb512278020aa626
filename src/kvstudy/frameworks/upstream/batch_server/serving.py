"""OpenAI's completions over a batcher: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, /config.

Standard library only. A thread a connection writes what the generating thread hands it; a token is sent when the fork's
loop has yielded it.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .batching import Batcher, Refused, Request, serve_batch

MAX_BODY_BYTES = 32 << 20


class Text:
    """Turns an answer's tokens into text as they come; holds back what is not a whole character yet."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # tokens before it are written and give no context any more
        self._written = 0

    def add(self, token: int) -> str:
        """The text that this token adds, maybe empty."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._written])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._start, self._written = self._written, len(self._ids)
        added: str = text[len(before) :]
        return added


class BatchServer:
    """The server's state: the queue, the loop behind it, and the thread that generates.

    Parameters
    ----------
    config
        `served_model_name`, `max_batch`, `max_wait_s`, `kv_memory_bytes`, and what `/config` answers.
    loop
        A generation loop: `run`, `check`, `kv_bytes`, `live_bytes`, `weight_bytes`, `allocated_peak`, `reset_peaks`,
        `totals`.
    tokenizer
        `decode(ids)`, `encode(text)`; `eos_token_id` and `apply_chat_template` where it has them.
    api_key
        What a client must send as a bearer token; None asks for nothing. `/health` is open.
    """

    def __init__(self, config: dict[str, Any], loop: Any, tokenizer: Any, api_key: str | None = None) -> None:
        self.config, self.loop, self.tokenizer, self.api_key = config, loop, tokenizer, api_key
        self.batcher = Batcher(config["max_batch"], config["max_wait_s"], self._fits)
        self.live_peak: dict[str, int] = {"device": 0, "host": 0}
        self.crash: str | None = None

    def _fits(self, batch: Any) -> bool:
        """All caches are allocated for the batch's longest output."""
        longest = max(request.max_tokens for request in batch)
        need = sum(self.loop.kv_bytes(len(request.prompt), longest) for request in batch)
        return bool(need <= self.config["kv_memory_bytes"])

    def generate_forever(self) -> None:
        """Serve batch after batch. A loop that fails ends the process: its state is not to be trusted any more."""
        try:
            while True:
                serve_batch(self.batcher.next_batch(), self.loop, self.loop.totals)
        except BaseException as error:
            self.crash = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(f"batch server: {self.crash}", file=sys.stderr, flush=True)
            os._exit(1)

    def new_request(self, body: dict[str, Any], chat: bool) -> Request:
        """A checked request. Raises `Refused` where the body is wrong or the fork cannot serve it."""
        known = self.config["served_model_name"]
        if body.get("model") not in (None, known):
            raise Refused(f"the model {body['model']!r} does not exist; this server has {known!r}")
        if chat:
            ids = self._chat_ids(body)
        else:
            prompt = body.get("prompt")
            ids = list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
            if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
                ids = ids[0]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise Refused("prompt: one text or one list of token ids, not empty")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        temperature = body.get("temperature", 1.0)
        if type(wanted) is not int or wanted < 1:
            raise Refused("max_tokens: a whole number of at least 1")
        if not isinstance(temperature, (int, float)) or not 0 <= temperature <= 10:
            raise Refused("temperature: a number from 0 to 10")
        if body.get("stop"):
            raise Refused("stop: the fork knows no stop strings")
        if body.get("n", 1) != 1:
            raise Refused("n: one answer a request")
        self.loop.check(ids, wanted, top_p=float(body.get("top_p") or 1.0))
        eos = None if body.get("ignore_eos") else getattr(self.tokenizer, "eos_token_id", None)
        return Request(ids, wanted, eos, float(temperature), self.batcher.clock())

    def _chat_ids(self, body: dict[str, Any]) -> Any:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused("messages: the model has no chat template")
        text = self.tokenizer.apply_chat_template(body.get("messages"), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def metrics(self) -> str:
        """Prometheus text, by the names that our own engine uses for the same things."""
        totals, live = self.loop.totals, self.loop.live_bytes()
        rows: dict[str, float] = {
            "kvstudy_weights_bytes": self.loop.weight_bytes(),
            "kvstudy_requests_running": totals.running,
            "kvstudy_requests_waiting": len(self.batcher.waiting),
            "kvstudy_requests_running_peak": totals.running_peak,
            "kvstudy_preemptions_total": 0,
        }
        for tier, size in live.items():
            self.live_peak[tier] = max(self.live_peak[tier], size)
            for kind in (
                "live",
                "reserved",
            ):  # the fork allocates a batch's cache when it starts, and frees it at its end
                rows[f'kvstudy_kv_{kind}_bytes{{tier="{tier}"}}'] = size
            rows[f'kvstudy_kv_live_peak_bytes{{tier="{tier}"}}'] = self.live_peak[tier]
        allocated = self.loop.allocated_peak()
        if allocated is not None:
            rows["kvstudy_workspace_peak_bytes"] = max(
                0, allocated - self.loop.weight_bytes() - self.live_peak["device"]
            )
        for name, value in totals.counts.items():
            if name.startswith("moved_"):
                rows[f'kvstudy_moved_bytes_total{{direction="{name[6:]}"}}'] = value
            else:
                rows[f"kvstudy_{name}_total"] = value
        for reason, count in sorted(totals.finished.items()):
            rows[f'kvstudy_requests_finished_total{{reason="{reason}"}}'] = count
        return "".join(f"{name} {value}\n" for name, value in rows.items())

    def reset(self) -> None:
        """Peaks start anew."""
        self.live_peak = dict(self.loop.live_bytes())
        self.loop.reset_peaks()
        self.loop.totals.reset()

    def listen(self, host: str, port: int) -> ThreadingHTTPServer:
        """An HTTP server on that address, its generating thread started; `serve_forever` is the caller's."""
        state = self

        class Handler(_Handler):
            server_state = state

        http = ThreadingHTTPServer((host, port), Handler)
        http.daemon_threads = True
        threading.Thread(target=self.generate_forever, daemon=True, name="generate").start()
        return http


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_state: BatchServer

    def log_message(self, *_: Any) -> None:
        """No line a request."""

    def do_GET(self) -> None:
        """Health, metrics, config, models."""
        state = self.server_state
        if self.path == "/health":
            self._answer(200, b"", "text/plain")
        elif not self._allowed():
            self._error(401, "wrong or missing API key")
        elif self.path == "/metrics":
            self._answer(200, state.metrics().encode(), "text/plain; version=0.0.4")
        elif self.path == "/config":
            self._json(200, {"config": state.config})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": state.config["served_model_name"], "object": "model"}]})
        else:
            self._error(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        """Completions, chat, reset."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._error(413, f"the body is over {MAX_BODY_BYTES} bytes")
            return
        raw = self.rfile.read(length)
        if not self._allowed():
            self._error(401, "wrong or missing API key")
            return
        if self.path == "/reset":
            self.server_state.reset()
            self._json(200, {})
            return
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._error(404, f"no such path: {self.path}")
            return
        chat = "chat" in self.path
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise Refused("the body is not a JSON object")
            request = self.server_state.new_request(body, chat)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            self._error(400, f"the body is not JSON: {error}")
            return
        except (Refused, TypeError, ValueError) as error:
            self._error(400, str(error))
            return
        self.server_state.batcher.submit(request)
        try:
            (self._stream if body.get("stream") else self._whole)(request, body, chat)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            request.cancelled = request.finished is None

    def _allowed(self) -> bool:
        key = self.server_state.api_key
        given = str(self.headers.get("Authorization") or "")
        return key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    # --- answers -------------------------------------------------------------------------------------

    def _stream(self, request: Request, body: dict[str, Any], chat: bool) -> None:
        options = body.get("stream_options") or {}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        shape = _Shape(self.server_state.config["served_model_name"], chat)
        text = Text(self.server_state.tokenizer)
        tokens = 0
        for kind, value, _ in self._events(request):
            if kind == "error":
                self._chunk({"error": {"message": value, "type": "server_error"}})
                break
            if kind == "token":
                tokens += 1
                usage = _usage(request, tokens) if options.get("continuous_usage_stats") else None
                self._chunk(shape.chunk(text.add(value), None, usage))
            else:
                self._chunk(shape.chunk("", value, None))
                if options.get("include_usage"):
                    self._chunk(shape.last(_usage(request, tokens), _extension(request)))
        self._raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _whole(self, request: Request, _: dict[str, Any], chat: bool) -> None:
        text = Text(self.server_state.tokenizer)
        parts = []
        for kind, value, _ in self._events(request):
            if kind == "error":
                self._error(500, value)
                return
            if kind == "token":
                parts.append(text.add(value))
        shape = _Shape(self.server_state.config["served_model_name"], chat)
        self._json(200, shape.whole("".join(parts), request))

    def _events(self, request: Request) -> Iterator[Any]:
        """Until it ends; a client that has gone is noticed while it waits."""
        while True:
            try:
                event = request.events.get(timeout=1.0)
            except queue.Empty:
                if self._client_gone():
                    raise BrokenPipeError from None
                continue
            yield event
            if event[0] != "token":
                return

    def _client_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _chunk(self, value: dict[str, Any]) -> None:
        self._raw(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    def _raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json")

    def _error(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._json(status, {"error": {"message": message, "type": kind}})

    def _answer(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Shape:
    """How one endpoint's answers look."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        name = "chat.completion" if chat else "text_completion"
        self.whole_name, self.chunk_name = name, name + (".chunk" if chat else "")
        self.head = {"id": "cmpl-" + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def chunk(self, text: str, finish: str | None, usage: dict[str, int] | None) -> dict[str, Any]:
        """A token's."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice.update({"delta": {"content": text}} if self.chat else {"text": text})
        return {**self.head, "object": self.chunk_name, "choices": [choice], **({"usage": usage} if usage else {})}

    def last(self, usage: dict[str, int], extension: dict[str, Any]) -> dict[str, Any]:
        """The one with the usage."""
        return {**self.head, "object": self.chunk_name, "choices": [], "usage": usage, "kvstudy": extension}

    def whole(self, text: str, request: Request) -> dict[str, Any]:
        """Of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": request.reason}
        choice.update({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})
        usage = _usage(request, len(request.output))
        extension = {**_extension(request), "token_ids": request.output}
        return {**self.head, "object": self.whole_name, "choices": [choice], "usage": usage, "kvstudy": extension}


def _usage(request: Request, tokens: int) -> dict[str, int]:
    prompt = len(request.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _extension(request: Request) -> dict[str, Any]:
    """Seconds by phase, from arrival."""
    assert request.admitted is not None and request.finished is not None
    first = request.first_token if request.first_token is not None else request.finished
    return {
        "queue_s": request.admitted - request.arrived,
        "ttft_s": first - request.arrived,
        "total_s": request.finished - request.arrived,
    }
