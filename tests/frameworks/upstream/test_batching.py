"""Batches are formed first come, first served, of one length; tokens are handed out as the loop yields them."""

from __future__ import annotations

import threading
import time

from kvstudy.frameworks.upstream.batch_server.batching import Batcher, Request, serve_batch

from .stand_in import StandIn


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(length: int, arrived: float, max_tokens: int = 4, **options: float) -> Request:
    return Request(list(range(length)), max_tokens, None, options.get("temperature", 0.0), arrived)


def test_the_oldest_request_chooses_the_length_and_nobody_overtakes_within_it() -> None:
    clock = Clock()
    batcher = Batcher(3, 0.0, clock=clock)
    lengths = [8, 5, 8, 5, 8, 8]
    queued = [request(length, 0.0) for length in lengths]
    for one in queued:
        batcher.submit(one)
    taken = [batcher.next_batch(0.0) for _ in range(3)]
    assert taken == [[queued[0], queued[2], queued[4]], [queued[1], queued[3]], [queued[5]]]
    assert batcher.next_batch(0.0) == []


def test_a_batch_that_is_not_full_waits_no_longer_than_it_may() -> None:
    clock = Clock()
    batcher = Batcher(2, 1.5, clock=clock)
    first = request(4, 0.0)
    batcher.submit(first)
    assert batcher.next_batch(0.0) == []
    clock.now = 1.4
    assert batcher.next_batch(0.0) == []
    clock.now = 1.5
    assert batcher.next_batch(0.0) == [first] and first.admitted == 1.5
    batcher.submit(request(4, 1.6))
    second = request(4, 1.7)
    batcher.submit(second)
    clock.now = 1.7  # full: it goes at once
    assert batcher.next_batch(0.0)[1] is second


def test_waiting_ends_when_the_batch_fills() -> None:
    batcher = Batcher(2, 30.0)
    batcher.submit(request(4, batcher.clock()))
    later = threading.Timer(0.1, lambda: batcher.submit(request(4, batcher.clock())))
    later.start()
    begun = time.monotonic()
    assert len(batcher.next_batch()) == 2
    assert time.monotonic() - begun < 10


def test_what_does_not_fit_waits_for_the_next_batch() -> None:
    clock = Clock()
    batcher = Batcher(8, 5.0, fits=lambda batch: sum(len(r.prompt) for r in batch) <= 10, clock=clock)
    queued = [request(4, 0.0) for _ in range(3)]
    for one in queued:
        batcher.submit(one)
    assert batcher.next_batch(0.0) == queued[:2]  # memory is full: no reason to wait
    assert batcher.next_batch(0.0) == []
    clock.now = 5.0
    assert batcher.next_batch(0.0) == queued[2:]


def test_temperatures_do_not_mix_and_who_has_gone_is_not_served() -> None:
    batcher = Batcher(8, 0.0, clock=Clock())
    cold, warm, gone = request(4, 0.0), request(4, 0.0, temperature=1.0), request(4, 0.0)
    gone.cancelled = True
    for one in (cold, warm, gone):
        batcher.submit(one)
    assert batcher.next_batch(0.0) == [cold]
    assert batcher.next_batch(0.0) == [warm]


def test_each_request_is_released_at_its_own_last_token() -> None:
    clock, loop = Clock(), StandIn()
    batch = [request(3, 0.0, max_tokens=1), request(3, 0.5, max_tokens=4), request(3, 0.7, max_tokens=2)]
    seen: list[int] = []

    def tick() -> float:
        clock.now += 1.0
        seen.append(loop.totals.running)
        return clock.now

    serve_batch(batch, loop, loop.totals, tick)
    assert [r.output for r in batch] == [[3], [3, 4, 5, 6], [3, 4]]
    assert [r.reason for r in batch] == ["length"] * 3
    # The clock is read at the begin, once a step and at the end: 2 to 5 are the steps.
    assert [r.first_token for r in batch] == [2.0, 2.0, 2.0]
    assert [r.finished for r in batch] == [2.0, 5.0, 3.0]
    assert loop.totals.running == 0 and loop.totals.running_peak == 3
    counts = loop.totals.counts
    assert (counts["prompt_tokens"], counts["generation_tokens"], counts["batches"]) == (9, 7, 1)
    assert loop.totals.finished == {"length": 3}


def test_a_batch_ends_when_nobody_wants_more() -> None:
    loop = StandIn()
    ends = Request([1, 2], 50, eos=5, temperature=0.0, arrived=0.0)
    leaves = request(2, 0.0, max_tokens=50)
    leaves.cancelled = True
    serve_batch([ends, leaves], loop, loop.totals)
    assert ends.output == [3, 4, 5] and ends.reason == "stop"
    assert loop.steps == [3] and leaves.output == []


def test_a_loop_that_stops_short_fails_its_requests() -> None:
    class Short(StandIn):
        def run(self, prompts, gen_len, temperature, on_tokens):  # type: ignore[no-untyped-def]
            on_tokens([1] * len(prompts))

    loop, one = Short(), request(2, 0.0)
    serve_batch([one], loop, loop.totals)
    assert [one.events.get()[0] for _ in range(2)] == ["token", "error"]
    assert loop.totals.finished == {"error": 1}
