from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from array import array

import pytest
import pytest_asyncio

from router.backends.backend import Backend
from router.clock import VirtualClock
from router.tokens import local
from router.tokens.answers import NoTokens, TokenIds, Why
from router.tokens.local import LocalTokenizer
from router.tokens.model_folder import read_model_folder
from router.tokens.question import CHAT_PATH, COMPLETIONS_PATH, ChatPrompt, TextPrompt, read_prompt
from router.tokens.segment_cache import SegmentCache
from router.tokens.tokens import TOLD_LIMIT, Tokens, TokensSettings
from tests.support.tokenizer_folders import write_folder

pytestmark = pytest.mark.asyncio

CHAT = json.dumps({"messages": [{"role": "user", "content": "The quick brown fox"}]}).encode()


class Engine:
    """What an engine with this folder answers to /tokenize; `skew` is added to every id."""

    def __init__(self, folder):
        self.local = LocalTokenizer(read_model_folder(str(folder)), SegmentCache(1 << 20))
        self.skew = 0
        self.status = 200
        self.questions = []
        self.gate = None

    async def post(self, backend, path, body, time_limit_s):
        assert path == "/tokenize"
        self.questions.append(json.loads(body))
        if self.gate is not None:
            await self.gate.wait()
        if self.status != 200:
            return self.status, b'{"detail":"Not Found"}'
        question = self.questions[-1]
        assert question["model"] == "m"
        prompt = read_prompt(CHAT_PATH if "messages" in question else COMPLETIONS_PATH, body)
        ids = [token + self.skew for token in self.local.tokenize(prompt).ids]
        return 200, json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode()


class World:
    def __init__(self, folder):
        self.folder = str(folder)
        self.engine = Engine(folder)
        self.backend = Backend("b", "http://b:1", "b", 1, models={"m": {}})
        self.clock = VirtualClock()
        self.made = []

    def tokens(self, **settings):
        loop = asyncio.get_running_loop()
        made = Tokens(TokensSettings(**settings), self.clock, loop, self.engine.post, lambda model: [self.backend])
        self.made.append(made)
        return made


@pytest_asyncio.fixture
async def world(tmp_path):
    made = World(write_folder(tmp_path / "model"))
    yield made
    for tokens in made.made:
        tokens.close()


