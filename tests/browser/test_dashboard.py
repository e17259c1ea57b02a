"""The dashboard in a real browser: it shows what happens, asks only the gateway, and runs nobody else's script."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from router.backends.backend import State
from router.backends.in_flight import InFlight
from tests.browser.chromium import Page, connected, requires_chromium, start_chromium
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import SimProcess, running_sim
from tests.unit.dashboard.test_live import Told
from tests.unit.dashboard.test_server import served

pytestmark = [requires_chromium, pytest.mark.asyncio]

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details")
HOSTILE_NAME = "<img src=x onerror=\"document.title='owned'\">"
HOSTILE_MODEL = "<script>document.title='owned'</script>"
ROWS = "[...document.querySelectorAll('#backends-body tr')]"
LIVE = "document.querySelector('#link-text').textContent === 'live'"


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    """One browser for all tests, with an empty profile; a tab for each."""
    with tempfile.TemporaryDirectory(prefix="kvgate-chromium-", ignore_cleanup_errors=True) as folder:
        process, address = start_chromium(folder)
        try:
            yield address
        finally:
            process.terminate()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST)) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    """Two engines that both have served."""
    with running_gateway([sim.url for sim in sims], routing={"strategy": "prefixaware"}) as gateway:
        for at in range(8):
            chat(gateway, f"user {at % 4} says " * 100)
        yield gateway


def chat(gateway: GatewayProcess, text: str, model: str = "sim-8b") -> str:
    """Ask; returns the request's id."""
    request_id = next_id()
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    assert gateway.request("POST", CHAT, body, {"X-Request-Id": request_id}).status == 200
    return request_id


@asynccontextmanager
async def opened(devtools: str, url: str, width: int = 1280, scheme: str = "light") -> AsyncIterator[Page]:
    """The dashboard at this address, once it is live."""
    async with connected(devtools) as browser:
        page = await browser.page(width)
        try:
            await page.prefer(scheme)
            await page.open(url)
            await page.until(LIVE)
            yield page
        finally:
            await page.close()


def origins(page: Page) -> set[str]:
    return {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, page.requests) if parts.scheme != "data"}


async def test_it_shows_the_fleet_and_its_traffic_and_asks_nobody_but_the_gateway(
    devtools: str, gateway: GatewayProcess
) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.until(f"{ROWS}.length === 2 && document.querySelectorAll('#decisions-body tr').length >= 8")
        rows = await page.run(f"{ROWS}.map((row) => row.innerText)")
        assert [row.split()[0] for row in rows] == ["gpu-0", "gpu-1"]
        assert all("✓ up" in row and "sim-8b" in row for row in rows)
        assert "Serving: 2 of 2 backends in rotation" in await page.text("#verdict")
        decisions = await page.text("#decisions-body")
        assert "prefix" in decisions  # the second question of each user found the first
        assert "load" in decisions
        await page.until("/\\d ms median/.test(document.querySelector('#tiles').innerText.replaceAll('\\n', ' '))")
        assert "prefixaware" in await page.text("#about")
        assert await page.run("document.querySelector('#figures').hasAttribute('aria-busy')") is False
        assert origins(page) == {gateway.admin_url}
        assert page.complaints == []


async def test_what_happens_is_seen_without_a_reload(devtools: str, gateway: GatewayProcess) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.run("window.loaded_once = true")
        request_id = await asyncio.to_thread(chat, gateway, "something new")
        await page.until(f"document.querySelector('#decisions-body tr').innerText.includes('{request_id}')")
        await page.until("parseFloat(document.querySelector('.tile .value').textContent) > 0")
        assert await page.run("window.loaded_once") is True
        assert page.complaints == []


async def test_a_paused_page_stands_still_and_goes_on(devtools: str, gateway: GatewayProcess) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.run("document.querySelector('#pause').click()")
        assert await page.text("#link-text") == "paused"
        asked = len(page.requests)
        request_id = await asyncio.to_thread(chat, gateway, "while paused")
        uptime = await page.text("#about")
        for _ in range(30):  # frames that the browser draws
            await page.run("new Promise(requestAnimationFrame)")
        assert await page.text("#about") == uptime
        assert len(page.requests) <= asked + 1  # one may have been under way
        await page.run("document.querySelector('#pause').click()")
        await page.until(f"document.querySelector('#decisions-body tr').innerText.includes('{request_id}')")


