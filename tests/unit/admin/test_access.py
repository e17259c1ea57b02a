"""Who may change something, by what a request tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admin.access import Asker, is_loopback, refusal_of_change

TOKEN = "sesame-0123456789"
HERE = Asker(peer="127.0.0.1", hosts=("127.0.0.1:9090",))
AWAY = Asker(peer="10.0.0.9", hosts=("gateway.example:9090",))


def status(asker: Asker, *, token: str | None = TOKEN, admin_host: str = "127.0.0.1") -> int:
    refused = refusal_of_change(asker, admin_host=admin_host, token=token)
    return 200 if refused is None else refused.status


def bearing(asker: Asker, *values: str) -> Asker:
    return replace(asker, authorizations=values)


@pytest.mark.parametrize(
    ("peer", "is_so"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("localhost", False),
        (None, False),
    ],
)
def test_what_counts_as_loopback(peer: str | None, is_so: bool) -> None:
    assert is_loopback(peer) is is_so


def test_loopback_needs_no_token_whether_one_is_configured_or_not() -> None:
    assert status(HERE) == 200
    assert status(HERE, token=None) == 200
    assert status(bearing(HERE, "Bearer wrong")) == 200
    assert status(replace(HERE, peer="::ffff:127.0.0.1")) == 200


def test_from_elsewhere_the_token_is_needed() -> None:
    assert status(AWAY) == 401
    assert status(bearing(AWAY, f"Bearer {TOKEN}")) == 200
    assert status(bearing(AWAY, f"bearer   {TOKEN} ")) == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer{TOKEN}",
        "Bearer \udcff\udcfe",
        "Bearer schön",
    ],
)
def test_a_wrong_token_is_401(value: str) -> None:
    assert status(bearing(AWAY, value)) == 401


def test_two_tokens_are_none() -> None:
    assert status(bearing(AWAY, f"Bearer {TOKEN}", f"Bearer {TOKEN}")) == 401


def test_without_a_configured_token_nothing_from_elsewhere_changes_anything_and_the_answer_says_which_key() -> None:
    for asker in (AWAY, bearing(AWAY, "Bearer "), bearing(AWAY, "Bearer None")):
        refused = refusal_of_change(asker, admin_host="0.0.0.0", token=None)
        assert refused is not None
        assert refused.status == 403
        assert "token_env" in refused.message
        assert "not from loopback" in refused.message


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:9090", "localhost", "LocalHost:9090", "[::1]:9090", "[::1]", "10.1.2.3:9090", "admin.lan"],
)
def test_hosts_that_no_page_of_a_stranger_can_have(host: str) -> None:
    assert status(replace(HERE, hosts=(host,)), token=None, admin_host="Admin.LAN") == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9090",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "x@localhost",
        "[",
        "",
        ":1",
    ],
)
def test_a_name_that_was_rebound_to_loopback_needs_the_token(host: str) -> None:
    asker = replace(HERE, hosts=(host,))
    assert status(asker) == 401
    assert status(bearing(asker, f"Bearer {TOKEN}")) == 200
    refused = refusal_of_change(asker, admin_host="127.0.0.1", token=None)
    assert refused is not None
    assert refused.status == 403
    assert "localhost" in refused.message


def test_two_hosts_are_not_trusted_and_none_is_a_program() -> None:
    assert status(replace(HERE, hosts=("127.0.0.1", "127.0.0.1"))) == 401
    assert status(replace(HERE, hosts=())) == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:9090", "http://127.0.0.1:9090"),
        ("LOCALHOST:9090", "http://localhost:9090"),
        ("[::1]:9090", "http://[::1]:9090"),
        ("localhost", "http://localhost:80"),
        ("localhost:443", "https://localhost"),
    ],
)
def test_a_page_of_our_own_may(host: str, origin: str) -> None:
    asker = replace(HERE, hosts=(host,), origins=(origin,), fetch_sites=("same-origin",))
    assert status(asker) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://127.0.0.1:3000",
        "http://localhost:9090",
        "http://127.0.0.1",
        "null",
        "",
        "file://",
        "chrome-extension://127.0.0.1:9090",
        "http://evil@127.0.0.1:9090",
        "http://127.0.0.1:9090/",
        "http://127.0.0.1:9090 http://evil.example",
    ],
)
def test_a_page_of_another_origin_may_not_even_with_the_token(origin: str) -> None:
    asker = replace(HERE, origins=(origin,))
    assert status(asker) == 403
    assert status(bearing(asker, f"Bearer {TOKEN}")) == 403


def test_of_several_origins_all_must_be_ours() -> None:
    assert status(replace(HERE, origins=("http://127.0.0.1:9090", "http://evil.example"))) == 403


@pytest.mark.parametrize(
    ("site", "expected"),
    [("cross-site", 403), ("Cross-Site", 403), ("same-site", 403), ("", 403), ("same-origin", 200), ("none", 200)],
)
def test_what_the_browser_says_of_the_page(site: str, expected: int) -> None:
    assert status(replace(HERE, fetch_sites=(site,))) == expected


VALUES = st.one_of(
    st.sampled_from(["127.0.0.1:9090", "localhost", "[::1]", "http://localhost", "null", "Bearer x", "same-origin"]),
    st.text(max_size=30),
)
MANY = st.lists(VALUES, max_size=3)


@given(
    asker=st.builds(
        Asker,
        peer=st.one_of(st.none(), st.ip_addresses().map(str), st.text(max_size=12)),
        hosts=MANY,
        origins=MANY,
        fetch_sites=MANY,
        authorizations=MANY,
    ),
    token=st.one_of(st.none(), st.just(TOKEN)),
)
def test_nothing_that_a_request_tells_makes_it_fail_or_opens_it_from_afar(asker: Asker, token: str | None) -> None:
    refused = refusal_of_change(asker, admin_host="127.0.0.1", token=token)
    if refused is None:
        assert is_loopback(asker.peer)
        assert not asker.origins or len(asker.hosts) == 1
    else:
        assert refused.status in (401, 403)
        assert (refused.status == 401) <= (token is not None)
        assert TOKEN not in refused.message
