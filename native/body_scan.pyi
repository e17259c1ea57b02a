"""What routing needs of a JSON request body, read without building objects for it."""

from typing import Final, Never, final

from native.block_hash import BlockHashes

OK: Final[int]
"""A JSON object with a prompt of a known shape."""
UNKNOWN_SHAPE: Final[int]
"""JSON, but no prompt that we know: the engine judges it, and load places it."""
MALFORMED: Final[int]
"""Not JSON: cut short, unbalanced, followed by something, or broken where we read. Nothing else is told of it."""

@final
class ScannedBody:
    """Made by scan_json alone (TypeError otherwise). All but `status` is empty where it is MALFORMED."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def status(self) -> int:
        """OK, UNKNOWN_SHAPE or MALFORMED."""
    @property
    def model(self) -> str | None:
        """Decoded; None where it is absent or no string. A surrogate without its half and bytes that are no UTF-8
        become U+FFFD."""
    @property
    def model_span(self) -> tuple[int, int] | None:
        """Start and end of the model's JSON string in the body, quotation marks included, for splicing."""
    @property
    def stream(self) -> bool:
        """Whether `stream` is true."""
    @property
    def max_tokens(self) -> int | None:
        """max_completion_tokens, max_output_tokens or max_tokens, the first that is a non-negative integer of at most
        15 digits."""
    @property
    def values(self) -> tuple[bytes | None, ...]:
        """For each of the `fields`: UTF-8 of a string, digits of an integer; None for anything else, for what is
        absent, and for what takes more than 4,096 bytes in the body."""
    @property
    def blocks(self) -> BlockHashes | None:
        """Chained hashes of the routing prefix's full blocks; None unless OK and asked for."""
    @property
    def prefix_bytes(self) -> int:
        """Length of the routing prefix, the unhashed tail included; also without hashing."""
    @property
    def prompt_tokens(self) -> int | None:
        """Exact, where the prompt is token ids and nothing else."""

def scan_json(
    body: bytes,
    block_bytes: int,
    fields: tuple[bytes, ...] = (),
    hash_prefix: bool = True,
    seeds: dict[str, bytes] | None = None,
    default_seed: bytes = b"",
) -> ScannedBody:
    """Read a request body. The routing prefix and its encoding are described at the top of body_scan.pyx.

    `seeds` gives the bytes that seed the prefix in the place of a model's name; `default_seed` those for a body
    without one. `fields` names wanted top-level keys (at most 16, of 1 to 256 bytes). As in Python's json the last of
    equal keys wins, keys may be escaped, white space may stand around the value, a byte order mark may not. Nesting
    beyond 10,000 levels is MALFORMED. What lies deeper than routing reads is checked for balance only: validity is the
    engine's to judge.

    No bytes make it raise. TypeError for a seed that is not bytes; ValueError for a `block_bytes` outside 1 to
    1,048,576 and for bad `fields`; MemoryError.
    Linear in the body. Extra memory: two blocks, 8 bytes a hash, at most a sixteenth of the body for the positions of
    long strings. A chat of 1 kB takes 1 us, of 400 kB 80 to 120 us with blocks of 256 bytes (orjson.loads: 1.1 and 180
    to 250); tests/benchmarks/test_body_scan.py.
    """
