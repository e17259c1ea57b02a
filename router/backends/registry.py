"""The fleet: which backends exist, what they serve, which may be chosen. The only writer of their state.

Everything runs on the event loop's thread and nothing waits, so a reader between two awaits sees one consistent fleet.
Each change raises `version`; pools and listings are derived from the backends and renewed at their first use after a
change: a request pays a comparison of two integers, a change pays nothing per model.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from router.backends.backend import SERVING_STATES, Backend, State
from router.clock import Clock, TimerHandle

logger = logging.getLogger(__name__)

BACKENDS_LIMIT: Final = 4096
START_PATIENCE_S: Final = 600.0  # how long a backend may load its weights before nobody waits for its models any more
REAP_INTERVAL_S: Final = 0.25  # how soon a deleted backend leaves after its last attempt ended

# vLLM makes these anew for each answer to /v1/models: they tell nothing about the model.
_VOLATILE_FIELDS: Final = frozenset(("created", "permission"))
_PLACEHOLDER_OWNER: Final = "kvgate"


@dataclass(frozen=True, slots=True)
class BackendAdded:
    backend: Backend


@dataclass(frozen=True, slots=True)
class BackendRemoved:
    """It left the fleet: nothing of ours runs on it any more."""

    backend: Backend


@dataclass(frozen=True, slots=True)
class StateChanged:
    """`why` as it was given with this change; `backend.why` may have gone on by the time of delivery."""

    backend: Backend
    before: State
    after: State
    why: str = ""


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """`backend.draining` or `backend.deleted` changed."""

    backend: Backend


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Its weight, key or configured models are others."""

    backend: Backend


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """Names gained and lost; both are empty where only fields of an entry changed."""

    backend: Backend
    gained: frozenset[str]
    lost: frozenset[str]


@dataclass(frozen=True, slots=True)
class PromptSeeds:
    """Which name stands for a model where prompts are hashed: all names of one base model share their prefixes, as they
    share the engine's cache. `names`: only those for which it is another, None for none; `default`: for a body that
    names no model. Values are UTF-8.
    """

    names: dict[str, bytes] | None
    default: bytes


# By what two engines know that they serve one model: ("name", id) or ("root", root).
Sign = tuple[str, str]

FleetEvent = BackendAdded | BackendRemoved | StateChanged | DrainChanged | Reconfigured | ModelsChanged


class Pool:
    """The backends that serve one model. One object for as long as the model is known, always up to date."""

    __slots__ = (
        "_candidates",
        "_members",
        "_needs_filter",
        "_registry",
        "_serves",
        "_version",
        "awaited",
        "listed_by",
        "model",
    )

    def __init__(self, registry: Registry, model: str, serves: Callable[[Backend], bool]) -> None:
        self.model = model  # empty for the pool of all backends
        self.awaited = False  # nobody has told yet that he serves what is waited for
        self.listed_by = 0  # backends that list the model; kept by the registry
        self._registry = registry
        self._serves = serves
        self._version = -1
        self._members: tuple[Backend, ...] = ()
        self._candidates: tuple[Backend, ...] = ()
        self._needs_filter = False

    @property
    def candidates(self) -> tuple[Backend, ...]:
        """Members that may be chosen now, in the order of the fleet. Costs nothing unless the fleet changed."""
        if self._version != self._registry.version:
            self._renew()
        return self._candidates

    @property
    def needs_filter(self) -> bool:
        """A candidate is on trial: it may be chosen only while no request of its trial is open."""
        if self._version != self._registry.version:
            self._renew()
        return self._needs_filter

    @property
    def members(self) -> tuple[Backend, ...]:
        """All that list the model and are to stay, serving or not."""
        if self._version != self._registry.version:
            self._renew()
        return self._members

    def _renew(self) -> None:
        serves = self._serves
        self._members = tuple([b for b in self._registry.backends if not b.deleted and serves(b)])
        self._candidates = tuple([b for b in self._members if b.serving])
        trial = State.TRIAL
        self._needs_filter = any(b.state is trial for b in self._candidates)
        self._version = self._registry.version

    def __repr__(self) -> str:
        return f"<Pool {self.model!r} {len(self.candidates)} of {len(self.members)}>"


