"""The requests that are here, found by their own ids and by those of their sequences."""

from services.decode.core.request import Member, Request


class Roster:
    """All requests but those that are kept without blocks until they are adopted."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._of: dict[int, Request] = {}  # by the ids of all members that they may have

    def add(self, request: Request) -> None:
        """It has come, or come back."""
        self.requests[request.id] = request
        self._of |= dict.fromkeys(range(request.id, request.id + request.width), request)

    def remove(self, request: Request) -> None:
        """It is not here any more."""
        del self.requests[request.id]
        for number in range(request.id, request.id + request.width):
            del self._of[number]

    def of(self, number: int) -> Request:
        """The request of a sequence, which may have ended."""
        return self._of[number]

    def get(self, number: int) -> Request | None:
        """The request of a sequence; None when it is not here any more."""
        return self._of.get(number)

    def find(self, number: int) -> Member | None:
        """A sequence; None when it is not here any more."""
        request = self._of.get(number)
        return request.member(number) if request is not None else None

    def check_invariants(self) -> None:
        """Asserts that each sequence leads to its request."""
        for request in self.requests.values():
            assert all(self._of[member.id] is request for member in request.members)
        assert len(self._of) == sum(request.width for request in self.requests.values())