async def until(condition):
    """Let the loop and the threads go on until it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads set no event of the loop's
            await asyncio.sleep(0)


async def settled(tokens, *sources):
    await until(lambda: tokens.state("m")["source"] in sources)
    return tokens.state("m")


async def ask(tokens, body=CHAT, path=CHAT_PATH, deadline=None):
    future = asyncio.get_running_loop().create_future()
    question = tokens.ask("m", path, body, tokens._clock.now() + 5 if deadline is None else deadline, future.set_result)
    if question.answer is not None:
        return question.answer
    async with asyncio.timeout(20):
        return await future


def ids_of(world, prompt=None):
    return world.engine.local.tokenize(
        prompt or ChatPrompt([{"role": "user", "content": "The quick brown fox"}], None)
    ).ids


# -- the way for a model


async def test_a_verified_folder_serves(world):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    state = await settled(tokens, "local")
    assert (state["check"], state["detail"]) == ("verified", "7 of 7 samples equal the engine's ids")
    asked = len(world.engine.questions)
    assert await ask(tokens) == TokenIds(ids_of(world), "local")
    assert len(world.engine.questions) == asked


async def test_an_engines_root_serves_where_it_is_a_folder_of_this_machine(world):
    tokens = world.tokens()
    tokens.learn("m", world.folder)
    assert (await settled(tokens, "local"))["folder"] == world.folder


async def test_a_folder_for_one_model_wins_over_the_one_for_all(world):
    tokens = world.tokens(folder="/nowhere", folders={"m": world.folder})
    tokens.learn("m")
    await settled(tokens, "local")


async def test_a_mismatch_names_the_difference_and_turns_to_the_engine(world, caplog):
    world.engine.skew = 1
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    state = await settled(tokens, "engine")
    assert state["check"] == "mismatch"
    first = world.engine.local.tokenize(ChatPrompt([{"role": "user", "content": "x"}], None)).ids[0]
    assert state["detail"] == f"sample 'plain': token 0 is {first} here and {first + 1} in the engine"
    assert "model 'm': local tokenizing is off" in caplog.text
    assert (await ask(tokens)).source == "engine"


async def test_completions_that_differ_leave_the_chats(world, caplog):
    before = world.engine.post

    async def post(backend, path, body, time_limit_s):
        world.engine.skew = 1 if b'"prompt"' in body else 0
        return await before(backend, path, body, time_limit_s)

    world.engine.post = post
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    state = await settled(tokens, "local")
    assert state["detail"].startswith("chats only; sample 'completion': token 0 is ")
    assert "is for chats only" in caplog.text
    assert (await ask(tokens)).ids == ids_of(world)
    assert (await ask(tokens, b'{"prompt": "x"}', COMPLETIONS_PATH)).why is Why.UNCERTAIN
    assert (await ask(tokens, b'{"prompt": [1]}', COMPLETIONS_PATH)).source == "given"


async def test_a_mismatch_where_only_local_is_wanted_turns_tokens_off(world):
    world.engine.skew = 1
    tokens = world.tokens(tokenization="local", folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "off")
    assert (await ask(tokens)).why is Why.OFF


async def test_engines_without_the_route_leave_local_unverified(world, caplog):
    world.engine.status = 404
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    state = await settled(tokens, "local")
    assert state["check"] == "unverified"
    assert "is not verified" in caplog.text
    assert (await ask(tokens)).ids == ids_of(world)


async def test_an_engine_that_cannot_be_asked_now_is_asked_again(world):
    world.engine.status = 503
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await until(lambda: tokens.state("m")["check"] == "pending")
    assert (await ask(tokens)).why is Why.STARTING
    world.engine.status = 200
    world.clock.advance(2.0)
    await settled(tokens, "local")


async def test_a_bad_folder_turns_to_the_engine_and_says_why(world, caplog):
    tokens = world.tokens(folder="/nowhere")
    tokens.learn("m")
    assert (await settled(tokens, "engine"))["detail"] == "local: not a folder"
    assert "not a folder" in caplog.text


@pytest.mark.parametrize("root", ["org/model", "/nowhere", ""])
async def test_without_a_folder_the_engine_is_asked(world, root, caplog):
    tokens = world.tokens()
    tokens.learn("m", root)
    await settled(tokens, "engine")
    assert not caplog.text, "nobody asked for a folder: nothing is wrong"
    assert await ask(tokens) == TokenIds(ids_of(world), "engine")


@pytest.mark.parametrize(
    ("settings", "root"), [({"tokenization": "off"}, ""), ({"tokenization": "local"}, ""), ({}, "openai/gpt-oss-20b")]
)
async def test_off_says_why(world, settings, root):
    tokens = world.tokens(**settings)
    tokens.learn("m", root)
    assert tokens.state("m")["source"] == "off"
    assert tokens.state("m")["detail"]
    assert await ask(tokens) == NoTokens(Why.OFF, "no tokens for this model")


async def test_a_restarted_engine_is_compared_again(world, caplog):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    world.engine.skew = 1
    for _ in range(3):
        tokens.restarted(world.backend)
        assert (await settled(tokens, "engine"))["check"] == "mismatch"
    assert caplog.text.count("local tokenizing is off") == 1, "one fault, one line"
    world.engine.skew = 0
    tokens.restarted(world.backend)
    assert (await settled(tokens, "local"))["check"] == "verified"


@pytest.fixture
def fleet(world):
    """Backends a and b, of which `odd` tokenizes as no other; `asked`: which were."""

    class Fleet:
        a, b = (Backend(name, f"http://{name}:1", name, 1, models={"m": {}}) for name in "ab")
        odd = None
        asked: list[str] = []  # noqa: RUF012 - of this one test
        only_completions = False

        async def post(self, backend, path, body, time_limit_s):
            self.asked.append(backend.name)
            differs = backend is self.odd and (b'"prompt"' in body or not self.only_completions)
            world.engine.skew = 1 if differs else 0
            return await Engine.post(world.engine, backend, path, body, time_limit_s)

    made = Fleet()
    made.asked.clear()
    world.engine.post = made.post
    world.backend = made.a
    return made


async def test_each_engine_that_joins_is_compared(world, fleet, caplog):
    tokens = world.tokens(folder=world.folder)
    tokens.joined(fleet.a)
    tokens.learn("m")
    await settled(tokens, "local")
    tokens.joined(fleet.b)
    await until(lambda: "b" in fleet.asked and tokens._models["m"].task is None)
    assert fleet.asked == ["a"] * 7 + ["b"] * 7
    assert tokens.state("m")["source"] == "local"
    fleet.odd = fleet.b
    tokens.joined(fleet.b)
    state = await settled(tokens, "engine")
    assert state["detail"].startswith("backend b: sample 'plain': token 0 is ")
    assert "local tokenizing is off: backend b: sample" in caplog.text


async def test_an_engine_that_differs_and_leaves_is_no_reason_any_more(world, fleet):
    fleet.odd = fleet.b
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    tokens.joined(fleet.b)
    await settled(tokens, "engine")
    tokens.left(fleet.b)
    assert (await settled(tokens, "local"))["check"] == "verified"
    assert tokens._models["m"].unchecked == {}


async def test_engines_that_join_meanwhile_are_compared_after_the_first(world, fleet):
    fleet.odd = fleet.b
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    for _ in range(3):
        tokens.joined(fleet.a)
        tokens.joined(fleet.b)
    assert len(tokens._models["m"].unchecked) == 2
    assert (await settled(tokens, "engine"))["detail"].startswith("backend b: ")


async def test_one_engine_that_reads_completions_differently_leaves_the_chats(world, fleet):
    fleet.odd, fleet.only_completions = fleet.b, True
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    tokens.joined(fleet.b)
    await until(lambda: "chats only" in tokens.state("m")["detail"])
    assert (await ask(tokens)).source == "local"
    assert (await ask(tokens, b'{"prompt": "x"}', COMPLETIONS_PATH)).why is Why.UNCERTAIN


async def test_an_engine_that_cannot_be_compared_now_is_asked_again(world, fleet):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    world.engine.status = 503
    tokens.joined(fleet.b)
    await until(lambda: tokens._models["m"].timer is not None)
    assert tokens.state("m")["source"] == "local"
    world.engine.status, fleet.odd = 200, fleet.b
    world.clock.advance(2.0)
    await settled(tokens, "engine")
    assert tokens._models["m"].unchecked == {}


async def test_a_restarted_engine_is_the_one_that_is_asked(world, fleet):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    fleet.odd = fleet.b
    tokens.restarted(fleet.b)
    state = await settled(tokens, "engine")
    assert state["check"] == "mismatch"
    assert fleet.asked[-1] == "b"


async def test_lines_about_one_model_are_bounded(world, caplog):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    known = tokens._models["m"]
    for n in range(TOLD_LIMIT + 5):
        known.tell(logging.WARNING, f"line {n}")
    assert caplog.text.count("line ") == TOLD_LIMIT


async def test_engines_without_the_route_are_told_of_once_where_they_are_asked(world, caplog):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    assert tokens.state("m") == {"source": "engine", "check": None, "detail": ""}
    world.engine.status = 404
    for _ in range(2):
        assert (await ask(tokens)).why is Why.ENGINE
    assert tokens.state("m")["detail"] == "the engines have no /tokenize"
    assert caplog.text.count("no /tokenize") == 1


async def test_the_last_trouble_with_an_engine_is_told_until_it_is_over(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    world.engine.status = 503
    await ask(tokens)
    assert tokens.state("m")["detail"] == "/tokenize answered 503"
    world.engine.status = 200
    world.clock.advance(1.0)
    assert (await ask(tokens)).source == "engine"
    assert tokens.state("m")["detail"] == ""


async def test_the_figures_are_those_of_what_was_asked(world):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    before = tokens.figures()
    assert before.results == {}
    for body in (CHAT, CHAT, b"{"):
        await ask(tokens, body)
    after = tokens.figures()
    assert after.results == {"local": 2, "shape": 1}
    assert (after.wait.count, after.queued) == (2, 0)
    assert after.cache_hit_tokens - before.cache_hit_tokens == len(ids_of(world))
    assert after.cache_missed_tokens - before.cache_missed_tokens == len(ids_of(world))
    assert after.cache_bytes > before.cache_bytes


async def test_an_engines_failure_is_no_source(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    world.engine.status = 500
    await ask(tokens)
    assert tokens.figures().results == {"engine-failed": 1}


async def test_models_are_bounded_and_forgotten(world):
    tokens = world.tokens(tokenization="engine", model_limit=1)
    tokens.learn("m")
    tokens.learn("other")
    assert tokens.state("other")["detail"] == "the model is not followed"
    tokens.forget("m")
    tokens.learn("other")
    assert tokens.state("other")["source"] == "engine"


async def test_an_adapters_folder_is_its_base_models_unless_it_has_its_own(world):
    tokens = world.tokens(folder="/nowhere", folders={"base": world.folder})
    tokens.learn("m", "org/base", "base")
    assert (await settled(tokens, "local"))["folder"] == world.folder
    tokens = world.tokens(folders={"base": "/nowhere", "m": world.folder})
    tokens.learn("m", "org/base", "base")
    await settled(tokens, "local")


async def test_models_beyond_the_limit_are_told_of_once(world, caplog):
    tokens = world.tokens(tokenization="engine", model_limit=1)
    for model in ("m", "second", "third"):
        tokens.learn(model)
    assert caplog.text.count("no tokens for model") == 1


# -- other settings


async def test_other_settings_concern_the_models_that_they_are_about(world):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    asked = len(world.engine.questions)
    tokens.configure(TokensSettings(folder=world.folder, folders={"another": "/nowhere"}))
    assert tokens.state("m")["source"] == "local"
    tokens.configure(TokensSettings(tokenization="engine", folder=world.folder))
    assert tokens.state("m")["source"] == "engine"
    tokens.configure(TokensSettings(tokenization="off"))
    assert tokens.state("m")["source"] == "off"
    assert len(world.engine.questions) == asked
    tokens.configure(TokensSettings(folder=world.folder))
    assert (await settled(tokens, "local"))["check"] == "verified"


async def test_a_folder_that_was_mended_is_read_at_the_next_settings(world, tmp_path):
    folder = tmp_path / "later"
    tokens = world.tokens(folder=str(folder))
    tokens.learn("m")
    await settled(tokens, "engine")
    write_folder(folder)
    tokens.configure(TokensSettings(folder=str(folder)))
    await settled(tokens, "local")


async def test_a_question_that_waits_across_other_settings_is_answered(world):
    world.engine.gate = asyncio.Event()
    tokens = world.tokens(tokenization="engine", engine_time_limit_s=60.0)
    tokens.learn("m")
    waiting = asyncio.ensure_future(ask(tokens))
    await until(lambda: world.engine.questions)
    tokens.configure(TokensSettings(tokenization="off"))
    world.engine.gate.set()
    assert (await waiting).ids == ids_of(world)


async def test_a_folder_that_breaks_our_reading_leaves_no_model_in_between(world, monkeypatch, caplog):
    monkeypatch.setattr(local, "read_model_folder", lambda path: 1 / 0)
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    assert "ZeroDivisionError" in (await settled(tokens, "engine"))["detail"]
    assert "could not be read" in caplog.text


async def test_a_tokenizer_that_breaks_in_the_self_test_is_not_used(world, monkeypatch, caplog):
    monkeypatch.setattr(LocalTokenizer, "render", lambda self, prompt: 1 / 0)
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    assert (await settled(tokens, "engine"))["detail"] == "ZeroDivisionError in the self-test"
    assert "the self-test of model 'm' failed" in caplog.text


async def test_without_the_packages_the_engine_is_asked(world, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "router.tokens.local", None)
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    assert "kvgate[tokenizers]" in (await settled(tokens, "engine"))["detail"]
    assert "kvgate[tokenizers]" in caplog.text


# -- questions


async def test_token_ids_pass_through(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    assert await ask(tokens, b'{"prompt": [5, 6]}', COMPLETIONS_PATH) == TokenIds(array("I", [5, 6]), "given")
    assert world.engine.questions == []


@pytest.mark.parametrize("tokenization", ["engine", "local"])
async def test_the_salt_comes_with_the_ids_and_takes_no_part_in_finding_them(world, tokenization):
    tokens = world.tokens(tokenization=tokenization, folder=world.folder)
    tokens.learn("m")
    await settled(tokens, tokenization)
    asked = len(world.engine.questions)
    for salt in ("a", "b", None):
        body = json.dumps({**json.loads(CHAT), "cache_salt": salt}).encode()
        answer = await ask(tokens, body)
        assert (answer.ids, answer.salt) == (ids_of(world), salt)
    assert len(world.engine.questions) - asked == (1 if tokenization == "engine" else 0)
    given = await ask(tokens, b'{"prompt": [5], "cache_salt": "a"}', COMPLETIONS_PATH)
    assert given == TokenIds(array("I", [5]), "given", salt="a")


async def test_what_cannot_be_rendered_is_refused_with_its_reason(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    assert (await ask(tokens, b"{")).why is Why.SHAPE
    assert (await ask(tokens, CHAT, "/v1/responses")).why is Why.PATH


async def test_an_engines_answer_is_kept(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    first = await ask(tokens)
    again = await ask(tokens)
    assert (first.ids, first.cached, again.cached) == (again.ids, 0, len(first.ids))
    assert len(world.engine.questions) == 1
    prompt = TextPrompt("another")
    assert (await ask(tokens, b'{"prompt": "another"}', COMPLETIONS_PATH)).ids == ids_of(world, prompt)


async def test_nobody_waits_longer_than_the_deadline(world):
    world.engine.gate = asyncio.Event()
    tokens = world.tokens(tokenization="engine", engine_time_limit_s=60.0)
    tokens.learn("m")
    answers = []
    tokens.ask("m", CHAT_PATH, CHAT, world.clock.now() + 0.5, answers.append)
    await until(lambda: world.engine.questions)
    world.clock.advance(0.49)
    assert answers == []
    world.clock.advance(0.02)
    assert answers == [NoTokens(Why.LATE, "not within the deadline")]
    world.engine.gate.set()
    await until(lambda: not tokens.engine_open)
    assert len(answers) == 1
    assert world.clock.pending == 0


async def test_a_deadline_that_is_over_is_said_at_once(world):
    tokens = world.tokens(tokenization="engine")
    tokens.learn("m")
    assert (await ask(tokens, deadline=world.clock.now())).why is Why.LATE


async def test_a_full_queue_is_said_at_once(world, monkeypatch):
    tokens = world.tokens(folder=world.folder, threads=1, queue_limit=2)
    tokens.learn("m")
    await settled(tokens, "local")
    go = threading.Event()
    monkeypatch.setattr(LocalTokenizer, "tokenize", lambda self, prompt: go.wait(20) and TokenIds(array("I"), "local"))
    held = [asyncio.ensure_future(ask(tokens)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await ask(tokens)).why is Why.BUSY
    go.set()
    assert [answer.source for answer in await asyncio.gather(*held)] == ["local", "local"]
    assert tokens.answers["busy"] == 1
    assert tokens.figures().queued == 0
    assert world.clock.pending == 0


async def test_a_body_may_be_as_long_as_its_bound(world):
    tokens = world.tokens(tokenization="engine", body_limit_bytes=len(CHAT))
    tokens.learn("m")
    assert (await ask(tokens)).source == "engine"
    assert (await ask(tokens, CHAT + b" ")).why is Why.TOO_BIG


async def test_a_client_that_leaves_hears_nothing(world):
    world.engine.gate = asyncio.Event()
    tokens = world.tokens(tokenization="engine", engine_time_limit_s=60.0)
    tokens.learn("m")
    answers = []
    question = tokens.ask("m", CHAT_PATH, CHAT, world.clock.now() + 0.5, answers.append)
    await until(lambda: world.engine.questions)
    question.cancel()
    await until(lambda: not tokens.engine_open)
    assert answers == []
    assert world.clock.pending == 0


async def test_a_defect_of_ours_fails_no_request(world, monkeypatch, caplog):
    tokens = world.tokens(folder=world.folder)
    tokens.learn("m")
    await settled(tokens, "local")
    monkeypatch.setattr(LocalTokenizer, "tokenize", lambda self, prompt: 1 / 0)
    assert (await ask(tokens)).why is Why.OFF
    assert "ZeroDivisionError" in caplog.text
    assert "quick brown" not in caplog.text