class Registry:
    """Adds, removes and changes backends, and tells its subscribers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[str, Backend] = {}  # without those that are leaving: their names are free
        self._leaving: list[Backend] = []  # deleted, with attempts still in flight
        self._snapshot: tuple[Backend, ...] = ()
        self._told: set[Backend] = set()  # those whose models are known, from the engine or from the configuration
        self._pools: dict[str, Pool] = {}
        self._any_pool = Pool(self, "", lambda backend: True)
        self._default_pool: Pool | None = None
        self._default_names: list[str] | None = None
        self._default_version = -1
        self._seeds = PromptSeeds(None, b"")
        self._seeds_version = -1
        self._listing = b""
        self._listing_version = -1
        self._known: list[str] = []
        self._known_version = -1
        self._subscribers: list[Callable[[FleetEvent], object]] = []
        self._undelivered: deque[FleetEvent] = deque()
        self._delivering = False
        self._reaper: TimerHandle | None = None
        self._models_version = 0  # grows where the models of those that are to stay may have changed
        self._emptied_at = clock.now()  # when the last backend left; the beginning, if none ever came
        self.aliases: dict[str, str] = {}  # a client's name for a model -> the fleet's; written by set_aliases alone
        self.version = 0

    # --- reading

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All, in order of addition, deleted ones included until their last attempt ended."""
        return self._snapshot

    def get(self, name: str) -> Backend | None:
        """The backend of that name; one that is leaving only where no other has taken its name."""
        found = self._by_name.get(name)
        if found is None:
            found = next((backend for backend in self._leaving if backend.name == name), None)
        return found

    def __contains__(self, backend: Backend) -> bool:
        return self._by_name.get(backend.name) is backend or backend in self._leaving

    def pool(self, model: str) -> Pool | None:
        """The pool of a base model or LoRA adapter; None for a name that no backend listed when it last answered."""
        return self._pools.get(model)

    def any_pool(self) -> Pool:
        """All backends, for paths without a model."""
        return self._any_pool

    def default_pool(self) -> Pool | None:
        """For a body that names no model: the pool of the fleet's only base model, None where there are several."""
        if self._default_version != self._models_version:
            self._default_version = self._models_version
            names = self._only_base_model()
            if names is None:
                self._default_pool = None
            elif len(names) == 1:
                self._default_pool = self._pools[names[0]]
            elif names != self._default_names or self._default_pool is None:
                self._default_pool = Pool(self, names[0], _lists_any(frozenset(names)))
            self._default_names = names
        return self._default_pool

    def known_models(self) -> list[str]:
        """Sorted, with the aliases of those that are known. A model stays known while a backend that is to stay listed
        it last, be that backend up or down."""
        if self._known_version != self._models_version:
            self._known_version = self._models_version
            aliases = [alias for alias, model in self.aliases.items() if model in self._pools]
            self._known = sorted({*self._pools, *aliases})
        return list(self._known)

    def prompt_seeds(self) -> PromptSeeds:
        """Costs nothing unless models or aliases changed."""
        if self._seeds_version != self._models_version:
            self._seeds_version = self._models_version
            self._seeds = self._renewed_seeds()
        return self._seeds

    @property
    def models_unknown(self) -> bool:
        """Some backend never told its models: a name that we do not know may still be one of its."""
        return any(backend not in self._told for backend in self._snapshot if not backend.deleted)

    def models_awaited(self) -> bool:
        """A backend that never told its models is just starting: worth waiting for it. One that has not answered for
        START_PATIENCE_S is not."""
        since = self._clock.now() - START_PATIENCE_S
        return any(
            b.state is State.STARTING and not b.draining and b.out_since > since and b not in self._told
            for b in self._snapshot
        )

    def waiting_pool(self) -> Pool:
        """For one request whose model is not known yet: nobody serves it, and it stands in nobody's way."""
        pool = Pool(self, "", lambda backend: False)
        pool.awaited = True
        return pool

    def outage_s(self, members: Sequence[Backend]) -> float:
        """How long none of these has served; of none at all, how long the fleet has been empty."""
        since = max([b.out_since for b in members]) if members else self._emptied_at
        return self._clock.now() - since

    def listing(self) -> bytes:
        """The answer to GET /v1/models: the union over the fleet, each entry as the first engine with it gave it. An
        alias has its model's entry under its own id, and takes the place of a model of its name."""
        if self._listing_version != self._models_version:
            self._listing_version = self._models_version
            entries: dict[str, dict[str, Any]] = {}
            for backend in self._snapshot:
                if backend.deleted:
                    continue
                for model, entry in backend.models.items():
                    known = entries.get(model)
                    if known is None or (_is_placeholder(known) and not _is_placeholder(entry)):
                        entries[model] = entry
            aliased = {
                alias: {**entries[model], "id": alias} for alias, model in self.aliases.items() if model in entries
            }
            entries |= aliased
            self._listing = orjson.dumps({"object": "list", "data": list(entries.values())})
        return self._listing

    def others_serve(self, backend: Backend) -> bool:
        """Whether each of its models has another backend that serves. O(backends)."""
        left = set(backend.models)
        anybody = False
        for other in self._snapshot:
            if other is not backend and other.serving:
                anybody = True
                left.difference_update(other.models)
        return anybody and not left

    # --- writing

    def add(
        self,
        name: str,
        url: str,
        weight: float = 1.0,
        api_key: str | None = None,
        models: Sequence[str] | None = None,
        tls_ca: str | None = None,
        tls_verify: bool = True,
        kv_events: str = "auto",
    ) -> Backend:
        """A new backend, in state STARTING. An empty name becomes host:port.

        ValueError: a name that is taken (one that is leaving has given it back), a URL that is not http(s)://host[:port],
        a weight that is not a positive number, or a fleet at its limit.
        """
        scheme, host, port = split_url(url)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        name = name or authority
        if name in self._by_name:
            raise ValueError(f"a backend named {name!r} exists")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight!r} is not a positive number")
        if len(self._by_name) >= BACKENDS_LIMIT:
            raise ValueError(f"the fleet is at its limit of {BACKENDS_LIMIT} backends")
        backend = Backend(
            name=name,
            url=f"{scheme}://{authority}",
            host=host,
            port=port,
            weight=weight,
            api_key=api_key,
            configured_models=tuple(models) if models is not None else None,
            tls_ca=tls_ca,
            tls_verify=tls_verify,
            kv_events=kv_events,
            out_since=self._clock.now(),
        )
        self._by_name[name] = backend
        self._snapshot = (*self._snapshot, backend)
        if models is not None:
            self._told.add(backend)
            backend.models = {model: _placeholder(model) for model in models}
            self._list_names(backend.models)
        self._changed(BackendAdded(backend))
        return backend

    def remove(self, name: str) -> Backend:
        """No new work from now on, and its name is free; it leaves the fleet when its last attempt ends. KeyError: no
        such backend."""
        backend = self._named(name)
        if backend.deleted:
            return backend
        del self._by_name[name]
        self._leaving.append(backend)
        self._leaves_service(backend)
        backend.deleted = True
        backend.draining = True
        self._unlist_names(backend.models)
        self._changed(DrainChanged(backend))
        self.reap()
        return backend

    def reconfigure(
        self,
        backend: Backend,
        weight: float,
        api_key: str | None,
        models: Sequence[str] | None,
        kv_events: str = "auto",
    ) -> bool:
        """Other values for one that stays; its state, load and cache stay too. True if that says anything new."""
        if backend.deleted or backend not in self:
            return False
        configured = tuple(models) if models is not None else None
        before = (backend.weight, backend.api_key, backend.configured_models, backend.kv_events)
        if before == (weight, api_key, configured, kv_events):
            return False
        backend.weight, backend.api_key, backend.kv_events = weight, api_key, kv_events
        if backend.configured_models != configured:
            backend.configured_models = configured
            # What it listed is kept until it is asked again; names that are no longer configured go at once.
            self.set_models(backend, list(backend.models.values()))
        self._changed(Reconfigured(backend))
        return True

    def drain(self, name: str) -> Backend:
        """No new work until `undrain`; what is in flight goes on. KeyError: no such backend."""
        return self._set_draining(name, True)

    def undrain(self, name: str) -> Backend:
        """KeyError: no such backend. ValueError: it was deleted, and is not revived."""
        return self._set_draining(name, False)

    def set_state(self, backend: Backend, state: State, why: str) -> bool:
        """True if the state changed. `why` is kept for states that do not serve. A backend that left stays as it is."""
        if backend not in self:
            return False
        backend.why = "" if state is State.UP else why
        if backend.state is state:
            return False
        if state not in SERVING_STATES:
            self._leaves_service(backend)
        before, backend.state = backend.state, state
        self._changed(StateChanged(backend, before, state, backend.why))
        return True

    def set_models(self, backend: Backend, entries: Iterable[dict[str, Any]]) -> bool:
        """Take over a valid answer to /v1/models (see models.py). True if it says anything new.

        With configured models those names alone are served, and an entry only fills in their fields.
        """
        if backend not in self:
            return False
        listed: dict[str, dict[str, Any]] = {}
        for entry in entries:
            listed.setdefault(entry["id"], entry)
        if backend.configured_models is not None:
            listed = {model: listed.get(model) or _placeholder(model) for model in backend.configured_models}
        if backend in self._told and _same_models(backend.models, listed):
            return False
        gained = frozenset(listed.keys() - backend.models.keys())
        lost = frozenset(backend.models.keys() - listed.keys())
        self._told.add(backend)
        backend.models = listed
        if not backend.deleted:
            self._list_names(gained)
            self._unlist_names(lost)
        self._changed(ModelsChanged(backend, gained, lost))
        return True

    def set_aliases(self, aliases: Mapping[str, str]) -> None:
        """A client's name for a model -> the fleet's, in place of those before. An alias wins over a model of its name;
        it is unknown while its model is."""
        if aliases != self.aliases:
            self.aliases = dict(aliases)
            self._models_version += 1
            self.version += 1

    def reap(self) -> None:
        """Let deleted backends go that carry nothing any more. Runs by itself while any is left."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        gone = [backend for backend in self._leaving if backend.in_flight == 0]
        for backend in gone:
            self._leaving.remove(backend)
            self._told.discard(backend)
            self._snapshot = tuple([other for other in self._snapshot if other is not backend])
            if not self._snapshot:
                self._emptied_at = self._clock.now()
        if self._leaving:
            self._reaper = self._clock.call_later(REAP_INTERVAL_S, self.reap)
        for backend in gone:
            self._changed(BackendRemoved(backend))

    def close(self) -> None:
        """Stop the timer and forget the subscribers."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        self._subscribers.clear()

    # --- telling

    def subscribe(self, callback: Callable[[FleetEvent], object]) -> Callable[[], None]:
        """Call `callback` with each event, in the order of the changes, at once. Returns what ends that.

        A callback may change the fleet: the events of that follow when all subscribers have had the present one.
        """
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def _changed(self, event: FleetEvent) -> None:
        self.version += 1
        if not isinstance(event, StateChanged):
            self._models_version += 1
        self._undelivered.append(event)
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._undelivered:
                event = self._undelivered.popleft()
                for callback in tuple(self._subscribers):
                    self._deliver(callback, event)
        finally:
            self._delivering = False

    @staticmethod
    def _deliver(callback: Callable[[FleetEvent], object], event: FleetEvent) -> None:
        try:
            callback(event)
        except Exception:  # one subscriber's bug must not keep the others from knowing who is down
            logger.exception("a subscriber of the fleet failed on %s of %s", type(event).__name__, event.backend.name)

    def _leaves_service(self, backend: Backend) -> None:
        """To be called before a change that may end its serving."""
        if backend.serving:
            backend.out_since = self._clock.now()

    # --- models

    def _set_draining(self, name: str, draining: bool) -> Backend:
        backend = self._named(name)
        if backend.deleted:
            if not draining:
                raise ValueError(f"backend {name!r} is being removed")
            return backend
        if backend.draining is not draining:
            self._leaves_service(backend)
            backend.draining = draining
            self._changed(DrainChanged(backend))
        return backend

    def _named(self, name: str) -> Backend:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def _list_names(self, models: Iterable[str]) -> None:
        for model in models:
            pool = self._pools.get(model)
            if pool is None:
                pool = self._pools[model] = Pool(self, model, _lists(model))
            pool.listed_by += 1

    def _unlist_names(self, models: Iterable[str]) -> None:
        for model in models:
            pool = self._pools[model]
            pool.listed_by -= 1
            if pool.listed_by == 0:
                del self._pools[model]

    def _only_base_model(self) -> list[str] | None:
        """The names of the fleet's only base model, in order of the fleet; None without any, or with several."""
        models = self._base_models()
        return models[0] if len(models) == 1 else None

    def _base_models(self) -> list[list[str]]:
        """The names of each base model, in order of the fleet.

        Engines agree on a model by the name under which they serve it or by its `root` (the weights); either is
        enough, as one host may serve it from a local folder. An entry with a `parent` is an adapter.
        """
        names: list[str] = []
        group_of: dict[Sign, int] = {}
        groups: list[set[Sign]] = []
        seen: set[tuple[str, object]] = set()
        for backend in self._snapshot:
            if backend.deleted:
                continue
            for model, entry in backend.models.items():
                if entry.get("parent"):
                    continue
                root = entry.get("root") if isinstance(entry.get("root"), str) else None
                if (model, root) in seen:
                    continue
                seen.add((model, root))
                if ("name", model) not in group_of:
                    names.append(model)
                signs = {("name", model)}
                if root is not None:
                    signs.add(("root", root))
                _join(signs, group_of, groups)
        by_group: dict[int, list[str]] = {}
        for name in names:
            by_group.setdefault(group_of["name", name], []).append(name)
        return list(by_group.values())

    def _renewed_seeds(self) -> PromptSeeds:
        before = self._seeds.names or {}
        seeds: dict[str, bytes] = {}
        models = self._base_models()
        for names in models:
            if len(names) > 1:
                # A name that stood for others goes on to do so: what was learned of their prefixes stays true.
                stood = {before[name] for name in names if name in before}
                seed = next((name for name in names if name.encode() in stood), names[0]).encode()
                seeds.update({name: seed for name in names if name.encode() != seed})
        seeds.update(
            {alias: seeds.get(model, model.encode()) for alias, model in self.aliases.items() if model in self._pools}
        )
        default = b""
        if len(models) == 1:
            default = seeds.get(models[0][0], models[0][0].encode())
        return PromptSeeds(seeds or None, default)


