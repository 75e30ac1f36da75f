"""Prefix loads from kvstores and other instances, ahead of the steps that need them.

A failing source is skipped for a while: the failure delays one request by one deadline, not every request.
"""

from moonpool.base.scheduling.latency import load_is_cheaper, load_seconds, prompt_work
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.prefill.core.forecast import is_computed_by_other, overtake_at, wait_for_other_load_until
from moonpool.engine.prefill.core.in_flight import LoadFlight
from moonpool.engine.prefill.core.request import OvertakenLoad, PrefillRequest, PrefixLoad
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.prefill.core.step_planner import StepPlanner
from moonpool.engine.prefill.core.transfers import OutgoingTransfers
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.prefix_sources import KVSources, LoadBlocks, LoadEnded, PrefixLoaded, PrefixMiss


class PrefixLoads:
    """Loads prefixes into the pool.

    Attributes:
        loaded_blocks: blocks that arrived whole.
        sources: where prefixes are loaded from.
        overtaken: loads that took longer than computing their blocks.
        undecided: requests that wait for another request before deciding (`decide_again`).
    """

    def __init__(self, state: PrefillState, steps: StepPlanner, sends: OutgoingTransfers) -> None:
        self._state = state
        self._steps = steps
        self._sends = sends
        self.sources = KVSources(state.tracker, state.settings.load_timeout_s)
        self.undecided: dict[int, None] = {}
        self._in_flight: dict[int, int] = {}  # request of each load
        self.loaded_blocks = 0
        self.overtaken = 0

    def decide(self, request: PrefillRequest) -> None:
        """Load a prefix into a starting request's blocks, from the best source for which loading pays.

        If another request loads or computes the same blocks, the decision waits for that request (`decide_again`).
        """
        if self._comes_for_other(request):  # soon cached: a second load would bring the same blocks
            self.undecided[request.id] = None
            return
        while request.prefix.next_source < len(request.sources):
            blocks = self._worth(request)
            if blocks:
                self._begin(request, request.prefix.blocks, blocks)
                return
            request.prefix.next_source += 1

    def decide_again(self) -> None:
        """Decide for requests that waited for another request and need not any more."""
        for number in list(self.undecided):
            request = self._state.requests.get(number)
            if request is None or request.first_step_at is not None:
                del self.undecided[number]
            elif not self._comes_for_other(request):
                del self.undecided[number]
                self._steps.match_again(request)
                self.decide(request)

    def _comes_for_other(self, request: PrefillRequest) -> bool:
        """Return whether another request loads or computes the blocks that this request could load."""
        return bool(request.sources) and (
            wait_for_other_load_until(self._state, request) is not None or is_computed_by_other(self._state, request)
        )

    def layer_loaded(self, io: int, layer: int) -> None:
        """Note that all of a layer's blocks are in the pool."""
        request = self._request_of(io)
        if request is None or request.prefix.load is None:
            return
        request.prefix.load.layers, request.prefix.load.progressed_at = layer + 1, self._state.now
        if not layer:
            request.prefix.load.first_at = self._state.now
        self._sends.add(request, layer, request.prefix.load.first, request.prefix.load.end, None)
        self._steps.open_gates(request)

    def ended(self, io: int, flight: LoadFlight, result: LoadEnded) -> None:
        """End a load; blocks that did not arrive are computed."""
        del self._in_flight[io]
        self.sources.learn(flight.source, flight.nbytes, flight.wanted, result, self._state.now)
        self.loaded_blocks += result.blocks
        request = self._state.requests.get(flight.request)
        overtaken = request.prefix.overtaken if request is not None else None
        if request is not None and overtaken is not None and overtaken.load.io == io:
            self._overtaken_ended(request, overtaken, flight, result)
            return
        if request is None or request.prefix.load is None or request.prefix.load.io != io:
            return
        load = request.prefix.load
        if result.missing is not None and not flight.source.peer:  # a peer may lend fewer, and reports lost blocks
            request.prefix.misses.append(PrefixMiss(load.source, load.first + result.missing, result.windowed))
        if result.blocks == flight.wanted:
            request.prefix.loads.append(PrefixLoaded(load.source, result.blocks, result.seconds))
            self._load_over(request, load.end)
        # Once a layer is handed on, the layer's blocks may be on the way to decode. Another source's copy may differ in
        # the last bit, and must not be written over these blocks.
        elif result.blocks or load.layers or not self._load_from_next(request, load):
            request.prefix.load = None
            assert request.table is not None
            end = self._state.manager.continuable(request.table.blocks[: load.first + result.blocks])
            self._steps.rewind(request, end)
            self._load_over(request, end)

    def digest(self) -> bytes:
        """Return a hash of the paused sources, the undecided requests and the counters."""
        counts = self.loaded_blocks, self.overtaken
        return digest_of(self.sources, self.undecided, self._in_flight, *counts)

    # --- overtaking ------------------------------------------------------------------------------------------------

    def overtake_at(self) -> float | None:
        """Return when the next load is overtaken, if no event comes before; None = not foreseen."""
        if not self._in_flight:
            return None  # most of the time
        state, others = self._state, self._others()
        requests = [
            request for number in self._in_flight.values() if (request := state.requests.get(number)) is not None
        ]
        times = [
            overtake_at(state, request, request.prefix.load, others)
            for request in requests
            if request.prefix.load is not None
        ]
        return min([at for at in times if at is not None], default=None)

    def overtake(self) -> None:
        """Compute the blocks of loads that take longer than computing, into other blocks, while the loads go on."""
        if not self._in_flight:
            return  # most of the time
        state, others = self._state, self._others()
        for io, number in list(self._in_flight.items()):
            request = state.requests.get(number)
            load = request.prefix.load if request is not None else None
            if request is None or load is None:
                continue
            at = overtake_at(state, request, load, others)
            if at is not None and at <= state.now:
                self._overtake(request, load, io)

    def _others(self) -> int:
        """Return requests that wait for the engine beside a request that loads."""
        state = self._state
        return len(state.waiting) + sum([not request.finished for request in state.started.values()]) - 1

    def _overtake(self, request: PrefillRequest, load: PrefixLoad, io: int) -> None:
        state, flight = self._state, self._state.ios.get(io)
        assert request.table is not None
        assert isinstance(flight, LoadFlight)
        # The load goes on into its blocks; computing gets new ones, as both would write the same.
        own = BlockTable(request.table.blocks[load.first : load.end], pins=2)
        request.table.blocks[load.first : load.end] = state.manager.allocate(load.end - load.first)
        request.table.unpin(state.manager)
        flight.tables = (own,)
        request.prefix.load, request.prefix.overtaken = None, OvertakenLoad(load, own)
        self._steps.rewind(request, load.first)
        self.overtaken += 1

    def computed(self, request: PrefillRequest) -> None:
        """Drop or takes an overtaken load, after a part of the request was computed."""
        overtaken, size = request.prefix.overtaken, self._state.settings.block_size
        if overtaken is None:
            return
        load = overtaken.load
        if request.computed >= min(load.end * size, request.spec.tokens):
            self._count_overtaken(request, load, load.end)
            if not overtaken.whole:
                self._learn_from_part(load)
            self.give_up(request)
        elif overtaken.whole:
            self._take_rest(request, overtaken)

    def _count_overtaken(self, request: PrefillRequest, load: PrefixLoad, end: int) -> None:
        """Count the tokens before block `end` that were computed in place of the load, not found cached meanwhile."""
        size = self._state.settings.block_size
        request.prefix.overtaken_tokens += max(0, end * size - max(load.first * size, request.prefix.cached))

    def give_up(self, request: PrefillRequest) -> None:
        """Cancel an overtaken load."""
        overtaken, request.prefix.overtaken = request.prefix.overtaken, None
        if overtaken is not None:
            self._state.cancel(overtaken.load.io)
            overtaken.table.unpin(self._state.manager)

    def _learn_from_part(self, load: PrefixLoad) -> None:
        """Learn how slow a load was that did not arrive whole: as if half of the next layer had come."""
        state, flight = self._state, self._state.ios.get(load.io)
        assert isinstance(flight, LoadFlight)
        nbytes = flight.nbytes * (load.layers + 0.5) / state.settings.layers
        state.tracker.observe_load(round(nbytes), state.now - load.began_at, peer=flight.source.peer)

    def _overtaken_ended(
        self, request: PrefillRequest, overtaken: OvertakenLoad, flight: LoadFlight, result: LoadEnded
    ) -> None:
        load = overtaken.load
        if result.missing is not None and not flight.source.peer:
            request.prefix.misses.append(PrefixMiss(load.source, load.first + result.missing, result.windowed))
        overtaken.whole = result.blocks == flight.wanted
        if overtaken.whole:
            request.prefix.loads.append(PrefixLoaded(load.source, result.blocks, result.seconds))
            self.computed(request)
        else:
            self.give_up(request)

    def _take_rest(self, request: PrefillRequest, overtaken: OvertakenLoad) -> None:
        """Take the blocks that are not computed from the load, once no step computes any."""
        state, load, table = self._state, overtaken.load, request.table
        if request.slices_in_flight:
            return  # a step writes into the blocks that would be exchanged
        assert table is not None
        first = request.computed // state.settings.block_size
        at = first - load.first
        rest = overtaken.table.blocks[at:]
        overtaken.table.blocks[at:], table.blocks[first : load.end] = table.blocks[first : load.end], rest
        self._count_overtaken(request, load, first)
        tokens = state.settings.reused_tokens(request.spec.tokens, load.end)
        request.prefix.blocks, request.prefix.loaded = load.end, request.prefix.loaded + tokens - request.computed
        for copy, until in enumerate(request.put_until):  # what the store gave, or holds, need not be written
            request.put_until[copy] = max(until, min(request.copies[copy].held or 0, load.end))
        state.advance(request, tokens)
        self._sends.leading(request, load.end)
        self.give_up(request)

    # --- parts -----------------------------------------------------------------------------------------------------

    def _load_over(self, request: PrefillRequest, end: int) -> None:
        """Count the blocks up to `end` as loaded: they are whole."""
        tokens = self._state.settings.reused_tokens(request.spec.tokens, end)
        request.prefix.load, request.prefix.blocks = None, end
        request.prefix.loaded = tokens - request.prefix.cached
        self._state.advance(request, tokens)
        self._state.pass_windows(request)
        self._sends.leading(request, end)
        self._steps.open_gates(request)

    def _load_from_next(self, request: PrefillRequest, load: PrefixLoad) -> bool:
        for source in range(load.source + 1, len(request.sources)):
            if not self.sources.is_paused(request.sources[source], self._state.now):
                request.prefix.next_source = source
                self._begin(request, load.first, load.end)
                return True
        return False

    def _begin(self, request: PrefillRequest, first: int, end: int) -> None:
        state = self._state
        assert request.table is not None
        assert first < end <= state.reusable_blocks(request)
        index, nbytes = request.prefix.next_source, state.settings.moved_bytes(end - first)
        source = request.sources[index]
        flight = LoadFlight(request.id, source, nbytes, end - first, (request.table,))
        io = state.ios.begin(flight)
        self._in_flight[io] = request.id
        request.prefix.load = PrefixLoad(io, index, first, end, state.now, state.now)
        blocks = tuple(request.table.blocks[first:end])
        state.manager.give_slots(blocks[-state.settings.window_blocks :])
        state.act(LoadBlocks(io, request.id, index, first, blocks, self.sources.timeout_s(source, nbytes)))

    def _worth(self, request: PrefillRequest) -> int:
        """Return leading blocks that the prompt should have after the next source's load; 0: computing is cheaper."""
        source, settings = request.sources[request.prefix.next_source], self._state.settings
        speeds, blocks = self.sources.speeds(source), min(source.blocks, self._state.reusable_blocks(request))
        if self.sources.is_paused(source, self._state.now) or blocks <= request.prefix.blocks:
            return 0
        lacking = blocks - request.prefix.blocks
        if self._state.manager.num_slots_available < min(settings.window_blocks, lacking):
            return 0
        tokens = request.spec.tokens
        local = prompt_work(tokens, request.prefix.cached, settings.max_num_batched_tokens)
        rest = prompt_work(tokens, settings.reused_tokens(tokens, blocks), settings.max_num_batched_tokens)
        nbytes = settings.moved_bytes(lacking)
        return blocks if load_is_cheaper(speeds, local, rest, nbytes=nbytes, layers=settings.layers) else 0

    def expected_seconds(self, request: PrefillRequest, held: int) -> float:
        """Return predicted seconds for loading what is behind `held` blocks, from the request's first source."""
        source = next(iter(request.sources), None)
        blocks = min(source.blocks, self._state.reusable_blocks(request)) - held if source is not None else 0
        if source is None or blocks <= 0:
            return 0.0
        return load_seconds(self.sources.speeds(source), self._state.settings.moved_bytes(blocks))

    def _request_of(self, io: int) -> PrefillRequest | None:
        """Return the load's request; None if the request has ended or does not use the load any more."""
        flight = self._state.ios.get(io)
        request = self._state.requests.get(flight.request) if isinstance(flight, LoadFlight) else None
        return (
            request
            if request is not None and request.prefix.load is not None and request.prefix.load.io == io
            else None
        )
