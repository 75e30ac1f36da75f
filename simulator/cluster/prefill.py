"""A prefill instance in virtual time: the service's own core decides, this does what it says.

Steps take the time of the profile, spread evenly over the layers; loads, slices and write-back that of their links.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.core.kernel import Cancel, Ended, Tick
from moonpool.cost import prefill_seconds
from moonpool.kv.keys import BlockKey
from services.prefill.core import actions, events
from services.prefill.core.core import PrefillCore
from services.prefill.core.state import Settings
from simulator.cluster.config import ClusterConfig
from simulator.cluster.host import Host
from simulator.cluster.loading import Loading
from simulator.cluster.requests import Attempt, keys_of_chain
from simulator.cluster.store import Store
from simulator.kernel.calls import Calls
from simulator.kernel.clock import PS, World, ps
from simulator.kernel.links import Flow, Link, Network

Event = events.Event | Ended[events.Result] | Tick


@dataclass(slots=True, eq=False)
class Step:
    """A step that is being computed, layer by layer. Times are picoseconds."""

    order: actions.RunStep
    duration: int
    layers: int
    gate: int
    """Layers up to this one may be computed."""
    done: int = 0
    """Layers that are computed."""
    begun: int = 0
    """When the current layer began."""
    computing: bool = False
    aborted: bool = False


@dataclass(slots=True)
class PrefillUse:
    """What an instance did."""

    steps: int = 0
    busy: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Peers:
    """Whom an instance tells what. `receives`: the link over which decode gets KV; None when it is not there.

    Attributes:
        on_token: an attempt's first token is there.
        on_fail: the core has ended an attempt that was still wanted.
        on_keys: keys came into the pool, and left it.
        open: a transfer begins; returns the link to send it over, None when decode does not know it.
        heard: some of a transfer has come.
        whole: all of a transfer has come; returns whether decode wants it.
    """

    on_token: Callable[[Attempt], None]
    on_fail: Callable[[Attempt], None]
    on_keys: Callable[[Sequence[BlockKey], Sequence[BlockKey]], None]
    open: Callable[[Attempt], Link | None]
    heard: Callable[[Attempt], None]
    whole: Callable[[Attempt], bool]


@dataclass(slots=True, eq=False)
class Prompt:
    """An attempt's prompt at its prefill instance."""

    attempt: Attempt
    keys: tuple[BlockKey, ...]
    begun: bool = False
    """Some of it is computed, or is being."""
    to: Link | None = None
    flows: dict[int, Flow] = field(default_factory=dict)


