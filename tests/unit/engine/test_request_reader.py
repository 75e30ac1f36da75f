"""Requests that are read beside the loop."""

import asyncio

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.engine.request import MAX_PENDING_READS, RequestReader
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
