"""A world around a prefill core, without I/O: a pool whose contents are checked, and I/O that ends when a test says so.

Every read and write of the pool is checked: a step finds the right prefix in each layer, a batch of slices and a put
read the same right contents from their begin to their end, and nobody writes what another one reads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded, Tick
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.unit.engine.kv_memory import KVMemory

BT = 16
LAYERS = 3
SETTINGS = PrefillSettings(
    num_blocks=12, block_size=BT, layers=LAYERS, block_bytes=LAYERS << 10, max_num_batched_tokens=40, stages=1
)
SPEEDS = Speeds(prefill_base_s=1e-3, prefill_per_token_s=1e-3, load_bytes_per_s=1e9)

Content = tuple[object, ...]
Event = events.Event | IoEnded[events.IoResult] | Tick


def keys(family: int, num_tokens: int) -> tuple[BlockKey, ...]:
    """Prompts of a family are prefixes of each other."""
    return tuple(BlockKey(bytes([family, index]) * 16) for index in range(num_tokens // BT))


@dataclass
class Client:
    """One request as its client sees it."""

    arrive: events.AddRequest
    accepted: bool = False
    token: actions.ReportFirstToken | None = None
    end: actions.EndRequest | None = None
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(layer, index) of the slices that left."""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that were computed and count."""
    open: bool = False
    closed: bool = False

    def content(self, index: int) -> Content:
        """What block `index` must hold."""
        if index < len(self.arrive.request.keys):
            return ("key", self.arrive.request.keys[index])
        return ("tail", self.arrive.request.keys, self.arrive.request.tokens)


@dataclass
class Flying:
    """A step in the engine."""

    order: actions.RunStep
    opened: int = -1
    layers: int = 0
    dropped: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    aborted: bool = False
    sampled: bool = False


class World:
    """Drives a core; `post` checks its invariants after every event."""

    def __init__(self, settings: PrefillSettings = SETTINGS, speeds: Speeds = SPEEDS) -> None:
        self.core = PrefillScheduler(settings, speeds)
        self.settings = settings
        self.now = 0.0
        self.clients: dict[int, Client] = {}
        self.memory = KVMemory(LAYERS, settings.windowed_layers)
        self.steps: dict[int, Flying] = {}
        self.ios: dict[int, actions.Action] = {}
        self.loaded: dict[int, int] = {}
        self._versions: dict[int, list[object]] = {}  # of the slices that an I/O reads
        self.cancelled: set[int] = set()
        self.lent: dict[int, list[tuple[int, BlockKey]]] = {}
        """By read: blocks that another instance reads, and their keys."""
        self.copied: dict[int, tuple[BlockKey, ...]] = {}
        self.done: list[actions.Action] = []
        """All actions, in order."""

    # --- events ----------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> list[actions.Action]:
        """Hands over an event; returns what was done."""
        out: list[actions.Action] = []
        if isinstance(event, events.ReplicateBlocks):
            self.copied[event.number] = event.keys
        self.core.handle(self.now, event, out)
        for action in out:
            self._perform(action)
        self.core.check_invariants()
        self.memory.check_keys(self.core.state.manager, lambda key, _: ("key", key))
        return out

    def pass_time(self, seconds: float) -> None:
        """Time passes; the core is ticked when it wants to be."""
        end, late = self.now + seconds, 0
        while (due := self.core.due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.post(Tick())
            again = self.core.due()
            late = late + 1 if again is not None and again <= self.now else 0
            assert late <= len(self.core.state.requests), "ticked for nothing, again and again"
        self.now = max(self.now, end)

    def arrive(
        self,
        num_tokens: int,
        family: int = 0,
        *,
        held: int | None = None,
        sources: tuple[KVSource, ...] = (),
        copies: tuple[events.WriteBackTarget, ...] = (),
        tenant: str = "",
        priority: int = 0,
        weight: float = 1.0,
        reuse: bool = True,
        transient: bool = False,
        max_queue_s: float | None = None,
        delay_s: float = 0.0,
        token_cost: int = 1,
        rows: tuple[int, float] = (0, 0.0),
    ) -> Client:
        number = len(self.clients) + 1
        chain = keys(family, num_tokens)
        spec = EngineRequest(
            chain,
            num_tokens,
            num_tokens,
            tenant=tenant,
            priority=priority,
            weight=weight,
            transient=transient,
            token_cost=token_cost,
        )
        client = Client(events.AddRequest(number, spec, held, sources, copies, reuse, max_queue_s, delay_s, *rows))
        self.clients[number] = client
        self.post(client.arrive)
        return client

    def end(self, io: int, result: events.IoResult) -> list[actions.Action]:
        action = self.ios.pop(io)
        self._look(action, io)
        self.loaded.pop(io, None)
        self.cancelled.discard(io)
        return self.post(IoEnded(io, result))

    def load_layer(self, io: int) -> None:
        """The next layer of a load comes."""
        order, layer = self.ios[io], self.loaded[io]
        assert isinstance(order, LoadBlocks)
        end = order.first + len(order.blocks)
        for index, block in enumerate(order.blocks, order.first):
            comes = self._is_read(layer, index, end)
            self.memory[layer, block] = self.clients[order.id].content(index) if comes else ("behind the window",)
        self.loaded[io] = layer + 1
        self.post(events.LayerLoaded(io, layer))

    def _is_read(self, layer: int, index: int, end: int) -> bool:
        """Whether a read of a chain up to block `end` brings a slice."""
        return layer not in self.settings.windowed_layers or index >= end - self.settings.window_blocks

    def load_all(self, io: int) -> None:
        """The rest of a load comes, and it ends well."""
        order = self.ios[io]
        assert isinstance(order, LoadBlocks)
        while self.loaded[io] < LAYERS:
            self.load_layer(io)
        self.end(io, LoadEnded(len(order.blocks), seconds=0.01))

    def lend(self, family: int, blocks: int) -> int:
        """Another instance begins to read a chain; returns the read's number."""
        number, chain = len(self.done) + 1, keys(family, blocks * BT)
        [lent] = [action for action in self.post(LendBlocks(number, chain)) if isinstance(action, BlocksLent)]
        self.lent[number] = list(zip(lent.blocks, chain, strict=False))
        self._look_at_lent(number)
        return number

    def take_back(self, number: int) -> None:
        """The read ends: all the time nobody has written what was lent."""
        self._look_at_lent(number)
        del self.lent[number]
        self.post(ReturnBlocks(number))

    def _look_at_lent(self, number: int) -> None:
        for block, key in self.lent[number]:
            assert all(self.memory[layer, block] == ("key", key) for layer in range(LAYERS)), f"read {number} is wrong"

    def copy(self, family: int, blocks: int) -> None:
        """A chain is to be copied here."""
        chain = keys(family, blocks * BT)
        self.post(events.ReplicateBlocks(len(self.done) + 1, chain, KVSource("peer", blocks, peer=True)))

    def end_copy(self, io: int, blocks: int) -> list[actions.Action]:
        """So many blocks of a copy have come."""
        order = self.ios[io]
        assert isinstance(order, actions.ReadReplica)
        came = zip(order.blocks[:blocks], self.copied[order.number][order.first :], strict=False)
        end = len(order.blocks) if blocks >= len(order.blocks) else 0
        for index, (block, key) in enumerate(came):
            for layer in range(LAYERS):
                comes = self._is_read(layer, index, end)
                self.memory[layer, block] = ("key", key) if comes else ("behind the window",)
        return self.end(io, LoadEnded(min(blocks, len(order.blocks)), seconds=0.01))

    def can_compute(self, io: int) -> bool:
        step = self.steps[io]
        return not step.aborted and step.layers < LAYERS and (not step.order.gated or step.opened >= step.layers)

    def compute_layer(self, io: int) -> None:
        """A step computes its next layer."""
        step = self.steps[io]
        for index, chunk in enumerate(step.order.chunks):
            self._compute(chunk, step.layers, garbage=index in step.dropped)
        step.layers += 1
        self.post(events.LayerComputed(io, step.layers - 1))

    def _compute(self, chunk: actions.ChunkOrder, layer: int, *, garbage: bool) -> None:
        client, first = self.clients[chunk.id], chunk.start // BT
        seen = 0 if layer not in self.settings.windowed_layers else chunk.start + 1 - self.settings.window_blocks * BT
        for index, block in enumerate(chunk.blocks):
            if index < seen // BT:
                continue
            if index < first or chunk.full_hit:
                right = garbage or self.memory[layer, block] == client.content(index)
                assert right, f"block {index} of request {chunk.id} is not there in layer {layer}"
            else:
                whole = chunk.last or (index + 1) * BT <= chunk.end
                self.memory[layer, block] = ("garbage",) if garbage or not whole else client.content(index)
                is_read = not self.settings.states_alone or index == len(chunk.blocks) - 1
                assert not is_read or self.memory[layer, block], f"block {index} of request {chunk.id} has no slot"

    def sample(self, io: int) -> list[actions.Action]:
        """All layers are computed: the tokens are told before the step ends."""
        step = self.steps[io]
        assert step.layers == LAYERS
        step.sampled = True
        told = {
            request.id  # a sequence whose prefix is on its way may still be dropped
            for request in self.core.steps.sampled(io)
            if request.prefix.load is None and request.prefix.overtaken is None
        }
        self._count(step, [index for index, chunk in enumerate(step.order.chunks) if chunk.id in told])
        return self.post(events.TokensSampled(io))

    def _count(self, step: Flying, chunks: Iterable[int]) -> None:
        for index in sorted(set(chunks) - step.dropped - step.counted):
            step.counted.add(index)
            chunk = step.order.chunks[index]
            if self.clients[chunk.id].end is None:
                self.clients[chunk.id].counted.append((chunk.start, chunk.end))

    def end_step(self, io: int, *, aborted: bool = False, pictures: tuple[int, float] = (0, 0.0)) -> None:
        """A step ends; the engine gives it up by itself where it was not told so.

        `pictures`: tokens of pictures that were encoded, and seconds.
        """
        step = self.steps.pop(io)
        aborted = (aborted or step.aborted) and not step.sampled
        if aborted and step.layers < LAYERS:  # until now, the engine has computed the next layer
            for chunk in step.order.chunks:
                self._compute(chunk, step.layers, garbage=True)
        if not (aborted or step.aborted):  # what is given up does not count, though its tokens came
            self._count(step, range(len(step.order.chunks)))
        self.ios.pop(io)
        self.cancelled.discard(io)
        self.post(IoEnded(io, events.StepEnded(aborted, 0.01, 1.0, *pictures)))

    def run_step(self, io: int) -> None:
        """A step is run to its end."""
        while self.can_compute(io):
            self.compute_layer(io)
        if self.steps[io].aborted or self.steps[io].layers == LAYERS:
            self.end_step(io)

    # --- actions ---------------------------------------------------------------------------------------------------

    def _perform(self, action: actions.Action) -> None:
        self.done.append(action)
        if (io := getattr(action, "io", None)) is not None and not isinstance(action, CancelIo):
            assert io not in self.ios
            self.ios[io] = action
        match action:
            case MoveSlots(moves):
                self.memory.move(moves)
            case actions.RunStep():
                assert all(step.order.io < action.io for step in self.steps.values())
                assert len({chunk.id for chunk in action.chunks}) == len(action.chunks)
                self.steps[action.io] = Flying(action)
            case actions.OpenKVGate():
                self.steps[action.step].opened = max(self.steps[action.step].opened, action.layer)
            case actions.DropSequenceSlice():
                self.steps[action.step].dropped.add(action.index)
            case actions.GiveUpStep():
                self.steps[action.step].aborted = True
            case LoadBlocks():
                self.loaded[action.io] = 0
            case CancelIo():
                assert action.io in self.ios
                self.cancelled.add(action.io)
            case actions.SendSlices():
                self._send(action)
            case actions.WriteBackBlocks():
                self._look(action, action.io)
            case actions.OpenTransfer() | actions.AwaitVerdict():
                pass
            case _:
                self._tell(action)

    def _send(self, order: actions.SendSlices) -> None:
        client = self.clients[order.id]
        assert client.open
        assert not client.closed
        self._look(order, order.io)
        held = client.arrive.held_blocks
        assert held is not None
        for piece in order.pieces:
            for index in range(piece.first, piece.first + len(piece.blocks)):
                assert index >= held, "decode holds it"
                client.sent[piece.layer, index] += 1
                assert client.sent[piece.layer, index] == 1, "a slice leaves once"

    def _look(self, action: actions.Action, io: int) -> None:
        """What is read from the pool must be right at the begin of reading, and nobody writes it until the end."""
        slices = list(self._slices_read(action))
        for layer, block, content in slices:
            assert self.memory[layer, block] == content, f"block {block} of io {io} is wrong in layer {layer}"
        versions = [self.memory.version(layer, block) for layer, block, _ in slices]
        assert self._versions.pop(io, versions) == versions, f"written while io {io} reads"
        self._versions[io] = versions

    def _slices_read(self, action: actions.Action) -> Iterator[tuple[int, int, Content]]:
        """Layer and block of the slices that an action reads, and what these must hold."""
        if isinstance(action, actions.SendSlices):
            for piece in action.pieces:
                for index, block in enumerate(piece.blocks, piece.first):
                    yield piece.layer, block, self.clients[action.id].content(index)
        if isinstance(action, actions.WriteBackBlocks):
            for index, block in enumerate(action.blocks, action.first):
                for layer in range(LAYERS):
                    if layer not in self.settings.windowed_layers or index in action.windowed:
                        yield layer, block, self.clients[action.id].content(index)

    def _tell(self, action: actions.Action) -> None:
        match action:
            case actions.AcceptRequest():
                self.clients[action.id].accepted = True
            case actions.RefuseRequest() | actions.RefuseStaleRequest():
                assert not self.clients[action.id].accepted
            case actions.CloseTransfer():
                client = self.clients[action.id]
                assert client.open or action.aborted
                client.closed = True
            case actions.ReportFirstToken():
                assert self.clients[action.id].token is None
                self.clients[action.id].token = action
                self._whole(self.clients[action.id], action)
            case actions.EndRequest():
                client = self.clients[action.id]
                assert client.accepted
                assert client.end is None, "a request ends once"
                client.end = action
                if action.outcome is actions.PrefillOutcome.DONE:
                    self._sent_whole(client)

    def _whole(self, client: Client, told: actions.ReportFirstToken) -> None:
        """Cached, loaded and computed tokens make up the prompt, each computed once."""
        at, loaded = told.cached_tokens, 0
        for start, end in client.counted:
            assert start >= at, f"{client.counted} of {client.arrive.request.tokens}"
            loaded, at = loaded + start - at, end
        assert (at, loaded) == (client.arrive.request.tokens, told.loaded_tokens)
        assert told.computed_tokens == at - told.cached_tokens - told.loaded_tokens
        assert told.overtaken_tokens <= told.computed_tokens

    def _sent_whole(self, client: Client) -> None:
        held = client.arrive.held_blocks
        if held is not None:
            tokens, windowed = client.arrive.request.tokens, self.settings.windowed_layers
            first = max(held, tokens // BT - self.settings.window_blocks)
            blocks = [range(first if number in windowed else held, -(-tokens // BT)) for number in range(LAYERS)]
            assert set(client.sent) == {(layer, index) for layer in range(LAYERS) for index in blocks[layer]}

    # --- to the end ------------------------------------------------------------------------------------------------

    def finish_io(self, io: int) -> None:
        """Ends one I/O well, or as it must when it was cancelled."""
        action, cancelled = self.ios[io], io in self.cancelled
        match action:
            case actions.RunStep():
                if cancelled:
                    self.end_step(io, aborted=True)
                elif io == min(self.steps):
                    self.run_step(io)
            case LoadBlocks():
                if cancelled:
                    self.end(io, LoadEnded(0, failed=True))
                else:
                    self.load_all(io)
            case actions.ReadReplica():
                self.end_copy(io, 0 if cancelled else len(action.blocks))
            case actions.OpenTransfer():
                self.clients[action.id].open = not cancelled
                self.end(io, events.IoFailed() if cancelled else events.IoDone())
            case actions.SendSlices():
                self.end(io, events.IoFailed() if cancelled else events.SlicesSent(1, 1e-6))
            case actions.AwaitVerdict():
                self.end(io, events.IoFailed() if cancelled else events.IoDone())
            case _:
                self.end(io, events.IoDone())

    def settle(self) -> None:
        """Everything goes well from now on, until nothing is under way."""
        for number in list(self.lent):
            self.take_back(number)
        for _ in range(1000):
            if not self.ios:
                break
            for io in list(self.ios):
                if io in self.ios:
                    self.finish_io(io)
            self.pass_time(0.001)
        assert not self.ios

    def check_rest(self) -> None:
        """Every accepted request has ended, and everything has come back."""
        assert all(client.end is not None for client in self.clients.values() if client.accepted)
        state = self.core.state
        assert not state.requests
        assert not len(state.ios)
        assert state.manager.num_used == 0
        assert self.core.queued_tokens == 0
        assert self.core.drain_seconds() == 0.0
        assert self.core.due() is None


def staged(stages: int, **changes: object) -> PrefillSettings:
    """The settings for so many stages."""
    return replace(SETTINGS, stages=stages, **changes)  # type: ignore[arg-type]
