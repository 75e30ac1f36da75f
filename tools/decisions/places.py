"""Where the cores and the state machines of their tests are: the one module to change when they move."""

from collections.abc import Mapping
from typing import Any

ORDERS: Mapping[str, tuple[str, ...]] = {}
"""Class name -> attributes, dotted ones too, that are rendered in place of its fields in their declared order.

Needed only where fields were added, removed, reordered or moved into a nested record since the other recording.
"""


def cores() -> list[Any]:
    """Classes whose `handle(now, event, out)` and `due()` are recorded."""
    from services.conductor.core.conductor import ConductorCore
    from services.decode.core.machine import DecodeCore
    from services.prefill.core.core import PrefillCore

    return [ConductorCore, DecodeCore, PrefillCore]


def machines() -> dict[str, Any]:
    """Hypothesis's state machines that walk each core alone, by the walk's name."""
    from services.kvstore.policies import POLICIES
    from tests.unit.conductor.core.test_request_machine import RequestMachine
    from tests.unit.decode.core.test_machine import DecodeMachine
    from tests.unit.kvstore.core.test_machine import StoreMachine
    from tests.unit.kvstore.policies.test_machine import PolicyMachine
    from tests.unit.prefill.test_core_machine import PrefillMachine

    found = {"conductor": RequestMachine, "decode": DecodeMachine, "prefill": PrefillMachine, "kvstore": StoreMachine}
    eviction = {
        f"eviction-{name}": type("Machine", (PolicyMachine,), {"make": staticmethod(make)})
        for name, make in sorted(POLICIES.items())
    }
    return found | eviction


def beside() -> tuple[Any, str]:
    """The method of a store's files that does something in a thread, `later(change, path)`: here it is done at once."""
    from services.kvstore.ssd.files import Files

    return Files, "later"


def state_of(machine: Any) -> object:
    """What is recorded after each rule of a machine without a core: what a store holds, or the order of eviction."""
    from tests.unit.kvstore.core.test_machine import StoreMachine
    from tests.unit.kvstore.policies.test_machine import PolicyMachine

    match machine:
        case StoreMachine():
            return machine.announced, machine.cold, [entry.visible for entry in machine.sessions]
        case PolicyMachine():
            return list(machine.policy.candidates())
    return None


def interludes(name: str) -> list[Any]:
    """Events in the middle of some walks that the machine itself does not have."""
    from moonpool.kv.selection import Selection
    from moonpool.sched.forgetting import ForgetKV

    tenants = {"decode": "", "prefill": "a"}
    return [ForgetKV(1, Selection(tenants=frozenset({tenants[name]})))] if name in tenants else []


def last_events(name: str) -> list[Any]:
    """Events that end some walks while everything is under way, told to the core alone."""
    from services.conductor.core.changes import RoleAsked
    from services.conductor.core.messages import KeysChanged, Left
    from services.decode.core.events import Died
    from services.prefill.core.events import Drain, Stop

    gap = KeysChanged("prefill-0", 1000, (), (), snapshot_begin=False, snapshot_end=False)
    lost = [Left(f"{kind}-{number}", 1, "is lost") for kind in ("prefill", "decode") for number in range(3)]
    events: dict[str, list[Any]] = {
        "conductor": [gap, RoleAsked("decode-1"), *lost],
        "decode": [Died("a test says so")],
        "prefill": [Drain(), Stop()],
    }
    return events.get(name, [])
