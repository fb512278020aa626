"""How much load one client process can offer, and how late it is: `python -m benchmarks.client [--json]`.

A scripted server on one core answers; the client, on another, sends an open loop. Targets: 5,000 requests a second of
one-chunk replies and 300 a second of 64-chunk streams, p99 lag below 5 ms. Beside it a plain aiohttp program does the
same work (schedule, stream, time of each line, no parsing), so that `ratio` is our CPU over aiohttp's on this machine.
"""

from __future__ import annotations

import asyncio
import os
import time

import aiohttp
import numpy as np

from benchmarks.common import Row, main
from kvstudy.load.client import Plan, completion_body, run
from kvstudy.load.flights import Request
from kvstudy.load.mock import Script, running
from kvstudy.measure import gates

LAG_TARGET_S = 0.005


def schedule(rate: float, seconds: float) -> np.ndarray:
    times = np.cumsum(np.random.default_rng(0).exponential(1 / rate, int(rate * seconds * 1.2) + 50))
    return times[times < seconds]


def requests(count: int, tokens: int) -> list[Request]:
    body = completion_body("mock", list(range(32)), tokens)
    return [Request(i, "short", 32, tokens, body) for i in range(count)]


async def _with_aiohttp(url: str, times: np.ndarray, tokens: int) -> tuple[np.ndarray, float]:
    """(lag, share answered) of what one would write first: a task a request, a pool without a limit."""
    body = completion_body("mock", list(range(32)), tokens)
    lag = np.empty(len(times))
    failed = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        zero = time.monotonic() + 0.02

        async def one(index: int) -> None:
            nonlocal failed
            due = zero + times[index]
            lag[index] = time.monotonic() - due
            headers = {"Content-Type": "application/json"}
            try:
                async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                    async for _ in answer.content:
                        time.monotonic()
            except (aiohttp.ClientError, OSError):
                failed += 1

        tasks = []
        for index, at in enumerate(times):
            wait = zero + at - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(index)))
        await asyncio.gather(*tasks)
    return lag, 1.0 - failed / len(times)


def measure(rate: float, tokens: int, seconds: float) -> list[Row]:
    cores = sorted(os.sched_getaffinity(0))
    times = schedule(rate, seconds)
    script = Script(gap_s=0.02 if tokens > 1 else 0.0)
    name = f"{rate:.0f} requests/s x {tokens} chunk{'s' if tokens > 1 else ''}"
    os.sched_setaffinity(0, cores[:1])  # the server's core, inherited
    try:
        with running(script) as mock:
            os.sched_setaffinity(0, cores[-1:])
            begun = time.process_time()
            frame = run(Plan(requests(len(times), tokens), seconds, 30.0, 30.0, times=times), mock.url).frame
            ours = time.process_time() - begun
            begun = time.process_time()
            theirs_lag, theirs_ok = asyncio.run(_with_aiohttp(mock.url, times, tokens))
            theirs = time.process_time() - begun
    finally:
        os.sched_setaffinity(0, cores)
    lag = (frame["sent_s"] - frame["scheduled_s"]).to_numpy()
    sent = frame["sent_s"].to_numpy()
    rate_sent = (len(sent) - 1) / float(np.ptp(sent))
    asked = (len(times) - 1) / float(np.ptp(times))
    ok = float((frame["status"] == "ok").mean())
    p99 = float(np.nanquantile(lag, 0.99))
    bound = gates.client_bound(frame)
    return [
        Row(
            f"{name}: rate sent",
            rate_sent,
            "requests/s",
            rate_sent / asked,
            asked,
            abs(rate_sent / asked - 1) < 0.01,
        ),
        Row(f"{name}: answered", ok, "share", ok, 1.0, ok == 1.0),
        Row(f"{name}: p99 lag", p99, "s", p99 / LAG_TARGET_S, LAG_TARGET_S, p99 < LAG_TARGET_S),
        Row(f"{name}: a cell would say client_bound", float(bound), "(1 is yes)"),
        Row(f"{name}: p99 lag of raw aiohttp", float(np.quantile(theirs_lag, 0.99)), "s"),
        Row(f"{name}: answered to raw aiohttp", theirs_ok, "share"),
        Row(f"{name}: client CPU", ours / seconds, "cores", ours / theirs),
        Row(f"{name}: CPU of raw aiohttp", theirs / seconds, "cores"),
    ]


def rows() -> list[Row]:
    return [*measure(5000, 1, 6.0), *measure(300, 64, 6.0)]


if __name__ == "__main__":
    main(__doc__ or "", rows)
