"""The tokens of an answer so far: as kept here, and as a conductor sends them when it starts the request."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.logprobs import Logprobs
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.subscriber import Subscriber


@dataclass(frozen=True, slots=True)
class Said:
    """What one answer has said so far.

    Attributes:
        tokens: its own, without the prompt's.
        finish: why it has ended by itself; unspecified as long as it has not.
        score: of a hypothesis of a beam search.
        logprobs: of the tokens from `scored_from` on; None where they are not wanted.
    """

    tokens: "array[int]"
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    score: float | None = None
    logprobs: Logprobs | None = None
    scored_from: int = 0

    def tell(self, subscriber: Subscriber, request_id: str, choice: int, position: int) -> None:
        """Lets a conductor know everything from a position on; goes with its next `flush`."""
        its = None if self.logprobs is None else self.logprobs.part(position - self.scored_from)
        tokens = self.tokens[position:].tolist()
        subscriber.tokens(request_id, position, tokens, self.finish, choice, self.score, its)


def known_tokens(message: decode_pb2.StartSequence, answers: int) -> list[Sequence[int]]:
    """Of each answer, the tokens that are known behind its first one."""
    further: list[Sequence[int]] = [it.token_ids for it in message.further_known]
    return [message.known_token_ids, *(further or [()] * (answers - 1))]
