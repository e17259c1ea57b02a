"""Whatever comes, in whatever order: books close, mirrors stay sound, idle equals share alike."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.strategies.registry import FACTORIES
from tests.support.fleet import Fleet, backend, request, text_of
from tests.unit.strategies.test_contract import Rig

PLACING = ["kvaware", "prefixaware", "session"]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(FACTORIES)),
    seed=st.integers(0, 1 << 30),
    engines=st.integers(1, 5),
    kv_tokens=st.sampled_from([2_000, 8_000, 100_000]),
    stream=st.booleans(),
    usage=st.booleans(),
    metrics=st.booleans(),
)
def test_a_fleet_under_any_load_ends_with_its_books_closed(
    name: str, seed: int, engines: int, kv_tokens: int, stream: bool, usage: bool, metrics: bool
) -> None:
    rng = Random(seed)
    fleet = Fleet(name, seed=seed, stream=stream, usage=usage, exports_metrics=metrics, metrics_age_s=rng.random() * 2)
    for n in range(engines):
        fleet.add(f"b{n}", kv_tokens=kv_tokens, tokens_per_s=rng.choice([2_000.0, 10_000.0, 40_000.0]))
    texts = [text_of(n, rng.randint(1, 800)) for n in range(6)]
    at = 0.0
    for _ in range(60):
        which = rng.randrange(6)
        texts[which] += text_of(rng.randrange(1000), rng.randint(0, 60))
        fleet.send_at(at, texts[which][: 1800 * 4], rng.randint(1, 30))
        at += rng.expovariate(rng.choice([2.0, 50.0]))
    fleet.run(at + 1.0)
    fleet.drain()
    assert len(fleet.jobs) == 60
    for served in fleet.backends:
        assert served.in_flight == 0
    fleet.tree.check()
    for job in fleet.jobs:
        assert 0 <= job.choice.matched_tokens < max(job.choice.prompt_tokens, 1)
    for gone in fleet.backends:
        fleet.remove(gone)
    assert len(fleet.tree) == 0


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*PLACING, "leastload", "roundrobin"]),
    count=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
)
def test_serial_requests_without_a_match_share_an_idle_fleet_alike(name: str, count: int, sizes: list[int]) -> None:
    """Equal sizes, so that equal work is equal numbers."""
    fleet = Fleet(name)
    fleet.grow(count)
    for n in range(len(sizes)):
        fleet.ask(text_of(n, sizes[0]), 2)
    share = [fleet.share()[served.name] for served in fleet.backends]
    assert max(share) - min(share) <= 1


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.integers(0, 6), min_size=2, max_size=6),
    tokens=st.integers(1, 2000),
    seed=st.integers(0, 1 << 20),
)
@pytest.mark.parametrize("name", PLACING)
def test_a_miss_never_joins_a_longer_line_of_equals(name: str, loads: list[int], tokens: int, seed: int) -> None:
    rig = Rig(name, seed=seed, count=0)
    backends = tuple(backend(f"b{n}") for n in range(len(loads)))
    for joined in backends:
        rig.strategy.joined(joined)
    for n, (one, load) in enumerate(zip(backends, loads, strict=True)):
        for k in range(load):
            rig.take(text_of(100 * n + k, 200), (one,))
    choice = rig.strategy.choose(request(text_of(99_999, tokens)), backends)
    assert choice is not None
    assert choice.backend.in_flight == min(loads)
