"""The priced choice: what a request costs on each backend, in seconds, its own and the others'.

    w = the wait: prefill that we sent there and that is not yet at its first token; or, where the KV pool would
        overflow, the time until running requests free enough of it
    x = the work that the request brings: a fixed cost, and its tokens without those that the backend's cache holds
    k = arrivals per engine and second / (1 - prefill utilisation)
    price = w + x + k x (w + x / 2) + decoding

The third term is the delay that the work causes to those who arrive before the engine drains. The fourth is what one
more sequence costs in a running batch: each decode step grows by what a few prefill tokens cost, for the request itself
and for everyone in the batch, and reading that much slower counts as a small part of waiting.

What a cache holds is known from a mirror: our own LRU copy of each engine's, sized by the capacity that it reports. A
prompt enters it when it is sent, so its blocks count while they are still coming, and siblings follow their leader as
long as waiting for it is cheaper than doing its work again. A further copy of a hot prefix is bought on the account of
those that used the first (learning/copy_worth.py).

Nothing here waits, and nothing is allocated per candidate. One choice with its three notices costs about 12 us with
8 candidates (tests/benchmarks/test_strategies.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Protocol

from native.block_hash import BlockHashes
from router.backends.backend import Backend, EngineReport
from router.clock import Clock
from router.learning.arrival_rate import ArrivalRate
from router.learning.bytes_per_token import BytesPerToken
from router.learning.copy_worth import CopyAccounts
from router.learning.l2_rate import L2Rate
from router.learning.mirror_size import MirrorSize
from router.learning.prefill_ledger import Phase, PrefillLedger
from router.learning.prefill_speed import PRIOR_TOKENS_PER_S, PrefillSpeed
from router.learning.recent_work import RecentWork
from router.learning.tier_cost import TierCost
from router.learning.trust import Trust
from router.strategies.strategy import NEVER, Choice, End, Explanation, Need, Outcome, Reason, RoutingRequest, Terms

NEAR_RATIO: Final = 1.02  # prices this near to the least tie
NEAR_S: Final = 0.002
USEFUL_S: Final = 0.001  # a match that saves less decides nothing, unless it is half of the prompt
ALIKE: Final = 0.15  # engines whose learned speeds differ by less count as equal, else noise would pick favourites
DECODE_TOKENS: Final = (
    2.5  # prefill tokens that cost what one more sequence adds to a step (0.25 ms at 10,000 tokens/s)
)
CROWDED: Final = 2.0  # the price of a copy, in its own prefill, where it displaces something
# Seconds of waiting that a second of slower reading is worth; 0.1 cost a tenth of the mean wait of agents.
READING: Final = 0.03
PRIOR_OUTPUT_TOKENS: Final = 200.0
PRIOR_STAY_S: Final = 2.5  # from first to last token
UNKNOWN: Final = float("inf")  # a pool whose size is not reported never overflows
LONGER: Final = 1.25  # by so much our count of a prompt's tokens may be above the engine's
SLOW: Final = 0.02  # weight of one answer in the averages of outputs and stays
MAX_MODELS = 1024  # learned apart; the fleet's further models share one record


# Names of this module: to look a member up in its Enum costs 0.2 us each time, a Final nothing.
SHAPE: Final = Reason.SHAPE
LOAD: Final = Reason.LOAD
PREFIX: Final = Reason.PREFIX
COMPLETE: Final = End.COMPLETE
WAITING: Final = Phase.WAITING
DECODING: Final = Phase.DECODING


class PrefixMirror(Protocol):
    """The index: native.prefix_tree.PrefixTree, or its reference. `matched` is filled by match(), by slot."""

    @property
    def matched(self) -> array[int]: ...
    def add_backend(self) -> int: ...
    def remove_backend(self, slot: int) -> None: ...
    def clear_backend(self, slot: int) -> object: ...
    def set_capacity(self, slot: int, blocks: int) -> object: ...
    def insert(self, slot: int, blocks: BlockHashes) -> int: ...
    def match(self, blocks: BlockHashes) -> int: ...
    def match_one(self, slot: int, blocks: BlockHashes) -> int: ...
    def forget_after(self, slot: int, blocks: BlockHashes, keep: int) -> int: ...
    def blocks_of(self, slot: int) -> int: ...


class KvHits:
    """What the engines' KV events tell of one prompt, by place among the candidates. Filled by whoever follows them."""

    __slots__ = ("at_least", "believed", "best_prefix", "best_tokens", "cpu", "far", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []  # held in any tier, or soon to be; those of one that tells nothing are -1
        self.cpu: list[int] = []  # how many of these have to be loaded from the engine's CPU memory
        self.far: list[int] = []  # and from farther away
        self.believed: list[bool] = []  # False: the mirror is asked
        self.at_least: list[bool] = []  # asked too: of an engine that tells what it stores, but not all of before
        self.best_tokens = 0  # the longest of those believed
        self.best_prefix: int | None = None  # the hash that names it

    def make_room(self, candidates: int) -> None:
        """For a new question about so many. What the lists hold is the caller's to write."""
        missing = candidates - len(self.tokens)
        if missing > 0:
            self.tokens.extend([-1] * missing)
            self.cpu.extend([0] * missing)
            self.far.extend([0] * missing)
            self.believed.extend([False] * missing)
            self.at_least.extend([False] * missing)
        self.best_tokens = 0
        self.best_prefix = None


class EngineState:
    """What is known of one backend. It dies with `forget`; attempts sent before then are strangers to its successor."""

    __slots__ = (
        "backend",
        "caching",
        "cleared_at",
        "cpu_token_s",
        "elsewhere",
        "far_token_s",
        "fixed_s",
        "foreign",
        "foreign_wait_s",
        "kv_budget",
        "kv_capacity",
        "ledger",
        "left_token_s",
        "quiet",
        "seconds_per_token",
        "shared",
        "size",
        "slot",
        "speed",
        "stay_s",
        "tiers",
        "trust",
        "worth",
    )

    def __init__(self, backend: Backend, slot: int, speed: PrefillSpeed, size: MirrorSize) -> None:
        self.backend = backend
        self.slot = slot
        self.ledger = PrefillLedger()
        self.speed = speed
        self.size = size
        self.fixed_s = speed.fixed_s
        self.seconds_per_token = 1.0 / speed.tokens_per_s  # as applied: the same number for engines that are alike
        self.tiers = TierCost()
        self.shared = L2Rate()
        self.cpu_token_s = self.far_token_s = self.left_token_s = 0.0
        self.reckon()
        self.caching = True
        self.trust = 1.0
        self.worth = 1.0  # of a matched token: trust, or 0 where the engine does not cache
        self.kv_capacity = UNKNOWN  # tokens
        self.kv_budget = UNKNOWN  # what ledger.kv_tokens may reach before the pool overflows
        self.foreign = 0.0  # requests there that are not ours
        self.foreign_wait_s = 0.0  # prefill of those that wait
        self.elsewhere = (0.0, 0.0)  # foreign running and waiting, as the last poll made it
        self.stay_s = PRIOR_STAY_S
        self.quiet: Choice | None = None  # the attempt before its first byte that has the engine for itself so far
        self.cleared_at = NEVER

    def reckon(self) -> None:
        """What tokens cost by where they come from, after something was learned: from CPU memory, from a store that
        engines share, and those that the engine lacks, of which that store has a share."""
        self.tiers.computing(1.0 / self.seconds_per_token, self.fixed_s)
        self.cpu_token_s, self.far_token_s = self.tiers.cpu_s, self.tiers.l2_s
        rate = self.shared.rate
        self.left_token_s = self.seconds_per_token
        if rate is not None:
            self.left_token_s += rate * (self.far_token_s - self.seconds_per_token)


class ModelState:
    """What is learned of one model."""

    __slots__ = ("arrivals", "output_tokens", "text")

    def __init__(self) -> None:
        self.text = BytesPerToken()
        self.arrivals = ArrivalRate()
        self.output_tokens = PRIOR_OUTPUT_TOKENS


class PrefixAffinity:
    """`prefixaware`. `backend.slot` is written here alone: the backend's number in the mirror."""

    needs: frozenset[Need] = frozenset((Need.PREFIX_BLOCKS,))

    def __init__(
        self, clock: Clock, rng: Random, mirror: PrefixMirror, *, block_bytes: int, assumed_kv_tokens: int
    ) -> None:
        self._now = clock.now
        self._rng = rng
        self._random = rng.random
        self._mirror = mirror
        self.block_bytes = block_bytes
        self._assumed_kv_tokens = assumed_kv_tokens
        self._engines: dict[Backend, EngineState] = {}
        self._models: dict[str, ModelState] = {}
        self._further_models = ModelState()
        self._fleet = ArrivalRate()
        self._recent: RecentWork[Backend] = RecentWork()
        self._copies = CopyAccounts()
        self._prices: list[float] = []
        self._hits: list[float] = []  # tokens, by place among the candidates
        self._known: Sequence[Backend] = ()  # the last snapshot whose backends were all known

    # ---- the choice

    def choose(
        self, request: RoutingRequest, candidates: Sequence[Backend], known: KvHits | None = None
    ) -> Choice | None:
        """`known`: what KV events tell, in the place of the mirror where it is believed."""
        return self._cheapest(request, candidates, known, None)

    def explain(
        self, request: RoutingRequest, candidates: Sequence[Backend], known: KvHits | None = None
    ) -> Explanation:
        told = Explanation("the lowest score_s; of those near it (near_least) the longest match, then the lowest load")
        drawn = self._rng.getstate()
        try:
            told.choice = self._cheapest(request, candidates, known, told)
        finally:
            self._rng.setstate(drawn)
        if told.choice is not None:
            limit = _near(min(self._prices[: len(told.candidates)]))
            for terms, price in zip(told.candidates, self._prices, strict=False):  # the list may be longer
                whole = sum(value for name, value in terms.terms.items() if name.endswith("_s"))
                terms.terms["paid_copy_s"] = price - whole if terms.terms["copy_is_paid"] else 0.0
                terms.terms["near_least"] = price <= limit
                terms.score_s = price
        return told

    def _cheapest(
        self,
        request: RoutingRequest,
        candidates: Sequence[Backend],
        known: KvHits | None,
        told: Explanation | None,
    ) -> Choice | None:
        """The choice; `told`, where it is given, is filled with the figures as they are used."""
        if not candidates:
            return None
        if candidates is not self._known:
            self._know(candidates)
        now = self._now()
        model = self._models.get(request.model, self._further_models)
        count = len(candidates)
        pressure = model.arrivals.pressure(now, count)
        if len(self._models) > 1:  # adapters of one base model share engines: each sees little of what comes
            pressure = max(pressure, self._fleet.pressure(now, len(self._engines)))

        mirror = self._mirror
        blocks = request.blocks
        total = request.prompt_tokens or int(request.prefix_bytes / model.text.ratio) or 1
        top = total - 1  # a full hit still computes one token
        prefix: int | None = None
        block_tokens = deep = 0.0
        if blocks is not None and (deepest := mirror.match(blocks)):
            block_tokens = self.block_bytes * total / request.prefix_bytes
            deep = deepest * block_tokens
            if deep > top:
                deep = float(top)
            prefix = blocks[deepest - 1]
        if known is not None and known.best_prefix is not None:  # it names prefixes otherwise than the mirror does
            prefix = known.best_prefix
            deep = float(known.best_tokens)
        paid_s = self._copies.balance_s(prefix, now) if prefix is not None else 0.0
        matched = mirror.matched
        output = model.output_tokens
        if request.max_tokens is not None and request.max_tokens < output:
            output = float(request.max_tokens)
        # Cached blocks take no room while others use them too; those of a prefix that nobody else used are unheld, and
        # become held with this request.
        held_anyway = bool(paid_s)
        room = output + total
        slower = DECODE_TOKENS * (1.0 + 2.0 * READING * output)

        if told is not None:
            told.terms = {
                "prompt_tokens": total,
                "bytes_per_token": model.text.ratio,
                "expected_output_tokens": output,
                "pressure_per_s": pressure,
                "paid_for_copies_s": paid_s,
            }

        engines = self._engines
        shared = None if request.shared_tokens is None else min(request.shared_tokens, top)
        prices = self._prices
        hits = self._hits
        least = shortest = float("inf")
        longest = 0.0
        for at, backend in enumerate(candidates):
            engine = engines[backend]
            loading = 0.0
            if known is not None and known.believed[at]:
                hit = float(known.tokens[at])
                if known.cpu[at] or known.far[at]:
                    loading = known.cpu[at] * engine.cpu_token_s + known.far[at] * engine.far_token_s
            else:
                hit = matched[engine.slot] * block_tokens * engine.worth
                if hit > top:
                    hit = float(top)
                if known is not None and known.at_least[at] and known.tokens[at] > hit:
                    hit = float(known.tokens[at])
            hits[at] = hit
            if hit > longest:
                longest = hit
            left = total - hit
            left_s = left * engine.left_token_s
            if shared is not None:  # what the store has of it is known, and the rest has to be computed
                left_s = left * engine.seconds_per_token
                if shared > hit:
                    left_s -= (shared - hit) * (engine.seconds_per_token - engine.far_token_s)
            ledger = engine.ledger
            wait = engine.foreign_wait_s
            if ledger.pending_s:
                wait += ledger.wait_s(now)
            over = ledger.kv_tokens + room - engine.kv_budget
            if held_anyway:
                over -= hit
            if over > 0.0:
                freeing = self._freeing_s(engine, over)
                if freeing > wait:
                    wait = freeing
            if wait < shortest:
                shortest = wait
            token_s = engine.seconds_per_token
            work = engine.fixed_s + left_s + loading
            decoding = (ledger.decoding + engine.foreign) * token_s * slower
            price = wait + work + pressure * work * (wait + 0.5 * work) + decoding
            if told is not None:
                terms = Terms(backend, matched[engine.slot] if block_tokens else 0, int(hit))
                terms.terms = {
                    "wait_s": wait,
                    "prefill_s": work,
                    "delay_of_others_s": price - wait - work - decoding,
                    "decoding_s": decoding,
                    "copy_is_paid": False,
                }
                told.candidates.append(terms)
            if paid_s and hit < deep:
                work -= (deep - hit) * token_s
                bought = wait + work + pressure * work * (wait + 0.5 * work) + decoding
                extra = price - bought
                if paid_s >= extra and (paid_s >= CROWDED * extra or not self._crowded(engine)):
                    # The copy is paid for: neither its prefill nor whom that delays is a cost of this request's, and
                    # making it wins a tie.
                    price = bought / NEAR_RATIO - 2.0 * NEAR_S
                    if told is not None:
                        told.candidates[at].terms["copy_is_paid"] = True
            prices[at] = price
            if price < least:
                least = price

        place = self._nearest(candidates, least)
        chosen = engines[candidates[place]]
        raw = matched[chosen.slot] if block_tokens else 0
        hit = hits[place]
        reason = self._reason(request, chosen, hit, longest, total)
        ledger = chosen.ledger
        wait = chosen.foreign_wait_s + (ledger.wait_s(now) if ledger.pending_s else 0.0)
        choice = self._choice(request, chosen, reason, raw, hit, total)
        choice.best_prefix = prefix
        choice.spared_s = max(wait - shortest, 0.0)
        held = raw * block_tokens
        if known is not None and known.at_least[place]:
            held = max(held, hit)
        elif known is not None and known.tokens[place] >= 0:
            choice.kv_tokens = known.tokens[place]
            if known.believed[place]:
                held = hit
                choice.cpu_tokens, choice.far_tokens = known.cpu[place], known.far[place]
        choice.missing_tokens = max(deep - held, 0.0)
        if shared is not None and shared > choice.matched_tokens:
            self._count_shared(choice, shared)
        lost = 0.0
        if not held_anyway:
            # Until the pool has room, those ahead and those that decode take the blocks that nobody holds, and what
            # this prompt had cached among them. The wait of who comes next has that work in it. The price has not:
            # each that leaves its history for that reason displaces another's, and all would leave.
            lost = min(max(ledger.kv_tokens + room - chosen.kv_budget, 0.0), hit)
        choice.uncached_s = (
            chosen.fixed_s
            + lost * chosen.left_token_s
            + choice.uncached_tokens * (chosen.left_token_s if shared is None else chosen.seconds_per_token)
            + choice.cpu_tokens * chosen.cpu_token_s
            + choice.far_tokens * chosen.far_token_s
        )
        return choice

    def _count_shared(self, choice: Choice, shared: int) -> None:
        """What a store shared by all has beyond the engine's own is a hit as well, and was no reason for the choice."""
        choice.far_tokens += shared - choice.matched_tokens
        if choice.kv_tokens is not None and choice.kv_tokens < shared:
            choice.kv_tokens = shared
        choice.matched_tokens = shared
        choice.uncached_tokens = choice.prompt_tokens - shared

    def _reason(self, request: RoutingRequest, chosen: EngineState, hit: float, longest: float, total: int) -> Reason:
        """`prefix` where the match is useful and none of the candidates has a longer one that was outweighed."""
        if not request.readable:
            return SHAPE
        token_s = chosen.seconds_per_token
        if hit * token_s <= USEFUL_S and 2.0 * hit < total:
            return LOAD
        return PREFIX if (longest - hit) * token_s <= NEAR_S else LOAD

    def _nearest(self, candidates: Sequence[Backend], least: float) -> int:
        """Of the prices near the least: the longest match, the fewest outstanding, the least recent work, the lot.
        Its place among the candidates."""
        limit = _near(least)
        engines, prices, hits, recent = self._engines, self._prices, self._hits, self._recent.of
        best = -1
        best_hit = best_load = best_recent = 0.0
        ties = 1
        for at, backend in enumerate(candidates):
            if prices[at] > limit:
                continue
            hit = hits[at]
            load = backend.in_flight / backend.weight
            if best >= 0:
                more_s = (hit - best_hit) * engines[backend].seconds_per_token
                if more_s < -NEAR_S:
                    continue
                if more_s <= NEAR_S:
                    if load > best_load:
                        continue
                    if load == best_load:
                        its_recent = recent(backend) / backend.weight
                        if its_recent > best_recent:
                            continue
                        if its_recent == best_recent:
                            ties += 1
                            if self._random() * ties >= 1.0:
                                continue
                            best, best_hit = at, hit
                            continue
            best, best_hit, best_load, ties = at, hit, load, 1
            best_recent = recent(backend) / backend.weight
        assert best >= 0
        return best

    def _freeing_s(self, engine: EngineState, over: float) -> float:
        """Seconds until running requests have freed `over` KV tokens."""
        held = engine.kv_capacity - engine.kv_budget + engine.ledger.kv_tokens
        return 2.0 * engine.stay_s * over / held if held > 1.0 else 0.0

    def _crowded(self, engine: EngineState) -> bool:
        """Whether a copy displaces something that may be asked for again."""
        return self._mirror.blocks_of(engine.slot) >= 0.95 * engine.size.blocks

    def assign(self, request: RoutingRequest, backend: Backend, reason: Reason) -> Choice:
        """The choice of a given backend, for strategies that choose by other means: with its match and its work."""
        engine = self._engines.get(backend) or self._join(backend)
        raw, hit, total = self._match(request, engine)
        return self._choice(request, engine, reason, raw, hit, total)

    def whole_prefill_s(self, request: RoutingRequest, backend: Backend) -> float:
        """What computing all of a prompt takes a backend, without its fixed cost."""
        engine = self._engines.get(backend) or self._join(backend)
        model = self._models.get(request.model, self._further_models)
        total = request.prompt_tokens or int(request.prefix_bytes / model.text.ratio)
        return total * engine.seconds_per_token

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        engine = self._engines.get(backend)
        if engine is None:
            return 0, 0
        raw, hit, _ = self._match(request, engine)
        return raw, int(hit)

    def _match(self, request: RoutingRequest, engine: EngineState) -> tuple[int, float, int]:
        """Blocks in the mirror, the tokens that they count for, and the prompt's tokens."""
        model = self._models.get(request.model, self._further_models)
        total = request.prompt_tokens or int(request.prefix_bytes / model.text.ratio) or 1
        raw, hit = 0, 0.0
        if request.blocks is not None:
            raw = self._mirror.match_one(engine.slot, request.blocks)
        if raw:
            hit = min(raw * self.block_bytes * total / request.prefix_bytes * engine.worth, total - 1)
        return raw, hit, total

    def _choice(
        self,
        request: RoutingRequest,
        engine: EngineState,
        reason: Reason,
        match_blocks: int,
        hit: float,
        total: int,
    ) -> Choice:
        cached = int(hit)
        return Choice(
            request,
            engine.backend,
            reason,
            match_blocks=match_blocks,
            matched_tokens=cached,
            prompt_tokens=total,
            uncached_tokens=total - cached,
            uncached_s=engine.fixed_s + (total - cached) * engine.seconds_per_token,
        )

    # ---- the life of an attempt

    def placed(self, choice: Choice) -> None:
        engine = self._engines.get(choice.backend)
        if engine is None:
            return
        choice.placed_at = now = self._now()
        request = choice.request
        model = self._models.get(request.model)
        if model is None:
            model = self._learn_model(request.model)
        work_s = choice.uncached_s
        ledger = engine.ledger
        ledger.advance(now)
        if not ledger.pending_s:
            engine.speed.busy_began(now)
        engine.quiet = None if len(ledger) else choice
        kv_tokens = choice.prompt_tokens + int(model.output_tokens)
        blocks = request.blocks
        prefix = choice.best_prefix
        if prefix is not None and prefix in self._copies:
            kv_tokens -= choice.matched_tokens  # held by others
        ledger.sent(choice, work_s, kv_tokens, now, silent=not request.stream)
        model.arrivals.arrived(now, work_s)
        self._fleet.arrived(now, work_s)
        self._recent.add(choice.backend, work_s, now)
        if blocks is None or not blocks:
            return
        if prefix is not None:
            if choice.missing_tokens < 1.0:
                saved_s = choice.matched_tokens * engine.seconds_per_token
                self._copies.served(prefix, saved_s, choice.spared_s, now)
            else:
                self._copies.copied(prefix, choice.missing_tokens * engine.seconds_per_token, now)
        if engine.caching and choice.prompt_tokens <= self._longest_prompt(engine, request.model):
            self._mirror.insert(engine.slot, blocks)

    def _longest_prompt(self, engine: EngineState, model: str) -> float:
        """Tokens above which the engine will refuse a prompt: one that is far too long must not empty its mirror."""
        longest = engine.kv_capacity if engine.kv_capacity != UNKNOWN else self._assumed_kv_tokens
        entry = engine.backend.models.get(model)
        if entry is not None:
            told = entry.get("max_model_len")
            if isinstance(told, int) and 0 < told < longest:
                longest = told
        return LONGER * longest

    def first_byte(self, choice: Choice) -> None:
        engine = self._engines.get(choice.backend)
        if engine is None:
            return
        now = self._now()
        ledger = engine.ledger
        was_waiting = ledger.first_token(choice, now)
        if choice.first_byte_at != NEVER or (not was_waiting and choice not in ledger):
            return
        choice.first_byte_at = now
        choice.quiet = engine.quiet is choice
        engine.quiet = None
        if (
            not choice.quiet
            and choice.request.stream
            and engine.speed.busy_prefilled(choice.uncached_tokens, now, idle=not ledger.pending_s)
        ):
            self._apply_speed(engine)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        engine = self._engines.get(choice.backend)
        if engine is None:
            return
        now = self._now()
        was = engine.ledger.ended(choice, now)
        if was is None:
            return
        if engine.quiet is choice:
            engine.quiet = None
        refused = outcome.status is not None and outcome.status >= 400
        request = choice.request
        blocks = request.blocks
        if blocks and engine.caching:
            if refused or (was is WAITING and outcome.end is not COMPLETE):
                self._mirror.forget_after(engine.slot, blocks, choice.match_blocks)
            elif choice.placed_at < engine.cleared_at:
                self._mirror.insert(engine.slot, blocks)  # the mirror was emptied since, this prompt is there
        if refused:
            return
        model = self._models.get(request.model, self._further_models)
        if was is DECODING and outcome.end is COMPLETE:
            began = choice.first_byte_at if request.stream else choice.placed_at
            engine.stay_s += SLOW * (now - began - engine.stay_s)
        if outcome.completion_tokens is not None:
            model.output_tokens += SLOW * (outcome.completion_tokens - model.output_tokens)
        prompt_tokens = outcome.prompt_tokens
        if (
            prompt_tokens is not None
            and not request.ids_in_body
            and model.text.observe(request.prefix_bytes, prompt_tokens)
        ):
            self._size_mirror(engine, model.text.ratio)
        if choice.quiet:
            self._learn_speed(engine, choice, outcome)

    def _learn_speed(self, engine: EngineState, choice: Choice, outcome: Outcome) -> None:
        """A quiet sample: nothing else of ours was there until its first byte, and the engine reported idle."""
        in_one_piece = not choice.request.stream and (outcome.completion_tokens or 2) > 1
        if in_one_piece or not choice.request.readable or engine.foreign or engine.foreign_wait_s:
            return
        took_s = choice.first_byte_at - choice.placed_at
        if choice.cpu_tokens or choice.far_tokens:
            fetched = choice.cpu_tokens + choice.far_tokens
            cached, prompt = outcome.cached_tokens, outcome.prompt_tokens
            if cached == choice.matched_tokens and prompt is not None:  # each token was where it was said to be
                on_gpu = cached - fetched
                engine.tiers.observe(on_gpu, choice.cpu_tokens, choice.far_tokens, prompt - cached, took_s)
                engine.reckon()
            return
        uncached = choice.uncached_tokens
        if outcome.prompt_tokens is not None:
            uncached = outcome.prompt_tokens - (outcome.cached_tokens or 0)
            if outcome.cached_tokens is None:
                uncached = max(outcome.prompt_tokens - choice.matched_tokens, 1)
        if engine.speed.quiet(uncached, took_s):
            self._apply_speed(engine)

    # ---- what the engines say

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        engine = self._engines.get(backend)
        if engine is None:
            return
        self._heed_report(engine, now)
        engine.shared.counted(now.external_queries, now.external_hits)
        engine.reckon()
        if before.at == NEVER:
            return
        gains = [
            None if old is None or new is None else new - old
            for old, new in (
                (before.prefix_queries, now.prefix_queries),
                (before.prefix_hits, now.prefix_hits),
                (before.prefill_seconds_sum, now.prefill_seconds_sum),
                (before.prefill_count, now.prefill_count),
            )
        ]
        queries, hits, seconds, requests = gains
        if queries is None or hits is None or seconds is None or requests is None or min(queries, hits) < 0:
            return
        settled = not (engine.ledger.waiting or now.waiting or engine.foreign or engine.foreign_wait_s)
        if engine.speed.reported(queries - hits, seconds, requests, now.at - before.at, settled=settled):
            self._apply_speed(engine)

    def _heed_report(self, engine: EngineState, report: EngineReport) -> None:
        ledger = engine.ledger
        # What is there beyond ours, or has left us since the engine counted: the smaller of two polls in a row.
        reported_waiting = report.waiting or 0.0  # None: not exported, and then nothing is known beyond ours
        others = max((report.running or 0.0) + reported_waiting - len(ledger), 0.0)
        waiting = min(others, reported_waiting)
        running = others - waiting
        engine.foreign = min(running, engine.elsewhere[0])
        engine.foreign_wait_s = min(waiting, engine.elsewhere[1]) * self._fleet.mean_work_s()
        engine.elsewhere = (running, waiting)
        capacity = report.kv_capacity_tokens
        if capacity:
            engine.kv_capacity = float(capacity)
            engine.kv_budget = capacity * (1.0 - (report.kv_usage or 0.0)) + ledger.decoding_kv_tokens
        caching = report.prefix_caching is not False
        if caching is not engine.caching:
            engine.caching = caching
            engine.worth = engine.trust if caching else 0.0
            if not caching:
                self._mirror.clear_backend(engine.slot)
        for model in engine.backend.models:
            state = self._models.get(model)
            if state is not None:
                self._size_mirror(engine, state.text.ratio)
                break
        else:
            self._size_mirror(engine, self._further_models.text.ratio)

    def joined(self, backend: Backend) -> None:
        if backend not in self._engines:
            self._join(backend)

    def forget(self, backend: Backend) -> None:
        engine = self._engines.pop(backend, None)
        if engine is None:
            return
        self._known = ()
        self._mirror.remove_backend(engine.slot)
        self._recent.forget(backend)
        backend.slot = -1

    def trust_of(self, backend: Backend) -> Trust | None:
        return None

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        engine = self._engines.get(backend)
        if engine is None:
            return {}
        ledger = engine.ledger
        return {
            "prefill_tokens_per_s": 1.0 / engine.seconds_per_token,
            "prefill_fixed_s": engine.fixed_s,
            "prefill_speed_learned": engine.speed.learned,
            "cpu_token_s": engine.cpu_token_s,
            "far_token_s": engine.far_token_s,
            "shared_hit_rate": engine.shared.rate,
            "prefill_pending_s": ledger.wait_s(self._now()),
            "prefilling": ledger.waiting,
            "decoding": ledger.decoding,
            "kv_tokens": ledger.kv_tokens,
            "kv_capacity_tokens": None if engine.kv_capacity == UNKNOWN else engine.kv_capacity,
            "kv_budget_tokens": None if engine.kv_budget == UNKNOWN else engine.kv_budget,
            "foreign_requests": engine.foreign,
            "foreign_wait_s": engine.foreign_wait_s,
            "decode_stay_s": engine.stay_s,
            "prefix_caching": engine.caching,
            "match_worth": engine.worth,
            "index_blocks": self._mirror.blocks_of(engine.slot),
            "index_capacity_blocks": engine.size.blocks,
        }

    # ---- for strategies built on this one

    @property
    def mirror(self) -> PrefixMirror:
        return self._mirror

    def engine(self, backend: Backend) -> EngineState | None:
        """What is known of a backend, None for one that is not in the fleet."""
        return self._engines.get(backend)

    def trust_all(self) -> None:
        for engine in self._engines.values():
            self.set_trust(engine, 1.0)

    def set_trust(self, engine: EngineState, trust: float) -> None:
        """What a matched token of this backend's is worth, 0 to 1."""
        engine.trust = trust
        if engine.caching:
            engine.worth = trust

    def clear(self, engine: EngineState) -> None:
        """Its cache was reset. Prompts that are on their way enter the mirror again when they end."""
        self._mirror.clear_backend(engine.slot)
        engine.cleared_at = self._now()

    # ---- inner records

    def _know(self, candidates: Sequence[Backend]) -> None:
        for backend in candidates:
            if backend not in self._engines:
                self._join(backend)
        missing = len(candidates) - len(self._prices)
        if missing > 0:
            self._prices.extend([0.0] * missing)
            self._hits.extend([0.0] * missing)
        if isinstance(candidates, tuple):  # what cannot change need not be looked at again
            self._known = candidates

    def _join(self, backend: Backend) -> EngineState:
        backend.slot = self._mirror.add_backend()
        size = MirrorSize(self.block_bytes, self._assumed_kv_tokens)
        engine = EngineState(backend, backend.slot, PrefillSpeed(self._usual_speed() * backend.weight), size)
        self._engines[backend] = engine
        self._heed_report(engine, backend.report)
        return engine

    def _learn_model(self, name: str) -> ModelState:
        if len(self._models) >= MAX_MODELS:
            return self._further_models
        model = self._models[name] = ModelState()
        return model

    def _size_mirror(self, engine: EngineState, bytes_per_token: float) -> None:
        if engine.size.update(engine.backend.report.kv_capacity_tokens, bytes_per_token):
            self._mirror.set_capacity(engine.slot, engine.size.blocks)

    def _apply_speed(self, engine: EngineState) -> None:
        """Takes over what was learned where it makes a difference, as the same number for engines that are alike."""
        engine.fixed_s = engine.speed.fixed_s
        if not engine.speed.learned:
            return
        wanted = engine.speed.tokens_per_s
        if abs(wanted * engine.seconds_per_token - 1.0) > ALIKE:
            engine.seconds_per_token = 1.0 / wanted
            for other in self._engines.values():
                if other is not engine and abs(wanted * other.seconds_per_token - 1.0) <= ALIKE:
                    engine.seconds_per_token = other.seconds_per_token
                    break
        # One that nothing was learned of would else never be asked, if the prior is too low for this fleet.
        for other in self._engines.values():
            if not other.speed.learned:
                other.seconds_per_token = 1.0 / (self._usual_speed() * other.backend.weight)
            other.reckon()

    def _usual_speed(self) -> float:
        """Tokens per second at weight 1, of the middle of the engines that it was learned of."""
        learned = sorted(
            1.0 / (engine.seconds_per_token * engine.backend.weight)
            for engine in self._engines.values()
            if engine.speed.learned
        )
        return learned[len(learned) // 2] if learned else PRIOR_TOKENS_PER_S


def _near(least: float) -> float:
    """Prices up to this one tie with the least."""
    return least * NEAR_RATIO + NEAR_S if least > 0.0 else least + NEAR_S
