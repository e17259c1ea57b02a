"""A real Redis for the modules that ask for it, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def empty_server(server: RedisServer) -> RedisServer:
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server
