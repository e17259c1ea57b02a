"""The running configuration, and every change to it and to the fleet while the gateway runs.

A reload reads everything anew, compares, and only then changes anything: a bad file, or a key that only a start can
change, leaves all as it was. Backends are told apart by name. Those that the file lists follow the file; those that
came through the admin port stay until they are deleted there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from router import config as configuration
from router.backends.backend import Backend
from router.backends.registry import BACKENDS_LIMIT, Registry
from router.config import BackendConfig, Change, Config, ConfigError, Fault
from router.metrics import Metrics

logger = logging.getLogger(__name__)

# Bound to what exists once: listeners, the index, the exporter of spans.
NEEDS_RESTART: Final = (
    "server.host",
    "server.port",
    "server.workers",
    "admin.host",
    "admin.port",
    "kv_cache.",
    "redis.",
    "tracing.",
    "index.",
    "routing.kvaware.relearn",
)


class Control:
    """`read`: the configuration as a start would have it now, flags included; it may raise ConfigError. `apply` takes
    a new one into use and must not fail: everything that can was tried before."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        registry: Registry,
        metrics: Metrics,
        apply: Callable[[Config], None],
    ) -> None:
        self.config = config
        self._read = read
        self._registry = registry
        self._metrics = metrics
        self._apply = apply
        self._reloading = asyncio.Lock()
        self._added: dict[str, BackendConfig] = {}  # through the admin port

    def start(self) -> None:
        """Fill the fleet."""
        for backend in self.config.backends:
            self._add(backend)

    async def reload(self) -> list[Change]:
        """What changed, in the order of the file. ConfigError: why nothing did."""
        async with self._reloading:
            try:
                new = await asyncio.get_running_loop().run_in_executor(None, self._read)
                changes = configuration.changes(self.config, new)
                _refuse_restarts(self.config, new, changes)
                self._refuse_too_many(new)
            except ConfigError as error:
                self._metrics.reloads["failed"] += 1
                logger.warning("reload failed, the old configuration stays: %s", "; ".join(map(str, error.faults)))
                raise
            except BaseException:
                self._metrics.reloads["failed"] += 1
                raise
            old, self.config = self.config, new
            try:
                self._apply(new)
                self._follow_file(old, new)
            except BaseException:
                self._metrics.reloads["failed"] += 1
                raise
            self._metrics.reloads["ok"] += 1
            logger.info("reloaded: %s", "; ".join(map(str, changes)) or "nothing changed")
            return changes

    def _refuse_too_many(self, new: Config) -> None:
        staying = {backend.name for backend in new.backends} | self._added.keys()
        if len(staying) > BACKENDS_LIMIT:
            fault = Fault("backends", f"{len(staying)} with those added here", f"at most {BACKENDS_LIMIT}")
            raise ConfigError([fault])

    def _follow_file(self, old: Config, new: Config) -> None:
        listed = {backend.name for backend in new.backends}
        for backend in old.backends:
            if backend.name not in listed and backend.name not in self._added and self._present(backend.name):
                self._registry.remove(backend.name)
        for wanted in new.backends:
            self._added.pop(wanted.name, None)  # the file's from now on
            present = self._present(wanted.name)
            if present is not None and _same_place(present, wanted):
                self._registry.reconfigure(present, wanted.weight, wanted.api_key, wanted.models, wanted.kv_events)
                continue
            if present is not None:
                self._registry.remove(wanted.name)
            self._add(wanted)

    # -- the fleet

    def add(self, spec: Mapping[str, Any]) -> Backend:
        """A backend as a table of the file would have it. ConfigError: what is wrong with it. ValueError: its name is
        taken, or the fleet is full."""
        wanted = configuration.parse_backend(spec)
        taken = (self.config.admin.token_env, self.config.tracing.headers_env)
        if wanted.api_key_env is not None and wanted.api_key_env in taken:
            # It would be sent to an address that whoever asks has chosen.
            raise ConfigError(
                [Fault("api_key_env", "another secret of the gateway", "the variable of an engine's key")]
            )
        added = self._add(wanted)
        self._added[wanted.name] = wanted
        logger.info("backend %s added at %s", added.name, added.url)
        return added

    def remove(self, name: str) -> Backend:
        """It gets no new work and leaves when its last attempt ends. KeyError: no such backend."""
        removed = self._registry.remove(name)
        self._added.pop(name, None)
        logger.info("backend %s is being removed", name)
        return removed

    def drain(self, name: str) -> Backend:
        """KeyError: no such backend."""
        backend = self._registry.drain(name)
        logger.info("backend %s is draining", name)
        return backend

    def undrain(self, name: str) -> Backend:
        """KeyError: no such backend. ValueError: it is being removed."""
        backend = self._registry.undrain(name)
        logger.info("backend %s is no longer draining", name)
        return backend

    def _add(self, wanted: BackendConfig) -> Backend:
        return self._registry.add(
            wanted.name,
            wanted.url,
            wanted.weight,
            wanted.api_key,
            wanted.models,
            tls_ca=wanted.tls_ca,
            tls_verify=wanted.tls_verify,
            kv_events=wanted.kv_events,
        )

    def _present(self, name: str) -> Backend | None:
        backend = self._registry.get(name)
        return None if backend is None or backend.deleted else backend


def _same_place(backend: Backend, wanted: BackendConfig) -> bool:
    """Whether it is the same engine reached in the same way, so that its connections and its cache are the same."""
    return (backend.url, backend.tls_ca, backend.tls_verify) == (wanted.url, wanted.tls_ca, wanted.tls_verify)


def _refuse_restarts(old: Config, new: Config, changes: list[Change]) -> None:
    faults = [
        Fault(change.key_path, change.after, f"{change.before}: only a restart can change it")
        for change in changes
        if change.key_path.startswith(NEEDS_RESTART)
    ]
    if (old.server.tls_cert is None) != (new.server.tls_cert is None):
        before = "TLS" if old.server.tls_cert is not None else "no TLS"
        faults.append(Fault("server.tls_cert", "TLS on or off", f"{before}: only a restart can change it"))
    if faults:
        raise ConfigError(faults)
