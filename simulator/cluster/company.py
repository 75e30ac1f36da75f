"""Engines on one machine share its cores: each takes longer while another one computes."""

from collections.abc import Callable


class Company:
    """The engines of one machine.

    Args:
        slow: times as long as alone that work takes while another one computes; 1 = each has cores of its own.
    """

    def __init__(self, slow: float = 1.0) -> None:
        self.slow = slow
        self._changed: list[Callable[[], None]] = []
        self._computing: set[int] = set()

    def joins(self, changed: Callable[[], None]) -> "Member":
        """One more engine; `changed` is called when it is to look at its pace again."""
        self._changed.append(changed)
        return Member(self, len(self._changed) - 1)

    def pace(self, member: int) -> float:
        """Times as long as alone that the work of one of them takes now."""
        return self.slow if self.slow != 1.0 and self._computing - {member} else 1.0

    def note(self, member: int, *, computing: bool) -> None:
        """One of them computes, or does not any more."""
        if self.slow == 1.0 or (member in self._computing) == computing:
            return
        before = [self.pace(other) for other in range(len(self._changed))]
        (self._computing.add if computing else self._computing.discard)(member)
        for other, changed in enumerate(self._changed):
            if other != member and self.pace(other) != before[other]:
                changed()


class Member:
    """One engine of a machine."""

    __slots__ = ("_company", "_number")

    def __init__(self, company: Company, number: int) -> None:
        self._company, self._number = company, number

    @property
    def pace(self) -> float:
        """Times as long as alone that its work takes now."""
        return self._company.pace(self._number)

    def computes(self, computing: bool) -> None:
        """It computes, or does not any more."""
        self._company.note(self._number, computing=computing)
