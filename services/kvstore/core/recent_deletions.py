"""What was deleted not long ago, so that blocks that were computed before it do not come back."""

import collections
import math

from moonpool.errors import InvalidRequest
from moonpool.kv.selection import Selection
from services.kvstore.core.assembly import PutSpec

KEEP_S = 600.0
"""Writers give up long before: a write-back waits and is retried for a minute or two."""
MAX_NAMES = 1 << 18
"""Most keys, tenants and namespaces of all remembered deletions."""


class RecentDeletions:
    """Deletions of the last `keep_s` seconds, by one clock; fewer where they name too much.

    Blocks that are older than what is remembered are refused, whatever they are.
    """

    def __init__(self, keep_s: float = KEEP_S, max_names: int = MAX_NAMES) -> None:
        self._keep_s = keep_s
        self._max_names = max_names
        self._recent: collections.deque[tuple[float, Selection]] = collections.deque()
        self._names = 0
        self._unknown_until = -math.inf

    def add(self, selection: Selection, now: float) -> None:
        """Blocks are deleted now."""
        self._recent.append((now, selection))
        self._names += len(selection)
        while self._recent and (self._recent[0][0] < now - self._keep_s or self._names > self._max_names):
            at, oldest = self._recent.popleft()
            self._names -= len(oldest)
            self.unknown_until(at)

    def unknown_until(self, at: float) -> None:
        """What was deleted up to then is not remembered."""
        self._unknown_until = max(self._unknown_until, at)

    def check(self, spec: PutSpec) -> None:
        """Refuses a session of blocks that were, or may have been, deleted since they were computed.

        Raises:
            InvalidRequest: naming its keys.
        """
        if spec.computed_at < self._unknown_until:
            raise InvalidRequest("keys", "they are so old that they may have been deleted since")
        for at, selection in reversed(self._recent):
            if at <= spec.computed_at:
                return
            if spec.is_among(selection):
                raise InvalidRequest("keys", "blocks of them were deleted")
