"""Fault switches: values checked, counts used up, nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest

from router.sim.cli import parse_fault
from router.sim.faults import FaultKind, Faults


def test_a_fault_without_a_count_stays_on() -> None:
    faults = Faults()
    faults.set(FaultKind.STATUS, 503)
    assert [faults.take(FaultKind.STATUS) for _ in range(3)] == [503, 503, 503]
    faults.set(FaultKind.STATUS, None)
    assert faults.take(FaultKind.STATUS) is None


def test_a_count_is_used_up_by_taking_not_by_peeking() -> None:
    faults = Faults()
    faults.set(FaultKind.STALL, True, 2)
    assert faults.peek(FaultKind.STALL) is True
    assert [faults.take(FaultKind.STALL) for _ in range(3)] == [True, True, None]
    assert faults.active() == {}


def test_setting_again_forgets_the_count() -> None:
    faults = Faults()
    faults.set(FaultKind.DRIP, 0.1, 1)
    faults.set(FaultKind.DRIP, 0.2)
    assert [faults.take(FaultKind.DRIP) for _ in range(2)] == [0.2, 0.2]
    faults.clear()
    assert faults.active() == {}


def test_zero_chunks_is_on() -> None:
    faults = Faults()
    faults.set(FaultKind.RESET_AFTER_CHUNKS, 0)
    assert faults.take(FaultKind.RESET_AFTER_CHUNKS) == 0


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FaultKind.STATUS, 418),
        (FaultKind.STATUS, "many"),
        (FaultKind.STATUS, [503]),
        (FaultKind.DRIP, -0.1),
        (FaultKind.DRIP, True),
        (FaultKind.DIE_AFTER_CHUNKS, 1.5),
        (FaultKind.BAD_MODELS, "odd"),
        (FaultKind.STALL, 3),
        (FaultKind.REFUSE, 0),
        (FaultKind.REFUSE, [1]),
        (FaultKind.TRAILING_BYTES, 10**9),
    ],
)
def test_values_that_cannot_be_are_refused_and_change_nothing(kind: FaultKind, value: Any) -> None:
    faults = Faults()
    with pytest.raises(ValueError, match=kind.value):
        faults.set(kind, value)
    assert faults.active() == {}


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_counts_that_cannot_be_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="count"):
        Faults().set(FaultKind.STALL, True, count)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stall", (FaultKind.STALL, True, None)),
        ("status=503:2", (FaultKind.STATUS, "503", 2)),
        ("drip=0.5", (FaultKind.DRIP, "0.5", None)),
    ],
)
def test_the_flags_form(text: str, expected: tuple[FaultKind, Any, int | None]) -> None:
    assert parse_fault(text) == expected
    kind, value, count = expected
    Faults().set(kind, value, count)


@pytest.mark.parametrize("text", ["odd", "status=503:x"])
def test_flags_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="--fault"):
        parse_fault(text)
