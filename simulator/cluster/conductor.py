"""A conductor in virtual time: the services' index, counters and placement, and the life of each request."""

from collections.abc import Callable, Sequence

from services.conductor.index import PrefixIndex
from services.conductor.inflight import DecodesInFlight, PrefillsInFlight
from services.conductor.placement import (
    DecodeView,
    Demand,
    PrefillChoice,
    PrefillView,
    Shape,
    rank_decodes,
)
from services.conductor.planner import EXPECTED_ANSWER_TOKENS
from services.conductor.stores import Forks, StoreView, choose_write_back, scores
from simulator.cluster.config import ClusterConfig
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.policies import POLICIES
from simulator.cluster.prefill import PrefillInstance
from simulator.cluster.requests import Attempt, Request
from simulator.kernel.calls import Calls
from simulator.kernel.clock import World, ps

REFUSED = "refused"
TOO_LARGE = "too_large"
GIVEN_UP = "given_up"
DONE = "done"
RETRY_S = 1.0
"""Pause before a request is placed anew after an instance was lost."""


class Placement:
    """Where a request goes. Knows instances by number; ids are "p3", "d0", "s1"."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.index = PrefixIndex()
        self.prefills = [PrefillsInFlight() for _ in range(config.prefill)]
        self.decodes = [DecodesInFlight() for _ in range(config.decode)]
        self._placed = [0] * (config.prefill + config.decode)
        self._forks = Forks()
        self._choose = POLICIES[config.policy]
        self._shape = Shape(config.block_tokens, config.profile.token_bytes, config.profile.layers)
        self._sequences: dict[str, int] = {}
        self._decisions = 0
        self.down: set[str] = set()
        """Instances that take no requests."""
        for name in [f"p{n}" for n in range(config.prefill)] + [f"s{n}" for n in range(config.kvstore)]:
            self.joined(name)

    @property
    def ready(self) -> bool:
        """Whether requests can be placed."""
        lost = "".join(name[0] for name in self.down)
        return lost.count("p") < self._config.prefill and lost.count("d") < self._config.decode

    def joined(self, name: str) -> None:
        """An instance joins, empty."""
        self.index.add_instance(name)
        self.index.apply(name, 1, (), (), snapshot_begin=True, snapshot_end=True)
        self._sequences[name] = 1

    def keys_changed(self, name: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """An instance tells what came and what left."""
        self._sequences[name] += 1
        self.index.apply(name, self._sequences[name], stored, removed)

    def prefill(self, now: float, request: Request, tokens: int, left: int) -> tuple[PrefillChoice, int, int]:
        """The prefill instance, the store that shall hold the chain (-1: none), and the number of the instance."""
        config, keys = self._config, request.keys
        held = self.index.match(keys)
        demand = self._demand(request, tokens, left)
        stores = self._stores(keys, held)
        up = [number for number in range(config.prefill) if f"p{number}" not in self.down]
        views = [self._prefill_view(number, held, now) for number in up]
        self._decisions += 1
        choice = self._choose(config, self._decisions, demand, self._shape, views, stores)
        return choice, self._write_to(keys, stores), int(choice.id[1:])

    def decode(self, request: Request, tokens: int, left: int, instances: Sequence[DecodeInstance]) -> int:
        """The decode instance; -1 when none is large enough."""
        demand = self._demand(request, tokens, left)
        views = [self._decode_view(number, instance) for number, instance in enumerate(instances)]
        ranked = rank_decodes(demand, self._shape, views)
        return int(ranked[0].id[1:]) if ranked else -1

    def count(self, prefill: int, decode: int) -> None:
        """Notes that a request goes there."""
        self._placed[prefill] += 1
        if decode >= 0:
            self._placed[self._config.prefill + decode] += 1

    def _demand(self, request: Request, tokens: int, left: int) -> Demand:
        blocks = self._config.blocks_for
        shared = tokens // self._config.block_tokens if self._config.memory.sharing else 0
        longest = tokens + left if self._config.memory.growing else tokens + self._config.memory.max_tokens
        total = shared + request.samples * (blocks(longest) - shared)
        return Demand(tokens, blocks(tokens), total, min(left - 1, EXPECTED_ANSWER_TOKENS))

    def _stores(self, keys: Sequence[bytes], held: dict[str, int]) -> list[StoreView]:
        names = [f"s{n}" for n in range(self._config.kvstore)]
        if not keys or not names:
            return []
        longest = max(held.get(name, 0) for name in names)
        wanted = scores(keys[min(longest, len(keys) - 1)], dict.fromkeys(names, self._config.store_bytes))
        return [StoreView(name, held.get(name, 0), 0, wanted[name]) for name in names]

    def _write_to(self, keys: Sequence[bytes], stores: Sequence[StoreView]) -> int:
        if not stores:
            return -1
        longest = max(store.blocks for store in stores)
        parts = len(stores) > 1 and 0 < longest < len(keys)
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
        return int(choose_write_back(stores, 1, shared=shared)[0].id[1:])

    def _prefill_view(self, number: int, held: dict[str, int], now: float) -> PrefillView:
        name, config = f"p{number}", self._config
        return PrefillView(
            id=name,
            speeds=config.profile.speeds,
            queue_s=self.prefills[number].queue_seconds(now),
            local_blocks=held.get(name, 0),
            total_blocks=config.blocks,
            placed=self._placed[number],
        )

    def _decode_view(self, number: int, instance: DecodeInstance) -> DecodeView:
        return DecodeView(
            id=f"d{number}",
            speeds=self._config.profile.speeds,
            sequences=len(self.decodes[number]),
            context_tokens=self.decodes[number].total_context_tokens(),
            room_blocks=instance.room.free,
            total_blocks=self._config.blocks,
            placed=self._placed[self._config.prefill + number],
            draining=f"d{number}" in self.down,
        )


class Conductor:
    """The life of each request: placed, its first token, its end; placed anew when an attempt fails.

    Args:
        ended: called with each request when it has ended.
    """

    def __init__(
        self,
        world: World,
        config: ClusterConfig,
        calls: Calls,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        ended: Callable[[Request], None],
    ) -> None:
        self.placement = Placement(config)
        self._world, self._config, self._calls = world, config, calls
        self._prefills, self._decodes, self._ended = prefills, decodes, ended
        self._attempts: dict[Request, Attempt] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._attempts)

    # The life of a request

    def place(self, request: Request) -> None:
        """Places a request, or ends it."""
        now, config = self._world.seconds, self._config
        if not self.placement.ready:
            return self._world.after(ps(RETRY_S), self._again, request)
        tokens, left = request.tokens + request.made, request.answer - request.made
        choice, write_to, prefill = self.placement.prefill(now, request, tokens, left)
        decode = self.placement.decode(request, tokens, left, self._decodes) if left > 1 else -1
        if choice.excluded or (decode < 0 and left > 1):
            return self._finish(request, TOO_LARGE)
        if not request.attempts:
            request.predicted_ttft_s = choice.ttft_s
            if config.refuse and choice.ttft_s > config.slo.ttft_s:
                return self._finish(request, REFUSED)
        request.attempts += 1
        store = int(choice.kvstore[1:]) if choice.kvstore else -1
        attempt = Attempt(
            request,
            request.attempts,
            prefill,
            decode,
            store,
            choice.used_blocks,
            write_to,
            self._world.now,
            tokens,
            left,
        )
        self._begin(attempt, choice.busy_s)
        return None

    def _begin(self, attempt: Attempt, busy_s: float) -> None:
        self._attempts[attempt.request] = attempt
        name, placement = str(attempt.request.number), self.placement
        placement.count(attempt.prefill, attempt.decode)
        placement.prefills[attempt.prefill].begin(name, busy_s, self._world.seconds)
        self._calls.send(lambda: self._submit(attempt))
        if attempt.decode >= 0:
            placement.decodes[attempt.decode].begin(name, attempt.tokens, 0)
            self._calls.send(lambda: self._ask(attempt))
        if self._config.deadline_s:
            self._world.after(ps(self._config.deadline_s), self.failed, attempt)

    def _submit(self, attempt: Attempt) -> None:
        instance = self._prefills[attempt.prefill]
        if instance.up and not attempt.over:
            instance.submit(attempt)

    def _ask(self, attempt: Attempt) -> None:
        instance = self._decodes[attempt.decode]
        if instance.up and not attempt.over:
            instance.ask(attempt)

    def first_token(self, attempt: Attempt) -> None:
        """A prefill instance has the first token of an attempt."""
        request = attempt.request
        self.placement.prefills[attempt.prefill].end(str(request.number), self._world.seconds)
        if attempt.over:
            return
        now = self._world.now
        if request.made:
            request.intervals.append(now - request.last_at)
        else:
            request.first_at = now
        request.made += 1
        request.last_at = now
        if attempt.decode < 0:
            self.answered(attempt)
        else:
            self._calls.send(lambda: self._decodes[attempt.decode].start(attempt))

    def answered(self, attempt: Attempt) -> None:
        """All tokens have come."""
        if not attempt.over:
            self._close(attempt)
            self._finish(attempt.request, DONE)

    def failed(self, attempt: Attempt) -> None:
        """An attempt cannot go on: what its instances hold comes back, and the request is placed anew."""
        if attempt.over:
            return
        self._close(attempt)
        self._calls.send(lambda: self._prefills[attempt.prefill].cancel(attempt), reliable=True)
        if attempt.decode >= 0:
            self._calls.send(lambda: self._decodes[attempt.decode].cancel(attempt), reliable=True)
        self._world.after(ps(RETRY_S), self._again, attempt.request)

    def _again(self, request: Request) -> None:
        if request.made >= request.answer:
            self._finish(request, DONE)
        elif request.attempts >= self._config.attempts:
            self._finish(request, GIVEN_UP)
        else:
            self.place(request)

    def lost(self, name: str) -> None:
        """An instance is lost: attempts that need it fail."""
        number, prefill = int(name[1:]), name[0] == "p"
        self.placement.down.add(name)
        if prefill:
            self.placement.joined(name)
        for attempt in list(self._attempts.values()):
            if attempt.prefill == number and not attempt.whole if prefill else attempt.decode == number:
                self.failed(attempt)

    def back(self, name: str) -> None:
        """An instance is there again, empty."""
        self.placement.down.discard(name)

    def _close(self, attempt: Attempt) -> None:
        if attempt.decode >= 0:
            self._decodes[attempt.decode].settle(attempt)
        attempt.over = True
        name = str(attempt.request.number)
        self.placement.prefills[attempt.prefill].end(name, self._world.seconds)
        if attempt.decode >= 0:
            self.placement.decodes[attempt.decode].end(name)

    def _finish(self, request: Request, outcome: str) -> None:
        self._attempts.pop(request, None)
        request.outcome, request.ended_at = outcome, self._world.now
        self._ended(request)
