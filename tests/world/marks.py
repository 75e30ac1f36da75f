"""Paths that a storm has met, told by the journals of the services' cores and by what clients saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moonpool.base.runtime.journal import JournalEntry, journal_files, rerun
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.conductor.core import actions as conductor_actions
from moonpool.conductor.core import events as conductor
from moonpool.conductor.core.failures import DAMAGED_KINDS
from moonpool.conductor.core.replication import ReplicatePrefix
from moonpool.conductor.core.request_spec import MIN_KNOWN_TOKENS, RequestSpec
from moonpool.engine.decode.core import actions as decode_actions
from moonpool.engine.decode.core import events as decode
from moonpool.engine.prefill.core import events as prefill
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.world.clients import Outcome

OF_CONDUCTORS = (
    "a takeover",
    "a takeover with known tokens",
    "a takeover of several answers",
    "a resumed request is placed anew",
    "a resumed request meets a damaged frame",
    "a request is placed anew",
    "a request is placed anew after a damaged frame",
    "a client is gone",
    "a hot prefix is copied",
)
OF_DECODE = (
    "a sequence goes on behind known tokens",
    "a sequence has outlived its conductor",
    "several answers have outlived their conductor",
    "an answer is fetched after its end",
    "a preempted sequence is swapped out",
    "a guess is right",
    "a guess is wrong",
    "beams fork",
    "an engine dies",
    "KV is deleted",
    "a conductor is fenced off",
)
OF_PREFILL = (
    "a prefix is loaded from a store",
    "a prefix is loaded from a peer",
    "a load is cut short",
    "a transfer's frame is damaged",
)
OF_CLIENTS = (
    "a stream is resumed",
    "an answer with a format is resumed",
    "an answer with log probabilities is resumed",
    "several answers are placed anew",
    "beams are placed anew",
    "an answer over HTTP is complete while services are disturbed",
    "a tool is called",
    "a tool's call is streamed",
    "an answer is read late",
    "log probabilities came over HTTP",
    "a prompt is cached",
    "a body is refused for want of memory",
    "a deleted context is unknown",
    "a request is refused for its own limits",
    "a request is late for its own deadline",
    "a turn finds the turn before",
    "a context is used",
    "a store's value is deleted",
    "a store's value is read",
    "a batch is complete",
    "a batch goes on in another life of the gateway",
)
OF_BOTH = ("a whole prompt is computed at decode",)
"""Of instances in the role both."""
ALL = (*OF_CONDUCTORS, *OF_DECODE, *OF_PREFILL, *OF_CLIENTS)
SOON = (
    "a takeover",
    "a takeover with known tokens",
    "a request is placed anew",
    "a request is placed anew after a damaged frame",
    "a client is gone",
    "a sequence has outlived its conductor",
    "an answer is fetched after its end",
    "a preempted sequence is swapped out",
    "a guess is right",
    "a guess is wrong",
    "beams fork",
    "KV is deleted",
    "a prefix is loaded from a store",
    "a prefix is loaded from a peer",
    "a stream is resumed",
    "an answer over HTTP is complete while services are disturbed",
    "a tool is called",
    "a prompt is cached",
    "a turn finds the turn before",
    "a context is used",
    "a store's value is deleted",
    "a store's value is read",
    "a batch is complete",
)
"""Marks that a few short storms meet."""

BOTH_SOON = (
    *OF_BOTH,
    "a takeover",
    "a request is placed anew",
    "a client is gone",
    "a sequence has outlived its conductor",
    "beams fork",
    "KV is deleted",
    "a prefix is loaded from a store",
    "a prefix is loaded from a peer",
    "log probabilities came over HTTP",
    "a prompt is cached",
    "a turn finds the turn before",
    "a context is used",
)
"""Marks that a few short storms of instances in the role both meet."""


DIED = "was killed by signal"
"""Of an engine's stage."""


