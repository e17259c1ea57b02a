"""Endpoints as engines name them, and what of them a gateway can connect to."""

import pytest

from router.kv_events.sources import (
    NoSource,
    Source,
    configured_sources,
    ranks_in_metrics,
    read_sources,
    resolve,
)


@pytest.mark.parametrize(
    ("endpoint", "host", "target"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "gpu-0", "tcp://gpu-0:5557"),
        ("tcp://[::]:5557", "fe80::1", "tcp://[fe80::1]:5557"),
        ("tcp://10.0.0.7:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("ipc:///tmp/kv", "127.0.0.1", "ipc:///tmp/kv"),
    ],
)
def test_wildcards_and_the_engines_own_address_mean_the_backends_host(endpoint: str, host: str, target: str) -> None:
    assert resolve(endpoint, host)[0] == target


@pytest.mark.parametrize(
    ("endpoint", "host", "why"),
    [
        ("tcp://169.254.169.254:80", "10.0.0.7", "cannot bind"),
        ("tcp://224.0.0.1:5557", "10.0.0.7", "cannot bind"),
        ("tcp://node-7.example:5557", "10.0.0.7", "cannot bind"),
        ("tcp://127.0.0.1:5557", "10.0.0.7", "cannot bind"),
        ("ipc:///tmp/kv", "10.0.0.7", "only its own host"),
        ("inproc://kv", "127.0.0.1", "out of reach"),
        ("tcp://*:0", "127.0.0.1", "out of reach"),
        ("tcp://*:70000", "127.0.0.1", "out of reach"),
        (7, "127.0.0.1", "malformed"),
    ],
)
def test_what_cannot_be_reached_says_why_and_names_the_cure(endpoint: object, host: str, why: str) -> None:
    with pytest.raises(NoSource, match=why) as caught:
        resolve(endpoint, host)
    assert "malformed" in why or "--kv-events-config" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "engine.example"])
def test_an_engine_that_chose_its_port_is_reached_where_it_says(host: str) -> None:
    """For tcp://*:0 a real one binds the address of its node alone, whichever way we know it by."""
    endpoint, hint = resolve("tcp://192.0.2.2:44643", host)
    assert endpoint == "tcp://192.0.2.2:44643"
    assert "--kv-events-config" in hint


@pytest.mark.parametrize("body", [b"[]", b"nonsense", b"{}", b'{"a": {}}', b'{"0": 1}'])
def test_an_answer_that_names_no_rank_is_off(body: bytes) -> None:
    with pytest.raises(NoSource):
        read_sources(body, "h")


def test_too_many_ranks_are_refused() -> None:
    body = b"{" + b",".join(b'"%d":{}' % rank for rank in range(257)) + b"}"
    with pytest.raises(NoSource, match="256"):
        read_sources(body, "h")


def test_a_rank_without_publisher_is_off_and_the_other_is_not() -> None:
    body = (
        b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:1","replay_endpoint":null,"topic":"t"},'
        b'"1":{"enable_kv_cache_events":false,"publisher":null}}'
    )
    found = read_sources(body, "h")
    assert found[0] == Source("tcp://h:1", None, b"t")
    assert isinstance(found[1], NoSource)


def test_configured_ranks_follow_each_other_in_ports() -> None:
    assert configured_sources("tcp://h:5557", [0, 1]) == {0: Source("tcp://h:5557"), 1: Source("tcp://h:5558")}
    assert isinstance(configured_sources("tcp://h:65535", [1])[1], NoSource)


def test_ranks_come_from_the_engine_labels() -> None:
    text = b'vllm:num_requests_running{engine="1",model_name="m"} 0\nvllm:num_requests_running{engine="0"} 0\n'
    assert ranks_in_metrics(text) == [0, 1]
    assert ranks_in_metrics(b"vllm:num_requests_running 0\n") == [0]
