"""Random walks for each core alone: the tests' state machines, driven by a plain seeded generator.

Rules are taken in definition order and arguments in decorator order, so that a walk depends neither on names nor on
hypothesis's own choices, which come from the code it finds.
"""

import random
from contextlib import suppress
from typing import Any

from hypothesis.control import BuildContext
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.conjecture.providers import PrimitiveProvider

from tools.decisions.places import interludes, last_events, machines, state_of
from tools.decisions.recorder import Recorder

STEPS = {"conductor": 60, "decode": 60, "prefill": 80, "kvstore": 30}
"""Rules of a walk; 40 of others."""


class _Provider(PrimitiveProvider):
    """Draws evenly."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(None)
        self._rng = rng

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self._rng.random() < p

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **_: Any) -> int:
        assert min_value is not None
        assert max_value is not None
        return self._rng.randint(min_value, max_value)

    def draw_float(self, **_: Any) -> float:
        raise NotImplementedError

    def draw_string(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def draw_bytes(self, *_: Any, **__: Any) -> bytes:
        raise NotImplementedError


def walk(name: str, seed: int, number: int, recorder: Recorder) -> None:
    """One walk. Each fourth walk is disturbed by other events, each third walk does not come to rest.

    Raises:
        AssertionError: the machine finds something wrong.
    """
    rng = random.Random(f"{name} {seed} {number}")
    machine, steps = machines()[name](), STEPS.get(name, 40)
    setup = type(machine).setup_state()
    rules = sorted(setup.rules, key=_line)
    for begin in sorted(setup.initializers, key=_line):
        _take(begin, machine, rng, recorder)
    for step in range(steps):
        if step == steps // 2 and number % 4 == 3:
            for event in interludes(name):
                machine.world.post(event)
        valid = [rule for rule in rules if all(holds(machine) for holds in rule.preconditions)]
        _take(rng.choice(valid), machine, rng, recorder)
    if number % 3 == 2 and (events := last_events(name)):
        for event in events:
            machine.world.core.handle(machine.world.now, event, [])
    else:
        machine.teardown()


def _line(rule: Any) -> int:
    return int(rule.function.__code__.co_firstlineno)


def _take(rule: Any, machine: Any, rng: random.Random, recorder: Recorder) -> None:
    data = ConjectureData(random=None, provider=_Provider(rng))
    with BuildContext(data, wrapped_test=rule.function), suppress(UnsatisfiedAssumption):
        rule.function(machine, **{name: data.draw(strategy) for name, strategy in rule.arguments.items()})
    if (state := state_of(machine)) is not None:
        recorder.pair("state", recorder.text(state), ())
