"""Each call that the core orders has exactly one end, also one that cannot even begin."""

from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.scheduling.state_machine import IoEnded
from moonpool.v1 import kv_pb2
from services.conductor.core.events import Event, Failure, FailureKind
from services.conductor.dispatcher import InstanceCalls


class Unbuildable:
    """A request whose message cannot be built."""

    def sequence_spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        raise ValueError(sequence)


@pytest.mark.parametrize("kind", ["reserve", "prefill"])
async def test_a_call_whose_message_cannot_be_built_ends(kind: str) -> None:
    posted: list[Event] = []
    nothing: Any = None
    calls = InstanceCalls(nothing, nothing, lambda _: None, posted.append, posted.append, 1.0)
    order: Any = SimpleNamespace(io=7, sequence="s", tbt_slo_s=0.0, starts_in_s=0.0)
    getattr(calls, kind)(order, Unbuildable())
    [ended] = posted
    assert isinstance(ended, IoEnded)
    assert (ended.io, ended.result) == (7, Failure(FailureKind.INTERNAL, "a call failed"))
    await calls.aclose()
