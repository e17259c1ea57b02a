"""`kvaware`: the priced choice on what each engine holds by its own account, and on the mirror where it gives none.

An engine's KV events, together with the prompts that are on their way to it, say what it holds of a prompt whose token
ids are known. Every answer that reports its cached tokens is compared with what was predicted, both ways of knowing at
once (learning/standing.py): so an engine whose events are wrong is placed by the mirror, one whose mirror is wrong as
well by its load, and both come back by themselves when they are right again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from native.block_hash import BlockHashes
from router.backends.backend import Backend, EngineReport
from router.clock import Clock
from router.index.kv_holdings import EngineKv, KvHoldings
from router.learning.standing import Level, Standing
from router.learning.trust import Trust
from router.strategies.prefix_affinity import EngineState, KvHits, PrefixAffinity
from router.strategies.strategy import NEVER, Choice, Explanation, Need, Outcome, Reason, RoutingRequest

ENGINE_BLOCK_TOKENS: Final = 16  # vLLM's default, where the engine does not say
RATIO_ERROR: Final = 0.02  # of a prediction of the mirror, that a wrong number of bytes per token may cost
USAGE_FRESH_S: Final = 60.0  # after an answer with cached_tokens: so long the polled sums are not needed
ENOUGH_TOKENS: Final = 1024  # predicted, in the polls that are compared together
FOREIGN_RATIO: Final = 1.5  # the engine was asked for so many times our tokens: its hits are not ours
PATIENCE_LIMIT_S: Final = 1.0
SILENT_ANSWERS: Final = 5  # that should have said how much was cached, and then nobody waits for it any more

# Names of this module: to look a member up in its Enum costs 0.2 us each time, a Final nothing.
KV: Final = Reason.KV
PREFIX: Final = Reason.PREFIX
SHAPE: Final = Reason.SHAPE
UNTRUSTED: Final = Reason.UNTRUSTED
NO_EVENTS: Final = Reason.NO_EVENTS
NO_TOKENS: Final = Reason.NO_TOKENS


class Account:
    """The predictions and reports of one backend. `polled_*` are sums since their last comparison."""

    __slots__ = (
        "polled_answers",
        "polled_events",
        "polled_hits",
        "polled_mirror",
        "polled_prompt",
        "polled_queries",
        "silent_answers",
        "standing",
        "usage_at",
    )

    def __init__(self) -> None:
        self.standing = Standing()
        self.usage_at = NEVER
        self.silent_answers = 0  # with usage, of prompts that were cached, and nothing said of that
        self.polled_answers = self.polled_mirror = self.polled_prompt = 0
        self.polled_events: int | None = 0  # None: one of them was not predicted by events
        self.polled_hits = self.polled_queries = 0.0

    @property
    def reports_cached_tokens(self) -> bool | None:
        """None while too little was seen to know."""
        if self.usage_at != NEVER:
            return True
        return False if self.silent_answers >= SILENT_ANSWERS else None

    def start_over(self) -> None:
        self.polled_answers = self.polled_mirror = self.polled_prompt = 0
        self.polled_events = 0
        self.polled_hits = self.polled_queries = 0.0


class KvAware:
    """`holdings`: what the engines tell; None: nobody follows them. `resync` is asked to hear an engine's events anew;
    `level_changed` is told (backend, before, after); `untold` (backend, request, cached tokens) of an answer that shows
    more cached than an engine has told, which does not tell all. `token_wait_share`: see token_patience_s.

    The mirror's matches count as far as they are borne out; several much lower reports in a row mean that the cache was
    reset: the mirror is cleared, so that ghosts go. A choice that distrust changed says `fallback-untrusted`.
    """

    needs: frozenset[Need] = frozenset((Need.PREFIX_BLOCKS, Need.TOKENS))

    def __init__(
        self,
        clock: Clock,
        placement: PrefixAffinity,
        holdings: KvHoldings | None = None,
        *,
        token_wait_share: float = 0.25,
        resync: Callable[[Backend], object] = lambda backend: None,
        level_changed: Callable[[Backend, Level, Level], object] = lambda backend, before, after: None,
        untold: Callable[[Backend, RoutingRequest, int], object] = lambda backend, request, cached: None,
    ) -> None:
        self._now = clock.now
        self._placement = placement
        self._holdings = holdings
        self.token_wait_share = token_wait_share
        self._resync = resync
        self._level_changed = level_changed
        self._untold = untold
        self._accounts: dict[Backend, Account] = {}
        self._untrusted = 0  # how many mirrors are not trusted now
        self._hits = KvHits()

    # ---- the choice

    def token_patience_s(self, request: RoutingRequest, candidates: Sequence[Backend]) -> float:
        """How long this request may wait for its token ids: a share of the prefill that a whole hit would save, at most
        a second. 0 where no candidate's events could make use of them."""
        holdings = self._holdings
        if holdings is None or not request.readable:
            return 0.0
        for backend in candidates:
            if holdings.heard(backend) is not None:
                saved_s = self._placement.whole_prefill_s(request, backend)
                return min(self.token_wait_share * saved_s, PATIENCE_LIMIT_S)
        return 0.0

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        known = self._look(request, candidates)
        choice = self._placement.choose(request, candidates, known)
        if choice is not None:
            self._name_reason(choice, candidates, known)
        return choice

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        known = self._look(request, candidates)
        told = self._placement.explain(request, candidates, known)
        if told.choice is not None:
            self._name_reason(told.choice, candidates, known)
        for at, terms in enumerate(told.candidates):
            account = self._accounts.get(terms.backend)
            by_events = known is not None and known.believed[at]
            trust = None
            if account is not None:
                trust = account.standing.events if by_events else account.standing.mirror
            terms.terms["trust"] = 1.0 if trust is None else trust.value
            terms.terms["trusted"] = trust is None or not trust.lost
            terms.terms["by_events"] = by_events
            if known is not None and known.tokens[at] >= 0:
                terms.terms["event_tokens"] = known.tokens[at]
                terms.terms["event_tokens_in_cpu_memory"] = known.cpu[at]
                terms.terms["event_tokens_in_storage"] = known.far[at]
        return told

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        known = self._look(request, (backend,))
        if known is not None and known.believed[0]:
            assert self._holdings is not None
            return known.tokens[0] // (self._holdings.block_tokens(backend) or ENGINE_BLOCK_TOKENS), known.tokens[0]
        return self._placement.match_of(request, backend)

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        known = dict(self._placement.known_of(backend))
        if not known:
            return known
        account = self._accounts.get(backend)
        standing = account.standing if account is not None else Standing()
        known["placed_by"] = self._level(backend, standing).value
        known["events_trust"] = standing.events.value if self._told(backend) else None
        known["mirror_trust"] = standing.mirror.value
        known["event_resyncs"] = standing.resyncs
        known["reports_cached_tokens"] = account.reports_cached_tokens if account is not None else None
        return known

    def _look(self, request: RoutingRequest, candidates: Sequence[Backend]) -> KvHits | None:
        """What the candidates' events tell of this prompt; None where its token ids are not known."""
        holdings = self._holdings
        ids = request.ids
        if holdings is None or ids is None:
            return None
        hits = self._hits
        hits.make_room(len(candidates))
        index = holdings.index
        last = len(ids) - 1  # a full hit still computes one token
        matched_size = 0
        for at, backend in enumerate(candidates):
            hits.tokens[at] = -1
            hits.cpu[at] = hits.far[at] = 0
            hits.believed[at] = False
            hits.at_least[at] = False
            complete = True
            engine = holdings.told(backend)
            if engine is None:
                complete = False
                engine = holdings.heard(backend)
                if engine is None:
                    continue
            size = holdings.block_tokens(backend)
            if not size:
                continue
            blocks = request.kv_blocks(size, adapter_name(backend, request.model))
            if size != matched_size:
                index.match(blocks, size)
                matched_size = size
            self._read_runs(hits, at, backend, engine, blocks, size, last // size)
            account = self._accounts.get(backend)
            if account is None or not account.standing.events.lost:
                hits.believed[at] = complete
                hits.at_least[at] = not complete
                if hits.tokens[at] > hits.best_tokens:
                    hits.best_tokens = hits.tokens[at]
                    hits.best_prefix = blocks[hits.best_tokens // size - 1]
        return hits

    def _read_runs(
        self, hits: KvHits, at: int, backend: Backend, engine: EngineKv, blocks: BlockHashes, size: int, most: int
    ) -> None:
        """The tokens of one candidate, by tier, from the runs that the index has just matched; `most` blocks can be a
        hit. Which rank of several an engine will take is its own affair: the mean is what to expect."""
        assert self._holdings is not None
        index = self._holdings.index
        gpu = cpu = whole = 0
        for rank in engine.ranks:
            gpu += min(index.matched_gpu[rank], most)
            cpu += min(index.matched_cpu[rank], most)
            whole += min(index.matched_any[rank], most)
        ranks = len(engine.ranks)
        if ranks == 1:
            coming = min(self._holdings.sent.longest(backend.slot, blocks, gpu), most)
            if coming > gpu:
                gpu = coming
                cpu = max(cpu, gpu)
                whole = max(whole, cpu)
        hits.tokens[at] = whole // ranks * size
        hits.cpu[at] = (cpu - gpu) // ranks * size
        hits.far[at] = (whole - cpu) // ranks * size

    def _name_reason(self, choice: Choice, candidates: Sequence[Backend], known: KvHits | None) -> None:
        """What the placement called a match or a load, by what it was known from."""
        if choice.reason is SHAPE:
            return
        by_events = False
        if known is not None:
            for at, backend in enumerate(candidates):
                if backend is choice.backend:
                    by_events = known.believed[at] or (known.at_least[at] and known.tokens[at] >= choice.matched_tokens)
                    break
        if self._ignored_more(choice, candidates, known, by_events):
            choice.reason = UNTRUSTED
        elif by_events:
            if choice.reason is PREFIX:
                choice.reason = KV
        elif not self._any_heard(candidates):
            choice.reason = NO_EVENTS
        elif choice.request.ids is None:
            choice.reason = NO_TOKENS

    def _ignored_more(
        self, choice: Choice, candidates: Sequence[Backend], known: KvHits | None, by_events: bool
    ) -> bool:
        """Whether a candidate that is not trusted has a longer match than the one that counted."""
        if known is not None:
            for at in range(len(candidates)):
                if not (known.believed[at] or known.at_least[at]) and known.tokens[at] > choice.matched_tokens:
                    return True
        if by_events or not self._untrusted or choice.best_prefix is None:
            return False
        matched = self._placement.mirror.matched  # as the choice left it
        own = self._accounts.get(choice.backend)
        counted = 0 if own is not None and own.standing.mirror.lost else choice.match_blocks
        for backend in candidates:
            account = self._accounts.get(backend)
            if account is not None and account.standing.mirror.lost and matched[backend.slot] > counted:
                return True
        return False

    def _any_heard(self, candidates: Sequence[Backend]) -> bool:
        holdings = self._holdings
        return holdings is not None and any(holdings.heard(backend) is not None for backend in candidates)

    def _told(self, backend: Backend) -> bool:
        return self._holdings is not None and self._holdings.told(backend) is not None

    # ---- the life of an attempt

    def placed(self, choice: Choice) -> None:
        self._placement.placed(choice)
        holdings, request = self._holdings, choice.request
        if holdings is None or request.ids is None or choice.backend.slot < 0:
            return
        size = holdings.block_tokens(choice.backend)
        if size and holdings.heard(choice.backend) is not None:
            choice.kv_blocks = request.kv_blocks(size, adapter_name(choice.backend, request.model))
            holdings.sent.add(choice.backend.slot, choice.kv_blocks)

    def first_byte(self, choice: Choice) -> None:
        before = choice.first_byte_at
        self._placement.first_byte(choice)
        if before == NEVER and choice.first_byte_at != NEVER:
            account = self._account(choice.backend)
            if choice.first_byte_at - account.usage_at <= USAGE_FRESH_S:
                return
            account.polled_answers += 1
            account.polled_prompt += choice.prompt_tokens
            account.polled_mirror += self._mirrored(choice, choice.prompt_tokens)
            if choice.kv_tokens is None:
                account.polled_events = None
            elif account.polled_events is not None:
                # the engine's counters of hits are those of its GPU blocks
                account.polled_events += choice.kv_tokens - choice.cpu_tokens - choice.far_tokens

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        # Its blocks are in the engine until here, whatever the events say: they are held for it.
        if choice.kv_blocks is not None and self._holdings is not None:
            self._holdings.sent.discard(choice.backend.slot, choice.kv_blocks)
        engine = self._placement.engine(choice.backend)
        prompt_tokens = outcome.prompt_tokens
        if engine is not None and prompt_tokens is not None:
            account = self._account(choice.backend)
            cached = outcome.cached_tokens
            now = self._now()
            if cached is not None:
                account.usage_at = now
            elif now - account.usage_at <= USAGE_FRESH_S:
                cached = 0  # releases that leave a zero out
            elif account.usage_at == NEVER and choice.matched_tokens >= self._block(engine):
                account.silent_answers += 1
            if cached is not None:
                if choice.placed_at >= engine.cleared_at:
                    self._compare_mirror(engine, account, self._mirrored(choice, prompt_tokens), cached, 1)
                if choice.kv_tokens is not None:
                    self._compare_events(engine, account, choice.kv_tokens, cached, 1)
                elif choice.kv_blocks is not None and cached > self._heard_tokens(choice):
                    self._untold(choice.backend, choice.request, cached)
        self._placement.observe(choice, outcome)

    def _heard_tokens(self, choice: Choice) -> int:
        """What the choice's engine tells now that it holds of the prompt; as if all where it tells everything."""
        holdings, blocks = self._holdings, choice.kv_blocks
        assert holdings is not None
        assert blocks is not None
        engine = holdings.heard(choice.backend)
        if engine is None or holdings.told(choice.backend) is not None:
            return choice.prompt_tokens
        size = holdings.block_tokens(choice.backend)
        holdings.index.match(blocks, size)
        return size * max(holdings.index.matched_any[rank] for rank in engine.ranks)

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        self._placement.reported(backend, before, now)
        engine = self._placement.engine(backend)
        account = self._accounts.get(backend)
        if engine is None or account is None:
            return
        if (
            now.prefix_hits is None
            or now.prefix_queries is None
            or before.prefix_hits is None
            or before.prefix_queries is None
            or now.at - account.usage_at <= USAGE_FRESH_S
        ):
            account.start_over()
            return
        hits, queries = now.prefix_hits - before.prefix_hits, now.prefix_queries - before.prefix_queries
        if hits < 0 or queries < 0:
            account.start_over()
            return
        account.polled_hits += hits
        account.polled_queries += queries
        if account.polled_mirror < ENOUGH_TOKENS and (account.polled_events or 0) < ENOUGH_TOKENS:
            return
        # The engine counts at the start of a prefill and we at its end: the ratio bears that, a sum would not.
        if account.polled_prompt / FOREIGN_RATIO <= account.polled_queries <= account.polled_prompt * FOREIGN_RATIO:
            borne = int(account.polled_prompt * account.polled_hits / account.polled_queries)
            self._compare_mirror(engine, account, account.polled_mirror, borne, account.polled_answers)
            if account.polled_events is not None:
                self._compare_events(engine, account, account.polled_events, borne, account.polled_answers)
        account.start_over()

    # ---- trust

    def knowledge_changed(self, backend: Backend) -> None:
        """Its events came or went."""
        self._settle(backend, self._account(backend).standing)

    def _compare_mirror(self, engine: EngineState, account: Account, predicted: int, cached: int, answers: int) -> None:
        trust = account.standing.mirror
        was_lost = trust.lost
        allowance = answers * self._block(engine) + int(predicted * RATIO_ERROR)
        trust.compare(predicted, cached, allowance=allowance, answers=answers)
        self._untrusted += trust.lost - was_lost
        if engine.trust != trust.worth:
            self._placement.set_trust(engine, trust.worth)
        if trust.cache_gone():
            self._placement.clear(engine)
        self._settle(engine.backend, account.standing)

    def _compare_events(self, engine: EngineState, account: Account, predicted: int, cached: int, answers: int) -> None:
        allowance = answers * self._block(engine)
        wanted = account.standing.compare_events(predicted, cached, self._now(), allowance=allowance, answers=answers)
        self._settle(engine.backend, account.standing)
        if wanted:
            self._resync(engine.backend)

    def _settle(self, backend: Backend, standing: Standing) -> None:
        before = standing.level
        standing.level = after = self._level(backend, standing)
        if after is not before:
            self._level_changed(backend, before, after)

    def _level(self, backend: Backend, standing: Standing) -> Level:
        return standing.level_where(self._told(backend))

    def _block(self, engine: EngineState) -> int:
        told = self._holdings.block_tokens(engine.backend) if self._holdings is not None else 0
        return told or engine.backend.report.block_size_tokens or ENGINE_BLOCK_TOKENS

    def _mirrored(self, choice: Choice, prompt_tokens: int) -> int:
        """Tokens that the mirror held of this prompt, whatever they were worth."""
        if not choice.match_blocks:
            return 0
        part = choice.match_blocks * self._placement.block_bytes / choice.request.prefix_bytes
        return min(int(part * prompt_tokens), prompt_tokens - 1)

    def _account(self, backend: Backend) -> Account:
        account = self._accounts.get(backend)
        if account is None:
            account = self._accounts[backend] = Account()
        return account

    def trust_of(self, backend: Backend) -> Trust | None:
        account = self._accounts.get(backend)
        if account is None:
            return None
        return account.standing.events if self._told(backend) else account.standing.mirror

    # ---- the fleet

    def joined(self, backend: Backend) -> None:
        self._placement.joined(backend)

    def forget(self, backend: Backend) -> None:
        account = self._accounts.pop(backend, None)
        if account is not None and account.standing.mirror.lost:
            self._untrusted -= 1
        if self._holdings is not None:
            self._holdings.sent.forget(backend.slot)
        self._placement.forget(backend)


def adapter_name(backend: Backend, model: str) -> str | None:
    """The name by which the engine's events know a LoRA adapter: the one that it is asked for by. An adapter's entry in
    /v1/models names the model that it belongs to."""
    entry = backend.models.get(model)
    return model if entry is not None and isinstance(entry.get("parent"), str) else None
