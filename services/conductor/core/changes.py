"""The event and the action by which instances change their role (`services.conductor.core.roles` decides)."""

from dataclasses import dataclass

from services.conductor.core.facts import Kind


@dataclass(frozen=True, slots=True)
class RoleAsked:
    """Somebody wants an instance to change its role, whatever the load."""

    instance: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Order an instance to drain, and to come back in the other role."""

    instance: str
    incarnation: int
    kind: Kind