async def test_a_backend_opens_by_keyboard_and_closes_again(devtools: str, gateway: GatewayProcess) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.until(f"{ROWS}.length === 2")
        button = f"{ROWS}[1].querySelector('button')"
        await page.run(f"{button}.focus()")
        assert await page.run(f"{button}.getAttribute('aria-expanded')") == "false"
        await page.run(f"{button}.click()")
        await page.until("document.querySelector('#detail-facts').innerText.includes('http://')")
        assert await page.text("#detail-title") == "gpu-1: up"
        assert await page.run("document.activeElement.id") == "detail-title"
        assert await page.run(f"{button}.getAttribute('aria-expanded')") == "true"
        await page.run("document.querySelector('#detail .plot').focus()")
        await page.press("ArrowLeft")
        assert (await page.run("document.activeElement.getAttribute('aria-valuetext')")).startswith(
            "0:05 ago: in flight"
        )
        await page.press("Escape")
        await page.until("document.querySelector('#detail').hidden")
        assert await page.run(f"document.activeElement === {button}") is True
        assert page.complaints == []


async def test_each_control_has_a_name_and_updates_keep_the_keyboards_place(
    devtools: str, gateway: GatewayProcess
) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.until(f"{ROWS}.length === 2")
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        controls = [
            node
            for node in tree
            if node.get("role", {}).get("value") in ("button", "searchbox", "checkbox", "slider")
            and not node["ignored"]
        ]
        assert len(controls) >= 10
        assert [node for node in controls if not node.get("name", {}).get("value")] == []
        await page.run(f"{ROWS}[0].querySelector('button').focus()")
        before = await page.text("#about")
        await page.until(f"document.querySelector('#about').innerText !== {before!r}")
        assert await page.run(f"document.activeElement === {ROWS}[0].querySelector('button')") is True


@pytest.mark.parametrize("width", [390, 768, 1600])
async def test_nothing_is_wider_than_the_window(devtools: str, gateway: GatewayProcess, width: int) -> None:
    async with opened(devtools, gateway.admin_url, width) as page:
        await page.until(f"{ROWS}.length === 2")
        await page.run(f"{ROWS}[0].querySelector('button').click()")
        await page.until("document.querySelector('#detail-facts').innerText.includes('http://')")
        assert await page.run("window.innerWidth") == width
        assert await page.run("document.documentElement.scrollWidth") <= width
        beyond = """[...document.querySelectorAll('main *, header *')].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width > 1 && box.right > innerWidth + 1 && !element.closest('svg, thead');
        }).map((element) => element.outerHTML.slice(0, 80))"""
        assert await page.run(beyond) == []


async def test_light_and_dark_differ_and_both_can_be_read(devtools: str, gateway: GatewayProcess) -> None:
    contrast = """(() => {
        const light = (text) => {
            const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((part) => {
                const value = part / 255;
                return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const color = getComputedStyle(at).backgroundColor;
                if (!/rgba\\(0, 0, 0, 0\\)|transparent/.test(color)) return color;
            }
            return 'rgb(255, 255, 255)';
        };
        return [...document.querySelectorAll('h2, h3, p, th, td, td span, .key, .axis span')]
            .filter((element) => element.innerText?.trim() && element.offsetParent)
            .map((element) => {
                const both = [light(getComputedStyle(element).color), light(ground(element))];
                const [one, other] = both.sort((a, b) => b - a);
                return [(one + 0.05) / (other + 0.05), element.innerText.slice(0, 30)];
            }).sort((a, b) => a[0] - b[0])[0];
    })()"""
    shots = {}
    for scheme in ("light", "dark"):
        async with opened(devtools, gateway.admin_url, scheme=scheme) as page:
            await page.until(f"{ROWS}.length === 2")
            shots[scheme] = await page.run("getComputedStyle(document.body).backgroundColor")
            lowest, where = await page.run(contrast)
            assert lowest >= 4.5, (scheme, where)  # WCAG AA
            assert len(await page.screenshot()) > 10_000
    assert shots["light"] != shots["dark"]


