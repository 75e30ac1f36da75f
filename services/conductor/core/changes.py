"""The event and the action by which instances change their role (`services.conductor.core.roles` decides)."""

from moonpool.frozen import frozen
from services.conductor.core.facts import Kind


@frozen
class RoleAsked:
    """Somebody wants an instance to change its role, whatever the load."""

    instance: str


@frozen
class ChangeRole:
    """Order an instance to drain, and to come back in the other role."""

    instance: str
    incarnation: int
    kind: Kind
