"""The scheduler: step time, chunks, order, seats, preemption, aborts; all on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.clock import VirtualClock
from router.sim.engine_model import EngineConfig, EngineModel, EngineRequest, Finish, Output

CONFIG = EngineConfig(
    block_size=16,
    num_blocks=1025,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    step_s=0.008,
    prefill_token_s=0.0001,
    decode_s=0.004,
    decode_seq_s=0.00025,
)


def request(name: str, prompt: int, output: int = 1, hashes: Sequence[int] = ()) -> EngineRequest:
    return EngineRequest(name, prompt, output, hashes)


class Engine:
    """A model driven by a virtual clock."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.clock = VirtualClock(0.0)
        self.model = EngineModel(config)

    def submit(self, *requests: EngineRequest) -> None:
        for entry in requests:
            entry.arrived_at = self.clock.now()
            self.model.submit(entry)

    def step(self) -> list[Output]:
        duration, outputs = self.model.step(self.clock.now())
        self.clock.advance(duration)
        self.model.check()
        return outputs

    def run(self) -> None:
        for _ in range(100_000):
            if not self.model.has_work:
                return
            self.step()
        raise AssertionError("it never ends")


@pytest.mark.parametrize("prompt", [1, 100, 512, 513, 1024, 5000])
def test_ttft_is_the_sum_of_its_chunks(prompt: int) -> None:
    engine = Engine()
    only = request("a", prompt)
    engine.submit(only)
    engine.run()
    chunks = -(-prompt // 512)
    assert only.first_token_at == pytest.approx(chunks * 0.008 + prompt * 0.0001)


def test_a_cached_prefix_costs_no_prefill() -> None:
    engine = Engine()
    hashes = list(range(20))
    engine.submit(request("a", 330, hashes=hashes))
    engine.run()
    start = engine.clock.now()
    again = request("b", 330, hashes=hashes)
    engine.submit(again)
    engine.run()
    assert again.cached_tokens == 320
    assert engine.clock.now() - start == pytest.approx(0.008 + 10 * 0.0001)
    assert (engine.model.stats.prefix_queries, engine.model.stats.prefix_hits) == (660, 320)


def test_a_full_hit_computes_its_last_block() -> None:
    engine = Engine()
    engine.submit(request("a", 64, hashes=[1, 2, 3, 4]))
    engine.run()
    again = request("b", 64, hashes=[1, 2, 3, 4])
    engine.submit(again)
    engine.run()
    assert again.cached_tokens == 48


def test_without_prefix_caching_nothing_hits() -> None:
    engine = Engine(EngineConfig(prefix_caching=False))
    for name in "ab":
        entry = request(name, 64, hashes=[1, 2, 3, 4])
        engine.submit(entry)
        engine.run()
        assert entry.cached_tokens == 0


def test_decode_time_grows_with_the_batch_and_with_prefills() -> None:
    engine = Engine()
    engine.submit(request("a", 10, 50), request("b", 10, 50))
    engine.step()
    before = engine.clock.now()
    engine.step()
    assert engine.clock.now() - before == pytest.approx(0.008 + 0.004 + 2 * 0.00025)
    engine.submit(request("c", 1000))
    before = engine.clock.now()
    outputs = engine.step()
    assert {output.request.request_id for output in outputs} == {"a", "b"}
    # Two decodes leave 510 of 512 tokens to the prefill.
    assert engine.clock.now() - before == pytest.approx(0.008 + 510 * 0.0001 + 0.004 + 2 * 0.00025)


def test_prefills_share_a_step_first_come_first_served() -> None:
    engine = Engine()
    first, second, third = request("a", 200), request("b", 200), request("c", 200)
    engine.submit(first, second, third)
    assert [output.request for output in engine.step()] == [first, second]
    assert [output.request for output in engine.step()] == [third]


def test_siblings_in_one_step_share_blocks_that_are_being_computed() -> None:
    engine = Engine()
    leader, follower = request("a", 100, hashes=list(range(6))), request("b", 100, hashes=list(range(6)))
    engine.submit(leader, follower)
    engine.step()
    assert (leader.cached_tokens, follower.cached_tokens) == (0, 96)


def test_seats_are_limited() -> None:
    engine = Engine()
    requests = [request(str(number), 10, 5) for number in range(6)]
    engine.submit(*requests)
    engine.step()
    assert len(engine.model.running) == 4
    assert list(engine.model.waiting) == requests[4:]
    engine.run()
    assert all(entry.generated == 5 for entry in requests)


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = Engine(EngineConfig(num_blocks=11, block_size=16, max_num_batched_tokens=32))
    running, waiting = request("a", 64, 30), request("b", 120)
    engine.submit(running, waiting)
    engine.step()
    engine.step()
    assert engine.model.running == [running]
    engine.run()
    assert waiting.scheduled_at is not None
    assert running.finished_at is not None
    assert waiting.scheduled_at >= running.finished_at


def test_a_full_pool_preempts_the_newest_and_computes_it_again() -> None:
    engine = Engine(EngineConfig(num_blocks=11, block_size=16, max_num_batched_tokens=512))
    old, new = request("old", 64, 60, hashes=[1, 2, 3, 4]), request("new", 64, 60, hashes=[11, 12, 13, 14])
    engine.submit(old, new)
    engine.run()
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert old.generated == new.generated == 60
    assert engine.model.stats.preemptions == 1
    assert new.finished_at is not None
    assert old.finished_at is not None
    assert new.finished_at > old.finished_at
    # Counted once, however often it is computed.
    assert engine.model.stats.prompt_tokens == 128
    assert engine.model.stats.generation_tokens == 120


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_frees_everything(steps: int) -> None:
    engine = Engine()
    engine.submit(request("a", 600, 10), request("b", 10, 10))
    for _ in range(steps):
        engine.step()
    assert engine.model.abort("a") is not None
    assert engine.model.abort("a") is None
    engine.model.check()
    engine.run()
    assert engine.model.pool.usage == 0.0
    assert engine.model.stats.finished_requests == 1


def test_an_abort_within_a_step_brings_nothing() -> None:
    model = EngineModel(CONFIG)
    model.submit(request("a", 10, 5))
    model.submit(request("b", 10, 5))
    duration = model.schedule(0.0)
    assert duration is not None
    model.abort("a")
    outputs = model.complete(duration)
    assert [output.request.request_id for output in outputs] == ["b"]
    model.check()


def test_finish_reason_comes_with_the_last_token() -> None:
    engine = Engine()
    entry = EngineRequest("a", 10, 3, finish=Finish.STOP)
    engine.submit(entry)
    assert [engine.step()[0].finish for _ in range(3)] == [None, None, Finish.STOP]
    assert engine.step() == []
    assert engine.model.step(5.0) == (0.0, [])


def test_a_stretch_of_decodes_is_one_call() -> None:
    engine = Engine()
    engine.submit(request("a", 10, 100), request("b", 10, 40))
    engine.step()
    step_s = CONFIG.step_duration_s(0, 2)
    now = engine.clock.now()
    duration, outputs = engine.model.step(now, until=now + 1000.0)
    assert duration == pytest.approx(39 * step_s)
    assert [(output.new_tokens, output.finish) for output in outputs] == [(39, None), (39, Finish.LENGTH)]
    # An arrival in the middle of the fifth step is seen at its end.
    now += duration
    duration, outputs = engine.model.step(now, until=now + 4.5 * CONFIG.step_duration_s(0, 1))
    assert outputs[0].new_tokens == 5
    assert duration == pytest.approx(5 * CONFIG.step_duration_s(0, 1))


def test_what_cannot_be_is_refused() -> None:
    model = EngineModel(EngineConfig(num_blocks=11, block_size=16))
    model.submit(request("a", 10))
    with pytest.raises(ValueError, match="already here"):
        model.submit(request("a", 10))
    with pytest.raises(ValueError, match="larger than the whole pool"):
        model.submit(request("b", 160))
    with pytest.raises(ValueError, match="1 is the least"):
        request("c", 0)
    with pytest.raises(RuntimeError, match="no step is open"):
        model.complete(0.0)
    model.schedule(0.0)
    with pytest.raises(RuntimeError, match="not complete"):
        model.schedule(0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("num_blocks", 1), ("step_s", -1.0)],
)
def test_configurations_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_a_step_must_take_time() -> None:
    with pytest.raises(ValueError, match="must take time"):
        EngineConfig(step_s=0.0, prefill_token_s=0.0)
