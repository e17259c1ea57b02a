"""What the admin port can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from router.backends.backend import Backend
from router.config import Config


class FleetControl(Protocol):
    """The gateway as the admin port changes it. Everything has happened on return."""

    @property
    def config(self) -> Config:
        """The configuration that is in force."""
        ...

    def add(self, spec: Mapping[str, Any]) -> Backend:
        """A backend of a `[[backends]]` table. ConfigError with every fault; ValueError: its name is taken."""
        ...

    def remove(self, name: str) -> Backend:
        """No new work; it leaves when its last attempt ends. KeyError: no such backend."""
        ...

    def drain(self, name: str) -> Backend:
        """No new work until `undrain`. KeyError: no such backend."""
        ...

    def undrain(self, name: str) -> Backend:
        """KeyError: no such backend. ValueError: it is being removed."""
        ...

    async def reload(self) -> Sequence[object]:
        """Take over the configuration file as it is now. What changed, each with a line for people as its str(); no
        secret in it. ConfigError: it is wrong, and nothing has changed."""
        ...
