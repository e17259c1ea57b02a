"""/v1/realtime, vLLM's websocket for transcriptions: session.update, audio, commit; deltas and a final text come back.

One simplification: vLLM transcribes while the audio comes in, here it begins when the audio is final.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from router.sim.adapters import Adapters
from router.sim.calls import ApiError
from router.sim.http_protocol import Exchange
from router.sim.inference import Inference
from router.sim.websocket import FrameReader, Opcode, ProtocolError, close_frame, frame, json_message

MAX_AUDIO_BYTES = 25 * 2**20  # of one utterance


class RealtimeSession:
    """One websocket, from its acceptance to its end."""

    def __init__(
        self,
        exchange: Exchange,
        inference: Inference,
        adapters: Adapters,
        identities: Random,
        wall_time: Callable[[], float],
    ) -> None:
        self._exchange = exchange
        self._inference = inference
        self._adapters = adapters
        self._identities = identities
        self._wall_time = wall_time
        self._frames = FrameReader()
        self._model: str | None = None
        self._audio = bytearray()
        self._committed = False  # the client wants a transcription of what it sends
        self._transcribing = False

    def begin(self) -> None:
        self._exchange.accept_websocket(self._received)
        identity = f"sess-{self._identities.getrandbits(64):016x}"
        self._send({"type": "session.created", "id": identity, "created": int(self._wall_time())})

    def _received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except ProtocolError as error:
            self._end(error.code)
            return
        for kind, payload in messages:
            if self._exchange.done:
                return
            if kind is Opcode.PING:
                self._exchange.write_events([frame(Opcode.PONG, payload)])
            elif kind is Opcode.CLOSE:
                self._end(int.from_bytes(payload[:2]) if len(payload) >= 2 else 1000)
            elif kind is Opcode.TEXT:
                self._message(payload)
            elif kind is Opcode.BINARY:
                self._end(1003)

    def _message(self, payload: bytes) -> None:
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._refuse("Invalid JSON", "invalid_json")
            return
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "session.update":
            self._update(event)
        elif kind == "input_audio_buffer.append":
            self._append(event)
        elif kind == "input_audio_buffer.commit":
            self._commit(event.get("final") is True)
        else:
            self._refuse(f"Unknown event type: {str(kind)[:200]}", "unknown_event")

    def _update(self, event: dict[str, Any]) -> None:
        model = event.get("model")
        if model is None:
            self._refuse("Missing required field: model", "invalid_event")
            return
        try:
            self._model, _ = self._adapters.model_of({"model": model})
        except ApiError:
            self._refuse(f"The model `{str(model)[:200]}` does not exist.", "model_not_found")

    def _append(self, event: dict[str, Any]) -> None:
        audio = event.get("audio")
        try:
            given = base64.b64decode(audio, validate=True) if isinstance(audio, str) else b""
        except (binascii.Error, ValueError):
            given = b""
        if not given or len(given) % 2 or len(self._audio) + len(given) > MAX_AUDIO_BYTES:
            self._refuse("Invalid audio data", "invalid_audio")
            return
        self._audio += given

    def _commit(self, final: bool) -> None:
        if self._model is None:
            text = "Model not validated. Make sure to validate the model by sending a session.update event."
            self._refuse(text, "model_not_validated")
            return
        if not final:
            self._committed = True
        elif self._committed and self._audio and not self._transcribing:
            audio, self._audio = bytes(self._audio), bytearray()
            self._committed = False
            self._transcribing = True
            try:
                self._inference.transcribe(self._exchange, audio, self._model, self._done)
            except ApiError as error:
                self._transcribing = False
                self._refuse(error.message, "processing_error")

    def _done(self) -> None:
        self._transcribing = False

    def _end(self, code: int) -> None:
        """Say so and close; what is being transcribed for it ends as for any client that leaves."""
        on_gone = self._exchange.on_gone
        self._exchange.end_tunnel(close_frame(code))
        if on_gone is not None:
            on_gone()

    def _refuse(self, message: str, code: str) -> None:
        self._send({"type": "error", "error": message, "code": code})

    def _send(self, event: dict[str, Any]) -> None:
        self._exchange.write_events([json_message(event)])
