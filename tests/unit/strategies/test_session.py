from __future__ import annotations

from collections import Counter

from router.strategies.strategy import Reason
from tests.support.fleet import Fleet, text_of
from tests.unit.strategies.test_contract import TEXTS, Rig

KEYS = [b"session-%d" % n for n in range(600)]


def homes(rig: Rig, keys: list[bytes] = KEYS, backends: tuple | None = None) -> dict[bytes, str]:
    found = {}
    for key in keys:
        choice = rig.take(TEXTS[0], rig.backends if backends is None else backends, key=key)
        found[key] = choice.backend.name
        assert choice.reason is Reason.SESSION
        rig.end(choice)
    return found


def test_a_session_stays_and_sessions_spread_by_weight() -> None:
    rig = Rig("session")  # weights 1, 2, 1, 2
    first = homes(rig)
    assert homes(rig) == first
    share = Counter(first.values())
    for name, weight in (("b0", 1), ("b1", 2), ("b2", 1), ("b3", 2)):
        assert abs(share[name] - 100 * weight) < 45


def test_a_lost_backend_moves_only_its_own_sessions() -> None:
    rig = Rig("session")
    before = homes(rig)
    after = homes(rig, backends=rig.backends[1:])
    for key, home in before.items():
        if home != "b0":
            assert after[key] == home
    assert {after[key] for key, home in before.items() if home == "b0"} == {"b1", "b2", "b3"}


def test_a_hot_session_spills_at_the_bound_and_comes_home() -> None:
    rig = Rig("session")
    home = homes(rig, [b"hot"])[b"hot"]
    open_choices = [rig.take(TEXTS[0], rig.backends, key=b"hot") for _ in range(60)]
    at_home = sum(choice.backend.name == home for choice in open_choices)
    weight = next(b.weight for b in rig.backends if b.name == home)
    fair = 60 * weight / 6
    assert fair <= at_home <= max(fair * 1.25, fair + 4) + 1
    for choice in open_choices:
        rig.end(choice)
    assert homes(rig, [b"hot"])[b"hot"] == home


def test_at_low_traffic_a_session_never_spills() -> None:
    rig = Rig("session")
    open_choices = [rig.take(TEXTS[0], rig.backends, key=b"one") for _ in range(4)]
    assert len({choice.backend for choice in open_choices}) == 1


def test_without_a_key_the_prefix_decides_with_its_reason() -> None:
    fleet = Fleet("session")
    fleet.grow(4)
    text = text_of(1, 3000)
    leader = fleet.ask(text, key=b"somebody")
    assert leader.choice.reason is Reason.SESSION
    follower = fleet.ask(text)
    assert follower.backend is leader.backend  # what a keyed request left in the cache is known
    assert follower.choice.reason is Reason.PREFIX
    assert fleet.ask(text_of(2, 3000)).choice.reason is Reason.LOAD
    again = fleet.ask(text, key=b"somebody")
    assert again.choice.matched_tokens > 2900
