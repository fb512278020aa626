"""The engine's OpenAI-compatible face: completions, chat, models, and what a measurement reads.

What happens once a request may be comfortable; what happens once a token is not: server-sent events are put
together by hand and written straight to the connection, since server and client often share the cores with
the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send
from transformers import AutoTokenizer
from transformers.utils import logging

from kvstudy.engine import attention, kernels, metrics
from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine, Output, follow
from kvstudy.engine.echo import Echo
from kvstudy.engine.intake import (
    MOST_MESSAGES,
    ApiError,
    BoundedHead,
    Gate,
    Limits,
    answer_errors,
    bad_request,
    json_response,
    plain_messages,
    read_object,
    single_prompt,
    validated,
)
from kvstudy.engine.model import ModelMissing, ModelUnsupported
from kvstudy.engine.parallel import NotShared
from kvstudy.engine.policies import UnknownPolicy, WrongOptions
from kvstudy.engine.request import Request as EngineRequest
from kvstudy.engine.request import SamplingParams
from kvstudy.engine.runner import EngineStopped, Runner, Stream

__all__ = [
    "EngineFailed",
    "ModelMissing",
    "ModelUnsupported",
    "NotShared",
    "UnknownPolicy",
    "WrongOptions",
    "create_app",
    "join_others",
    "serve",
]


class EngineFailed(RuntimeError):
    """The engine ended while it served; the message says why, in one line."""


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """As vLLM has it: every chunk carries the usage so far."""


#: Stops are searched for in every token's text: few and short ones, or the engine waits for the search.
StopString = Annotated[str, Field(max_length=256)]


class Body(BaseModel):
    """What both endpoints take. Fields we do not know are ignored, as OpenAI's clients expect."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: Annotated[str, Field(max_length=256)] | Annotated[list[StopString], Field(max_length=16)] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    kvstudy_policy: str | None = None
    """Extension: which of the served policies keeps this request's KV."""

    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(s for s in stops if s)


class CompletionBody(Body):
    prompt: Any
    """A text or token ids, or a list of one of them: `intake.single_prompt`."""
    max_tokens: int | None = Field(None, ge=0)
    """0 only with `echo`."""
    echo: bool = False
    kvstudy_context_tokens: int | None = Field(None, ge=1)
    """Extension: how much of an echoed prompt is the context, prefilled and compressed; see `kvstudy.engine.echo`."""
    logprobs: int | None = Field(None, ge=0, le=20)


class ChatBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


BodyType = TypeVar("BodyType", bound=Body)


