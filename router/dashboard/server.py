"""The dashboard's two paths on the admin port: the page, and the figures that it asks for once a second."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files
from typing import Final

from aiohttp import web

from router.dashboard.live import SPARKS_LIMIT, Live, Question

NUMBER_LIMIT: Final = 2**53  # what a page can count to

_NEVER_STORED: Final = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Page:
    """One HTML document with its style and script inside, and the policy that lets nothing else in: no other script, no
    request but to the address that it came from, no frame around it."""

    def __init__(self, html: str, style: str, script: str) -> None:
        if "</style" in style or "</script" in script:
            raise ValueError("the style or the script ends its own element")
        for mark in ("/*STYLE*/", "/*SCRIPT*/"):
            if html.count(mark) != 1:
                raise ValueError(f"the page needs {mark} once")
        self.body = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
        self.policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src '{_digest(script)}'",
                f"style-src '{_digest(style)}'",
                "img-src data:",  # its icon
                "connect-src 'self'",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
                "require-trusted-types-for 'script'",  # text can never become HTML, whoever edits the script
            )
        )

    @classmethod
    def load(cls) -> Page:
        folder = files(__package__)
        return cls(*(folder.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")))


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def add_routes(app: web.Application, live: Live) -> None:
    """GET / and GET /dashboard/data, open to whoever reaches the port, as its other readings are."""
    page = Page.load()

    async def show(request: web.Request) -> web.Response:
        headers = {**_NEVER_STORED, "content-security-policy": page.policy, "x-frame-options": "DENY"}
        return web.Response(body=page.body, content_type="text/html", charset="utf-8", headers=headers)

    async def tell(request: web.Request) -> web.Response:
        body = live.answer(_question(request))
        return web.Response(body=body, content_type="application/json", headers=_NEVER_STORED)

    app.router.add_get("/", show)
    app.router.add_get("/dashboard/data", tell)


def _question(request: web.Request) -> Question:
    """HTTPBadRequest: a figure that is no number from 0 to NUMBER_LIMIT, or more backends than one may ask for."""
    asked = request.query

    def number(name: str, default: int = 0) -> int:
        text = asked.get(name)
        return default if text is None else _number(name, text)

    sparks = asked.get("sparks", "")
    wanted = sparks.split(",", SPARKS_LIMIT) if sparks else []
    if len(wanted) > SPARKS_LIMIT:
        raise web.HTTPBadRequest(reason=f"sparks: more than {SPARKS_LIMIT} backends")
    return Question(
        boot=asked.get("boot", ""),
        after=number("after"),
        decision=number("decision"),
        sparks=tuple([_number("sparks", text) for text in wanted]),
        detail=number("detail"),
        detail_step=number("detail_step", -1),
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= NUMBER_LIMIT):
        raise web.HTTPBadRequest(reason=f"{name}: expected a number")
    return int(text)
