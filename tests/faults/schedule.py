"""Faults and requests of a storm, drawn from a seed before anything runs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tests.faults.proxy import WAYS, Way

FaultKind = Literal["kill", "kill-engine", "terminate", "stop", "stop-engine", "reset", "partition", "deaf", "mute"]
"""Who is deaf gets nothing of what it is sent, and of who is mute nobody gets anything: connections stay open."""
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
WEIGHTS: dict[FaultKind, int] = {
    "kill": 3,
    "kill-engine": 1,
    "terminate": 1,
    "stop": 3,
    "stop-engine": 1,
    "reset": 6,
    "partition": 2,
    "deaf": 1,
    "mute": 1,
}
CUTS: dict[FaultKind, tuple[Way, ...]] = {"partition": WAYS, "deaf": ("to",), "mute": ("from",)}
"""Faults of links, and the ways on which nothing comes through."""
RESTARTED: tuple[FaultKind, ...] = ("kill", "kill-engine", "terminate")
"""Faults that end a service, which is then started anew."""
ENGINE_FAULTS = ("kill-engine", "stop-engine")

Ending = Literal["run", "cancel-tokens", "cancel-time", "deadline"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: seconds after the storm's beginning.
        kind: what; "kill" and "terminate" are followed by a restart, "stop" and cut links by their end.
        target: id of a service.
        lasts_s: seconds until the restart or the end.
    """

    at_s: float
    kind: FaultKind
    target: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.kind:<12} {self.target:<12} for {self.lasts_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and what its client will do.

    Attributes:
        number: of the request.
        prompt: token ids.
        max_tokens: to generate.
        seed: of the sampling; None = greedy.
        ending: whether the client stays, leaves after `limit` tokens or seconds, or has only `limit` seconds.
        limit: see `ending`.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    ending: Ending
    limit: float


def plan_faults(
    seed: int,
    seconds: float,
    targets: Sequence[str],
    *,
    kinds: Sequence[FaultKind] = FAULTS,
    gap_s: float = 2.0,
    silence_s: float = 2.5,
) -> list[Fault]:
    """Faults over a storm's time.

    Args:
        seed: of the schedule.
        seconds: how long the storm lasts.
        targets: ids of the services that may be hit; an engine fault needs a prefill or a decode instance.
        kinds: what may happen.
        gap_s: mean seconds between two faults.
        silence_s: longer than an instance may miss heartbeats.
    """
    generator = random.Random(f"faults/{seed}")
    faults: list[Fault] = []
    at_s = generator.uniform(0.5, 1.5)
    while at_s < seconds:
        kind = generator.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        able = [name for name in targets if can_hit(kind, name)]
        if able:
            lasts_s = generator.uniform(0.1, 1.0)
            if kind in ("stop", "stop-engine", *CUTS):
                # Half of them end before an instance is taken for lost, half of them later.
                lasts_s = generator.choice([generator.uniform(0.2, 1.0), silence_s * generator.uniform(1.0, 1.6)])
            faults.append(Fault(at_s, kind, generator.choice(able), 0.0 if kind == "reset" else lasts_s))
        at_s += generator.uniform(0.3, 1.7) * gap_s
    if faults and "kill" in kinds and not any(fault.kind in RESTARTED for fault in faults):
        faults[0] = replace(faults[0], kind="kill")  # no storm is without one
    return faults


def kinds_for(engine: str, kinds: Sequence[FaultKind]) -> list[FaultKind]:
    """The kinds that a stack with this engine knows: an emulated engine has no process of its own."""
    return [kind for kind in kinds if engine == "real" or kind not in ENGINE_FAULTS]


def can_hit(kind: FaultKind, target: str) -> bool:
    """Whether a service knows such a fault: only prefill and decode have engine processes."""
    return kind not in ENGINE_FAULTS or target.startswith(("prefill", "decode"))


class Asks:
    """Requests, drawn one after the other; number n is the same for the same seed."""

    def __init__(self, seed: int, *, vocab_size: int, longest_prompt: int, longest_answer: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._longest_prompt = longest_prompt
        self._longest_answer = longest_answer
        self._number = 0
        generator = random.Random(f"documents/{seed}")
        self._documents = [self._tokens(generator, longest_prompt) for _ in range(6)]

    def __iter__(self) -> "Asks":
        return self

    def __next__(self) -> Ask:
        number = self._number
        self._number += 1
        generator = random.Random(f"ask/{self._seed}/{number}")
        length = int(self._longest_prompt ** generator.uniform(0.2, 1.0))
        shared = int(length * generator.random()) if generator.random() < 0.7 else 0
        document = generator.choice(self._documents)
        prompt = document[:shared] + self._tokens(generator, max(1, length - shared))
        max_tokens = int(self._longest_answer ** generator.uniform(0.0, 1.0))
        ending: Ending = generator.choices(("run", "cancel-tokens", "cancel-time", "deadline"), (14, 3, 2, 1))[0]
        limit = {
            "run": 0.0,
            "cancel-tokens": float(generator.randint(1, max_tokens)),
            "cancel-time": generator.expovariate(2.0),
            "deadline": generator.uniform(0.05, 1.0),
        }[ending]
        seed = generator.getrandbits(31) if generator.random() < 0.3 else None
        return Ask(number, tuple(prompt), max_tokens, seed, ending, limit)

    def _tokens(self, generator: random.Random, count: int) -> list[int]:
        return [generator.randrange(8, self._vocab_size) for _ in range(count)]
