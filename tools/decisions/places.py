"""Where the cores and their tests' state machines are: the only module to change after a move."""

from collections.abc import Mapping
from typing import Any

ORDERS: Mapping[str, tuple[str, ...]] = {
    "ReserveBlocks": (
        *("id", "request.keys", "request.tokens", "request.prompt_tokens", "total_tokens", "tbt_slo_s", "conductor"),
        *("stores", "request.width", "starts_in_s", "search", "resumable", "fence", "request.priority"),
        *("request.tenant", "request.transient", "request.logprob_bytes"),
    ),
    "StartRun": ("step", "batch", "chunks", "copies", "steps", "patient"),
    "RunDone": ("step", "aborted", "seconds", "ended", "filled", "steps", "candidates", "waited_s", "late"),
    "LoadFacts": (
        *("running", "waiting", "free_blocks", "cached_blocks", "promised_blocks", "context_tokens", "drain_s"),
        *("speeds", "draining", "taken", "answer_tokens"),
    ),
    "PrefillChoice": (
        *("id", "local_blocks", "used_blocks", "queue_s", "load_s", "prefill_s", "busy_s", "source", "excluded"),
        *("overhead_s", "others", "growing_s", "rest_s", "read_s", "tail_s", "cold_blocks"),
    ),
    "AddRequest": (
        *("id", "request.tokens", "request.keys", "held_blocks", "sources", "copies", "request.tenant"),
        *("request.priority", "request.weight", "reuse", "request.transient", "max_queue_s"),
    ),
}
"""Class name -> attributes, also dotted, that are rendered instead of the fields in declared order.

Needed only where fields were added, removed, reordered or moved into a nested record since the other recording.
"""


def cores() -> list[Any]:
    """Classes with recorded `handle(now, event, out)` and `due()`."""
    from moonpool.conductor.core.conductor_core import ConductorCore
    from moonpool.engine.decode.core.scheduler import DecodeScheduler
    from moonpool.engine.prefill.core.scheduler import PrefillScheduler

    return [ConductorCore, DecodeScheduler, PrefillScheduler]


def machines() -> dict[str, Any]:
    """Hypothesis's state machines that walk each core alone, by the walk's name."""
    from moonpool.kvstore.eviction.policies import POLICIES
    from tests.unit.conductor.core.test_scheduler_machine import RequestMachine
    from tests.unit.engine.decode.core.test_scheduler import DecodeMachine
    from tests.unit.engine.prefill.core.test_scheduler import PrefillMachine
    from tests.unit.kvstore.core.test_machine import StoreMachine
    from tests.unit.kvstore.eviction.test_machine import PolicyMachine

    found = {"conductor": RequestMachine, "decode": DecodeMachine, "prefill": PrefillMachine, "kvstore": StoreMachine}
    eviction = {
        f"eviction-{name}": type("Machine", (PolicyMachine,), {"make": staticmethod(make)})
        for name, make in sorted(POLICIES.items())
    }
    return found | eviction


def beside() -> tuple[Any, str]:
    """The method by which a store's files work in a thread, `later(change, path)`: here the work is done at once."""
    from moonpool.kvstore.ssd.files import FileLayer

    return FileLayer, "later"


def state_of(machine: Any) -> object:
    """State recorded after each rule for a machine without a core: a store's content, or the order of eviction."""
    from tests.unit.kvstore.core.test_machine import StoreMachine
    from tests.unit.kvstore.eviction.test_machine import PolicyMachine

    match machine:
        case StoreMachine():
            return machine.announced, machine.cold, [entry.visible for entry in machine.transfers]
        case PolicyMachine():
            return list(machine.policy.candidates())
    return None


def interludes(name: str) -> list[Any]:
    """Events in the middle of some walks that the machine itself lacks."""
    from moonpool.base.kv.delete_kv import KVSelection
    from moonpool.base.scheduling.kv_deletion import DeleteKV

    tenants = {"decode": "", "prefill": "a"}
    return [DeleteKV(1, KVSelection(tenants=frozenset({tenants[name]})))] if name in tenants else []


def last_events(name: str) -> list[Any]:
    """Events that end some walks while everything is under way, told to the core alone."""
    from moonpool.conductor.core.events import InstanceLeft, KeysChanged, RoleChangeRequested
    from moonpool.engine.decode.core.events import EngineDied
    from moonpool.engine.prefill.core.events import Drain, StopAllRequests

    gap = KeysChanged("prefill-0", 1000, (), (), snapshot_begin=False, snapshot_end=False)
    lost = [InstanceLeft(f"{kind}-{number}", 1, "is lost") for kind in ("prefill", "decode") for number in range(3)]
    events: dict[str, list[Any]] = {
        "conductor": [gap, RoleChangeRequested("decode-1"), *lost],
        "decode": [EngineDied("a test says so")],
        "prefill": [Drain(), StopAllRequests()],
    }
    return events.get(name, [])
