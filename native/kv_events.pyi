"""KV events out of msgpack, of every vLLM release; here as Python objects, for tests and for looking at a frame.

The index reads the same way without building objects.
"""

from typing import Any

MAX_FRAME_BYTES: int

def read_events(payload: bytes) -> tuple[float, int, list[dict[str, Any]], bool]:
    """(timestamp, data-parallel rank or -1, events, malformed). Events before the place where the bytes break are
    there. An event of unknown type or shape is {"kind": "unknown"}; the others have "kind" (stored, removed, cleared)
    and what the index takes from them: hashes and parent as unsigned 64 bits, tokens, block_size, medium (0 GPU, 1
    CPU, 2 storage), group, adapter."""
