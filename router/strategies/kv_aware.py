"""`kvaware` on the approximate index: the priced choice, each backend's matches taken for what its reports bear out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.backends.backend import Backend, EngineReport
from router.clock import Clock
from router.learning.trust import Trust
from router.strategies.prefix_affinity import EngineState, PrefixAffinity
from router.strategies.strategy import NEVER, Choice, Explanation, Need, Outcome, Reason, RoutingRequest

ENGINE_BLOCK_TOKENS = 16  # vLLM's default, where the engine does not say
RATIO_ERROR = 0.02  # of a prediction, that a wrong number of bytes per token may cost
USAGE_FRESH_S = 60.0  # after an answer with cached_tokens: so long the polled sums are not needed
ENOUGH_TOKENS = 1024  # predicted, in the polls that are compared together
FOREIGN_RATIO = 1.5  # the engine was asked for so many times our tokens: its hits are not ours


class Account:
    """The predictions and reports of one backend. `polled_*` are sums since their last comparison."""

    __slots__ = (
        "polled_answers",
        "polled_hits",
        "polled_predicted",
        "polled_prompt",
        "polled_queries",
        "trust",
        "usage_at",
    )

    def __init__(self) -> None:
        self.trust = Trust()
        self.usage_at = NEVER
        self.start_over()

    def start_over(self) -> None:
        self.polled_answers = self.polled_predicted = self.polled_prompt = 0
        self.polled_hits = self.polled_queries = 0.0


class KvAware:
    """Trust comes from `usage.prompt_tokens_details.cached_tokens` where answers carry it, else from what the engine's
    hit and query counters gained between polls, against the predictions of the prompts prefilled meanwhile.

    Below a threshold a backend's matches count for nothing, and a choice that this changed says `fallback-untrusted`.
    Several much lower reports in a row mean that the cache was reset: the mirror is cleared, so that ghosts go.
    """

    needs: frozenset[Need] = frozenset((Need.PREFIX_BLOCKS,))

    def __init__(self, clock: Clock, placement: PrefixAffinity) -> None:
        self._now = clock.now
        self._placement = placement
        self._accounts: dict[Backend, Account] = {}
        self._untrusted = 0  # how many backends are not trusted now

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        choice = self._placement.choose(request, candidates)
        self._doubt(choice, candidates)
        return choice

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        told = self._placement.explain(request, candidates)
        self._doubt(told.choice, candidates)
        for terms in told.candidates:
            account = self._accounts.get(terms.backend)
            terms.terms["trust"] = 1.0 if account is None else account.trust.value
            terms.terms["trusted"] = account is None or not account.trust.lost
        return told

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        return self._placement.match_of(request, backend)

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | None]:
        return self._placement.known_of(backend)

    def _doubt(self, choice: Choice | None, candidates: Sequence[Backend]) -> None:
        if choice is not None and self._untrusted and choice.best_blocks and self._ignored_more(choice, candidates):
            choice.reason = Reason.UNTRUSTED

    def _ignored_more(self, choice: Choice, candidates: Sequence[Backend]) -> bool:
        """Whether an untrusted candidate has a longer match in the mirror than the one that counted."""
        matched = self._placement.mirror.matched  # as the choice left it
        own = self._accounts.get(choice.backend)
        counted = 0 if own is not None and own.trust.lost else choice.match_blocks
        for backend in candidates:
            account = self._accounts.get(backend)
            if account is not None and account.trust.lost and matched[backend.slot] > counted:
                return True
        return False

    def placed(self, choice: Choice) -> None:
        self._placement.placed(choice)

    def first_byte(self, choice: Choice) -> None:
        before = choice.first_byte_at
        self._placement.first_byte(choice)
        if before == NEVER and choice.first_byte_at != NEVER:
            account = self._account(choice.backend)
            if choice.first_byte_at - account.usage_at <= USAGE_FRESH_S:
                return
            account.polled_answers += 1
            account.polled_prompt += choice.prompt_tokens
            account.polled_predicted += self._predicted(choice, choice.prompt_tokens)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        engine = self._placement.engine(choice.backend)
        prompt_tokens = outcome.prompt_tokens
        if engine is not None and prompt_tokens is not None and choice.placed_at >= engine.cleared_at:
            account = self._account(choice.backend)
            cached = outcome.cached_tokens
            now = self._now()
            if cached is not None:
                account.usage_at = now
            elif now - account.usage_at <= USAGE_FRESH_S:
                cached = 0  # releases that leave a zero out
            if cached is not None:
                self._compare(engine, account, self._predicted(choice, prompt_tokens), cached, 1)
        self._placement.observe(choice, outcome)

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
        if account.polled_predicted < ENOUGH_TOKENS:
            return
        # The engine counts at the start of a prefill and we at its end: the ratio bears that, a sum would not.
        if account.polled_prompt / FOREIGN_RATIO <= account.polled_queries <= account.polled_prompt * FOREIGN_RATIO:
            borne = int(account.polled_prompt * account.polled_hits / account.polled_queries)
            self._compare(engine, account, account.polled_predicted, borne, account.polled_answers)
        account.start_over()

    def _compare(self, engine: EngineState, account: Account, predicted: int, cached: int, answers: int) -> None:
        trust = account.trust
        was_lost = trust.lost
        block = engine.backend.report.block_size_tokens or ENGINE_BLOCK_TOKENS
        allowance = answers * block + int(predicted * RATIO_ERROR)
        trust.compare(predicted, cached, allowance=allowance, answers=answers)
        self._untrusted += trust.lost - was_lost
        if engine.trust != trust.worth:
            self._placement.set_trust(engine, trust.worth)
        if trust.cache_gone():
            self._placement.clear(engine)

    def _predicted(self, choice: Choice, prompt_tokens: int) -> int:
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
        return None if account is None else account.trust

    def joined(self, backend: Backend) -> None:
        self._placement.joined(backend)

    def forget(self, backend: Backend) -> None:
        account = self._accounts.pop(backend, None)
        if account is not None and account.trust.lost:
            self._untrusted -= 1
        self._placement.forget(backend)
