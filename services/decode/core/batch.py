"""The sequences that get one token in each step. A step in which nobody needs a block costs O(1) here."""

from heapq import heappop, heappush

from services.decode.core.request import Member, Request


class Batch:
    """All sequences advance by one token with each step, so their tokens are a base plus the steps (`ticks`).

    The block that is needed next is at the top of a heap over step numbers. Requests join and leave between steps only,
    with all their members.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.ticks = 0
        self.context = 0
        """Tokens of all sequences."""
        self._requests: dict[int, Request] = {}
        self._members: dict[int, tuple[Member, Request]] = {}
        self._needs: list[tuple[int, int]] = []
        self._forked: dict[int, Request] = {}
        self._hurried = 0
        self._ids: tuple[int, ...] | None = ()
        self._tbt_s: list[float] | None = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    @property
    def requests(self) -> list[Request]:
        """In the order in which they came."""
        return list(self._requests.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the sequences, in the order in which they came."""
        if self._ids is None:
            self._ids = tuple(self._members)
        return self._ids

    @property
    def tbt_slo_s(self) -> float:
        """The strictest time between tokens that a request was promised; 0 = none was."""
        if self._tbt_s is None:
            self._tbt_s = sorted(request.tbt_slo_s for request in self._requests.values() if request.tbt_slo_s)
        return self._tbt_s[0] if self._tbt_s else 0.0

    @property
    def patient(self) -> bool:
        """Whether nobody waits for single tokens."""
        return not self._hurried

    def tokens_of(self, member: Member) -> int:
        """Tokens of a sequence, in the batch or not."""
        return member.tokens + self.ticks if member.id in self._members else member.tokens

    def context_of(self, request: Request) -> int:
        """Tokens of all sequences of a request, in the batch or not, or of those that it will begin with."""
        if request.width == 1:
            return self.tokens_of(request.members[0])
        tokens = sum(map(self.tokens_of, request.members))
        return tokens * request.places // len(request.members)

    def join(self, request: Request) -> None:
        """Takes a request in."""
        self._requests[request.id] = request
        self._hurried += not request.patient
        for member in request.members:
            self.context += member.tokens
            member.tokens -= self.ticks
            self._members[member.id] = member, request
            self.grew(member)
        self._ids = self._tbt_s = None

    def leave(self, request: Request) -> None:
        """Lets a request go."""
        for member in request.members:
            self._let_go(member)
        del self._requests[request.id]
        self._hurried -= not request.patient
        self._forked.pop(request.id, None)
        self._tbt_s = None

    def end(self, member: Member) -> None:
        """One sequence of a request has ended; others go on."""
        self._let_go(member)

    def _let_go(self, member: Member) -> None:
        del self._members[member.id]
        self._ids = None
        member.tokens += self.ticks
        self.context -= member.tokens

    def advance(self, steps: int = 1) -> None:
        """Each sequence has got a token in each of these steps."""
        self.ticks += steps
        self.context += steps * len(self._members)

    def grew(self, member: Member) -> None:
        """Notes when a sequence needs its next block; call it when it has got one."""
        heappush(self._needs, (self._need(member), member.id))

    def forked(self, request: Request) -> None:
        """Notes that its members share the block that they write to next."""
        self._forked[request.id] = request

    def due(self) -> list[Request]:
        """Takes the requests that need blocks for the next step, first come first."""
        found, self._forked = self._forked, {}
        while self._needs and self._needs[0][0] <= self.ticks:
            tick, number = heappop(self._needs)
            member, request = self._members.get(number, (None, None))
            if member is not None and request is not None and self._need(member) == tick:
                found[request.id] = request
        return [found[number] for number in sorted(found)]

    @property
    def blocks_ahead(self) -> int:
        """Blocks of the members that hold none of their tokens yet."""
        return sum((self._need(member) - 1 - self.ticks) // self._block_tokens for member, _ in self._members.values())

    @property
    def is_plain(self) -> bool:
        """Whether nobody in it may have several sequences, or is a beam."""
        return not any(request.is_group for request in self._requests.values())

    def soonest(self, steps: int) -> tuple[Request, Member] | None:
        """The sequence whose blocks are the first not to be enough, if that is within so many steps."""
        while self._needs and self._needs[0][0] < self.ticks + steps:
            tick, number = self._needs[0]
            member, request = self._members.get(number, (None, None))
            if member is not None and request is not None and self._need(member) == tick:
                return request, member
            heappop(self._needs)
        return None

    def covered(self, most: int) -> int:
        """Steps from now on for which the blocks of all members are enough; `most` at most."""
        short = self.soonest(most)
        return self._need(short[1]) - self.ticks if short is not None else most

    def _need(self, member: Member) -> int:
        """The tick from which on the blocks do not hold all tokens."""
        return len(member.table) * self._block_tokens + 1 - member.tokens

    def check_invariants(self) -> None:
        """Asserts that the sums and the heap agree with the requests."""
        assert self.context == sum(member.tokens + self.ticks for member, _ in self._members.values())
        members = [(member.id, request.id) for request in self._requests.values() for member in request.members]
        assert members == [(number, request.id) for number, (_, request) in self._members.items()]
        assert self._forked.keys() <= self._requests.keys()
        assert self._hurried == sum(not request.patient for request in self._requests.values())
        noted = set(self._needs)
        for number, (member, _) in self._members.items():
            assert (self._need(member), number) in noted, "a sequence's next block was forgotten"
