"""Preemption: which sequence gives up its blocks, by which way (swap, store, recompute), and how it comes back."""

from moonpool.core.digest import digest_of
from moonpool.core.kernel import Outstanding
from moonpool.cost import SpeedTracker, prefill_seconds
from services.decode.core import groups
from services.decode.core.actions import Action, SwapDrop, SwapIn, SwapOut, Table
from services.decode.core.config import CoreConfig, Preemption
from services.decode.core.events import SwapEnd
from services.decode.core.holds import Copy, Holds
from services.decode.core.request import ACTIVE, Request, State
from services.decode.core.room import Room, most_needed
from services.decode.core.shelf import Shelf

PROTECTED_AFTER = 2
"""Who was preempted so often is spared as long as there is somebody else."""
SWAP_BYTES_PER_S = 4e9
"""Assumed rate of copying to DRAM and back until it was measured."""
SWAP_WEIGHT = 0.2
"""Weight of one measured copy."""


def choose_victim(active: list[Request], wanting: Request) -> Request | None:
    """Who is preempted so that `wanting` gets a block: last come of the lowest priority first.

    The one whose turn is first is never chosen, so it can always finish; those preempted twice are spared if possible.

    Returns:
        A request, maybe `wanting` itself; None when nobody may be preempted.
    """
    first = min((*active, wanting), key=_turn)
    free = [request for request in active if request is not first]
    spared = [request for request in free if request.preemptions < PROTECTED_AFTER]
    return max(spared or free, key=_turn, default=None)


def _turn(request: Request) -> tuple[float, int]:
    return request.turn


