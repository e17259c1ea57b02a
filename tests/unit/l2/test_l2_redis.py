"""Questions to a real Redis server with keys as LMCache writes them."""

from __future__ import annotations

import logging
import ssl
from array import array
from pathlib import Path
from typing import Any

import pytest
import redis

from router.l2.answers import L2Answer, Why
from router.l2.chunk_hash import Chain, in_process_chains, multi_process_chains
from router.l2.learned_form import LAYOUTS_LIMIT, MISSES_TO_DOUBT, UNSUCCESSFUL_PROBES
from router.l2.settings import L2Settings
from tests.support.certificates import make_certificates
from tests.support.redis_server import RedisServer, running_redis
from tests.unit.l2.rig import BLAKE3, BUILTIN, ROOT, prompt, rig, scripted, stored, until, write

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("empty_server")]
MP = {"head": f"{ROOT}@01000100@0@", "tail": "", "endings": ("",)}


async def test_the_leading_chunks_that_are_there_are_counted_up_to_the_first_gap(server: RedisServer) -> None:
    ids = prompt(2000)
    keys = stored(ids)
    write(server.port, keys[:6] + keys[8:])  # three chunks, a gap, three more
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(ids) == L2Answer(768, Why.STORE)
        assert await r.ask(ids[:600]) == L2Answer(512, Why.REMEMBERED)
        assert await r.ask(prompt(2000, seed=2)) == L2Answer(0, Why.STORE)
        assert r.l2.answers == {Why.STORE: 2, Why.REMEMBERED: 1}
        assert (r.l2.found_tokens, r.l2.asked_tokens) == (768 + 512, 4600)
        assert sum(r.l2.wait.counts) == 2


FORMS: list[tuple[Chain, dict[str, Any]]] = [
    *[(chain, {}) for chain in in_process_chains("0")],
    *[(chain, MP) for chain in multi_process_chains("0")],
    (BUILTIN, {"endings": ("",)}),  # one key a chunk
    (BUILTIN, {"chunk_tokens": 128}),
    (BUILTIN, {"chunk_tokens": 16, "endings": ("",)}),
    (BUILTIN, {"head": f"{ROOT}@4@3@", "tail": "@fp8_e4m3fn"}),
    (BUILTIN, {"tail": "@half@0"}),  # layerwise
    (BLAKE3, MP | {"head": f"fleet-a@{ROOT}@02010201@3@"}),
    (BUILTIN, {"head": "served@1@0@"}),  # the name that it is served by
]


@pytest.mark.parametrize(("chain", "form"), FORMS)
async def test_every_form_is_learned_from_the_keys_and_the_prompts_of_the_fleet(
    server: RedisServer, chain: Chain, form: dict[str, Any]
) -> None:
    ids = prompt(1100)
    head = form.get("head", f"{ROOT}@1@0@")
    if "@4@3@" in head:  # a key of its last worker was seen; the first one's is asked for
        write(server.port, stored(ids, chain=chain, **(form | {"head": head.replace("@4@3@", "@4@0@")})))
    if "@02010201@" in head:
        write(server.port, stored(ids, chain=chain, **(form | {"head": head.replace("@02010201@", "@02000200@")})))
    write(server.port, stored(ids, chain=chain, **form))
    with rig(server.url) as r:
        await r.ready()
        for _ in range(8):  # other lengths of chunks are tried in turn
            answer = await r.ask(ids)
            if answer.known:
                break
        chunk_tokens = form.get("chunk_tokens", 256)
        assert answer.tokens == 1100 // chunk_tokens * chunk_tokens
        state = r.model_state()
        assert (state["state"], state["hash"], state["chunk_tokens"]) == ("learned", chain.name, chunk_tokens)


async def test_the_seed_of_the_engines_is_what_the_settings_say(server: RedisServer) -> None:
    ids = prompt(600)
    write(server.port, stored(ids, chain=in_process_chains("7")[0]))
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(ids) == L2Answer(None, Why.LEARNING)
    with rig(server.url, hash_seed=7) as r:
        await r.ready()
        assert (await r.ask(ids)).tokens == 512


async def test_chunks_written_after_the_start_are_found_by_later_looks_at_the_keys(server: RedisServer) -> None:
    ids = prompt(600)
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(ids) == L2Answer(None, Why.LEARNING)
        assert r.model_state() == {"state": "no keys", "detail": "no key of /models/llama or served was seen"}
        write(server.port, stored(ids))
        r.clock.advance(r.settings.sample_first_s)
        await until(lambda: bool(r.l2.state()["models_seen"]))
        assert (await r.ask(ids)).tokens == 512
        assert r.l2.state()["models_seen"] == [ROOT]
        assert r.l2.state()["keys"] == {"in-process": 4}


