"""What may not leave a tier: pinned blocks, and blocks of tenants that have no more than they are guaranteed.

Owns the answer to that one question, for one tier. Must not know of policies, holds, bytes of blocks or files. Each
tier has its own: the account behind it is that tier's, and the tier keeps it up to date with every single block that
comes or goes, so that a series of removals is judged one after the other.
"""

from collections.abc import Callable
from typing import Protocol

from moonpool.kv.keys import BlockKey


class TierAccount(Protocol):
    """Bytes of one tier by tenant."""

    def add(self, tenant: str, nbytes: int) -> None:
        """A block of the tenant came to the tier."""
        ...

    def remove(self, tenant: str, nbytes: int) -> None:
        """A block of the tenant left the tier."""
        ...

    def guards(self, tenant: str, nbytes: int) -> bool:
        """Whether the tenant would have less than it is guaranteed if `nbytes` of it left."""
        ...


class Protection:
    """Asked by a tier before it lets a block go.

    Args:
        pinned: whether a key is pinned.
        account: the tier's bytes by tenant; None when the tier keeps none.
    """

    def __init__(self, pinned: Callable[[BlockKey], bool], account: TierAccount | None = None) -> None:
        self._pinned = pinned
        self._account = account

    def keeps(self, key: BlockKey, tenant: str, nbytes: int = 1) -> bool:
        """Whether a block must stay.

        Args:
            key: the block.
            tenant: whose it is.
            nbytes: what would leave with it; without it the tenant may fall below its guarantee by one block.
        """
        return self._pinned(key) or (self._account is not None and self._account.guards(tenant, nbytes))


NOTHING_KEPT = Protection(lambda key: False)
"""For a tier alone."""