class PrefillInstance:
    """One instance.

    Args:
        stores: of the cluster.
        calls: to decode.
        peers: are told what happens.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        config: ClusterConfig,
        name: str,
        stores: Sequence[Store],
        calls: Calls,
        peers: Peers,
    ) -> None:
        self.name = name
        self.sends = Link(f"{name} out", config.transfer_bytes_per_s)
        self._world, self._network, self._config, self._stores = world, network, config, stores
        self._calls, self._peers = calls, peers
        self._settings = core_settings(config)
        self._receives = Link(f"{name} in", config.load_bytes_per_s)
        self._came = 0
        self.up = True
        self.use = PrefillUse()
        self.begin_anew()

    def begin_anew(self) -> None:
        """An empty instance, as after a crash; what was under way has no effect."""
        self.core = PrefillCore(self._settings, self._config.profile.speeds)
        self.host: Host[Event, actions.Action] = Host(self._world, self.core, self._perform)
        self._prompts: dict[int, Prompt] = {}
        self._numbers: dict[Attempt, int] = {}
        self._step: Step | None = None
        self._loading = Loading(
            self._world, self._network, self._stores, self._receives, self._settings.slice_bytes,
            self._settings.layers, self._tell,
        )  # fmt: skip

    def crash(self) -> None:
        """Loses everything."""
        self.host.close()
        self._loading.stop()
        for prompt in self._prompts.values():
            for flow in prompt.flows.values():
                self._network.cancel(flow)
        self.begin_anew()

    # What others tell it

    def submit(self, attempt: Attempt) -> None:
        """An attempt's prompt is to be computed."""
        self._came += 1
        keys = keys_of_chain(attempt, self._config.block_tokens)
        self._prompts[self._came] = Prompt(attempt, keys)
        self._numbers[attempt] = self._came
        held = None if attempt.decode < 0 else attempt.held
        sources = (events.Source(f"s{attempt.store}", attempt.loaded_blocks),) if attempt.store >= 0 else ()
        copies = (events.Copy(f"s{attempt.write_to}", None),) if attempt.write_to >= 0 else ()
        self._tell(events.Arrive(self._came, attempt.tokens, keys, held, sources, copies))

    def cancel(self, attempt: Attempt) -> None:
        """An attempt is over; unknown ones are fine."""
        number = self._numbers.get(attempt)
        if number is not None:
            self._tell(events.Leave(number))

    def lose_store(self, store: int) -> None:
        """A store is gone, and what is being loaded from it."""
        self._loading.lose(f"s{store}")

    def check_at_rest(self) -> None:
        """Asserts that nothing is held."""
        self.core.check_invariants()
        assert not self._prompts
        assert not self._numbers
        assert not len(self.core.state.ios)
        assert self.core.state.manager.num_used == 0

    def _tell(self, event: Event) -> None:
        self.host.post(event)
        keys = self.core.state.manager.take_events()
        if keys.stored or keys.removed:
            self._peers.on_keys(keys.stored, keys.removed)

    def _tell_if(self, host: "Host[Event, actions.Action]", event: Event) -> None:
        """Tells the core that has begun some I/O, unless it was lost."""
        if not host.closed:
            self._tell(event)

    # Steps

    def _begin(self, order: actions.RunStep) -> None:
        speeds = self._config.profile.speeds
        seconds = speeds.prefill_base_s
        for chunk in order.chunks:
            prompt = self._prompts[chunk.job]
            seconds += prefill_seconds(speeds, chunk.end - chunk.start, chunk.start, steps=0, begins=not prompt.begun)
            prompt.begun = True
            self.use.computed_tokens += chunk.end - chunk.start
        layers = self._settings.layers
        self._step = Step(order, ps(seconds), layers, -1 if order.gated else layers)
        self.use.steps += 1
        self.use.busy += self._step.duration
        self._go_on(self._step)

    def _go_on(self, step: Step) -> None:
        """Computes the next layer when its gate is open; the gates of a step are opened after it was ordered."""
        if not step.computing and step.gate >= step.done and not step.aborted:
            step.computing, step.begun = True, self._world.now
            each = step.duration * (step.done + 1) // step.layers - step.duration * step.done // step.layers
            self._world.after(each, self._layer_done, step)

    def _layer_done(self, step: Step) -> None:
        if step is not self._step:
            return
        step.computing = False
        if not step.aborted:
            step.done += 1
            self._tell(events.LayerComputed(step.order.io, step.done - 1))
        if step.aborted or step.done == step.layers:
            self._over(step)
        else:
            self._go_on(step)

    def _over(self, step: Step) -> None:
        self._step = None
        self._tell(Ended(step.order.io, events.StepEnded(step.done < step.layers, step.duration / PS)))

    def _abort(self, io: int) -> None:
        step = self._step
        if step is not None and step.order.io == io and not step.aborted:
            step.aborted = True
            if not step.computing:
                self._over(step)

    def _open_gate(self, io: int, layer: int) -> None:
        step = self._step
        if step is not None and step.order.io == io:
            step.gate = max(step.gate, layer)
            self._go_on(step)

    # The core's actions

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.RunStep():
                self._begin(action)
            case actions.OpenGate(step, layer):
                self._open_gate(step, layer)
            case actions.AbortStep(step) | Cancel(step):
                self._abort(step)
                self._loading.cancel(step)
            case actions.LoadBlocks():
                self._load(action)
            case actions.PutBlocks():
                self._put(action)
            case actions.TellToken() | actions.EndJob() | actions.Refuse():
                self._say(action)
            case actions.OpenTransfer() | actions.SendSlices() | actions.AwaitVerdict():
                self._transfer(action)

    def _say(self, action: actions.TellToken | actions.EndJob | actions.Refuse) -> None:
        attempt = self._prompts[action.job].attempt
        if isinstance(action, actions.TellToken):
            attempt.request.reused = action.cached_tokens + action.loaded_tokens
            self.use.reused_tokens += attempt.request.reused
            self._peers.on_token(attempt)
            return
        done = isinstance(action, actions.EndJob) and action.outcome is actions.Outcome.DONE
        del self._prompts[action.job]
        self._numbers.pop(attempt, None)
        if not done and not attempt.over:
            self._peers.on_fail(attempt)

    def _load(self, action: actions.LoadBlocks) -> None:
        prompt = self._prompts[action.job]
        keys = prompt.keys[: action.first + len(action.blocks)]
        self._loading.begin(action.io, f"s{prompt.attempt.store}", keys, action.first, action.timeout_s)

    def _put(self, action: actions.PutBlocks) -> None:
        prompt, host = self._prompts[action.job], self.host
        store = self._stores[prompt.attempt.write_to]

        chain = prompt.keys[: action.first + len(action.blocks)]
        store.write(chain, self.sends, lambda: self._tell_if(host, Ended(action.io, events.Done())))

    # Transfers

    def _transfer(self, action: actions.OpenTransfer | actions.SendSlices | actions.AwaitVerdict) -> None:
        prompt, host = self._prompts[action.job], self.host
        match action:
            case actions.OpenTransfer(io):
                self._calls.send(lambda: self._open(host, io, prompt), reliable=True)
            case actions.SendSlices():
                self._send(action, prompt)
            case actions.AwaitVerdict(io):
                result = events.Done() if self._peers.whole(prompt.attempt) else events.Failed()
                self._calls.send(lambda: self._tell_if(host, Ended(io, result)), reliable=True)

    def _open(self, host: "Host[Event, actions.Action]", io: int, prompt: Prompt) -> None:
        if not host.closed:
            prompt.to = self._peers.open(prompt.attempt)
            self._tell(Ended(io, events.Failed() if prompt.to is None else events.Done()))

    def _send(self, action: actions.SendSlices, prompt: Prompt) -> None:
        nbytes, begun = sum(self._bytes(piece, prompt) for piece in action.pieces), self._world.now
        assert prompt.to is not None

        def sent() -> None:
            del prompt.flows[action.io]
            self._peers.heard(prompt.attempt)
            self._tell(Ended(action.io, events.SlicesSent(nbytes, (self._world.now - begun) / PS)))

        prompt.flows[action.io] = self._network.send([self.sends, prompt.to], nbytes, sent)

    def _bytes(self, piece: actions.Piece, prompt: Prompt) -> int:
        """Of the tokens in the blocks; the last block of a prompt may be part-filled."""
        size = self._config.block_tokens
        tokens = min(prompt.attempt.tokens, (piece.first + len(piece.blocks)) * size) - piece.first * size
        return tokens * self._settings.slice_bytes // size


def core_settings(config: ClusterConfig) -> Settings:
    """What the core of a prefill instance is told."""
    return Settings(
        blocks=config.blocks,
        block_tokens=config.block_tokens,
        layers=config.profile.layers,
        slice_bytes=config.block_bytes // config.profile.layers,
        step_tokens=max(config.step_tokens, config.block_tokens),
        max_queue=config.max_queue,
    )
