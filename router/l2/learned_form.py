"""Which of LMCache's names the chunks of one model have in this store: learned, not configured.

The keys in the store tell the layout. Which function and root made their hashes, and how long a chunk is, no key tells;
but the prompts of a fleet that writes into it do: the first chunk of each is looked for under every name that it could
have, and the first one found settles it (64 bits do not match by chance). Of the lengths other than LMCache's default
one is tried with each prompt, in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.l2.chunk_hash import Chain, ChunkHasher, as_hex
from router.l2.key_layout import Form, Layout

CHUNK_TOKENS: Final = 256
OTHER_CHUNK_TOKENS: Final = (128, 512, 64, 1024, 16, 32, 2048)
SMALLEST_CHUNK_TOKENS: Final = min(OTHER_CHUNK_TOKENS)
LAYOUTS_LIMIT: Final = 4
UNSUCCESSFUL_PROBES: Final = 100  # after so many, people are told, and it is tried with one prompt in RARELY
RARELY: Final = 16
MISSES_TO_DOUBT: Final = 64  # questions in a row with nothing found, after which other names are tried as well


@dataclass(frozen=True, slots=True)
class Variant:
    """How hashes are made; the same for all layouts of one form."""

    form: Form
    chain: Chain
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Probe:
    """A key that the first chunk of a prompt would have."""

    variant: Variant
    key: bytes


class LearnedForm:
    """Of one model of the store."""

    __slots__ = ("_turn", "layouts", "misses", "probes", "variant")

    def __init__(self) -> None:
        self.layouts: list[Layout] = []  # the latest seen first
        self.variant: Variant | None = None
        self.probes = 0  # prompts whose first chunk was looked for in vain
        self.misses = 0  # questions in a row with nothing found
        self._turn = 0

    def saw(self, layout: Layout) -> None:
        """A key of it is in the store. Of more than LAYOUTS_LIMIT the one that was not seen for the longest goes."""
        layouts = self.layouts
        if layouts and layouts[0] == layout:
            return
        if layout in layouts:
            layouts.remove(layout)
        layouts.insert(0, layout)
        del layouts[LAYOUTS_LIMIT:]

    def layouts_of(self, variant: Variant) -> list[Layout]:
        return [layout for layout in self.layouts if layout.form is variant.form]

    def gave_up_for_now(self) -> bool:
        """Whether this prompt is not worth the question; asked once per prompt."""
        if self.probes < UNSUCCESSFUL_PROBES:
            return False
        self._turn += 1
        return self._turn % RARELY != 0

    def candidates(self, chains: dict[Form, Sequence[Chain]], ids: array[int], hasher: ChunkHasher) -> list[Probe]:
        """The names to look for; none for a prompt too short to have one. Each call is one turn."""
        other = OTHER_CHUNK_TOKENS[self._turn % len(OTHER_CHUNK_TOKENS)]
        self._turn += 1
        found = []
        for form in {layout.form: None for layout in self.layouts}:
            for chunk_tokens in (CHUNK_TOKENS, other):
                for chain in chains[form]:
                    variant = Variant(form, chain, chunk_tokens)
                    for chunk in hasher.hashes(chain, ids, chunk_tokens, 1):
                        chunk_hex = as_hex(chunk)
                        found += [Probe(variant, layout.key(chunk_hex, b"")) for layout in self.layouts_of(variant)]
        return found

    def settle(self, variant: Variant) -> None:
        self.variant = variant
        self.probes = self.misses = 0
