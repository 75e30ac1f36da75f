"""Prompts at a simulated prefill instance, who wants them computed, and whom the instance tells what."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moonpool.kv.changes import KeyChanges
from moonpool.kv.keys import BlockKey
from services.conductor.core.failures import Failure, Stale
from services.conductor.core.messages import Target
from services.prefill.core import actions, events
from simulator.cluster.requests import Sequence
from simulator.kernel.links import Link


class Client(Protocol):
    """Who wants a prompt computed, and is told how that goes."""

    def accepted(self, number: int) -> None:
        """The prompt is in the queue, as the instance's so many-th."""

    def token(self, told: actions.TellToken) -> None:
        """Its first token is there."""

    def delivered(self) -> None:
        """Decode has all of its KV."""

    def over(self, result: Failure | Stale | None) -> None:
        """Nothing more comes."""


@dataclass(slots=True, frozen=True)
class Peers:
    """Whom an instance tells what.

    Attributes:
        keys: keys came into the pool, and left it.
        changed: load or keys are others now.
        open: a transfer begins; returns the link to send it over, None when decode does not know it.
        heard: some of a transfer has come.
        whole: all of a transfer has come; returns whether decode wants it.
        give_up: nothing more comes of a transfer.
    """

    keys: Callable[[KeyChanges], None]
    changed: Callable[[], None]
    open: Callable[[Target], Link | None]
    heard: Callable[[Target], None]
    whole: Callable[[Target], bool]
    give_up: Callable[[Target], None]


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt at its prefill instance."""

    sequence: Sequence
    keys: tuple[BlockKey, ...]
    target: Target | None
    sources: tuple[events.Source, ...]
    copies: tuple[events.Copy, ...]
    client: Client
    begun: bool = False
    """Some of it is computed, or is being."""
    to: Link | None = None
