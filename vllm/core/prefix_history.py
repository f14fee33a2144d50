"""Which prefixes have been seen lately, whether or not anything of them is still cached.

Used by `core/checkpoint.py` to find where a prompt forks from earlier ones. It holds digests only,
no blocks, and a bounded number of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vllm.core.prefix_index import ChainKey

MAX_DIGESTS = 1 << 16


class PrefixHistory:
    """Digests of grains, least recently seen first."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def match(self, chain: Sequence[ChainKey], num_grains: int) -> int:
        """Return how many of the first `num_grains` grains of a chain have been seen."""
        for number in range(num_grains):
            if chain[number][0] not in self._seen:
                return number
        return num_grains

    def note(self, chain: Sequence[ChainKey]) -> None:
        """Record the grains of a chain as seen now."""
        seen = self._seen
        for digest, _ in chain:
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._max_digests:
            seen.popitem(last=False)
