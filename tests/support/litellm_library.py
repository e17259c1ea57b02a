"""litellm as tests use it: without asking the network, and without what it leaves to the garbage collector. Who imports
this is skipped where it is not installed: it is too big for every test run."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask for its prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    litellm = pytest.importorskip("litellm")
litellm.telemetry = False
litellm.suppress_debug_info = True


def close_what_it_left() -> None:
    """litellm leaves event loops and sockets to the garbage collector, which warns of them: here, not at the end of the
    run, where the warnings would be errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for left in gc.get_objects():
            if isinstance(left, asyncio.BaseEventLoop) and not left.is_running() and not left.is_closed():
                left.close()
        gc.collect()
