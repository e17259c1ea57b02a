"""The engine model's times, found again from what an engine with known times would show."""

from __future__ import annotations

from random import Random

import pytest

from loadtest.policy.calibrate import describe, fit, line
from router.sim.engine_model import EngineConfig

KNOWN = EngineConfig(step_s=0.011, prefill_token_s=0.0009, decode_s=0.006, decode_seq_s=0.0004)


def test_known_times_are_found_again_whatever_an_outlier_says() -> None:
    rng = Random(3)
    prefills = [(size, KNOWN.step_duration_s(size, 0)) for size in (256, 512, 1024, 2048) for _ in range(5)]
    decodes = [(batch, KNOWN.step_duration_s(0, batch)) for batch in (1, 2, 4, 8) for _ in range(5)]
    prefills += [(size, 9.0 * rng.random()) for size in (256, 2048)]
    decodes.append((8, 3.0))
    found = fit(prefills, decodes)
    for name in ("step_s", "prefill_token_s", "decode_s", "decode_seq_s"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name))
    assert "1024 prefill tokens" in describe(found, prefills, decodes)


def test_noise_never_makes_a_time_negative() -> None:
    found = fit([(100, 0.02), (200, 0.05)], [(1, 0.01), (8, 0.009)])
    assert (found.step_s, found.decode_seq_s) == (0.0, 0.0)
    assert found.decode_s > 0.0


def test_one_size_is_no_line() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        line([(100, 0.1), (100, 0.2)])
