"""Prefixes of whole prompts, loaded from kvstores and other instances before the rest is computed here.

A load is waited for whole: a step that follows a load layer by layer would hold up the answers in the step.
"""

from moonpool.base.scheduling.latency import load_is_cheaper, prompt_work
from moonpool.base.scheduling.state_machine import CancelIo, digest_of
from moonpool.engine.decode.core.actions import BeginPrompt
from moonpool.engine.decode.core.in_flight import PromptLoadFlight
from moonpool.engine.decode.core.prompts import PromptQueue
from moonpool.engine.decode.core.request import DecodeRequest, PrefixState, RequestStatus
from moonpool.engine.decode.core.restoring import begin_prompt_here
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.scheduler.prefix_sources import (
    KVSource,
    KVSources,
    LoadBlocks,
    LoadEnded,
    PrefixLoaded,
    PrefixMiss,
)


class PromptLoads:
    """Loads prefixes into the bound blocks of prompts whose turn has come.

    Args:
        state: shared state of the scheduler.
        prompts: the order of prompts.

    Attributes:
        loading: LOADING requests, in the order in which their loads began.
        sources: where prefixes are loaded from.
        loaded_blocks: blocks that arrived whole.
    """

    def __init__(self, state: DecodeState, prompts: PromptQueue) -> None:
        self._state, self._settings, self._prompts = state, state.settings, prompts
        self.loading: list[DecodeRequest] = []
        self.sources = KVSources(state.tracker, state.settings.load_timeout_s)
        self.loaded_blocks = 0

    def begin(self, request: DecodeRequest, held: int) -> bool:
        """Begin to load behind the `held` cached blocks, from the best source for which loading pays.

        Returns:
            Whether a load has begun; else the prompt is computed behind these blocks.
        """
        request.prefix = PrefixState(held)
        if not self._load(request, range(len(request.sources))):
            return False
        request.set_status(RequestStatus.LOADING)
        self.loading.append(request)
        return True

    def give_up(self, request: DecodeRequest) -> None:
        """Cancel the load of a request that ends; the blocks stay pinned until the load has ended."""
        self.loading.remove(request)
        self._state.act(CancelIo(request.prefix.io))

    def ended(self, flight: PromptLoadFlight, result: LoadEnded) -> None:
        """Note that a load has ended; the request, unless it has ended, computes the rest or loads anew."""
        source, request, state = flight.request.sources[flight.source], flight.request, self._state
        nbytes = self._settings.moved_bytes(flight.wanted)
        self.sources.learn(source, nbytes, flight.wanted, result, state.now)
        self.loaded_blocks += result.blocks
        if request.status is not RequestStatus.LOADING:
            return
        prefix = request.prefix
        if result.missing is not None and not source.peer:  # a peer may lend fewer, and reports lost blocks
            prefix.misses.append(PrefixMiss(flight.source, prefix.held + result.missing, result.windowed))
        if not result.blocks and self._load(request, range(flight.source + 1, len(request.sources))):
            return
        if result.blocks == flight.wanted:
            prefix.loads.append(PrefixLoaded(flight.source, result.blocks, result.seconds))
        self.loading.remove(request)
        self._begin_behind(request, prefix.held + result.blocks)

    def _begin_behind(self, request: DecodeRequest, end: int) -> None:
        """Compute what is behind the blocks up to `end`, which have all that was asked for."""
        [sequence] = request.sequences
        blocks, manager = sequence.table.blocks, self._state.blocks
        end = manager.continuable(blocks[:end]) if end < request.prefix.asked_end else end
        for index in range(request.prefix.held, end):
            manager.register(blocks[index], sequence.keys[index], request.owner)
        begin_prompt_here(request, end, self._settings, manager)
        self.report(request)

    def report(self, request: DecodeRequest) -> None:
        """Tell that the prompt is computed from now on."""
        prefix, there = request.prefix, request.sequences[0].computed
        cached = min(there, self._settings.reused_tokens(request.spec.tokens, prefix.held))
        reads = tuple(prefix.misses), tuple(prefix.loads)
        self._state.act(BeginPrompt(request.id, cached, there - cached, *reads))

    def _load(self, request: DecodeRequest, sources: range) -> bool:
        """Begin a load from the first of these sources for which loading pays; return whether there was one."""
        held, state, settings = request.prefix.held, self._state, self._settings
        for index in sources:
            end = self._worth(request, request.sources[index], held)
            if not end:
                continue
            [sequence] = request.sequences
            nbytes, blocks = settings.moved_bytes(end - held), tuple(sequence.table.blocks[held:end])
            state.blocks.give_slots(blocks[-settings.window_blocks :] if settings.window_blocks else ())
            io = state.ios.begin(PromptLoadFlight(request, index, end - held, (sequence.table,)))
            request.prefix.io, request.prefix.asked_end = io, end
            timeout_s = self.sources.timeout_s(request.sources[index], nbytes)
            state.act(LoadBlocks(io, request.id, index, held, blocks, timeout_s))
            return True
        return False

    def _worth(self, request: DecodeRequest, source: KVSource, held: int) -> int:
        """Return leading blocks that the prompt should have after a load from a source; 0: computing is cheaper."""
        settings, tokens = self._settings, request.spec.tokens
        end = min(source.blocks, self._prompts.reusable_blocks(request))
        if end <= held or self.sources.is_paused(source, self._state.now):
            return 0
        if self._state.budget.window_blocks_available < min(settings.window_blocks, end - held):
            return 0
        most = settings.max_num_batched_tokens
        local = prompt_work(tokens, settings.reused_tokens(tokens, held), most)
        rest = prompt_work(tokens, settings.reused_tokens(tokens, end), most)
        nbytes = settings.moved_bytes(end - held)
        return end if load_is_cheaper(self.sources.speeds(source), local, rest, nbytes=nbytes) else 0

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that each LOADING request has its load in flight."""
        assert {request.id for request in requests if request.status is RequestStatus.LOADING} == {
            request.id for request in self.loading
        }
        for request in self.loading:
            flight = self._state.ios.get(request.prefix.io)
            assert isinstance(flight, PromptLoadFlight)
            assert flight.request is request

    def digest(self) -> bytes:
        """Return a hash of the loads and the sources."""
        return digest_of([request.id for request in self.loading], self.sources, self.loaded_blocks)
