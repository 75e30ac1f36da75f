"""What requests have said, for conductors that resume them: the tokens behind the decode core's logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Self

from moonpool.kv.keys import BlockKey, tokens_digest
from moonpool.v1 import decode_pb2
from services.decode.core.actions import Adopted, Fenced, Forget, Parked
from services.decode.live import LiveRequest, LiveRequests
from services.decode.said import Said
from services.decode.subscriber import Subscriber


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a request has said.

    Attributes:
        request_id: the conductor's name for it.
        generation: of its transfer.
        secret: who knows it may read on; b"" = nobody.
        chain_root: of its tenant's keys.
        answers: each of them.
        why: it has ended early.
    """

    request_id: str
    generation: int
    secret: bytes
    chain_root: BlockKey
    answers: Sequence[Said]
    why: str

    @classmethod
    def of(cls, live: LiveRequest) -> Self:
        """What a request has said so far."""
        generation, root = live.transfer.generation, live.incoming.chain_root
        return cls(live.request_id, generation, live.secret, root, live.said, live.why)

    def matches(self, asked: decode_pb2.ResumeSequence) -> bool:
        """Whether whoever asks knows the request, its secret, and each answer up to its position."""
        named = (asked.request_id, asked.generation) == (self.request_id, self.generation)
        if not named or not self.secret or not compare_digest(asked.secret, self.secret):
            return False
        if len(asked.further) != len(self.answers) - 1:
            return False
        had = [(asked.from_position, asked.digest), *((it.from_position, it.digest) for it in asked.further)]
        return all(self._knows(said, *its) for said, its in zip(self.answers, had, strict=True))

    def _knows(self, said: Said, position: int, digest: bytes) -> bool:
        if said.logprobs is not None and position < said.scored_from:
            return False  # what is not known here is computed anew
        known = said.tokens[:position]
        return compare_digest(digest, tokens_digest(self.chain_root, known)) and len(known) == position

    def tell(self, subscriber: Subscriber, positions: Sequence[int]) -> None:
        """Sends everything of each answer from its position on."""
        subscriber.forget(self.request_id)
        for choice, (said, position) in enumerate(zip(self.answers, positions, strict=True)):
            said.tell(subscriber, self.request_id, choice, position)
        if self.why:
            subscriber.failed(self.request_id, self.why)
        subscriber.flush()


class TokenLog:
    """The sequences that are kept. How long, and how many, is the core's business.

    Args:
        live: those that run; the shell's.
        streams: of the conductors, with the core's numbers; the shell's.
    """

    def __init__(self, live: LiveRequests, streams: dict[Subscriber, int]) -> None:
        self._live = live
        self._streams = streams
        self._parked: dict[int, LiveRequest] = {}
        self._ended: dict[int, Transcript] = {}
        self.adopted = 0
        """Sequences taken over, and answers read again, so far."""

    def knows(self, asked: decode_pb2.ResumeSequence) -> bool:
        """Whether there is such a sequence, and whoever asks may have it."""
        transcript = self._transcript(asked.transfer_id)
        return transcript is not None and transcript.matches(asked)

    def ended(self, live: LiveRequest) -> None:
        """Keeps what a request has said."""
        self._ended[live.id] = Transcript.of(live)

    def perform(self, action: Adopted | Fenced | Parked | Forget) -> None:
        """Does what the core has decided about the sequences that are kept."""
        match action:
            case Parked(number):
                live = self._parked[number] = self._live.take(number)
                for sequence in live.sequences:
                    sequence.table = ()
            case Forget(number):
                self._parked.pop(number, None)
                self._ended.pop(number, None)
            case Adopted(number, stream, positions):
                self._adopt(number, self._subscriber(stream), positions)
            case Fenced(number, stream):
                self._fence(number, self._subscriber(stream))

    def _adopt(self, number: int, subscriber: Subscriber | None, positions: Sequence[int]) -> None:
        self.adopted += 1
        if number in self._parked:
            self._live.add(self._parked.pop(number))
        if (live := self._live.requests.get(number)) is not None:
            live.subscriber = subscriber
            for sequence in live.sequences:
                sequence.told = sequence.output_tokens
        transcript = self._transcript(number)
        if subscriber is not None and transcript is not None:
            transcript.tell(subscriber, positions)

    def _fence(self, number: int, subscriber: Subscriber | None) -> None:
        transcript = self._transcript(number)
        if subscriber is not None and transcript is not None:
            subscriber.fenced(transcript.request_id)

    def _transcript(self, number: int) -> Transcript | None:
        live = self._live.requests.get(number) or self._parked.get(number)
        if live is None:
            return self._ended.get(number)
        return Transcript.of(live) if live.secret and live.started and not live.ending else None

    def _subscriber(self, stream: int) -> Subscriber | None:
        return next((subscriber for subscriber, number in self._streams.items() if number == stream), None)
