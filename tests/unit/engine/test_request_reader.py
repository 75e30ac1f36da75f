"""Requests that are read beside the loop."""

import asyncio
from array import array

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded, Unavailable
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.engine.request import MAX_PENDING_READS, IncomingRequest, RequestReader
from moonpool.v1 import kv_pb2
from tests.unit.fakes.beside import Held


def refused(spec: kv_pb2.SequenceSpec) -> None:
    raise InvalidRequest("sequence.tenant", f"is {spec.tenant}")


def asked(name: str, tokens: int) -> kv_pb2.SequenceSpec:
    return kv_pb2.SequenceSpec(request_id=name, tenant=name, token_ids=bytes(4 * tokens))


async def test_short_ones_are_read_at_once_and_what_is_wrong_with_any_is_told() -> None:
    threads = Held()
    intake = RequestReader(refused, ThreadOffload(threads, least_tokens=8))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is short"):
        await intake.read(asked("short", 7))
    reading = asyncio.ensure_future(intake.read(asked("long", 8)))
    await threads.came.wait()
    threads.release()
    with pytest.raises(InvalidRequest, match="is long"):
        await reading
    assert not intake.cancel("long")


async def test_only_so_many_wait_to_be_read() -> None:
    threads = Held()
    intake = RequestReader(refused, ThreadOffload(threads, least_tokens=1))  # type: ignore[arg-type]
    reading = [asyncio.ensure_future(intake.read(asked("a", 1))) for _ in range(MAX_PENDING_READS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="being read"):
        await intake.read(asked("b", 1))
    reading.pop().cancel()
    await asyncio.sleep(0)
    reading.append(asyncio.ensure_future(intake.read(asked("b", 1))))
    await asyncio.sleep(0)
    assert intake.cancel("b")
    threads.release()
    failures = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(failure, InvalidRequest) for failure in failures)


async def test_a_request_is_cancelled_while_rows_of_its_pictures_are_read() -> None:
    """A kvstore may take a second for them."""
    came, goes_on = asyncio.Event(), asyncio.Event()

    async def with_rows(incoming: IncomingRequest, spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        came.set()
        await goes_on.wait()
        return incoming

    def read(spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        tokens, sampling = array("i", [1]), SequenceSampling(1)
        return IncomingRequest(spec.request_id, tokens, BlockKey(bytes(32)), sampling, EngineRequest((), 1, 1))

    async with asyncio.timeout(30):
        intake = RequestReader(read, ThreadOffload(Held(on=False), least_tokens=1))
        reading = asyncio.ensure_future(intake.read(asked("a", 1), "conductor", with_rows))
        await came.wait()
        assert not intake.cancel("a", "another")
        assert intake.cancel("a", "conductor")
        goes_on.set()
        with pytest.raises(Unavailable, match="cancelled"):
            await reading
        assert not intake.cancel("a", "conductor")