class _Shape:
    """How one endpoint's answers look, as bytes around the parts that differ a chunk."""

    def __init__(self, chat: bool, model: str, tokenizer: Any) -> None:
        self.chat = chat
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self._tokenizer = tokenizer
        name = ("chat.completion" if chat else "text_completion") + (".chunk" if chat else "")
        head = {"id": self.id, "object": name, "created": self.created, "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._first = self._head + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]'
        self._open = self._head + (b'{"index":0,"delta":{"content":' if chat else b'{"index":0,"text":')
        self._close = b"}" if chat else b""

    def chunk(self, text: str, finish: str | None, logprobs: Any, usage: bytes) -> bytes:
        return b"".join(
            (
                self._open,
                orjson.dumps(text),
                self._close,
                b',"logprobs":',
                orjson.dumps(logprobs) if logprobs is not None else b"null",
                b',"finish_reason":',
                b'"' + finish.encode() + b'"' if finish else b"null",
                b"}]",
                usage,
                b"}\n\n",
            )
        )

    def first(self, usage: bytes) -> bytes:
        """Chat begins with a chunk that only names the role."""
        return self._first + usage + b"}\n\n" if self.chat else b""

    def last(self, usage: bytes, extension: dict[str, Any]) -> bytes:
        return self._head + b"]" + usage + b',"kvstudy":' + orjson.dumps(extension) + b"}\n\n"

    def name(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def logprobs(self, request: EngineRequest, first: int, stop: int) -> Any:
        """Of output tokens first .. stop - 1, in the endpoint's shape; None where none were asked for."""
        if request.params.logprobs is None:
            return None

        name = self.name
        entries = list(zip(request.output[first:stop], request.logprobs[first:stop], strict=True))
        if self.chat:
            return {
                "content": [
                    {
                        "token": name(token),
                        "logprob": own,
                        "bytes": list(name(token).encode()),
                        "top_logprobs": [
                            {"token": name(t), "logprob": p, "bytes": list(name(t).encode())} for t, p in best
                        ],
                    }
                    for token, (own, best) in entries
                ]
            }
        return {
            "tokens": [name(token) for token, _ in entries],
            "token_logprobs": [own for _, (own, _) in entries],
            "top_logprobs": [{name(t): p for t, p in best} for _, (_, best) in entries],
            "text_offset": [],
        }

    def whole(self, request: EngineRequest, text: str, echo: Echo | None = None, answered: int = 0) -> dict[str, Any]:
        """The answer to a request that does not stream; with `echo`, to one that has `answered` tokens of its own."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": request.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if echo is None:
            choice["logprobs"] = self.logprobs(request, 0, len(request.output))
            usage = usage_of(request, len(request.output))
        else:
            choice["logprobs"] = echo.logprobs(request, self.name, answered)
            total = len(echo.ids) + answered
            usage = {"prompt_tokens": len(echo.ids), "completion_tokens": answered, "total_tokens": total}
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage,
            "kvstudy": extension_of(request) | ({"context_tokens": echo.context} if echo else {}),
        }


def usage_of(request: EngineRequest, tokens: int) -> dict[str, int]:
    prompt = request.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def extension_of(request: EngineRequest) -> dict[str, Any]:
    """What the server alone knows of a request: seconds by phase, the share of KV its decode steps attended to."""
    share = request.attended_entries / request.full_entries if request.full_entries else None
    return request.timing() | {"policy": request.policy, "attended_share": share}


class EventStream(Response):
    """Server-sent events, one a token, written straight to the connection; ends when the client goes."""

    def __init__(
        self, runner: Runner, request: EngineRequest, stream: Stream, shape: _Shape, options: StreamOptions
    ) -> None:
        self.runner = runner
        self.request = request
        self.stream = stream
        self.shape = shape
        self.options = options
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        gone = asyncio.ensure_future(_wait_for_disconnect(receive, self.runner, self.request, self.stream))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self.runner.abort(self.request)

    async def _events(self) -> AsyncIterator[bytes]:
        request, shape, continuous = self.request, self.shape, self.options.continuous_usage_stats
        tokens = 0
        usage = b',"usage":null' if self.options.include_usage else b""
        while True:
            output = await self.stream.get()
            if isinstance(output, BaseException):
                yield _error_event(output)
                return
            tokens += 1
            if continuous:
                usage = b',"usage":' + orjson.dumps(usage_of(request, tokens))
            data = shape.chunk(output.text, output.finish_reason, shape.logprobs(request, tokens - 1, tokens), usage)
            yield shape.first(usage) + data if tokens == 1 else data
            if output.finish_reason:
                break
        if self.options.include_usage or continuous:
            yield shape.last(b',"usage":' + orjson.dumps(usage_of(request, tokens)), extension_of(request))
        yield b"data: [DONE]\n\n"


def _error_event(failure: BaseException) -> bytes:
    error = ApiError(500, str(failure), "server_error").body
    return b"data: " + orjson.dumps(error) + b"\n\ndata: [DONE]\n\n"


async def _wait_for_disconnect(receive: Receive, runner: Runner, request: EngineRequest, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    runner.abort(request)
    stream.put_nowait(EngineStopped("the client has gone"))


def create_app(engine: Engine, runner: Runner) -> FastAPI:
    """The routes over a running engine."""
    app = FastAPI(title="kvstudy engine", docs_url=None, redoc_url=None, openapi_url=None)
    config, tokenizer = engine.config, engine.tokenizer

    answer_errors(app)
    limits = Limits.of(engine.max_model_len, tokenizer)
    reading = 0

    def make_room() -> None:
        """Raise `ApiError` where as many wait as may; those whose bodies are being read count."""
        if runner.open_requests + reading - len(engine.scheduler.running) >= config.max_queue:
            raise ApiError(
                429, f"{config.max_queue} requests are waiting already", "rate_limit_error", None, "queue_full"
            )

    async def read(http: Request, kind: type[BodyType]) -> BodyType:
        """The checked body; raises `ApiError`."""
        nonlocal reading
        make_room()
        reading += 1
        try:
            body = validated(kind, await read_object(http, limits))
        finally:
            reading -= 1
        if body.model is not None and body.model != config.model_name:
            raise ApiError(
                404,
                f"the model {body.model[:200]!r} does not exist; this server has {config.model_name!r}",
                "not_found_error",
                "model",
                "model_not_found",
            )
        return body

    async def answer(
        http: Request, body: Body, ids: list[int], chat: bool, logprobs: int | None, echo: Echo | None = None
    ) -> Response:
        wanted = getattr(body, "max_completion_tokens", None) or body.max_tokens
        if wanted is None:
            wanted = max(1, engine.max_model_len - len(ids)) if chat else 16
        asked = wanted
        if echo is not None:
            ids, wanted = list(echo.ids[: echo.context]), max(1, len(echo.forced) + wanted)
        params = SamplingParams(
            max_tokens=wanted,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stop_strings(),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=echo is not None and logprobs is not None,
            forced_tokens=echo.forced if echo is not None else None,
        )
        make_room()
        try:
            request = engine.new_request(ids, params, body.kvstudy_policy)
            stream = runner.submit(request)
        except UnknownPolicy as error:
            raise bad_request(str(error), "kvstudy_policy") from None
        except ValueError as error:
            raise bad_request(str(error), None, "context_length_exceeded" if "length" in str(error) else None) from None
        except EngineStopped as error:
            raise ApiError(503, str(error), "server_error") from None
        shape = _Shape(chat, config.model_name, tokenizer)
        if body.stream:
            return EventStream(runner, request, stream, shape, body.stream_options or StreamOptions())
        gone = asyncio.ensure_future(_wait_for_disconnect(http.receive, runner, request, stream))
        text = [] if echo is None else [echo.text]
        given = 0 if echo is None else len(echo.forced)
        try:
            while True:
                output = await stream.get()
                if not isinstance(output, Output):
                    raise ApiError(500, str(output), "server_error")
                given -= 1
                if given < 0 and asked:
                    text.append(output.text)
                if output.finish_reason:
                    answered = min(asked, -given) if echo is not None else 0
                    return json_response(shape.whole(request, "".join(text), echo, answered))
        finally:
            gone.cancel()
            runner.abort(request)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        body = await read(http, CompletionBody)
        prompt = single_prompt(body.prompt, limits)
        if isinstance(prompt, str):
            # A text of megabytes takes seconds: in a thread, so that nobody else's stream waits for it.
            prompt = (await asyncio.to_thread(tokenizer, prompt))["input_ids"]
        return await answer(http, body, prompt, False, body.logprobs, await echo_of(body, prompt))

    async def echo_of(body: CompletionBody, ids: list[int]) -> Echo | None:
        if not body.echo:
            if body.kvstudy_context_tokens is not None:
                raise bad_request("kvstudy_context_tokens needs echo: true", "kvstudy_context_tokens")
            if body.max_tokens == 0:
                raise bad_request("max_tokens: 0 needs echo: true", "max_tokens")
            return None
        if body.stream or body.stop_strings():
            raise bad_request("echo goes with neither stream nor stop", "stream" if body.stream else "stop")
        text = await asyncio.to_thread(tokenizer.decode, ids) if isinstance(body.prompt, list) else str(body.prompt)
        try:
            return Echo.of(ids, text, body.kvstudy_context_tokens)
        except ValueError as error:
            raise bad_request(str(error), "kvstudy_context_tokens") from None

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        body = await read(http, ChatBody)
        if tokenizer.chat_template is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        messages = plain_messages(body.messages, limits)
        try:
            ids = await asyncio.to_thread(
                tokenizer.apply_chat_template, messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # whatever a template raises is about the messages
            raise bad_request(
                f"the chat template does not take these messages: {str(error)[:300]}", "messages"
            ) from None
        return await answer(http, body, ids, True, body.top_logprobs if body.logprobs else None)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": config.model_name,
            "object": "model",
            "created": started,
            "owned_by": "kvstudy",
            "max_model_len": engine.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        if runner.failure is not None or not runner.is_alive():
            return json_response(ApiError(503, str(runner.failure), "server_error").body, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return PlainTextResponse(
            metrics.render(engine, runner.open_requests), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/config")
    async def effective_config() -> Response:
        return json_response(effective(engine))

    @app.get("/budget")
    async def budget() -> Response:
        return json_response(metrics.attended_shares(engine))

    @app.post("/reset")
    async def reset() -> Response:
        await runner.call(engine.reset)
        return json_response({"status": "ok"})

    started = int(time.time())
    return app


def effective(engine: Engine) -> dict[str, Any]:
    """The config as it took effect, and what was found beside it."""
    geometry = dataclasses.asdict(engine.model.geometry)
    geometry |= {"dtype": str(engine.model.dtype).removeprefix("torch."), "device": str(engine.model.device)}
    return {
        "config": engine.config.model_dump(mode="json", exclude={"api_key"}),
        "model": geometry | {"class": type(engine.model.lm).__name__, "weight_bytes": engine.model.weight_bytes},
        "max_model_len": engine.max_model_len,
        "policies": {name: policy.options.model_dump(mode="json") for name, policy in engine.policies.items()},
        "kv": {
            pool.tier: {
                "bytes": pool.usable_bytes,
                "blocks": pool.num_blocks,
                "entry_bytes": pool.entry_bytes,
            }
            for pool in (engine.device_pool, engine.host_pool)
        },
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "kernels": kernels.describe() if attention.kernels_enabled() else None,
        "fused": engine.model.fused is not None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Says when it is ready, and ends open streams when it is told to stop, so that nothing is waited for."""

    def __init__(self, config: uvicorn.Config, runner: Runner, url: str) -> None:
        super().__init__(config)
        self.runner = runner
        self.url = url

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM, with exit code 0; uvicorn itself would raise the signal again."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"kvstudy engine ready on {self.url}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.runner.stop()
        await super().shutdown(sockets)


def join_others(config: EngineConfig) -> None:
    """Be one of the processes that share a model with the one that serves it, until that one stops."""
    follow(Engine(config, AutoTokenizer.from_pretrained(config.model_dir)))


def serve(config: EngineConfig, listener: socket.socket) -> None:
    """Load the model and answer on a bound socket until told to stop (SIGTERM, SIGINT).

    Raises `EngineFailed` when the engine does: a server that can only answer 503 is of no use, and whoever watches the
    process is to see that it ended.
    """
    # The engine's thread holds the interpreter for long stretches; the loop's is to get it soon when it has a
    # token to send.
    sys.setswitchinterval(1e-3)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(config.model_dir, trust_remote_code=False)
    # In a thread that ends with it, and whose OpenMP workers end too: beside those of the thread that steps there would
    # be more than cores, and libgomp then has all of them sleep at every barrier.
    with ThreadPoolExecutor(1) as builder:
        engine = builder.submit(Engine, config, tokenizer).result()
    host, port = listener.getsockname()[:2]

    async def run() -> None:
        runner = Runner(engine, asyncio.get_running_loop())
        app = create_app(engine, runner)
        settings = uvicorn.Config(
            app if config.api_key is None else Gate(app, config.api_key),
            http=BoundedHead,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = _Server(settings, runner, f"http://{host}:{port}")
        runner.on_failure = lambda: setattr(server, "should_exit", True)
        runner.start()
        await server.serve([listener])
        runner.join(timeout=0.5)
        if (failure := runner.failure) is not None:
            raise EngineFailed(" ".join(f"the engine failed: {type(failure).__name__}: {failure}".split()))

    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as loop:
        loop.run(run())
