"""A gateway in front of engines that share a store: what its listing and its metrics tell of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.redis_server import running_redis
from tests.support.sim_process import running_sim


def store_of(gateway: GatewayProcess) -> Any:
    return gateway.admin("GET", "/backends").json()["l2"]


def test_a_store_is_followed_while_kvaware_is_the_strategy_and_its_outage_is_told(tmp_path: Path) -> None:
    environment = {"STORE_PASSWORD": "s3cret"}
    with running_redis(tmp_path, "--requirepass", "s3cret") as server, running_sim() as sim:
        tables = {
            "kv_cache": {"l2": server.url, "l2_password_env": "STORE_PASSWORD"},
            "routing": {"strategy": "kvaware"},
        }
        with running_gateway([sim.url], environment=environment, **tables) as gateway:
            gateway.until(lambda: store_of(gateway)["store"] == "ready", "the store is ready")
            gateway.until(lambda: bool(store_of(gateway)["models"]), "the engine's model is followed")
            gateway.until_metric("l2_up", 1)
            server.stop()
            gateway.until_metric("l2_up", 0)
            assert store_of(gateway)["store"] == "away"
            changed = tables | {"routing": {"strategy": "prefixaware"}}
            gateway.write_config([sim.url], **changed)
            gateway.reload()
            gateway.until(lambda: store_of(gateway) is None, "nobody asks the store")


def test_without_a_store_there_is_nothing_to_tell() -> None:
    with running_sim() as sim, running_gateway([sim.url], routing={"strategy": "kvaware"}) as gateway:
        assert store_of(gateway) is None
        lines = gateway.admin("GET", "/metrics").body.decode().splitlines()
        assert not any(line.startswith("kvgate_l2") for line in lines)
