"""The running batch: the sequences that each step advances by one token.

A step in which no sequence needs a block costs O(1) here.
"""

from heapq import heappop, heappush

from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence


class RunningBatch:
    """The sequences that each step advances by one token.

    A sequence's tokens are a base plus the steps so far (`ticks`), so a step changes no sequence. A heap over step
    numbers says which sequence needs a block next. Requests join and leave between steps, with all their sequences.

    Attributes:
        ticks: steps so far.
        context: tokens in all sequences.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.ticks = 0
        self.context = 0
        self._requests: dict[int, DecodeRequest] = {}
        self._sequences: dict[int, tuple[RequestSequence, DecodeRequest]] = {}
        self._needs: list[tuple[int, int]] = []
        self._forked: dict[int, DecodeRequest] = {}
        self._hurried = 0
        self._ids: tuple[int, ...] | None = ()
        self._tbt_s: list[float] | None = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request: DecodeRequest) -> bool:
        return request.id in self._requests

    @property
    def requests(self) -> list[DecodeRequest]:
        """Requests, in the order in which they joined."""
        return list(self._requests.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """The sequences' ids, in the order in which sequences joined."""
        if self._ids is None:
            self._ids = tuple(self._sequences)
        return self._ids

    @property
    def tbt_slo_s(self) -> float:
        """The strictest promised time between tokens, seconds; 0 = none."""
        if self._tbt_s is None:
            self._tbt_s = sorted(request.tbt_slo_s for request in self._requests.values() if request.tbt_slo_s)
        return self._tbt_s[0] if self._tbt_s else 0.0

    @property
    def patient(self) -> bool:
        """Whether no client waits for single tokens."""
        return not self._hurried

    def tokens_of(self, sequence: RequestSequence) -> int:
        """Return a sequence's tokens, in the batch or not."""
        return sequence.tokens + self.ticks if sequence.id in self._sequences else sequence.tokens

    def context_of(self, request: DecodeRequest) -> int:
        """Return tokens in a request's sequences, in the batch or not; before the start, in the sequences to come."""
        if request.spec.width == 1:
            return self.tokens_of(request.sequences[0])
        tokens = sum(map(self.tokens_of, request.sequences))
        return tokens * request.num_seqs // len(request.sequences)

    def join(self, request: DecodeRequest) -> None:
        """Add a request."""
        self._requests[request.id] = request
        self._hurried += not request.patient
        for sequence in request.sequences:
            self.context += sequence.tokens
            sequence.tokens -= self.ticks
            self._sequences[sequence.id] = sequence, request
            self.grew(sequence)
        self._ids = self._tbt_s = None

    def leave(self, request: DecodeRequest) -> None:
        """Remove a request."""
        for sequence in request.sequences:
            self._remove(sequence)
        del self._requests[request.id]
        self._hurried -= not request.patient
        self._forked.pop(request.id, None)
        self._tbt_s = None

    def end(self, sequence: RequestSequence) -> None:
        """End a request's sequence; others continue."""
        self._remove(sequence)

    def _remove(self, sequence: RequestSequence) -> None:
        del self._sequences[sequence.id]
        self._ids = None
        sequence.tokens += self.ticks
        self.context -= sequence.tokens

    def advance(self, steps: int = 1) -> None:
        """Add a token to each sequence for each step."""
        self.ticks += steps
        self.context += steps * len(self._sequences)

    def gained(self, sequence: RequestSequence, tokens: int) -> None:
        """Note a sequence's tokens in the last step beyond the token that `advance` counts; -1 = no token."""
        if sequence.id in self._sequences:
            sequence.tokens += tokens
            self.context += tokens
            self.grew(sequence)

    def grew(self, sequence: RequestSequence) -> None:
        """Note when a sequence needs the next block; call this after giving a block."""
        heappush(self._needs, (self._need(sequence), sequence.id))

    def forked(self, request: DecodeRequest) -> None:
        """Note that a request's sequences share the block that they write to next."""
        self._forked[request.id] = request

    def due(self) -> list[DecodeRequest]:
        """Take the requests that need blocks for the next step, lowest id first."""
        found, self._forked = self._forked, {}
        while self._needs and self._needs[0][0] <= self.ticks:
            tick, number = heappop(self._needs)
            sequence, request = self._sequences.get(number, (None, None))
            if sequence is not None and request is not None and self._need(sequence) == tick:
                found[request.id] = request
        return [found[number] for number in sorted(found)]

    @property
    def blocks_ahead(self) -> int:
        """The sequences' blocks that hold no token yet."""
        return sum(
            (self._need(sequence) - 1 - self.ticks) // self._block_size for sequence, _ in self._sequences.values()
        )

    @property
    def has_search(self) -> bool:
        """Whether sequences of a request may fork after each step."""
        return any(request.search is not None for request in self._requests.values())

    def soonest(self, steps: int) -> tuple[DecodeRequest, RequestSequence] | None:
        """Return the sequence that runs out of blocks first, if within `steps` steps."""
        while self._needs and self._needs[0][0] < self.ticks + steps:
            tick, number = self._needs[0]
            sequence, request = self._sequences.get(number, (None, None))
            if sequence is not None and request is not None and self._need(sequence) == tick:
                return request, sequence
            heappop(self._needs)
        return None

    def covered(self, most: int) -> int:
        """Return steps for which all sequences' blocks suffice; at most `most`."""
        short = self.soonest(most)
        return self._need(short[1]) - self.ticks if short is not None else most

    def _need(self, sequence: RequestSequence) -> int:
        """Return the tick from which the blocks do not hold all tokens."""
        return len(sequence.table.blocks) * self._block_size + 1 - sequence.tokens

    def check_invariants(self) -> None:
        """Assert that the sums and the heap agree with the requests."""
        assert self.context == sum(sequence.tokens + self.ticks for sequence, _ in self._sequences.values())
        sequences = [(sequence.id, request.id) for request in self._requests.values() for sequence in request.sequences]
        assert sequences == [(number, request.id) for number, (_, request) in self._sequences.items()]
        assert self._forked.keys() <= self._requests.keys()
        assert self._hurried == sum(not request.patient for request in self._requests.values())
        noted = set(self._needs)
        for number, (sequence, _) in self._sequences.items():
            assert (self._need(sequence), number) in noted, "a sequence's next block was forgotten"
