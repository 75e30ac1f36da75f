"""What sequences have said, for conductors that resume them: the tokens behind the decode core's logs."""

from array import array
from dataclasses import dataclass
from hmac import compare_digest
from typing import Self

from moonpool.kv.keys import BlockKey, tokens_digest
from moonpool.logprobs import Logprobs
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.core.actions import Adopted, Fenced, Forget, Parked
from services.decode.live import LiveRequest, LiveRequests
from services.decode.subscriber import Subscriber


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a sequence has said.

    Attributes:
        request_id: the conductor's name for it.
        generation: of its transfer.
        secret: who knows it may read on; b"" = nobody.
        chain_root: of its tenant's keys.
        tokens: the answer's.
        finish: why it has ended by itself; unspecified as long as it has not.
        why: it has ended early.
        logprobs: of the tokens from `scored_from` on; None where they are not wanted.
    """

    request_id: str
    generation: int
    secret: bytes
    chain_root: BlockKey
    tokens: "array[int]"
    finish: kv_pb2.FinishReason.ValueType
    why: str
    logprobs: Logprobs | None = None
    scored_from: int = 0

    @classmethod
    def of(cls, live: LiveRequest) -> Self:
        """What a request has said so far."""
        [sequence] = live.sequences
        answer = sequence.tokens[sequence.sampling.prompt_tokens :]
        generation, root = live.transfer.generation, live.incoming.chain_root
        names = live.request_id, generation, live.secret, root
        scores = sequence.logprobs, sequence.scored_from
        return cls(*names, answer, sequence.finish, live.why, *scores)

    def matches(self, asked: decode_pb2.ResumeSequence) -> bool:
        """Whether whoever asks knows the sequence, its secret, and the answer up to the position."""
        named = (asked.request_id, asked.generation) == (self.request_id, self.generation)
        if not named or not self.secret or not compare_digest(asked.secret, self.secret):
            return False
        if self.logprobs is not None and asked.from_position < self.scored_from:
            return False  # what is not known here is computed anew
        known = self.tokens[: asked.from_position]
        same = compare_digest(asked.digest, tokens_digest(self.chain_root, known))
        return same and len(known) == asked.from_position

    def tell(self, subscriber: Subscriber, position: int) -> None:
        """Sends everything from a position on."""
        subscriber.forget(self.request_id)
        its = None if self.logprobs is None else self.logprobs.part(position - self.scored_from)
        subscriber.tokens(self.request_id, position, list(self.tokens[position:]), self.finish, logprobs=its)
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
                live.sequences[0].table = ()
            case Forget(number):
                self._parked.pop(number, None)
                self._ended.pop(number, None)
            case Adopted(number, stream, position):
                self._adopt(number, self._subscriber(stream), position)
            case Fenced(number, stream):
                self._fence(number, self._subscriber(stream))

    def _adopt(self, number: int, subscriber: Subscriber | None, position: int) -> None:
        self.adopted += 1
        if number in self._parked:
            self._live.add(self._parked.pop(number))
        if (live := self._live.requests.get(number)) is not None:
            live.subscriber, [sequence] = subscriber, live.sequences
            sequence.told = sequence.output_tokens
        transcript = self._transcript(number)
        if subscriber is not None and transcript is not None:
            transcript.tell(subscriber, position)

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
