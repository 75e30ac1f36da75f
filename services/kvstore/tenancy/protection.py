"""Which blocks may not leave a tier: pinned ones, and those of tenants that have no more than they are guaranteed."""

from collections.abc import Callable

from moonpool.kv.keys import BlockKey
from services.kvstore.tenancy.tenants import Account


class Protection:
    """Asked by a tier before it removes a block. Each tier has its own.

    Args:
        pinned: whether a key is pinned.
        account: the tier's bytes by tenant, which it updates with every block, so that removals are judged one by one.
    """

    def __init__(self, pinned: Callable[[BlockKey], bool], account: Account) -> None:
        self._pinned = pinned
        self._account = account

    def keeps(self, key: BlockKey, tenant: str, nbytes: int = 1) -> bool:
        """Whether a block must stay.

        Args:
            key: the block.
            tenant: whose it is.
            nbytes: what would leave with it; without it the tenant may fall below its guarantee by one block.
        """
        return self._pinned(key) or self._account.guards(tenant, nbytes)
