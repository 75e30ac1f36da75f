"""A simulated decode instance in the role both: whole prompts, in the time that the profile says."""

from dataclasses import replace
from itertools import pairwise

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.keys import BlockKey
from moonpool.conductor.core.events import ReserveGranted
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.roles import RoleLimits
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ChunkSteps, DecodeMemory
from moonpool.simulator.cluster.decode import DecodeListener, SimulatedDecode
from moonpool.simulator.cluster.requests import DONE, PlacedSequence, Request, SequenceReport
from moonpool.simulator.experiments.faults import storm
from moonpool.simulator.network import SimulatedNetwork
from tests.unit.simulator.cluster.rig import PROFILE, config, request, run

STREAM, CONDUCTOR = 1, "conductor"


class Both:
    """One instance, and what its conductor hears: tokens by sequence, and which have ended."""

    def __init__(self) -> None:
        self.world, self.config = SimulatedWorld(), config(decode=0, both=1)
        self.told: dict[int, int] = {}
        self.over: set[int] = set()
        self.ended_s = 0.0
        ears = DecodeListener(self._tokens, self._failed, lambda _: None, lambda: None)
        network = SimulatedNetwork(self.world)
        self.instance = SimulatedDecode(network, self.config, "d0", (), ears)
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


# In a cluster


ONE = {"prefill": 0, "decode": 0, "both": 1, "kvstore": 0}


def test_the_times_of_one_request_at_an_instance_that_has_both_parts() -> None:
    """Two steps of 256 tokens at most, then steps of the answer; nothing is sent."""
    (value,), cluster = run(config(**ONE), [request(1.0, 300, 3, 0)])
    prompt_s = 2 * 0.010 + 0.300  # a step's fixed time, and a millisecond a token
    assert value.outcome == DONE
    assert value.first_at - value.arrived == pytest.approx(ps(prompt_s), rel=1e-9)
    assert value.intervals == [ps(0.011) + (300 + number) * ps(1e-6) for number in (1, 2)]
    assert value.prefill == "d0"
    assert not cluster.prefills


@pytest.mark.parametrize(
    ("steps", "alone_s", "beside_s"),
    [(ChunkSteps.EMULATED, 0.010, 0.010), (ChunkSteps.CAPTURED, 0.050, 0.010), (ChunkSteps.EAGER, 0.050, 0.050)],
)
def test_the_fixed_time_of_steps_with_prompts(steps: ChunkSteps, alone_s: float, beside_s: float) -> None:
    profile = replace(PROFILE, speeds=replace(PROFILE.speeds, prefill_base_s=0.050))
    trace = [request(0.0, 64, 20, 0), request(0.2, 64, 2, 100)]
    (first, second), _ = run(config(profile=profile, chunk_steps=steps, **ONE), trace)
    assert first.first_at == pytest.approx(ps(alone_s + 0.064), rel=1e-9)
    mixed = max(first.intervals)
    assert mixed == pytest.approx(ps(beside_s + 0.064 + 0.001), rel=0.002)  # and the context's microseconds
    assert second.outcome == DONE


def test_answers_have_steps_alone_between_two_chunks() -> None:
    """A prompt of four chunks beside an answer, which has so many short intervals between two long ones."""
    memory = DecodeMemory(chunked_prefill_size=64, num_continuous_decode_steps=3)
    trace = [request(0.0, 64, 60, 0), request(0.2, 256, 2, 100)]
    (first, second), _ = run(config(memory=memory, **ONE), trace)
    assert second.outcome == DONE
    long = [place for place, interval in enumerate(first.intervals) if interval > ps(0.05)]
    assert len(long) == 4
    assert [after - before for before, after in pairwise(long)] == [4, 4, 4]


def test_a_prefix_is_loaded_from_a_store_and_from_a_peer() -> None:
    """The second instance loads what the first one has computed, as that is quicker than computing."""
    quick = replace(PROFILE, speeds=replace(PROFILE.speeds, load_bytes_per_s=1e8, transfer_bytes_per_s=1e8))
    trace = [request(0.0, 640, 1, 0), request(2.0, 640, 400, 0)]
    for kvstore, peers, key in ((1, False, "loaded_blocks"), (0, True, "loaded_from_peers_blocks")):
        wanted = config(profile=quick, prefill=0, decode=0, both=2, kvstore=kvstore, peers=peers)
        values, cluster = run(wanted, trace)
        assert [value.prefill for value in values] == ["d0", "d1"]
        assert cluster.use()[key] == 10
        assert [value.reused for value in values] == [0, 639]


def test_prompts_may_be_computed_at_prefill_and_decoded_at_an_instance_in_the_role_both() -> None:
    trace = [request(0.05 * number, 400, 10, 100 * number) for number in range(30)]
    values, cluster = run(config(prefill=1, decode=0, both=1, kvstore=1), trace)
    assert {value.outcome for value in values} == {DONE}
    assert {value.prefill for value in values} == {"p0", "d0"}
    assert cluster.prefills[0].use.steps


def test_several_answers_and_a_lost_instance() -> None:
    trace = [replace(request(0.1 * number, 300, 15, 100 * number), choices=1 + number % 3) for number in range(20)]
    ended: list[Request] = []
    cluster = Cluster(config(prefill=0, decode=0, both=2, kvstore=1), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(1.0), lambda _: cluster.crash("d0", 2.0))
    cluster.run()
    cluster.check_at_rest()
    assert {value.outcome for value in ended} == {DONE}
    assert all(answer.made == 15 for value in ended for answer in value.answers)
    assert max(value.attempts for value in ended) > 1


@pytest.mark.parametrize("seed", range(8))
def test_storms_at_instances_in_the_role_both(seed: int) -> None:
    trace = [request(0.3 * number, 200 + 40 * (number % 7), 12, 50 * (number % 9)) for number in range(40)]
    storm(config(prefill=seed % 2, decode=seed % 3 % 2, both=2, kvstore=1), trace, seed)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"decode": 0}, "decode"),
        ({"both": -1}, "both"),
        ({"both": 1, "roles": RoleLimits(swap=True)}, "both"),
    ],
)
def test_wrong_numbers_are_refused(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**wrong)
    assert refused.value.field == field
