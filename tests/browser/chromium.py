"""Debian's headless Chromium over its DevTools protocol: a page, what it asked for, what it complained about.

A client of a hundred lines in place of selenium or playwright: no driver to install that has to fit the browser, and
the protocol tells what those hide (each request, each violation of the page's policy).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

WAIT_S = 30.0  # for what has to happen; only a test that fails waits so long
MISSING = "needs Debian's package chromium (apt-get install chromium)"

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


requires_chromium = pytest.mark.skipif(find_chromium() is None, reason=MISSING)


class Page:
    """One tab. `requests` are the URLs that it asked for, `complaints` what went to its console as a warning or an
    error, uncaught exceptions and violations of its policy included."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        """Go there, and wait for the document and what it names."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises waited for."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until the expression is truthy, asked again at each frame that the browser draws; its value."""
        waiting = f"""new Promise((done) => {{
            const look = () => {{ const value = ({condition}); value ? done(value) : requestAnimationFrame(look); }};
            look();
        }})"""
        try:
            async with asyncio.timeout(WAIT_S):
                return await self.run(waiting)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never: {condition}\n{self.complaints}\n{text}") from None

    async def text(self, selector: str = "body") -> str:
        found = await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")
        assert isinstance(found, str), f"nothing is {selector}"
        return found

    async def resize(self, width: int, height: int = 1000) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def screenshot(self) -> bytes:
        """A PNG of the whole document."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", targetId=self._target)

    def note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in told["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


class Chromium:
    """The browser's end of one DevTools connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        number = self._last
        question: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            question["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_json(question)
            return await asyncio.wait_for(answer, 2 * WAIT_S)
        finally:
            del self._answers[number]

    async def page(self, width: int = 1280) -> Page:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, target, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(width)
        return page

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.get(told["id"])
                if answer is not None and not answer.done():
                    if "error" in told:
                        answer.set_exception(AssertionError(told["error"]["message"]))
                    else:
                        answer.set_result(told["result"])
            elif page := self._pages.get(told.get("sessionId", "")):
                page.note(told["method"], told["params"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(AssertionError("the browser ended"))


def start_chromium(folder: str) -> tuple[subprocess.Popen[str], str]:
    """The process with its empty profile in `folder`, and the address of its DevTools."""
    binary = find_chromium()
    assert binary is not None, MISSING
    process = subprocess.Popen(
        [binary, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": folder},
        start_new_session=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("DevTools listening on "):
            return process, line.removeprefix("DevTools listening on ").strip()
    process.wait()
    raise AssertionError(f"chromium did not start: {said[-20:]}")


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Chromium]:
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        browser = Chromium(socket)
        try:
            yield browser
        finally:
            await browser.close()
