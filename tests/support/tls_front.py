"""A TLS listener that passes everything on to a plain one: it makes an https engine of any engine."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from tests.support.certificates import Certificates


@contextmanager
def tls_front(url: str, certificates: Certificates) -> Iterator[str]:
    """https://127.0.0.1:PORT before the listener at `url`, from a thread of its own."""
    behind = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    ready = threading.Event()
    front: dict[str, object] = {}

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to, onward = await asyncio.open_connection(behind.hostname, behind.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pipe(reader, onward), pipe(to, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        stop = asyncio.Event()
        front["port"] = server.sockets[0].getsockname()[1]
        front["stop"] = (asyncio.get_running_loop(), stop)
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"https://127.0.0.1:{front['port']}"
    finally:
        loop, stop = front["stop"]  # type: ignore[misc]
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