class Marks:
    """How often each path was met."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys((*ALL, *OF_BOTH), 0)

    def meet(self, mark: str, times: int = 1) -> None:
        """A path was met."""
        assert mark in self.counts, f"{mark} is no mark"
        self.counts[mark] += times

    def read(self, folder: Path) -> Iterator[str]:
        """Meet what all journals below a folder tell; yields what is wrong with a journal, when it is rerun."""
        for kept in sorted({path.parent for path in folder.rglob("*.[01]")}):
            reader = READERS[kept.name.partition("-")[0]](self.meet)
            for path in journal_files(kept):
                again = rerun(path, reader)
                if again.difference is not None:
                    yield f"{kept.name}: other actions when rerun: {again.difference}"
                again.core.check_invariants()

    def see(self, outcome: Outcome, disturbed: bool) -> None:
        """Meet what a client saw."""
        ask, several = outcome.ask, outcome.placements > 1 or outcome.resumes
        met = {
            "a stream is resumed": outcome.resumes,
            "an answer with a format is resumed": outcome.resumes and ask.how.response_format,
            "an answer with log probabilities is resumed": outcome.resumes and ask.how.logprobs is not None,
            "several answers are placed anew": several and ask.feature == "several",
            "beams are placed anew": several and ask.feature == "beams",
            "an answer over HTTP is complete while services are disturbed": disturbed
            and not outcome.placements
            and outcome.ended == "complete",
            "a tool is called": outcome.arguments,
            "a tool's call is streamed": outcome.arguments and ask.streamed,
            "an answer is read late": ask.ending == "read late" and outcome.ended == "complete",
            "log probabilities came over HTTP": any(answer.told for answer in outcome.answers),
            "a body is refused for want of memory": "body_memory_bytes" in outcome.error,
            "a prompt is cached": outcome.cached,
            "a request is refused for its own limits": outcome.ended == "limited",
            "a request is late for its own deadline": outcome.ended == "late",
            "a context is used": ask.context and outcome.ended == "complete",
        }
        for mark, holds in met.items():
            if holds:
                self.meet(mark)


Meet = Callable[[str], None]
Reader = Callable[[int, JournalEntry, list[Any]], None]


def _conductor_reader(meet: Meet) -> Reader:
    resumed: dict[int, RequestSpec] = {}

    def read(number: int, entry: JournalEntry, actions: list[Any]) -> None:
        event = entry.event
        if isinstance(event, conductor.RequestArrived) and event.spec.resumed is not None:
            resumed[event.spec.number] = event.spec
        elif isinstance(event, conductor.ClientGone):
            meet("a client is gone")
        for action in actions:
            match action:
                case conductor_actions.TakeOverSequence():
                    meet("a takeover")
                    spec = resumed[action.request]
                    if spec.resumed is not None and spec.resumed.tokens >= MIN_KNOWN_TOKENS:
                        meet("a takeover with known tokens")
                    if spec.choices > 1:
                        meet("a takeover of several answers")
                case conductor_actions.AnnouncePlacement() if action.request in resumed:
                    meet("a resumed request is placed anew")
                case conductor_actions.Rehash():
                    meet("a request is placed anew")
                    if action.failure.kind in DAMAGED_KINDS:
                        meet("a request is placed anew after a damaged frame")
                        if action.request in resumed:
                            meet("a resumed request meets a damaged frame")
                case ReplicatePrefix():
                    meet("a hot prefix is copied")

    return read


class _Loads:
    """Loads of prefixes at one instance, as the instance's journal tells them."""

    def __init__(self, meet: Meet) -> None:
        self._meet = meet
        self._sources: dict[int, tuple[KVSource, ...]] = {}
        self._loads: dict[int, KVSource] = {}

    def read(self, event: Any, actions: list[Any]) -> None:
        match event:
            case prefill.AddRequest() | decode.QueuePrompt():
                self._sources[event.id] = event.sources
            case IoEnded(io=io, result=LoadEnded() as load) if io in self._loads:
                if load.missing is not None or load.failed:
                    self._meet("a load is cut short")
                elif load.blocks:
                    self._meet(f"a prefix is loaded from a {'peer' if self._loads[io].peer else 'store'}")
        for action in actions:
            if isinstance(action, LoadBlocks) and action.id in self._sources:
                self._loads[action.io] = self._sources[action.id][action.source]


def _decode_reader(meet: Meet) -> Reader:
    retained: set[int] = set()
    loads = _Loads(meet)

    def read(number: int, entry: JournalEntry, actions: list[Any]) -> None:
        loads.read(entry.event, actions)
        match entry.event:
            case decode.StartDecoding(known=known) if any(known):
                meet("a sequence goes on behind known tokens")
            case decode.RunDone(drafts=drafts, first_tokens=first_tokens):
                for draft in drafts:
                    meet("a guess is right" if draft.accepted else "a guess is wrong")
                for first in first_tokens:
                    meet("a whole prompt is computed at decode")
                    if any(first.known):
                        meet("a sequence goes on behind known tokens")
            case decode.EngineDied(why=why) if DIED in why:
                meet("an engine dies")
            case DeleteKV():
                meet("KV is deleted")
        for action in actions:
            match action:
                case decode_actions.RequestFreed(retained=True):
                    retained.add(action.id)
                case decode_actions.RequestAdopted():
                    meet("a sequence has outlived its conductor")
                    if len(action.positions) > 1:
                        meet("several answers have outlived their conductor")
                    if action.id in retained:
                        meet("an answer is fetched after its end")
                case decode_actions.SwapOut():
                    meet("a preempted sequence is swapped out")
                case decode_actions.ForkSequences():
                    meet("beams fork")
                case decode_actions.FenceConductor():
                    meet("a conductor is fenced off")

    return read


def _prefill_reader(meet: Meet) -> Reader:
    loads = _Loads(meet)

    def read(number: int, entry: JournalEntry, actions: list[Any]) -> None:
        loads.read(entry.event, actions)
        match entry.event:
            case IoEnded(result=prefill.IoFailed(damaged_block=int())):
                meet("a transfer's frame is damaged")

    return read


READERS: dict[str, Callable[[Meet], Reader]] = {
    "conductor": _conductor_reader,
    "decode": _decode_reader,
    "prefill": _prefill_reader,
}