async def test_what_is_absent_is_asked_again_soon_and_what_is_there_later(server: RedisServer) -> None:
    ids = prompt(1024)
    keys = stored(ids)
    write(server.port, keys[:4])
    with rig(server.url) as r:
        await r.ready()
        assert (await r.ask(ids)).tokens == 512
        write(server.port, keys)
        assert await r.ask(ids) == L2Answer(512, Why.REMEMBERED)
        r.clock.advance(r.settings.absent_age_s + 0.1)
        assert await r.ask(ids) == L2Answer(1024, Why.STORE)
        with redis.Redis(port=server.port) as client:
            client.flushall()
        r.clock.advance(r.settings.present_age_s - 2)
        assert await r.ask(ids) == L2Answer(1024, Why.REMEMBERED)
        r.clock.advance(2)
        assert await r.ask(ids) == L2Answer(0, Why.STORE)


async def test_salts_have_chunks_of_their_own_where_keys_tell_and_are_unknown_elsewhere(server: RedisServer) -> None:
    ids = prompt(600)
    write(server.port, stored(ids, chain=BLAKE3, **(MP | {"endings": ("@tenant",)})))
    with rig(server.url) as r:
        await r.ready()
        assert (await r.ask(ids, salt="tenant")).tokens == 512
        assert await r.ask(ids, salt="other") == L2Answer(0, Why.STORE)
        assert await r.ask(ids) == L2Answer(0, Why.STORE)
        assert await r.ask(ids, salt="a@b") == L2Answer(None, Why.SALT)
    with redis.Redis(port=server.port) as client:
        client.flushall()
    write(server.port, stored(ids))
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(ids, salt="tenant") == L2Answer(None, Why.SALT)
        assert (await r.ask(ids)).tokens == 512
        assert await r.ask(ids, salt="tenant") == L2Answer(None, Why.SALT)
        assert await r.ask(ids, lora="sql") == L2Answer(None, Why.ADAPTER)


async def test_short_prompts_models_not_followed_and_a_deadline_that_is_over_are_answered_at_once(
    server: RedisServer,
) -> None:
    ids = prompt(600)
    write(server.port, stored(ids))
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(prompt(15)) == L2Answer(0, Why.SHORT)
        assert (await r.ask(ids)).tokens == 512
        assert await r.ask(ids[:255]) == L2Answer(0, Why.SHORT)
        late = r.lookup(prompt(600, seed=3), within_s=0.0)
        assert late.answer == L2Answer(None, Why.LATE)
        r.l2.forget("served")
        assert await r.ask(ids) == L2Answer(None, Why.OFF)


async def test_the_longest_of_several_layouts_counts_and_their_number_is_bounded(server: RedisServer) -> None:
    ids = prompt(1300)
    for size in range(1, LAYOUTS_LIMIT + 3):
        write(server.port, stored(ids, head=f"{ROOT}@{size}@0@")[: 2 * min(size, 3)])
    with rig(server.url) as r:
        await r.ready()
        assert (await r.ask(ids)).tokens == 768
        assert r.model_state()["layouts"] == LAYOUTS_LIMIT


async def test_a_prompt_of_any_length_asks_for_a_bounded_number_of_keys(server: RedisServer) -> None:
    ids = prompt(20 * 256)
    write(server.port, stored(ids))
    with rig(server.url, max_chunks=8) as r:
        await r.ready()
        assert (await r.ask(ids)).tokens == 8 * 256
        assert r.l2.counters()["remembered_keys"] <= 8 + 2 * 9


async def test_what_is_remembered_is_bounded(server: RedisServer) -> None:
    write(server.port, stored(prompt(512)))
    with rig(server.url, remembered_limit=10) as r:
        await r.ready()
        for seed in range(1, 30):
            await r.ask(prompt(1024, seed=seed))
        assert r.l2.counters()["remembered_keys"] == 10


async def test_a_fleet_that_names_its_chunks_anew_is_learned_anew(server: RedisServer) -> None:
    ids = prompt(600)
    write(server.port, stored(ids))
    with rig(server.url) as r:
        await r.ready()
        assert (await r.ask(ids)).tokens == 512
        with redis.Redis(port=server.port) as client:
            client.flushall()
        other = in_process_chains("0")[1]
        for seed in range(100, 101 + MISSES_TO_DOUBT):
            new = prompt(600, seed=seed)
            write(server.port, stored(new, chain=other))
            await r.ask(new)
        await r.quiet()
        assert r.model_state()["hash"] == other.name
        assert (await r.ask(new)).tokens == 512


