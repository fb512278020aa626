"""What comes in: who may ask, how much, in what shape. Every refusal is an answer in OpenAI's error shape.

Nothing is done for a request before it is known to be small enough: a key is compared before a body is read, a body is
counted while it is read, a text that is longer than any prompt the model takes is refused before it is tokenised.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bounds that hold whatever the model: a body, all its headers, seconds to send it, messages of a chat.
MOST_BODY_BYTES = 32 << 20
MOST_HEAD_BYTES = 64 << 10
BODY_S = 60.0
MOST_MESSAGES = 4096

Body = TypeVar("Body", bound=BaseModel)


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, "invalid_request_error", param, code)


def json_response(body: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(orjson.dumps(body), status, media_type="application/json")


@dataclass(frozen=True)
class Limits:
    """What a model can serve at most, so that more is refused unread.

    A text of more than `context x longest token` characters has more tokens than the context, whatever it says.
    """

    context: int
    text: int
    body: int

    @classmethod
    def of(cls, context: int, tokenizer: Any) -> Limits:
        """For a context of so many tokens of this tokenizer."""
        longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        text = context * longest
        # JSON may write a character in six bytes, and token ids in a dozen each.
        return cls(context, text, min(MOST_BODY_BYTES, (1 << 20) + max(6 * text, 12 * context)))

    def check_text(self, characters: int, param: str) -> None:
        """Raise `ApiError` for a text that cannot fit."""
        if characters > self.text:
            raise bad_request(
                f"this model's maximum context length is {self.context} tokens; a text of {characters:,} characters "
                "has more",
                param,
                "context_length_exceeded",
            )


async def read_object(http: Request, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object without its nulls (OpenAI: null is the default); raises `ApiError`."""
    too_large = ApiError(413, f"the body is over {limits.body:,} bytes", "invalid_request_error", None, "too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limits.body:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                size += len(part)
                if size > limits.body:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body was not there after {BODY_S:g} s", "invalid_request_error") from None
    except ClientDisconnect:
        raise bad_request("the client has gone") from None
    try:
        value = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object")
    return {name: item for name, item in value.items() if item is not None}


def validated(kind: type[Body], value: dict[str, Any]) -> Body:
    """The object as a typed body; raises `ApiError` that names the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = str(first["loc"][0]) if first["loc"] else None
        raise bad_request(f"{where}: {first['msg']}", where) from None


def single_prompt(prompt: Any, limits: Limits) -> str | list[int]:
    """The one prompt of a completion, text or token ids; raises `ApiError`.

    Checked by hand: typed as a union, each item of a long list would be a handful of error objects.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        limits.check_text(len(prompt), "prompt")
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise bad_request("one prompt a request: prompt is a string or a list of token ids", "prompt")


def plain_messages(messages: list[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Messages whose content is one text, as templates take it; raises `ApiError`.

    Content may be a list of parts of type text (joined by newlines, as vLLM does) or null (a call of a tool).
    """
    plain = []
    size = 0
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message.get("role"), str):
            raise bad_request(f"{where}: role is missing or not a string", "messages")
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise bad_request(f"{where}: only content parts of type text are served", "messages")
                texts.append(part["text"])
            content = "\n".join(texts)
        if content is None:
            content = ""
        if not isinstance(content, str):
            raise bad_request(f"{where}: content is a string or a list of parts", "messages")
        size += len(content)
        limits.check_text(size, "messages")
        plain.append(message | {"content": content})
    return plain


class Gate:
    """Asks for the API key before anything else: under `/v1/`, and for what changes the server's state."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or hand on."""
        if scope["type"] == "http" and (scope["path"].startswith("/v1/") or scope["method"] not in ("GET", "HEAD")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given.removeprefix(b"Bearer "), self.key):
                wrong = ApiError(401, "wrong or missing API key", "authentication_error", None, "invalid_api_key")
                await json_response(wrong.body, wrong.status)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def answer_errors(app: FastAPI) -> None:
    """Make every error of an app an answer in OpenAI's shape: ours, the router's 404 and 405, and the unforeseen."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return json_response(error.body, error.status)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        if error.status_code == 404:
            refused = ApiError(404, f"no such path: {path}", "not_found_error")
        elif error.status_code == 405:
            refused = ApiError(405, f"{path} does not take {request.method}", "invalid_request_error")
        else:
            refused = ApiError(error.status_code, str(error.detail), "invalid_request_error")
        answer = json_response(refused.body, refused.status)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def on_unforeseen(_: Request, error: Exception) -> Response:
        # Its text is for the log, where uvicorn writes the trace: it may hold what is not the client's business.
        return json_response(ApiError(500, f"internal error: {type(error).__name__}", "server_error").body, 500)


class BoundedHead(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol with a bound on the request line and headers, which llhttp takes without end."""

    head_bytes = 0
    in_head = True
    of_body = False  # of the data in hand, whether any was

    def data_received(self, data: bytes) -> None:
        """Count what comes before a body."""
        self.of_body = not self.in_head
        super().data_received(data)
        if self.of_body:
            return
        self.head_bytes += len(data)
        if self.head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request line and headers are too long.")

    def on_headers_complete(self) -> None:
        """From here on it is a body, which its reader counts."""
        self.in_head = False
        self.of_body = True
        self.head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request begins."""
        self.in_head = True
        super().on_message_complete()
