"""The share of each instance's link that copies may take."""

from moonpool.base.scheduling.state_machine import digest_of


class LinkBudget:
    """The bound of what copies take of each instance's link, in both directions.

    Args:
        share: of a link; 0 = no copy is allowed.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_at: dict[str, float] = {}  # when an instance's link allows another copy

    def __bool__(self) -> bool:
        return self._share > 0

    def take(self, target: str, source: str, read_s: float, now: float) -> bool:
        """Take a copy of `read_s` seconds, unless one end's link has had as much as allowed. Return whether taken."""
        self._free_at = {end: at for end, at in self._free_at.items() if at > now}
        if target in self._free_at or source in self._free_at:
            return False
        self._free_at[target] = self._free_at[source] = now + read_s / self._share
        return True

    def digest(self) -> bytes:
        return digest_of(self._free_at)
