"""The two paths of the dashboard over a socket: what they send, refuse, and allow the page to do."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from router.dashboard.live import SPARKS_LIMIT
from router.dashboard.server import Page, add_routes
from tests.unit.dashboard.test_live import Told


@asynccontextmanager
async def served(fleet: Told, *more: web.RouteDef) -> AsyncIterator[str]:
    """The address of a server with nothing but the dashboard, and what is given."""
    app = web.Application()
    add_routes(app, fleet.live)
    app.add_routes(more)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def digest(text: str) -> str:
    return "'sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@pytest.mark.asyncio
async def test_the_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    async with served(Told("a")) as url, aiohttp.ClientSession(url) as session, session.get("/") as response:
        text = await response.text()
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
        assert policy["script-src"] == digest(script)
        assert policy["style-src"] == digest(style)
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_address_and_never_makes_html_of_text() -> None:
    text = Page.load().body.decode()
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not asked for
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon[a-z]+=\"|style=\"", text)


@pytest.mark.parametrize(
    ("html", "style", "script"),
    [
        ("/*STYLE*/", "", ""),
        ("/*STYLE*//*SCRIPT*//*SCRIPT*/", "", ""),
        ("/*STYLE*//*SCRIPT*/", "a</style>", ""),
        ("/*STYLE*//*SCRIPT*/", "", "'</script>'"),
    ],
)
def test_a_page_that_cannot_be_put_together_stops_the_start(html: str, style: str, script: str) -> None:
    with pytest.raises(ValueError):
        Page(html, style, script)


@pytest.mark.asyncio
async def test_figures_are_json_that_nobody_stores() -> None:
    fleet = Told("a")
    fleet.clock.advance(1)
    async with served(fleet) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/dashboard/data") as response:
            told = await response.json()
            assert told["sample"] == 1
            assert response.headers["cache-control"] == "no-store"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in response.headers
        query = {"boot": told["boot"], "after": "1", "sparks": "1", "detail": "1"}
        async with session.get("/dashboard/data", params=query) as response:
            told = await response.json()
            assert told.keys() == {"boot", "sample", "steps", "sparks", "detail"}


@pytest.mark.parametrize(
    "query",
    [
        "after=-1",
        "after=x",
        "after=1e3",
        "after=",
        "after=99999999999999999999",
        "decision=0x1",
        "detail=٣",
        "detail_step=-1",
        "sparks=1,,2",
        "sparks=a",
        "sparks=" + ",".join(["1"] * (SPARKS_LIMIT + 1)),
    ],
)
@pytest.mark.asyncio
async def test_a_question_that_makes_no_sense_is_a_400(query: str) -> None:
    async with (
        served(Told("a")) as url,
        aiohttp.ClientSession(url) as session,
        session.get(f"/dashboard/data?{query}") as response,
    ):
        assert response.status == 400