class Parking:
    """The preempted requests.

    Args:
        config: of the core.
        room: counts blocks.
        tracker: predicts the engine's times.
        ios: I/O under way.
        shelf: what is in kvstores.
    """

    def __init__(
        self, config: CoreConfig, room: Room, tracker: SpeedTracker, ios: Outstanding[Holds], shelf: Shelf
    ) -> None:
        self._config = config
        self._room = room
        self._tracker = tracker
        self._ios = ios
        self._shelf = shelf
        self.parked: list[Request] = []
        """Without blocks, in the order in which they come back: who has waited longest is first."""
        self._refused: tuple[int, int, int, int] | None = None  # how it was when there was no room for the first one
        self.coming = 0
        """Blocks that are free when the copies out of the pool are over."""
        self.saved = 0
        """Blocks swapped out, or being copied."""
        self.swap_bytes_per_s = SWAP_BYTES_PER_S
        self.preemptions = 0
        self.swaps = 0

    @property
    def loading(self) -> int:
        """Sequences that are being loaded from kvstores."""
        return self._shelf.loading

    # --- giving up -------------------------------------------------------------------------------------------------

    def preempt(self, request: Request, out: list[Action]) -> None:
        """Takes the blocks of a request that is in no container and no step any more."""
        request.preemptions += 1
        self.preemptions += 1
        request.shape = groups.shape_of(request, self._config)
        whole = request.state is not State.CATCHING_UP
        blocks = tuple(request.blocks_of(request.shape)) if whole else ()
        way = self._way(request, len(blocks))
        if way is Preemption.SWAP and blocks:
            self._swap_out(request, blocks, out)
            return
        if way is Preemption.STORE and whole:
            self._shelf.write_missing(request, out)
        request.recompute = way is Preemption.RECOMPUTE
        self._room.give_back(request)
        self.park(request)

    def predicted_s(self, request: Request, blocks: int) -> dict[Preemption, float]:
        """Seconds until a request would be back, by each way; cached blocks may be gone by then."""
        tokens = groups.tokens_to_compute(request, self._config)
        return {
            Preemption.SWAP: 2 * blocks * self._config.block_bytes / self.swap_bytes_per_s,
            Preemption.STORE: self._shelf.back_s(request),
            Preemption.CACHE: prefill_seconds(self._tracker.speeds, tokens, 0),
        }

    def _way(self, request: Request, blocks: int) -> Preemption:
        """How a sequence gives its blocks up."""
        way, full = self._config.preemption, self.saved + blocks > self._config.swap_blocks
        if way is Preemption.SWAP:
            return Preemption.CACHE if full else way
        if way is not Preemption.AUTO:
            return way
        predicted = self.predicted_s(request, blocks)
        if full:
            del predicted[Preemption.SWAP]
        return min(reversed(predicted), key=lambda way: predicted[way])

    def _swap_out(self, request: Request, blocks: tuple[int, ...], out: list[Action]) -> None:
        request.state = State.SWAPPING_OUT
        request.saved = len(blocks)
        self.saved += len(blocks)
        self.coming += len(request.blocks)
        self.swaps += 1
        out.append(SwapOut(self._ios.begin(Copy(request, True, blocks)), request.id, blocks))

    def park(self, request: Request) -> None:
        """Lets a sequence without blocks wait for its return."""
        request.state = State.PARKED
        self._room.claim(request, max(request.expected_blocks, groups.needed(request, self._config)))
        self.parked.append(request)

    def go_on(self, request: Request) -> None:
        """Lets a request begin behind known tokens, whose KV is computed as that of one that comes back."""
        request.prompt_here, request.shape = True, groups.shape_behind_prompt(request, self._config)
        self._room.give_back(request)  # full blocks stay in the pool as cache as long as they are not needed
        self.park(request)

    # --- coming back -----------------------------------------------------------------------------------------------

    def bring_back(self, active: list[Request], out: list[Action]) -> Request | None:
        """Brings the first parked request back if there is room for it now, and for all of them as they grow and end.

        Args:
            active: who runs, or could; when nobody does, nobody else's growth need be thought of.
            out: gets the actions.

        Returns:
            The request, READY, CATCHING_UP, SWAPPING_IN or LOADING; None when there is no room, or nobody is parked.
        """
        if not self.parked:
            return None
        request = self.parked[0]
        # Who grows as expected takes as much from what is free as from what is claimed: then nothing has changed.
        asked = request.id, self._room.spare - self._room.claims, len(self.parked), len(active)
        if active and asked == self._refused:
            return None
        held = self._shelf.held(request)
        new = groups.needed(request, self._config) - len(held)
        left = self._room.spare - self._room.cost(list(held.values()), new)
        growth = request.claim - len(held) - new
        if left < 0 or (active and left < self._room.watermark + self._needed(active, growth, new)):
            self._refused = asked
            return None
        del self.parked[0]
        blocks = groups.rebuild(request, held, self._config, self._room.blocks)
        self._room.claim(request, growth)
        out += [Table(member.id, tuple(member.table)) for member in request.members]
        self._fill(request, held, blocks, out)
        return request

    def _needed(self, active: list[Request], growth: int, new: int) -> int:
        """Blocks that all will need beyond what they have, if one more comes with so many blocks and so much growth."""
        known = sum(request.claim for request in (*active, *self.parked))
        lives = [(request.claim, self._room.frees(request)) for request in active]
        return self._room.claims - known + most_needed([*lives, (growth, new)])

    def _fill(self, request: Request, held: dict[int, int], blocks: list[int], out: list[Action]) -> None:
        """Chooses how the KV that is not held comes back."""
        if request.saved > len(held):
            copied = tuple(blocks[len(held) : request.saved])
            request.state = State.SWAPPING_IN
            out.append(SwapIn(self._ios.begin(Copy(request, False, copied)), request.id, len(held), copied))
            return
        self.forget(request, out)
        if not self._shelf.load(request, frozenset(held), out):
            groups.comes_with(request, frozenset(held), self._config)

    def copied(self, result: SwapEnd, copy: Copy) -> None:
        """A copy is over. A request that has ended meanwhile is the caller's business afterwards."""
        request = copy.request
        if result.ok:
            self._observe(len(copy.blocks) * self._config.block_bytes, result.seconds)
        if copy.out:
            self._out(request, ok=result.ok)
        else:
            self._in(request, ok=result.ok)

    def _out(self, request: Request, *, ok: bool) -> None:
        self.coming -= len(request.blocks)
        self._room.give_back(request)
        if not ok:
            self.saved -= request.saved
            request.saved = 0
        if request.state is State.SWAPPING_OUT:
            self.park(request)

    def _in(self, request: Request, *, ok: bool) -> None:
        self.saved -= request.saved
        request.saved = 0
        if request.state is not State.SWAPPING_IN:
            return
        if not ok:
            self._room.give_back(request)
            self.park(request)
            return
        for member in request.members:
            for block, key in zip(member.table, member.keys, strict=False):
                self._room.blocks.register(block, key, request.owner)
        request.state = State.READY

    def _observe(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self.swap_bytes_per_s += SWAP_WEIGHT * (nbytes / seconds - self.swap_bytes_per_s)

    def forget(self, request: Request, out: list[Action]) -> None:
        """Drops what a request has swapped out, if anything."""
        if request.saved:
            out.append(SwapDrop(request.id))
            self.saved -= request.saved
            request.saved = 0

    def digest(self) -> bytes:
        """Hash of what is not the requests' own."""
        waiting = [request.id for request in self.parked]
        counts = (self.coming, self.saved, self.preemptions, self.swaps, self.swap_bytes_per_s)
        return digest_of(waiting, self._refused, counts)

    def check_invariants(self, requests: list[Request]) -> None:
        """Asserts that lists and counts are those of the requests."""
        parked = [request for request in requests if request.state is State.PARKED]
        assert sorted(r.id for r in self.parked) == sorted(request.id for request in parked)
        assert not any(request.blocks for request in parked)
        assert self.saved == sum(request.saved for request in requests)
        out = [copy.request for _, copy in self._ios if isinstance(copy, Copy) and copy.out]
        assert self.coming == sum(len(request.blocks) for request in out)
        assert not any(request.saved for request in requests if request.state in ACTIVE)
