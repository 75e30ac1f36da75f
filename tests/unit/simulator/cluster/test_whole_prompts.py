"""A simulated decode instance in the role both: whole prompts, in the time that the profile says."""

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.conductor.core.events import ReserveGranted
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.simulator.clock import PS, SimulatedWorld
from moonpool.simulator.cluster.decode import DecodeListener, SimulatedDecode
from moonpool.simulator.cluster.requests import PlacedSequence, Request, SequenceReport
from moonpool.simulator.network import SimulatedNetwork
from tests.unit.simulator.cluster.rig import config

STREAM, CONDUCTOR = 1, "conductor"


class Both:
    """One instance, and what its conductor hears: tokens by sequence, and which have ended."""

    def __init__(self) -> None:
        self.world, self.config = SimulatedWorld(), config()
        self.told: dict[int, int] = {}
        self.over: set[int] = set()
        self.ended_s = 0.0
        ears = DecodeListener(self._tokens, self._failed, lambda _: None, lambda: None)
        network = SimulatedNetwork(self.world)
        self.instance = SimulatedDecode(network, self.config, "d0", (), ears, computes_prompts=True)
        self.instance.stream_opened(STREAM, CONDUCTOR)

    def reserve(self, number: int, tokens: int, answer: int, width: int = 1, **options: float) -> object:
        size = self.config.block_size
        keys = tuple(BlockKey(bytes([number]) * 4 + index.to_bytes(12, "little")) for index in range(tokens // size))
        request = Request(number, arrived=0, tokens=tokens, answer=answer, keys=keys, choices=width)
        placed = PlacedSequence(request, f"r{number}", tokens, answer, width=width)
        return self.instance.reserve(placed, CONDUCTOR, whole=True, **options)  # type: ignore[arg-type]

    def ask(self, number: int, tokens: int, answer: int, width: int = 1) -> int:
        granted = self.reserve(number, tokens, answer, width)
        assert isinstance(granted, ReserveGranted)
        self.instance.start(STREAM, granted.target.transfer_id, compute=True)
        return granted.target.transfer_id

    def _tokens(self, stream: int, news: list[SequenceReport]) -> None:
        for report in news:
            if report.made is not None:
                self.told[report.number] = self.told.get(report.number, 0) + 1 + len(report.made.gaps)
            if report.over:
                self.over.add(report.number)
                self.ended_s = self.world.now / PS

    def _failed(self, stream: int, transfer: int, failure: Failure) -> None:
        raise AssertionError(f"{transfer} failed: {failure}")


@pytest.mark.parametrize("tokens", [1, 512, 2000])
@pytest.mark.parametrize(("answer", "width"), [(1, 1), (40, 1), (40, 3), (1, 2)])
def test_every_answer_comes_whole(tokens: int, answer: int, width: int) -> None:
    both = Both()
    numbers = [both.ask(number, tokens, answer, width) for number in range(3)]
    both.world.run()
    wanted = {number + at for number in numbers for at in range(width)}
    assert both.told == dict.fromkeys(wanted, answer)
    assert both.over == wanted
    both.instance.check_at_rest()


def test_prompts_take_the_time_of_the_profile_and_are_reported() -> None:
    both = Both()
    both.ask(0, 5000, 1)
    load = both.instance.load()
    assert load.queued_tokens == 5000
    assert load.drain_s is not None
    refused = both.reserve(1, 100, 1, max_queue_s=load.drain_s / 2)
    assert isinstance(refused, Failure)
    assert (refused.kind, refused.reason) == (FailureKind.OVERLOADED, "stale")
    both.world.run()
    assert both.instance.load().queued_tokens == 0
    assert both.ended_s == pytest.approx(load.drain_s, rel=0.3)
    both.instance.check_at_rest()