def split_url(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of http(s)://host[:port][/]. ValueError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"url {url!r} is not valid, expected http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"url {url!r} is not valid, expected http://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"url {_without_userinfo(url)!r} has more than a host and a port")
    return parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _without_userinfo(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url


def _lists(model: str) -> Callable[[Backend], bool]:
    return lambda backend: model in backend.models


def _lists_any(models: frozenset[str]) -> Callable[[Backend], bool]:
    return lambda backend: not models.isdisjoint(backend.models)


def _join(signs: set[Sign], group_of: dict[Sign, int], groups: list[set[Sign]]) -> None:
    """Put signs of one model into one group, merging the groups that they were in."""
    found = {group_of[sign] for sign in signs if sign in group_of}
    if found:
        keep = min(found)
    else:
        keep = len(groups)
        groups.append(set())
    for other in found - {keep}:
        signs |= groups[other]
        groups[other] = set()
    for sign in signs:
        group_of[sign] = keep
    groups[keep] |= signs


def _placeholder(model: str) -> dict[str, Any]:
    """What clients need to read of a model that only the configuration names so far."""
    return {"id": model, "object": "model", "created": 0, "owned_by": _PLACEHOLDER_OWNER}


def _is_placeholder(entry: dict[str, Any]) -> bool:
    return entry.get("owned_by") == _PLACEHOLDER_OWNER


def _same_models(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    return before.keys() == after.keys() and all(_lasting(before[m]) == _lasting(after[m]) for m in after)


def _lasting(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in _VOLATILE_FIELDS}