async def test_hashes_that_are_never_found_are_told_with_their_cure_and_asked_for_rarely(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    write(server.port, stored(prompt(600), chain=in_process_chains("99")[0]))
    with rig(server.url) as r:
        await r.ready()
        for seed in range(UNSUCCESSFUL_PROBES + 32):
            assert await r.ask(prompt(256, seed=seed)) == L2Answer(None, Why.LEARNING)
        assert "l2_hash_seed" in str(r.model_state()["cure"])
        assert [record.levelno for record in caplog.records if "l2_hash_seed" in record.message] == [logging.WARNING]
        form = r.l2._forms[ROOT]
        assert form.probes == UNSUCCESSFUL_PROBES + 2


async def test_without_blake3_the_state_says_what_is_missing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(600)
    write(server.port, stored(ids, chain=BLAKE3, **MP))
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with rig(server.url) as r:
        await r.ready()
        assert await r.ask(ids) == L2Answer(None, Why.LEARNING)
        assert "kvgate[lmcache]" in str(r.model_state()["cure"])


async def test_keys_of_others_are_counted_and_named_as_such(server: RedisServer) -> None:
    write(server.port, [b"session:1", b"\xff\xfe", b"m@1@0@1f@half@user%7metadata"])
    with rig(server.url) as r:
        await r.ready()
        assert r.l2.state()["keys"] == {"other": 2, "tagged": 1}
        assert r.model_state()["detail"] == "the store holds keys, but none of a form that is known"


async def test_models_of_the_store_are_bounded_and_those_that_are_served_stay(server: RedisServer) -> None:
    write(server.port, stored(prompt(256)) + [f"m{n}@1@0@1f@half".encode() for n in range(200)])
    with rig(server.url) as r:
        await r.ready()
        seen = r.l2.state()["models_seen"]
        assert len(seen) == 64
        assert ROOT in seen
        for n in range(100):
            r.l2.learn(f"more{n}")
        assert len(r.l2.state()["models"]) == r.settings.model_limit


async def test_a_password_and_a_database_are_used_and_a_wrong_one_is_named_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(600)
    with running_redis(tmp_path, "--requirepass", "s3cret") as server:
        with redis.Redis(port=server.port, password="s3cret", db=3) as client:
            client.mset(dict.fromkeys(stored(ids), b"kv"))
        url = f"redis://127.0.0.1:{server.port}/3"
        with rig(url, password="s3cret") as r:
            await r.ready()
            assert (await r.ask(ids)).tokens == 512
        with rig(f"redis://default@127.0.0.1:{server.port}/3", password="s3cret") as r:
            await r.ready()
            assert "default" not in r.l2.state()["url"]
        for password, kind in ((None, "NOAUTH"), ("wr0ng", "WRONGPASS")):
            with rig(url, password=password) as r:
                await until(lambda: r.l2.state()["store"] == "away")
                assert kind in r.l2.state()["detail"]
                assert await r.ask(ids) == L2Answer(None, Why.AWAY)
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text
    assert "s3cret" not in repr(L2Settings(url, "s3cret"))


async def test_a_user_without_rights_on_the_keys_is_named(tmp_path: Path) -> None:
    ids = prompt(600)
    with running_redis(
        tmp_path, *["--user", "default", "on", "nopass", "~*", "+@connection", "+scan", "+mset"]
    ) as server:
        write(server.port, stored(ids))
        with rig(server.url) as r:
            await r.ready()
            assert not (await r.ask(ids)).known
            r.l2._forms[ROOT].settle(r.l2._forms[ROOT].candidates(r.l2._chains, ids, r.l2._hasher)[0].variant)
            assert await r.ask(ids) == L2Answer(None, Why.AWAY)
            assert r.l2.state()["detail"] == "commands are answered with NOPERM"


async def test_tls_is_spoken_and_a_certificate_of_nobody_known_is_refused(tmp_path: Path) -> None:
    ids = prompt(600)
    made = make_certificates(tmp_path / "tls")
    options = ("--tls-cert-file", made.cert, "--tls-key-file", made.key, "--tls-ca-cert-file", made.ca)
    with running_redis(tmp_path, *map(str, options), "--tls-auth-clients", "no", tls=True) as server:
        with redis.Redis(port=server.port, ssl=True, ssl_ca_certs=str(made.ca)) as client:
            client.mset(dict.fromkeys(stored(ids), b"kv"))
        url = f"rediss://localhost:{server.port}"
        with rig(url, tls_context=lambda: ssl.create_default_context(cafile=str(made.ca))) as r:
            await r.ready()
            assert (await r.ask(ids)).tokens == 512
        with rig(url) as r:
            await until(lambda: r.l2.state()["store"] == "away")


async def test_a_server_that_is_killed_and_comes_back_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(600)
    with running_redis(tmp_path) as server:
        write(server.port, stored(ids))
        with rig(server.url) as r:
            await r.ready()
            assert (await r.ask(ids)).tokens == 512
            server.stop()
            await until(lambda: r.l2.state()["store"] == "away")
            assert await r.ask(ids) == L2Answer(None, Why.AWAY)
            for failures in (2, 3, 4):  # tried again with back-off
                r.clock.advance(r.settings.longest_retry_s)
                await until(lambda wanted=failures: r.l2.counters()["failures"] == wanted)
            with running_redis(tmp_path, port=server.port) as second:
                write(second.port, stored(ids)[:2])
                r.clock.advance(r.settings.longest_retry_s)
                await r.ready()
                assert await r.ask(ids) == L2Answer(256, Why.STORE)  # what was remembered was another server's
    told = [record.message for record in caplog.records if "KV store" in record.message]
    assert len(told) == 2  # the outage once, however many tries it took
    assert " is away: " in told[0]
    assert told[1].endswith(" is back")


# ---- a server that does not behave


def only_hello(words: list[bytes]) -> bytes | None:
    """Answers at the start, then nothing."""
    if words[0] == b"PING":
        return b"+PONG\r\n"
    if words[0] == b"SCAN":
        key = stored(prompt(256))[1]
        return b"*2\r\n$1\r\n0\r\n*1\r\n$%d\r\n%s\r\n" % (len(key), key)
    return None


async def test_a_slow_server_costs_a_request_its_time_limit_and_the_next_ones_nothing() -> None:
    server, store, url = await scripted(only_hello)
    with rig(url) as r:
        await r.ready()
        first = r.lookup(prompt(256))
        assert first.answer is None
        await until(lambda: store.heard[-1][0] == b"EXISTS")
        r.clock.advance(r.settings.time_limit_s)
        assert r.came == [L2Answer(None, Why.LATE)]
        r.clock.advance(0.001)
        assert r.lookup(prompt(300)).answer == L2Answer(None, Why.SLOW)
        assert r.l2.counters()["open_keys"] > 0
        r.clock.advance(r.settings.stall_s)  # it is given up
        assert r.l2.state()["store"] == "away"
        assert "no answer" in r.l2.state()["detail"]
        assert r.l2.counters()["open_keys"] == 0
        assert r.came == [L2Answer(None, Why.LATE)]
        await until(lambda: store.closed == 1)
    server.close()


async def test_a_deadline_before_the_time_limit_is_kept_and_a_late_answer_is_remembered() -> None:
    held: list[bytes] = []

    def script(words: list[bytes]) -> bytes | None:
        if words[0] == b"EXISTS":
            held.append(words[1])
            return None
        return only_hello(words)

    server, store, url = await scripted(script)
    ids = prompt(256)
    with rig(url) as r:
        await r.ready()
        r.l2._forms[ROOT].settle(r.l2._forms[ROOT].candidates(r.l2._chains, ids, r.l2._hasher)[0].variant)
        r.lookup(ids, within_s=0.005)
        await until(lambda: len(held) == 1)
        r.clock.advance(0.004)
        assert r.came == []
        r.clock.advance(0.001)
        assert r.came == [L2Answer(None, Why.LATE)]
        store.say(b":1\r\n")
        await r.quiet()
        assert r.lookup(ids).answer == L2Answer(256, Why.REMEMBERED)
        assert len(r.came) == 1
    server.close()


async def test_a_cancelled_question_is_never_answered() -> None:
    server, store, url = await scripted(only_hello)
    with rig(url) as r:
        await r.ready()
        lookup = r.lookup(prompt(256))
        lookup.cancel()
        lookup.cancel()
        await until(lambda: store.heard[-1][0] == b"EXISTS")
        r.clock.advance(r.settings.stall_s)
        assert r.came == []
    server.close()


async def test_a_question_that_is_open_at_the_end_is_answered_and_leaves_nothing() -> None:
    server, store, url = await scripted(only_hello)
    with rig(url) as r:
        await r.ready()
        r.lookup(prompt(256))
        await until(lambda: store.heard[-1][0] == b"EXISTS")
    assert r.came == [L2Answer(None, Why.AWAY)]
    server.close()


async def test_more_keys_than_may_be_open_are_not_asked_for() -> None:
    server, _store, url = await scripted(only_hello)
    with rig(url, open_keys_limit=40) as r:
        await r.ready()
        assert r.lookup(prompt(256)).answer is None  # 18 names of a first chunk
        assert r.lookup(prompt(256, seed=2)).answer is None
        open_keys = r.l2.counters()["open_keys"]
        assert r.lookup(prompt(256, seed=3)).answer == L2Answer(None, Why.BUSY)
        assert r.l2.counters()["open_keys"] == open_keys <= 40
    server.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+PONG\r\n+PONG\r\n",
        b"*1000000\r\n",
        b"$9999999\r\n",
        b"+" + b"x" * 9000,
    ],
)
async def test_a_server_of_another_kind_is_left(said: bytes) -> None:
    server, store, url = await scripted(lambda words: said)
    with rig(url) as r:
        await until(lambda: r.l2.counters()["failures"] >= 1)
        assert r.l2.state()["store"] == "away"
        await until(lambda: store.closed == 1)
    server.close()


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    server, store, url = await scripted(lambda words: None)
    with rig(url) as r:
        await until(lambda: store.heard == [[b"PING"]])
        assert r.lookup(prompt(256)).answer == L2Answer(None, Why.AWAY)
        r.clock.advance(r.settings.stall_s)
        assert (r.l2.state()["store"], r.l2.state()["detail"]) == ("away", "no answer for 1 s")
        r.clock.advance(r.settings.first_retry_s)
        await until(lambda: len(store.heard) == 2)
    server.close()


