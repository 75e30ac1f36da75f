"""How often the core hears of a sequence's tokens: at once of the first and the last, else now and then."""

from types import SimpleNamespace
from typing import Any

from moonpool.base.errors import StreamBroken
from moonpool.conductor.core.events import Event, TokensArrived
from moonpool.conductor.decode_streams import NewTokens
from moonpool.conductor.sequence_subscription import COUNT_S, SequenceSubscription
from moonpool.v1 import kv_pb2

STOP = kv_pb2.FINISH_REASON_STOP


class Sequence:
    """A subscription of an answer that takes every token, and what the core and the call's owner heard."""

    def __init__(self) -> None:
        self.heard: list[Event | str] = []
        self.now = 0.0
        self.choice = SimpleNamespace(index=0, finish=kv_pb2.FINISH_REASON_UNSPECIFIED)
        stream: Any = SimpleNamespace(
            choices=[self.choice],
            finish=self.choice.finish,
            untold=0,
            add_tokens=lambda new, sequence: len(new.token_ids),
        )
        self.subscription = SequenceSubscription(
            7, "sequence", stream, self.heard.append, self._ended, lambda choice: None, lambda: self.now
        )

    def _ended(self, result: object, *, cancel: bool) -> None:
        self.heard.append("ended" if result is None else "failed")

    def add(self, tokens: int, reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED) -> None:
        """Tokens come."""
        self.subscription.add_tokens(NewTokens(0, 0, [1] * tokens, reason))

    @property
    def counts(self) -> list[int | str]:
        """Numbers of tokens that the core heard of, and the call's end."""
        return [event.count if isinstance(event, TokensArrived) else str(event) for event in self.heard]


def test_the_first_tokens_are_told_at_once_then_several_at_a_time() -> None:
    sequence = Sequence()
    for _ in range(5):
        sequence.add(1)
    assert sequence.counts == [1]
    sequence.now = COUNT_S
    sequence.add(1)
    assert sequence.counts == [1, 5]


def test_the_last_tokens_are_told_before_the_call_ends() -> None:
    sequence = Sequence()
    for reason in (kv_pb2.FINISH_REASON_UNSPECIFIED, kv_pb2.FINISH_REASON_UNSPECIFIED, STOP):
        sequence.add(2, reason)
    assert sequence.counts == [2, 4, "ended"]


def test_tokens_before_a_failure_are_told_first() -> None:
    sequence = Sequence()
    sequence.add(1)
    sequence.add(3)
    sequence.subscription.fail(StreamBroken("gone"))
    assert sequence.counts == [1, 3, "failed"]


def test_a_failure_without_tokens_is_told_alone() -> None:
    sequence = Sequence()
    sequence.subscription.fail(StreamBroken("gone"))
    assert sequence.counts == ["failed"]