async def test_figures_that_change_move_nothing(devtools: str, gateway: GatewayProcess) -> None:
    async with opened(devtools, gateway.admin_url) as page:
        await page.until("document.querySelector('#choices-empty').hidden")
        # The first answer fills an empty page, in a frame that is still to be drawn: that is no update.
        await page.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        await page.run(
            """window.shifts = []; new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) window.shifts.push(entry.value);
            }).observe({ type: 'layout-shift' })"""
        )
        tops = "[...document.querySelectorAll('section, figure, .tile')].map((box) => box.getBoundingClientRect().top)"
        before = await page.run(tops)
        for at in range(3):
            request_id = await asyncio.to_thread(chat, gateway, f"moves {at}" * 200)
            await page.until(f"document.querySelector('#decisions-body').innerText.includes('{request_id}')")
        assert await page.run(tops) == before
        assert sum(await page.run("window.shifts")) < 0.01


async def test_a_dead_backend_is_named_first_with_its_reason_and_a_hostile_model_is_text(
    devtools: str, sims: list[SimProcess]
) -> None:
    with ExitStack() as stack:
        hostile = stack.enter_context(running_sim(*FAST, "--served-model-name", HOSTILE_MODEL))
        gateway = stack.enter_context(running_gateway([sims[0].url, hostile.url]))
        request_id = chat(gateway, "to the hostile one", HOSTILE_MODEL)
        async with opened(devtools, gateway.admin_url) as page:
            await page.until(f"document.querySelector('#decisions-body').innerText.includes('{request_id}')")
            assert HOSTILE_MODEL in await page.text("#backends-body")
            assert HOSTILE_MODEL in await page.text("#decisions-body")
            await page.run(f"{ROWS}[1].querySelector('button').click()")
            await page.until("document.querySelector('#detail-facts').innerText.includes('<script>')")
            assert "✓ Serving: 2 of 2" in await page.text("#verdict")

            hostile.stop()
            await page.until("document.querySelector('#verdict').dataset.level === 'warn'")
            assert await page.text("#verdict-line") == "△ Serving with 1 of 2 backends"
            why = await page.text("#verdict-why")
            assert f"no backend for {HOSTILE_MODEL}" in why
            assert "gpu-1: down for" in why
            assert "refused" in why
            first = await page.run(f"{ROWS}[0].innerText")
            assert "gpu-1" in first
            assert "✕ down" in first
            assert "refused" in first
            await assert_inert(page)
            assert origins(page) == {gateway.admin_url}
            assert page.complaints == []


async def assert_inert(page: Page) -> None:
    """No name became HTML, and nothing that one holds has run."""
    assert await page.run("document.querySelectorAll('img, main script, iframe, b b, a').length") == 0
    assert "owned" not in await page.run("document.title")