@pytest.mark.parametrize("reply", [b":2\r\n", b"$1\r\n1\r\n", b"-MOVED 1 10.0.0.1:6379\r\n", b"*0\r\n", b"$-1\r\n"])
async def test_an_answer_that_is_no_word_on_a_key_is_none(reply: bytes) -> None:
    server, _store, url = await scripted(lambda words: reply if words[0] == b"EXISTS" else only_hello(words))
    ids = prompt(256)
    with rig(url) as r:
        await r.ready()
        r.l2._forms[ROOT].settle(r.l2._forms[ROOT].candidates(r.l2._chains, ids, r.l2._hasher)[0].variant)
        assert not (await r.ask(ids)).known
        assert r.l2.counters()["remembered_keys"] == 0
    server.close()


@pytest.mark.parametrize(
    "reply", [b"*0\r\n", b":1\r\n", b"-NOPERM x\r\n", b"*2\r\n$1\r\nx\r\n*0\r\n", b"*2\r\n:0\r\n:0\r\n"]
)
async def test_a_server_that_does_not_list_its_keys_is_asked_again_later(reply: bytes) -> None:
    server, store, url = await scripted(lambda words: reply if words[0] == b"SCAN" else only_hello(words))
    with rig(url) as r:
        await r.ready()
        assert await r.ask(prompt(256)) == L2Answer(None, Why.LEARNING)
        scans = len(store.heard)
        r.clock.advance(r.settings.sample_first_s)
        await until(lambda: len(store.heard) > scans)
    server.close()


async def test_a_look_at_the_keys_is_bounded_and_goes_on_where_it_ended() -> None:
    cursors: list[bytes] = []

    def script(words: list[bytes]) -> bytes | None:
        if words[0] == b"SCAN":
            cursors.append(words[1])
            cursor = b"%d" % len(cursors)
            return b"*2\r\n$%d\r\n%s\r\n*0\r\n" % (len(cursor), cursor)
        return only_hello(words)

    server, _store, url = await scripted(script)
    with rig(url, sample_keys=500) as r:
        await r.ready()
        await until(lambda: len(cursors) == 5)
        await r.quiet()
        r.clock.advance(r.settings.sample_first_s)
        await until(lambda: len(cursors) == 10)
        await r.quiet()
        assert cursors == [b"%d" % n for n in range(10)]
    server.close()


async def test_nobody_there_and_a_start_that_is_cut_short_leave_nothing() -> None:
    with rig("redis://127.0.0.1:1") as r:
        await until(lambda: r.l2.counters()["failures"] == 1)
        assert await r.ask(array("I", range(300))) == L2Answer(None, Why.AWAY)
    with rig("redis://127.0.0.1:1"):
        pass
