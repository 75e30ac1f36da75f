"""Histories of a kvstore's clients, and whether they are those of one store that may forget values.

A value may vanish at any time, and each read may miss. All else has to be linearisable: a read gives the value that is
there, a deleted value does not come back, and nobody finds another tenant's value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["put", "get", "delete"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class Operation:
    """One call of a client.

    Attributes:
        kind: which call.
        value: what was put, or what a read has found; "" for a miss and for a deletion.
        begin: when the call began, seconds.
        end: when it ended; infinite if it failed: what it does may happen at any later time.
        changed: whether the store said that a put was new, or that a deletion found the value; None: it failed.
    """

    kind: Kind
    value: str
    begin: float
    end: float = math.inf
    changed: bool | None = None


State = str
"""The key's value; "" for none."""


def after(state: State, operation: Operation) -> list[State]:
    """What may be there after an operation that takes effect while `state` is there; empty: it cannot be."""
    match operation.kind:
        case "put" if operation.changed is None:
            return [state, operation.value] if not state else [state, "", operation.value]
        case "put":
            # A put is refused by a value that is there; one that is new finds none, as the one before has vanished.
            return [operation.value] if operation.changed else ([state] if state else [])
        case "get":
            return [state] if not operation.value or operation.value == state else []
        case "delete":
            return [""] if not operation.changed or state else []


def linearisable(operations: Sequence[Operation]) -> bool:
    """Whether the operations on one key are those of a store, in some order that keeps their times.

    Each takes effect between its begin and its end; one that failed may have none.
    """
    operations = sorted(
        (operation for operation in operations if operation.kind != "get" or operation.value),
        key=lambda operation: operation.begin,
    )
    whole = (1 << len(operations)) - 1
    optional = sum(
        1 << index
        for index, operation in enumerate(operations)
        if operation.changed is None and operation.kind != "get"
    )
    seen: set[tuple[int, State]] = set()
    ways: list[tuple[int, State]] = [(0, "")]
    while ways:
        done, state = ways.pop()
        if done | optional == whole:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        left = [index for index in range(len(operations)) if not done >> index & 1]
        first_end = min(operations[index].end for index in left)
        for index in left:
            if operations[index].begin > first_end:
                break
            ways += [(done | 1 << index, then) for then in after(state, operations[index])]
    return False


class Histories:
    """Operations by store, tenant and key."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, str, bytes], list[Operation]] = {}

    def __len__(self) -> int:
        """Number of all operations."""
        return sum(map(len, self._operations.values()))

    def add(self, store: str, tenant: str, key: bytes, operation: Operation) -> None:
        """An operation has begun; its end and its result are set later."""
        self._operations.setdefault((store, tenant, key), []).append(operation)

    def operations(self) -> Iterable[Operation]:
        """All operations."""
        return (operation for operations in self._operations.values() for operation in operations)

    def faults(self) -> Iterable[str]:
        """What no store that forgets may do, a line each."""
        for (store, tenant, key), operations in self._operations.items():
            for operation in operations:
                if operation.kind == "get" and operation.value and not operation.value.startswith(f"{tenant}/"):
                    yield f"{tenant} has read a value of {operation.value.partition('/')[0]} from {store}"
            if not linearisable(operations):
                story = "; ".join(
                    f"{each.begin:.3f}-{each.end:.3f} {each.kind} {each.value or '-'} {each.changed}"
                    for each in operations
                )
                yield f"no order explains what happened to {key!r} of {tenant} at {store}: {story}"
