"""A conductor that is connected and says nothing: it is asked whether it is there, and given up when it is not."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from moonpool.base.rpc.connection_monitor import PROBES, ConnectionMonitor, MonitoredCall, ProcessorWait
from moonpool.base.rpc.server import serving
from moonpool.client import AsyncClient
from tests.unit.client.test_grpc import DESCRIPTOR, Scripted

SILENCE_S = 0.02
WAIT_S = 60.0


class Asked:
    """What a conductor says when it is asked: nothing, or that it is there."""

    def __init__(self, *there: bool, then: Callable[[], Awaitable[None]] | None = None) -> None:
        self.answers = list(there)
        self.times = 0
        self._then = then

    async def __call__(self, timeout_s: float) -> None:
        there = self.answers[min(self.times, len(self.answers) - 1)]
        self.times += 1
        if self._then is not None:
            await self._then()
        if not there:
            raise TimeoutError


async def given_up(pulse: ConnectionMonitor) -> MonitoredCall:
    """A call that waits until it is given up."""
    over = asyncio.Event()
    async with asyncio.timeout(WAIT_S):
        with pulse.waiting(over.set) as waiting:
            await over.wait()
    return waiting


async def test_calls_are_given_up_when_it_does_not_answer() -> None:
    asked = Asked(False)
    pulse = ConnectionMonitor(asked, SILENCE_S)
    both = await asyncio.gather(given_up(pulse), given_up(pulse))
    assert [call.lost for call in both] == [True, True]
    assert asked.times == PROBES
    assert (await given_up(pulse)).lost, "the next call finds out by itself"
    await pulse.aclose()


async def test_one_that_answers_is_waited_for() -> None:
    asked = Asked(False, True, True, False)  # one answer too late is none that is missing
    pulse = ConnectionMonitor(asked, SILENCE_S)
    assert (await given_up(pulse)).lost
    assert asked.times == 3 + PROBES
    await pulse.aclose()


async def test_what_comes_meanwhile_is_an_answer() -> None:
    async def another_call_hears() -> None:
        if asked.times <= PROBES:
            with pulse.waiting(lambda: None):
                pass

    asked = Asked(False, then=another_call_hears)
    pulse = ConnectionMonitor(asked, SILENCE_S)
    assert (await given_up(pulse)).lost
    assert asked.times == PROBES + PROBES, "what was heard ended each of the first two"
    await pulse.aclose()


def test_messages_seldom_ask_the_kernel() -> None:
    totals = iter((10.0, 12.0, 12.5, 20.0))
    wait = ProcessorWait(lambda: next(totals))
    for message in range(100):
        wait.heard(message * ProcessorWait.RESAMPLE_S / 100)  # one sample: 10
    wait.heard(ProcessorWait.RESAMPLE_S)  # the second: 12
    assert (wait.since_s(), wait.since_s()) == (0.5, 8.0)


async def test_without_a_limit_nobody_is_asked() -> None:
    asked = Asked(False)
    pulse = ConnectionMonitor(asked, 0.0)
    with pulse.waiting(lambda: None) as waiting:
        await asyncio.sleep(0)
    assert (asked.times, waiting.lost) == (0, False)
    await pulse.aclose()


async def test_a_client_asks_another_conductor() -> None:
    """The first one's port is open, and nobody takes the connections: as those of a stopped process."""
    async with serving("127.0.0.1:0", [(DESCRIPTOR, Scripted())], grace_s=0.0) as other:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}", other.address]
            async with AsyncClient(addresses, timeout_s=WAIT_S, silence_s=0.05) as client:
                assert (await client.cluster_state()).ready
                assert (await client.generate(prompt="ok")).text == "1 2 3 "
