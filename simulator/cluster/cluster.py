"""A whole cluster in virtual time: wires its parts, feeds it with a trace, crashes parts of it."""

from collections.abc import Callable, Iterable, Iterator

from simulator.cluster.conductor import Conductor
from simulator.cluster.config import ClusterConfig
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.prefill import Peers, PrefillInstance
from simulator.cluster.requests import Attempt, Request, keys_of
from simulator.cluster.store import Store
from simulator.kernel.calls import Calls
from simulator.kernel.clock import PS, World, ps
from simulator.kernel.links import Link, Network
from simulator.traces.mooncake import TraceRequest

DETECTION_S = 3.0
"""Until the conductor notices that an instance is lost."""


class Cluster:
    """All parts.

    Args:
        config: what there is.
        ended: called with each request that has ended.
        longest_run: decode steps at once at most.
    """

    def __init__(
        self,
        config: ClusterConfig,
        ended: Callable[[Request], None],
        *,
        longest_run: int = 1 << 40,
    ) -> None:
        self.config = config
        self.world = World()
        self.network = Network(self.world)
        self.calls = Calls(self.world, config.delays, config.seed)
        self.stores = [self._store(number) for number in range(config.kvstore)]
        self.prefills = [self._prefill(number) for number in range(config.prefill)]
        self.decodes = [self._decode(number, longest_run) for number in range(config.decode)]
        self.conductor = Conductor(self.world, config, self.calls, self.prefills, self.decodes, ended)
        self._came = 0

    def _store(self, number: int) -> Store:
        name = f"s{number}"
        return Store(
            self.world, self.network, self.config, name, lambda new, old: self._keys(name, list(new), list(old))
        )

    def _prefill(self, number: int) -> PrefillInstance:
        name = f"p{number}"
        peers = Peers(
            self._token, self._given_up, lambda new, old: self._keys(name, list(new), list(old)),
            self._open, lambda attempt: self.decodes[attempt.decode].heard(attempt), self._whole,
        )  # fmt: skip
        return PrefillInstance(self.world, self.network, self.config, name, self.stores, self.calls, peers)

    def _decode(self, number: int, longest_run: int) -> DecodeInstance:
        name = f"d{number}"
        return DecodeInstance(
            self.world, self.network, self.config, name, self.stores, self._answered,
            lambda: self._room(number), self._ended, self._given_up,
            lambda new, old: self._keys(name, list(new), list(old)), longest_run,
        )  # fmt: skip

    # Requests

    def feed(self, requests: Iterable[TraceRequest]) -> None:
        """Lets requests come at their times; the trace is read as time goes on."""
        self._next(iter(requests))

    def _next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            at = ps(request.timestamp / 1000 / self.config.rate)
            self.world.at(max(at, self.world.now), self._arrive, (request, requests))

    def _arrive(self, coming: tuple[TraceRequest, Iterator[TraceRequest]]) -> None:
        trace, requests = coming
        self._came += 1
        keys = keys_of(trace, self.config.block_tokens)
        self.conductor.place(Request(self._came, self.world.now, trace.input_length, trace.output_length, keys))
        self._next(requests)

    # Messages between parts

    def _keys(self, name: str, stored: list[bytes], removed: list[bytes]) -> None:
        self.conductor.placement.keys_changed(name, stored, removed)

    def _answered(self, attempt: Attempt, promised: bool) -> None:
        self.calls.send(lambda: self.conductor.asked(attempt, promised), reliable=True)

    def _token(self, attempt: Attempt) -> None:
        self.calls.send(lambda: self.conductor.first_token(attempt))

    def _open(self, attempt: Attempt) -> Link | None:
        decode = self.decodes[attempt.decode]
        return decode.receives if decode.up and decode.open(attempt) else None

    def _whole(self, attempt: Attempt) -> bool:
        attempt.whole = self.decodes[attempt.decode].kv_whole(attempt)
        return attempt.whole

    def _ended(self, attempt: Attempt) -> None:
        self.calls.send(lambda: self.conductor.answered(attempt))

    def _room(self, decode: int) -> None:
        self.calls.send(lambda: self.conductor.room(decode), reliable=True)

    def _given_up(self, attempt: Attempt) -> None:
        self.calls.send(lambda: self.conductor.failed(attempt))

    # Faults

    def crash(self, name: str, down_s: float) -> None:
        """An instance or store loses everything and comes back, empty, after some time."""
        kind, number = name[0], int(name[1:])
        if kind == "s":
            self.stores[number].begin_anew()
            for prefill in self.prefills:
                prefill.lose_store(number)
            self.conductor.store_lost(name)
            return
        instance = self.prefills[number] if kind == "p" else self.decodes[number]
        if instance.up:
            instance.crash()
            instance.up = False
            self.world.after(ps(DETECTION_S), lambda _: self.conductor.lost(name))
            self.world.after(ps(max(down_s, DETECTION_S) + 1.0), self._back, name)

    def _back(self, name: str) -> None:
        instance = self.prefills[int(name[1:])] if name[0] == "p" else self.decodes[int(name[1:])]
        instance.up = True
        self.conductor.back(name)

    # The end

    def run(self) -> None:
        """Until nothing happens any more."""
        self.world.run()

    def check_at_rest(self) -> None:
        """Asserts that every request has ended and that everything came back."""
        assert not len(self.conductor)
        assert not self.network.flows
        for prefill in self.prefills:
            prefill.check_at_rest()
        for decode in self.decodes:
            decode.check_at_rest()
        self.conductor.placement.check_at_rest()

    def use(self) -> dict[str, float]:
        """How busy the parts were: shares of the time, and means."""
        elapsed = max(1, self.conductor.ended_at)
        decode = [instance.use for instance in self.decodes]
        steps = max(1, sum(use.steps for use in decode))
        return {
            "prefill_busy": sum(instance.use.busy for instance in self.prefills) / elapsed / len(self.prefills),
            "decode_busy": sum(use.busy for use in decode) / elapsed / len(decode),
            "decode_batch": sum(use.sequence_steps for use in decode) / steps,
            "preempted": sum(instance.preempted for instance in self.decodes),
            "loaded_blocks": sum(store.read_blocks for store in self.stores),
            "loaded_from_disk_blocks": sum(store.disk_blocks for store in self.stores),
            "virtual_s": elapsed / PS,
        }
