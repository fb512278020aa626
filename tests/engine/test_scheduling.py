"""Who runs when: joining and leaving in mid-flight, admission by memory, the static scheduler, exact
accounting.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_tiny import random_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstudy.engine import metrics
from kvstudy.engine.core import Engine
from kvstudy.engine.request import Request, SamplingParams, Status
from kvstudy.engine.scheduler import RequestTooLarge

Make = Callable[..., Engine]
ENTRY = 2 * 2 * 16 * 4  # K and V, 2 KV heads, head_dim 16, float32
LAYERS = 3


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_requests_join_and_leave_in_mid_flight(engine_of: Make) -> None:
    engine = engine_of(max_prefill_tokens=8)
    engine.trace = trace = []
    first = engine.submit(random_prompt(4), params(12))
    for _ in range(3):
        engine.step()
    second = engine.submit(random_prompt(20), params(3))
    run(engine)
    # The second's prompt takes three steps of at most 8 tokens; the first decodes in each of them.
    joined = [record for record in trace if any(chunk[0] == second.id for chunk in record.chunks)]
    assert [record.chunks for record in joined] == [[(second.id, 0, 8)], [(second.id, 8, 8)], [(second.id, 16, 4)]]
    assert all(record.decoded == [first.id] for record in joined)
    both = [record for record in trace if record.decoded == [first.id, second.id]]
    assert len(both) == 2
    assert both[-1].finished == [second.id]
    assert trace[-1].decoded == [first.id]
    # Nothing is computed twice.
    assert sum(length for record in trace for _, _, length in record.chunks) == 24
    assert sum(len(record.decoded) for record in trace) == 11 + 2


def test_a_long_prompt_does_not_stall_the_others(engine_of: Make) -> None:
    engine = engine_of(max_prefill_tokens=16)
    early = engine.submit(random_prompt(4), params(40))
    engine.step()
    late = engine.submit(random_prompt(160), params(2))
    before = len(early.output)
    while late.in_prefill:
        engine.step()
    assert len(early.output) - before == 160 // 16


def test_no_chunk_exceeds_the_limit_and_prompts_share_it(engine_of: Make) -> None:
    engine = engine_of(max_prefill_tokens=10)
    engine.trace = trace = []
    engine.generate([random_prompt(n) for n in (7, 7, 7)], params(1))
    assert [[length for _, _, length in record.chunks] for record in trace] == [[7, 3], [4, 6], [1]]


def test_pool_accounting_is_exact(engine_of: Make) -> None:
    engine = engine_of(block_size=16, max_prefill_tokens=32)
    pool = engine.device_pool
    request = engine.submit(random_prompt(40), params(20))
    engine.step()
    assert pool.live_bytes == 32 * LAYERS * ENTRY
    assert pool.used_blocks == 2 * LAYERS
    assert pool.reserved_bytes == 4 * LAYERS * 16 * ENTRY  # 59 entries: 4 blocks a layer
    engine.step()
    for step in range(19):
        assert pool.live_bytes == (40 + step) * LAYERS * ENTRY
        engine.step()
    assert request.is_finished
    assert (pool.live_bytes, pool.used_blocks, pool.reserved_bytes) == (0, 0, 0)
    assert pool.peak_live_bytes == 59 * LAYERS * ENTRY


def test_admission_queues_what_does_not_fit_yet_first_come_first_served(engine_of: Make) -> None:
    one = LAYERS * 2 * 16 * ENTRY  # 17..32 entries
    engine = engine_of(kv_memory_bytes=2 * one, max_prefill_tokens=64)
    requests = [engine.submit(random_prompt(20), params(n)) for n in (5, 9, 5)] + [engine.submit([1], params(2))]
    engine.step()
    assert [r.status for r in requests] == [Status.RUNNING, Status.RUNNING, Status.WAITING, Status.WAITING]
    run(engine)
    assert all(len(r.output) == r.params.max_tokens for r in requests)
    assert engine.scheduler.peak_running == 2
    # The third waited for memory, and the fourth behind it.
    assert (engine.scheduler.queued, engine.scheduler.peak_waiting) == ({"memory": 2, "seats": 0, "turn": 0}, 2)
    assert requests[2].admitted >= requests[0].finished  # type: ignore[operator]
    assert requests[3].admitted >= requests[2].admitted  # type: ignore[operator]


def test_what_could_never_fit_is_refused(engine_of: Make) -> None:
    engine = engine_of(kv_memory_bytes=LAYERS * 2 * 16 * ENTRY)
    engine.submit(random_prompt(20), params(13))
    with pytest.raises(RequestTooLarge, match="device KV memory"):
        engine.submit(random_prompt(20), params(14))


def test_max_num_seqs_bounds_the_batch(engine_of: Make) -> None:
    engine = engine_of(max_num_seqs=2)
    engine.generate([random_prompt(4)] * 5, params(4))
    assert engine.scheduler.peak_running == 2
    assert engine.scheduler.queued == {"memory": 0, "seats": 3, "turn": 0}
    text = metrics.render(engine, 0)
    assert 'kvstudy_requests_queued_total{short_of="seats"} 3' in text and "kvstudy_preemptions_total 0" in text
    engine.reset()
    assert engine.scheduler.queued == {"memory": 0, "seats": 0, "turn": 0}


def test_what_came_during_a_step_waits_though_the_scheduler_has_not_seen_it(engine_of: Make) -> None:
    engine = engine_of(max_num_seqs=1)
    engine.submit(random_prompt(4), params(4))
    engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (1, 0)
    assert "\nkvstudy_requests_waiting 2\n" in metrics.render(engine, 3)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_abort_gives_everything_back(when: str, engine_of: Make) -> None:
    engine = engine_of(max_prefill_tokens=8, max_num_seqs=1)
    other = engine.submit(random_prompt(4), params(30)) if when == "waiting" else None
    request = engine.submit(random_prompt(20), params(30))
    for _ in range({"waiting": 2, "prefill": 2, "decode": 6}[when]):
        engine.step()
    engine.abort(request)
    assert request.finish_reason == "abort"
    if other:
        engine.abort(other)
    pool = engine.device_pool
    assert (pool.live_bytes, pool.used_blocks, pool.reserved_bytes) == (0, 0, 0)
    assert not engine.has_work()
    engine.abort(request)


def test_static_batches_prefill_one_by_one_and_decode_together(engine_of: Make) -> None:
    engine = engine_of(scheduler="static", max_num_seqs=2, max_prefill_tokens=8)
    engine.trace = trace = []
    a, b, c = (engine.submit(random_prompt(n), params(m)) for n, m in ((10, 3), (4, 6), (5, 2)))
    run(engine)
    chunks = [(record.chunks, record.decoded) for record in trace]
    assert chunks[:3] == [([(a.id, 0, 8)], []), ([(a.id, 8, 2)], []), ([(b.id, 0, 4)], [])]
    assert chunks[3] == ([], [a.id, b.id])
    start_of_c = next(i for i, (parts, _) in enumerate(chunks) if parts and parts[0][0] == c.id)
    assert trace[start_of_c - 1].finished == [b.id]
    assert trace[start_of_c].admitted == [c.id]


def test_schedulers_give_the_same_tokens(engine_of: Make) -> None:
    prompts = [random_prompt(n, seed=n) for n in (3, 30, 12)]
    outputs = [
        [r.output for r in engine_of(scheduler=scheduler).generate(prompts, params(6))]
        for scheduler in ("continuous", "static")
    ]
    assert outputs[0] == outputs[1]


def test_two_policies_in_one_batch(engine_of: Make) -> None:
    engine = engine_of(other_policies={"streaming": {"sinks": 2}}, budget={"share": 0.25}, max_prefill_tokens=32)
    prompts = [random_prompt(n, seed=n) for n in (24, 40, 32)]
    names = ["full", "streaming", "full"]
    alone = []
    for prompt, name in zip(prompts, names, strict=True):
        alone += engine.generate([prompt], params(10), name)
    engine.trace = trace = []
    mixed: list[Request] = [engine.submit(p, params(10), name) for p, name in zip(prompts, names, strict=True)]
    run(engine)
    assert [r.output for r in mixed] == [r.output for r in alone]
    assert any(len(record.decoded) == 3 for record in trace)
    assert [r.attended_entries == r.full_entries for r in mixed] == [True, False, True]
    assert mixed[1].attended_entries == 9 * 10  # nine decode steps over a quarter of 40


def test_counters_and_reset(engine_of: Make) -> None:
    engine = engine_of()
    engine.generate([random_prompt(10)] * 2, params(5))
    counted = engine.policies["full"].counted
    assert engine.counters.prompt_tokens == 20
    assert engine.counters.generation_tokens == 10
    assert engine.counters.finished == {"length": 2}
    assert (counted.attended == 2 * (11 + 12 + 13 + 14)).all()
    assert (counted.attended == counted.full).all()
    engine.reset()
    assert engine.counters.steps == 0
    assert engine.device_pool.peak_live_bytes == 0
    assert counted.full.sum() == 0


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 10), st.integers(0, 6)), min_size=1, max_size=6),
    blocks=st.integers(4, 12),
    chunk=st.integers(1, 40),
    policy=st.sampled_from(["full", "streaming"]),
)
def test_nothing_ever_runs_out_or_leaks(
    sizes: list[tuple[int, int, int]], blocks: int, chunk: int, policy: str, engine_of: Make
) -> None:
    engine = engine_of(
        kv_memory_bytes=blocks * LAYERS * 16 * ENTRY, max_prefill_tokens=chunk, policy=policy, budget={"share": 0.5}
    )
    requests: list[Request] = []
    for prompt, output, gap in sizes:
        requests.append(engine.submit(random_prompt(prompt), params(output)))
        for _ in range(gap):
            engine.step()
            assert engine.device_pool.used_blocks * engine.device_pool.block_bytes <= engine.device_pool.reserved_bytes
    run(engine)
    assert all(len(r.output) == r.params.max_tokens for r in requests)
    pool = engine.device_pool
    assert (pool.live_bytes, pool.used_blocks, pool.reserved_bytes) == (0, 0, 0)
