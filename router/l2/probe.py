"""`kvgate check --probe`: whether the shared store can be asked, and whose keys are in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from router.backends.probe import Finding, Probed
from router.clock import SystemClock
from router.l2.connection import Phase
from router.l2.l2 import L2
from router.l2.settings import L2Settings

NAME: Final = "kv_cache.l2"
PATIENCE_S: Final = 10.0  # for a connection and one look at the keys
LOOK_S: Final = 0.02  # between two looks at what has come


async def probe_store(settings: L2Settings, engines: Sequence[Probed]) -> Probed:
    """`engines`: what backends.probe found, whose models are looked for. An empty store is no fault: nothing may have
    been computed yet."""
    loop = asyncio.get_running_loop()
    l2 = L2(settings, SystemClock(loop), loop)
    for engine in engines:
        for entry in engine.entries:
            if not isinstance(entry.get("parent"), str):
                root = entry.get("root")
                l2.learn(str(entry["id"]), root if isinstance(root, str) else "")
    l2.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not l2.looked and l2.state()["store"] != Phase.AWAY:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        pass  # the state says how far it came
    finally:
        state = l2.state()
        l2.close()
    result = Probed(NAME, models=tuple(state["models_seen"]))
    result.findings += [Finding(NAME, problem, cure) for problem, cure in _faults(settings, state)]
    return result


def _faults(settings: L2Settings, state: dict[str, object]) -> list[tuple[str, str]]:
    detail = str(state["detail"])
    if state["store"] != Phase.READY:
        return [(f"unreachable, {detail or 'no answer'}", f"is it at {settings.shown_url}, and l2_password_env right?")]
    if detail:
        return [(detail, "its user needs the commands EXISTS, SCAN, SELECT and PING on all keys")]
    models = state["models"]
    assert isinstance(models, dict)
    # One line for all models of which the same is to be said; those without keys yet have none.
    cures = {told["detail"]: told["cure"] for told in models.values() if told.get("cure")}
    return list(cures.items())
