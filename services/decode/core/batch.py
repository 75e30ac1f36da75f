"""The sequences that get one token in each step. A step in which nobody needs a block costs O(1) here."""

from heapq import heappop, heappush

from services.decode.core.request import Request


class Batch:
    """Members all advance by one token with each step, so a member's tokens are its base plus the steps (`ticks`).

    The block that is needed next is at the top of a heap over step numbers. Members change between steps only.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.ticks = 0
        self.context = 0
        """Tokens of all members."""
        self._members: dict[int, Request] = {}
        self._needs: list[tuple[int, int]] = []
        self._ids: tuple[int, ...] | None = ()
        self._tbt_s: list[float] | None = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._members

    @property
    def members(self) -> list[Request]:
        """In the order in which they came."""
        return list(self._members.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the members, in the order in which they came."""
        if self._ids is None:
            self._ids = tuple(self._members)
        return self._ids

    @property
    def tbt_slo_s(self) -> float:
        """The strictest time between tokens that a member was promised; 0 = none was."""
        if self._tbt_s is None:
            self._tbt_s = sorted(member.tbt_slo_s for member in self._members.values() if member.tbt_slo_s)
        return self._tbt_s[0] if self._tbt_s else 0.0

    def tokens_of(self, request: Request) -> int:
        """Tokens of any request, in the batch or not."""
        return request.tokens + self.ticks if request.id in self._members else request.tokens

    def join(self, request: Request) -> None:
        """Takes a sequence in."""
        self.context += request.tokens
        request.tokens -= self.ticks
        self._members[request.id] = request
        self._ids = self._tbt_s = None
        self.grew(request)

    def leave(self, request: Request) -> None:
        """Lets a sequence go."""
        del self._members[request.id]
        self._ids = self._tbt_s = None
        request.tokens += self.ticks
        self.context -= request.tokens

    def advance(self, steps: int = 1) -> None:
        """Each member has got a token in each of these steps."""
        self.ticks += steps
        self.context += steps * len(self._members)

    def grew(self, member: Request) -> None:
        """Notes when a member needs its next block; call it when it has got one."""
        heappush(self._needs, (self._need(member), member.id))

    def due(self) -> list[Request]:
        """Takes the members that need a block for the next step, first come first."""
        found: dict[int, Request] = {}
        while self._needs and self._needs[0][0] <= self.ticks:
            tick, number = heappop(self._needs)
            member = self._members.get(number)
            if member is not None and self._need(member) == tick:
                found[number] = member
        return [found[number] for number in sorted(found)]

    def covered(self, most: int) -> int:
        """Steps from now on for which the blocks of all members are enough; `most` at most."""
        while self._needs:
            tick, number = self._needs[0]
            member = self._members.get(number)
            if member is not None and self._need(member) == tick:
                return min(most, tick - self.ticks)
            heappop(self._needs)
        return most

    def _need(self, member: Request) -> int:
        """The tick from which on the blocks do not hold all tokens."""
        return len(member.table) * self._block_tokens + 1 - member.tokens

    def check_invariants(self) -> None:
        """Asserts that the sums and the heap agree with the members."""
        assert self.context == sum(member.tokens + self.ticks for member in self._members.values())
        noted = set(self._needs)
        for number, member in self._members.items():
            assert number == member.id
            assert (self._need(member), number) in noted, "a member's next block was forgotten"
