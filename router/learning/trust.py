"""How far an engine's reports bear our predictions out."""

from __future__ import annotations

from typing import Final

STEP: Final = 0.2  # weight of one comparison
FULL_TOKENS: Final = 256  # a prediction of fewer tokens weighs less
LOST_BELOW: Final = 0.5  # from here its matches are ignored
REGAINED_FROM: Final = 0.6
GHOST_RATIO: Final = 0.25  # a report below this part of the prediction is "much lower"
GHOSTS_IN_A_ROW: Final = 3  # one may be an eviction; three in a row are a cache that was reset


class Trust:
    """Trust in the mirror of one engine, 0 to 1, from pairs of a predicted and a reported hit (tokens).

    Four total misses in a row lose it, three good answers regain it. An engine that reports more than we
    predicted is no reason for distrust. One that reports nothing stays at 1.
    """

    __slots__ = ("ghosts", "lost", "predicted_tokens", "reported_tokens", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.lost = False
        self.ghosts = 0  # much lower reports in a row
        self.predicted_tokens = 0  # sums over all comparisons
        self.reported_tokens = 0

    @property
    def worth(self) -> float:
        """What a predicted match is to be multiplied with."""
        return 0.0 if self.lost else self.value

    def compare(
        self, predicted: int, reported: int, *, allowance: int, answers: int = 1, both_ways: bool = False
    ) -> None:
        """One comparison over `answers` answers; `allowance`: tokens that rounding to engine blocks may cost.
        `both_ways`: a report of more than was predicted is as bad as one of less."""
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        if both_ways and reported > predicted:
            predicted, reported = reported, predicted
            if predicted <= allowance:
                return
        if predicted <= 0:
            return
        borne = min((reported + allowance) / predicted, 1.0)
        full = min(predicted / FULL_TOKENS / answers, 1.0)
        self.value += (1.0 - (1.0 - STEP * full) ** answers) * (borne - self.value)
        if borne >= GHOST_RATIO:
            self.ghosts = 0
        elif full == 1.0:
            self.ghosts += answers
        if self.lost:
            self.lost = self.value < REGAINED_FROM
        else:
            self.lost = self.value < LOST_BELOW

    def start_over(self) -> None:
        """Believed again, as what it rests on was made anew. The sums stay."""
        self.value = 1.0
        self.lost = False
        self.ghosts = 0

    def cache_gone(self) -> bool:
        """Whether the mirror is to be cleared; asks once per row of ghosts."""
        if self.ghosts < GHOSTS_IN_A_ROW:
            return False
        self.ghosts = 0
        return True
