"""Begins prompts that are computed here: whole ones in their turn, and short remainders at once."""

from bisect import insort

from moonpool.engine.decode.core.actions import SetBlockTable
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.batch_slots import BatchSlots
from moonpool.engine.decode.core.preemption import PreemptedRequests
from moonpool.engine.decode.core.prompt_loads import PromptLoads
from moonpool.engine.decode.core.prompts import PromptQueue
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from moonpool.engine.decode.core.restoring import begin_prompt_here
from moonpool.engine.decode.core.state import DecodeState


class PromptStarts:
    """Begins prompts beside the batch and the requests that recompute.

    Args:
        state: shared state of the scheduler.
        batch: the running sequences.
        waiting: requests that wait for a batch slot or a block.
        recomputing: requests that compute missing KV; begun prompts are added.
        preempted: the preempted requests.

    Attributes:
        prompts: whole prompts that wait for their turn, and their order.
        loads: prefixes of whole prompts that are being loaded.
        slots: batch slots taken, kept and due.
        begun: prompts begun so far.
        unbound: a prompt that cannot begin, as its cached blocks lack slices, though nothing else is here.
    """

    def __init__(
        self,
        state: DecodeState,
        batch: RunningBatch,
        waiting: list[DecodeRequest],
        recomputing: list[DecodeRequest],
        preempted: PreemptedRequests,
    ) -> None:
        self._state, self._settings, self._budget, self._batch = state, state.settings, state.budget, batch
        self._waiting, self._recomputing, self._preempted = waiting, recomputing, preempted
        self.prompts = PromptQueue(state, batch)
        self.loads = PromptLoads(state, self.prompts)
        self.slots = BatchSlots(state.settings.max_num_seqs, batch, recomputing, self.loads.loading)
        self.begun = 0
        self.unbound: DecodeRequest | None = None

    def compute_at_once(self, request: DecodeRequest) -> bool:
        """Bind the promised blocks and compute the prompt behind the cached prefix, as after preemption.

        Returns:
            False if that is not possible: no slot is free, preempted requests wait for blocks, or cached blocks
            lack slices and the pool has none to compute these blocks anew.
        """
        if request.is_group or self._preempted.queue or not self.slots.has_room_for_prompt(request):
            return False
        return self._bind(request, load=False)

    def following(self) -> DecodeRequest | None:
        """Return the waiting prompt whose turn it is, if it may begin beside all others.

        Requests that were preempted, or wait for more slots than are free, go first. A step's worth of prompts is begun
        at a time: later ones may belong to a tenant with a smaller share, or find more blocks cached.
        """
        if not self.prompts.waiting:
            return None
        if self._preempted.queue and (self._is_busy or self._preempted.blocks_being_freed):
            return None
        if not all(map(self.slots.has_room, self._waiting)):
            return None
        enough = self.prompts.tokens_left(self._recomputing) >= self._settings.max_num_batched_tokens
        for request in self.prompts.in_turn([*self._recomputing, *self.loads.loading]):
            if self.slots.has_room_for_prompt(request) and not (enough and not request.sources):
                return request  # a load is begun ahead of the prompt's turn: the blocks are here then
        return None

    @property
    def ready(self) -> list[DecodeRequest]:
        """Prompts that the next step could compute."""
        begun = [request for request in self._recomputing if request.lacks_first_token]
        following = self.following()
        return [*begun, *([following] if following is not None else ())]

    @property
    def _is_busy(self) -> bool:
        """Whether requests run or could run."""
        return bool(len(self._batch) or self._waiting or self._recomputing)

    def begin_all(self) -> None:
        """Begin the prompts whose turn it is."""
        while self.begin():
            pass

    def begin(self, *, even_if_others_wait: bool = False) -> bool:
        """Begin the next prompt; return whether there was one that could begin."""
        request = self.following()
        if request is None and even_if_others_wait:
            begun = [*self._recomputing, *self.loads.loading]
            request = next(filter(self.slots.has_room_for_prompt, self.prompts.in_turn(begun)), None)
        if request is None:
            return False
        self._budget.match_again(request, self.prompts.reusable_blocks(request))
        if not self._bind(request, load=True):
            idle = not self._is_busy and not self._preempted.queue and not list(self._state.ios)
            self.unbound = request if idle else None
            return False
        self.prompts.remove(request)
        return True

    def _bind(self, request: DecodeRequest, *, load: bool) -> bool:
        """Bind a prompt's promised blocks and begin; False if cached blocks lack slices and cannot be given back.

        `load`: a prefix is loaded first, if that pays.
        """
        settings, most = self._settings, self.prompts.reusable_blocks(request)
        if not self._budget.keep_continuable(request, most, settings.window_blocks):
            return False
        held = len(request.blocks)
        self._budget.bind(request)
        self.begun += 1
        if load:
            self._state.act(SetBlockTable(request.id, tuple(request.blocks)))
            if self.loads.begin(request, held):
                return True
        begin_prompt_here(request, held, settings, self._state.blocks)
        if load:
            self.loads.report(request)
        at = self._recomputing if request.status is RequestStatus.RECOMPUTING else self._waiting
        insort(at, request, key=lambda other: other.order_key)
        return True

    def answers_begin(self, request: DecodeRequest) -> None:
        """Note that a prompt's first tokens are known; the request is in no list now."""
        request.turn = None
        self._recomputing.remove(request)
