"""Cancelled requests, conductors that leave, and leases that end."""

import pytest

from moonpool.base.errors import TransferFailed
from moonpool.v1 import kv_pb2
from tests.unit.clocks import StandingClock
from tests.unit.engine.decode.calls import conducting, reserve, sending, slices, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, WAIT_S, decoding, prompt, spec


async def test_cancel_while_receiving() -> None:
    """Cancelled in flight: the sender gets the verdict, and what it still sends lands nowhere."""
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, conducting(decode) as conductor, sending(decode) as sender:
        target = await reserve(decode, spec("a", tokens))
        async with await sender.open(target) as outbound:
            await outbound.send(slices(tokens, layers=range(1)))
            await decode.until(lambda: bool(decode.service.manager.num_used))
            await conductor.cancel("a", target)
            await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})
            with pytest.raises(TransferFailed, match="cancelled"):
                await outbound.verdict(WAIT_S)
        await decode.until(lambda: decode.service.manager.num_free == 32)


async def test_cancel_in_a_step() -> None:
    """Blocks that a running step writes to stay used until it is over."""
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold()
        target = await reserve(decode, spec("a", tokens, max_tokens=10))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 9)
        await reached.wait()
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})
        assert decode.service.manager.num_used == 2
        go.set()
        await decode.rest()
        assert conductor.tokens == {}


async def test_cancel_unknown() -> None:
    async with decoding() as decode, conducting(decode) as conductor:
        await conductor.cancel("a", kv_pb2.TransferTarget(transfer_id=7, generation=8))
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_UNKNOWN})
        await conductor.start("b", kv_pb2.TransferTarget(transfer_id=7, generation=8), 9)
        await conductor.until(lambda: "b" in conductor.failed)


async def test_a_promise_of_which_its_conductor_did_not_hear_is_given_back_by_its_name() -> None:
    """Other conductors', and what was started, are not meant."""
    nothing = kv_pb2.TransferTarget()
    async with decoding() as decode, conducting(decode) as conductor:
        ours, other = kv_pb2.Instance(id="conductor"), kv_pb2.Instance(id="another")
        await reserve(decode, spec("a", prompt(2 * BLOCK)), conductor=ours)
        theirs = await reserve(decode, spec("b", prompt(2 * BLOCK)), conductor=other)
        begun = await reserve(decode, spec("c", prompt(20)), conductor=ours)
        await transfer(decode, begun, prompt(20))
        for name in "abc":
            await conductor.cancel(name, nothing)
        await conductor.until(lambda: len(conductor.outcomes) == 3)
        before, unknown = kv_pb2.CANCEL_OUTCOME_BEFORE_START, kv_pb2.CANCEL_OUTCOME_UNKNOWN
        assert conductor.outcomes == {"a": before, "b": unknown, "c": unknown}
        await conductor.cancel("b", theirs)
        await conductor.cancel("c", begun)


async def test_conductor_leaves() -> None:
    """Its stream ends: its sequences end, those of another conductor go on."""
    tokens = prompt(20)
    async with decoding() as decode:
        reached, go = decode.engine.hold()
        async with conducting(decode) as staying:
            async with conducting(decode) as leaving:
                for conductor, name in ((leaving, "a"), (staying, "b")):
                    target = await reserve(decode, spec(name, tokens, max_tokens=3))
                    await transfer(decode, target, tokens)
                    await conductor.start(name, target, continuation(tokens, 1)[0])
                await reached.wait()
                await decode.until(
                    lambda: len(decode.service.core.planner.batch) + len(decode.service.core.planner.waiting) == 2
                )
            await decode.until(
                lambda: (
                    len(decode.service.executor) == 1
                    or sum(request.subscriber is None for request in decode.service.executor) == 1
                )
            )
            go.set()
            await staying.until(lambda: "b" in staying.reasons)
            assert staying.tokens["b"] == continuation(tokens, 3)[1:]


@pytest.mark.parametrize("opened", [False, True])
async def test_lease_ends(opened: bool) -> None:
    """Nothing is heard: the promise ends, the conductor and the sender are told."""
    tokens, clock = prompt(20), StandingClock()
    async with decoding(lease_s=0.1) as decode, conducting(decode) as conductor, sending(decode) as sender:
        target = await reserve(decode, spec("a", tokens))
        outbound = await sender.open(target) if opened else None
        await conductor.start("a", target, 9)
        [live] = decode.service.executor
        await decode.until(lambda: live.subscriber is not None)

        def ended() -> bool:
            clock.now_s += 1.0  # again and again: the transfer, once open, has a lease of its own
            return live.ending

        await decode.until(ended)
        await conductor.until(lambda: "a" in conductor.failed)
        assert "no frame of the transfer came" in conductor.failed["a"]
        await decode.rest()
        if outbound is None:
            outbound = await sender.open(target)
        with pytest.raises(TransferFailed):
            await outbound.verdict(WAIT_S)


async def test_lease_of_what_nobody_starts() -> None:
    """All KV is there, but the conductor never says a word."""
    tokens, clock = prompt(20), StandingClock()
    async with decoding(lease_s=0.1) as decode:
        await transfer(decode, await reserve(decode, spec("a", tokens)), tokens)
        clock.now_s += 1.0
        await decode.rest()
        assert decode.service.manager.num_cached == 1


async def test_a_promise_lives_as_long_as_its_conductor() -> None:
    """It waits in a prefill's queue for longer than its lease; then the conductor is lost, and it ends."""
    tokens = prompt(20)
    conductor = kv_pb2.Instance(id="conductor")
    async with decoding(lease_s=0.2) as decode:
        async with conducting(decode) as connected:
            target = await reserve(decode, spec("a", tokens), conductor=conductor)
            other = await reserve(decode, spec("b", tokens))  # nobody speaks for it
            await decode.until(lambda: decode.service.executor.get(other.transfer_id, other.generation) is None)
            for _ in range(3):  # its lease has ended several times since
                await reserve(decode, spec("c", tokens))
                await decode.until(lambda: len(decode.service.executor) == 1)
            await transfer(decode, target, tokens)
            await connected.start("a", target, continuation(tokens, 1)[0])
            await connected.until(lambda: "a" in connected.reasons)
            await reserve(decode, spec("d", tokens), conductor=conductor)
        await decode.rest()
