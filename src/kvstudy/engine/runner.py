"""The engine's one thread, and the way between it and an asyncio loop.

Requests, aborts and calls go in through an inbox that is read between two steps; what a step gave comes back
to the loop in one callback a step, which puts each output into its request's queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstudy.engine.core import Engine, Output
from kvstudy.engine.request import Request

logger = logging.getLogger(__name__)
Stream = asyncio.Queue[Output | BaseException]


class EngineStopped(RuntimeError):
    """The engine has been told to stop, or has failed."""


class Runner(threading.Thread):
    """Steps an engine whenever it has work. Every method but `run` is called from the loop's thread."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="kvstudy-engine", daemon=True)
        self.engine = engine
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called in the loop's thread when the engine has failed, after every stream was told."""
        self._loop = loop
        self._inbox: deque[Callable[[], Any]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._streams: dict[Request, Stream] = {}

    @property
    def open_requests(self) -> int:
        """Requests submitted and not ended, running or queued."""
        return len(self._streams)

    def submit(self, request: Request) -> Stream:
        """Queue a request; its outputs, or the exception that ended the engine, come out of the stream."""
        if self.failure or self._stopping:
            raise EngineStopped("the engine has stopped")
        stream: Stream = asyncio.Queue()
        self._streams[request] = stream
        self._post(lambda: self.engine.add(request))
        return stream

    def abort(self, request: Request) -> None:
        """End a request whose client has gone; nothing more comes out of its stream."""
        if self._streams.pop(request, None) is not None:
            self._post(lambda: self.engine.abort(request))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps; returns what it returned."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._post(lambda: self._answer(done, function))
        return await done

    def stop(self) -> None:
        """Stop after the step in hand and end every stream."""
        self._stopping = True
        self._wake.set()
        self._end_streams(EngineStopped("the server is stopping"))

    def run(self) -> None:
        """Step until told to stop; a failure ends every stream and is kept in `failure`."""
        try:
            while not self._stopping:
                while self._inbox:
                    self._inbox.popleft()()
                if self.engine.has_work():
                    if outputs := self.engine.step():
                        self._loop.call_soon_threadsafe(self._deliver, outputs)
                else:
                    self._wake.wait()
                    self._wake.clear()
            self.engine.stop()
        except BaseException as failure:
            logger.exception("the engine failed")
            self.failure = failure
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _post(self, action: Callable[[], Any]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _answer(self, done: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(done.set_result, function())

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request)
            if stream is not None:
                stream.put_nowait(output)
                if output.finish_reason:
                    del self._streams[output.request]

    def _fail(self, failure: BaseException) -> None:
        self._end_streams(failure)
        if self.on_failure is not None:
            self.on_failure()

    def _end_streams(self, failure: BaseException) -> None:
        for stream in self._streams.values():
            stream.put_nowait(failure)
        self._streams.clear()
