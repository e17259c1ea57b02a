from __future__ import annotations

import asyncio
import threading

import pytest
import pytest_asyncio

from router.tokens.offload import Offload

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def offload():
    pool = Offload(asyncio.get_running_loop(), threads=1, queue_limit=3, queue_bytes=100)
    yield pool
    pool.close()


def run(offload, work, size=1):
    future = asyncio.get_running_loop().create_future()
    job = offload.submit(work, size, future.set_result)
    return job, future


async def test_results_and_exceptions_come_back_on_the_loop(offload):
    name = run(offload, lambda: threading.current_thread().name)[1]
    assert (await name).startswith("tokens-")
    assert isinstance(await run(offload, lambda: 1 / 0)[1], ZeroDivisionError)
    assert (offload.queued, offload.queued_bytes) == (0, 0)


async def test_jobs_are_bounded_in_number_and_in_bytes(offload):
    go = threading.Event()
    held = [run(offload, go.wait, 40)[1] for _ in range(2)]
    assert run(offload, go.wait, 21)[0] is None
    held.append(run(offload, go.wait, 20)[1])
    assert run(offload, go.wait, 0)[0] is None
    go.set()
    await asyncio.gather(*held)
    assert (offload.queued, offload.queued_bytes) == (0, 0)
    assert await run(offload, lambda: 7, 100)[1] == 7


async def test_a_cancelled_job_that_has_not_begun_is_not_done(offload):
    go, ran = threading.Event(), []
    first = run(offload, go.wait)[1]
    job = offload.submit(lambda: ran.append(1), 1, lambda result: ran.append(2))
    job.cancel()
    last = run(offload, lambda: 3)[1]
    go.set()
    assert [await first, await last] == [True, 3]
    assert ran == []
    assert offload.queued == 0


async def test_a_closed_pool_takes_no_more_and_ends_its_threads():
    pool = Offload(asyncio.get_running_loop(), threads=1)
    thread = await run(pool, threading.current_thread)[1]
    pool.close()
    assert run(pool, lambda: 1)[0] is None
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_a_panic_in_native_code_does_not_end_the_thread(offload):
    class Panic(BaseException):
        pass

    def panic():
        raise Panic

    result = await run(offload, panic)[1]
    assert "Panic" in str(result)
    assert await run(offload, lambda: 4)[1] == 4
