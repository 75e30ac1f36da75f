"""Which of a tenant's own blocks leave the SSD tier when it would have more than it may.

Owns the search, oldest first, and where it stopped last time, so that it does not walk the whole catalogue again. Must
not know of accounts, files or the index.
"""

from collections.abc import Callable, Iterable

from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Catalogue


class OldestFirst:
    """Finds the oldest blocks of a tenant.

    Args:
        catalogue: what is there.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._begin: dict[str, int] = {}  # tenant -> the first segment that may have blocks of it

    def forget(self, tenants: Iterable[str]) -> None:
        """Nothing of these tenants is left."""
        for tenant in tenants:
            self._begin.pop(tenant, None)

    def find(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of a tenant, together at least `nbytes` of records; fewer when there are no more.

        Args:
            tenant: whose.
            nbytes: how much must go.
            stays: what may not go.
        """
        found: list[BlockKey] = []
        books, begin = self._catalogue, self._begin.get(tenant, 0)
        seen = False
        for number, segment in books.segments.items():
            if number < begin:
                continue
            for slot in books.live_slots(segment):
                if books.tenants[segment.tenants[slot]] != tenant:
                    continue
                if not seen:
                    seen, self._begin[tenant] = True, number
                if nbytes <= 0:
                    return found
                if not stays(segment.keys[slot]):
                    found.append(segment.keys[slot])
                    nbytes -= segment.nbytes(slot)
        if not seen:
            self._begin.pop(tenant, None)
        return found