class Relay:
    """A fixed address in front of a gateway's admin port, whichever process that is now."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.target is not None:
                with suppress(OSError):
                    there_reader, there_writer = await asyncio.open_connection(*self.target)
                    self._writers.add(there_writer)
                    await asyncio.gather(self._copy(reader, there_writer), self._copy(there_reader, writer))
                    self._writers.discard(there_writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # what one end leaves is told to the other
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        self.target = None
        for writer in list(self._writers):
            writer.transport.abort()


async def test_a_gateway_that_went_away_is_said_so_and_its_successor_is_shown(
    devtools: str, sims: list[SimProcess]
) -> None:
    relay = Relay()
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    url = f"http://{address[0]}:{address[1]}"
    try:
        with running_gateway([sims[0].url]) as gateway:
            relay.target = (gateway.admin_host, gateway.admin_port)
            old_id = chat(gateway, "before")
            async with opened(devtools, url) as page:
                await page.until(f"document.querySelector('#decisions-body').innerText.includes('{old_id}')")
                await page.run("window.loaded_once = true")
                await asyncio.to_thread(gateway.stop)
                relay.cut()
                await page.until("!document.querySelector('#banner').hidden")
                banner = await page.text("#banner")
                assert "not reachable since" in banner
                assert await page.text("#link-text") == "no answer"
                assert "not known" in await page.text("#verdict-line")
                assert await page.run("document.title.startsWith('?')") is True
                assert "gpu-0" in await page.text("#backends-body")  # the last figures stay, dimmed
                await page.until("Number(getComputedStyle(document.querySelector('#fleet')).opacity) < 0.6")
                with running_gateway([sim.url for sim in sims]) as successor:
                    relay.target = (successor.admin_host, successor.admin_port)
                    new_id = chat(successor, "after")
                    await page.until(f"document.querySelector('#decisions-body').innerText.includes('{new_id}')")
                    assert await page.run("document.querySelector('#banner').hidden") is True
                    assert await page.text("#link-text") == "live"
                    await page.until(f"{ROWS}.length === 2")
                    assert old_id not in await page.text("#decisions-body")
                    assert await page.run("window.loaded_once") is True
                    relay.cut()
    finally:
        relay.cut()
        server.close()
        await server.wait_closed()


# -- pages of fleets that are made for it, in this process


async def shown(
    devtools: str, fleet: Told, look: Callable[[Page], Awaitable[None]], *, after: int = 1, width: int = 1280
) -> None:
    fleet.clock.advance(after)
    async with served(fleet) as url, opened(devtools, url, width) as page:
        await look(page)
        assert page.complaints == []


async def test_an_empty_fleet_and_no_traffic_are_said_in_words(devtools: str) -> None:
    async def look(page: Page) -> None:
        assert await page.text("#verdict-line") == "✕ Cannot serve: no backend yet"
        assert "[[backends]]" in await page.text("#fleet-empty")
        assert await page.run("document.querySelector('#backends').hidden") is True
        assert await page.text("#choices-empty") == "No request has been placed yet."
        assert await page.run("[...document.querySelectorAll('#charts .none')].map((text) => text.innerText)") == [
            "no traffic yet",
            "no first token yet",
            "no prompts yet",
            "nothing in flight, nothing queued",
        ]

    await shown(devtools, Told(), look)


async def test_names_reasons_and_request_ids_of_any_kind_are_text(devtools: str) -> None:
    fleet = Told("a")
    backend = fleet.registry.add(HOSTILE_NAME, "http://a", models=[HOSTILE_MODEL, "</td><b>m", "\u202egnp"])
    fleet.registry.set_state(backend, State.DOWN, HOSTILE_NAME)
    fleet.decide(backend, HOSTILE_MODEL.encode())
    fleet.hits = {HOSTILE_NAME: 1}

    async def look(page: Page) -> None:
        await page.until(f"{ROWS}.length === 2")
        await page.run(f"{ROWS}[0].querySelector('button').click()")
        await page.until("document.querySelector('#detail-facts').innerText.includes('</td><b>m')")
        for selector in ("#verdict", "#backends-body", "#detail-title", "#detail-facts", "#decisions-body"):
            assert HOSTILE_NAME.replace("_", " ") in await page.text(selector)
        assert HOSTILE_MODEL in await page.text("#decisions-body")
        await assert_inert(page)

    await shown(devtools, fleet, look)


async def test_a_backend_is_drained_and_put_back_with_the_token_that_the_admin_port_asks_for(devtools: str) -> None:
    fleet = Told("a")
    odd = fleet.registry.add("odd/name", "http://b", models=["m"])
    fleet.registry.set_state(odd, State.UP, "")
    fleet.clock.advance(1)
    asked = []

    async def change(request: web.Request) -> web.Response:
        asked.append((request.match_info["name"], request.match_info["what"], request.headers.get("authorization")))
        if request.headers.get("authorization") != "Bearer sesame":
            return web.json_response({"error": {"message": "no"}}, status=401)
        try:
            {"drain": fleet.registry.drain, "undrain": fleet.registry.undrain}[request.match_info["what"]]("odd/name")
        except ValueError:
            return web.json_response({"error": {"message": "it is being <b>removed</b>"}}, status=409)
        fleet.clock.advance(1)
        return web.json_response({})

    told = "document.querySelector('#change-told').innerText"
    press = "document.querySelector('#drain').click()"
    async with served(fleet, web.post("/backends/{name}/{what}", change)) as url, opened(devtools, url) as page:
        await page.until(f"{ROWS}.length === 2")
        await page.run(f"{ROWS}[1].querySelector('button').click()")
        assert await page.run("document.querySelector('#token-label').hidden") is True
        await page.run(press)
        await page.until(f"{told} === 'This needs the admin token.'")
        await page.run("document.querySelector('#token').value = 'wrong'")
        await page.run(press)
        await page.until(f"{told} === 'The gateway knows another token.'")
        await page.run("document.querySelector('#token').value = 'sesame'")
        await page.run(press)
        await page.until("document.querySelector('#drain').innerText === 'Put back'")
        assert "▽ draining" in await page.run(f"{ROWS}[0].innerText")
        assert await page.text("#verdict-line") == "✓ Serving with 1 of 2 backends, 1 draining"
        await page.run(press)
        await page.until("document.querySelector('#drain').innerText === 'Drain'")
        guard = InFlight(odd)
        fleet.registry.remove("odd/name")
        asked.clear()
        await page.run(press)  # the page does not know yet
        await page.until(f"{told} !== 'It may get requests again.'")
        assert {(name, token) for name, _, token in asked} == {("odd/name", "Bearer sesame")}
        guard.release()
        refused = [text for text in page.complaints if "401" not in text and "409" not in text]
        assert refused == []


async def test_why_nothing_is_served_is_said_first(devtools: str) -> None:
    fleet = Told("a", "b")
    fleet.clock.advance(2)
    fleet.registry.set_state(fleet.backends[0], State.DOWN, "HTTP 503 from /health")
    fleet.registry.set_state(fleet.backends[1], State.EJECTED, "3 failures in a row")

    async def look(page: Page) -> None:
        assert await page.text("#verdict-line") == "✕ Cannot serve: none of 2 backends is in rotation"
        assert await page.text("#verdict-why") == (
            "a: down for 4 s (HTTP 503 from /health) · b: ejected for 4 s (3 failures in a row)"
        )

    await shown(devtools, fleet, look, after=5)


async def test_requests_turned_away_and_waiting_are_told_at_the_top(devtools: str) -> None:
    fleet = Told("a")
    fleet.queued = 12
    fleet.metrics.codes[429] += 60
    fleet.metrics.codes[200] += 40
    fleet.metrics.codes[500] += 20

    async def look(page: Page) -> None:
        assert "turning requests away" in await page.text("#verdict-line")
        tiles = " ".join((await page.text("#tiles")).split())
        assert "Queue 12 waiting here" in tiles
        assert "2 /s failed · 6 /s turned away" in tiles

    await shown(devtools, fleet, look, after=10)


async def test_a_fleet_of_hundreds_is_paged_found_in_and_shows_first_what_is_out(devtools: str) -> None:
    fleet = Told(*(f"gpu-{at}" for at in range(512)))
    fleet.registry.set_state(fleet.backends[300], State.DOWN, "connection refused")
    guard = InFlight(fleet.backends[511])

    async def look(page: Page) -> None:
        await page.until(f"{ROWS}.length === 32")
        assert "gpu-300" in await page.run(f"{ROWS}[0].innerText")
        assert await page.text("#page-text") == "1 of 16 (512)"
        assert await page.run("document.querySelector('#page-back').disabled") is True
        await page.run("document.querySelector('#page-on').click()")
        await page.until("document.querySelector('#page-text').innerText.startsWith('2 of 16')")
        assert "gpu-31" in await page.run(f"{ROWS}[0].innerText")
        find = "Object.assign(document.querySelector('#filter'), {{ value: '{0}' }}).dispatchEvent(new Event('input'))"
        await page.run(find.format("gpu-511"))
        await page.until(f"{ROWS}.length === 1 && {ROWS}[0].innerText.includes('gpu-511')")
        # its load over time is asked for when it comes into view
        await page.until(
            "document.querySelector('.spark').getAttribute('aria-label') === 'in flight over ten minutes, at most 1'"
        )
        await page.run(find.format("no such backend"))
        await page.until("document.querySelector('#fleet-empty').innerText === 'No backend is like that.'")
        await page.run(find.format(""))
        await page.run("document.querySelector('#only-out').click()")
        await page.until(f"{ROWS}.length === 1 && {ROWS}[0].innerText.includes('gpu-300')")
        assert "Serving with 511 of 512 backends" in await page.text("#verdict-line")

    await shown(devtools, fleet, look, after=5)
    guard.release()
