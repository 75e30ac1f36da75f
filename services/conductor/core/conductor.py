"""The conductor's core: its picture of the cluster and the requests it serves, driven by one queue of events."""

from moonpool.core.digest import digest_of
from moonpool.core.kernel import Tick
from services.conductor.core.changes import RoleAsked
from services.conductor.core.messages import Action, Event, Joined, KeysChanged, Left, Reported, Resync
from services.conductor.core.picture import Picture
from services.conductor.core.placing import Limits
from services.conductor.core.request import Requests
from services.conductor.core.roles import FIXED_ROLES, RoleLimits, Roles


class ConductorCore:
    """What one conductor decides. The picture hears of a change before the requests do."""

    def __init__(self, limits: Limits, picture: Picture, roles: RoleLimits = FIXED_ROLES) -> None:
        self.picture = picture
        self.roles = Roles(roles, picture.prefills, picture.decodes)
        self.requests = Requests(limits, picture)

    def handle(self, now: float, event: Event | Tick, out: list[Action]) -> None:
        """Takes an event; see `Core.handle`."""
        match event:
            case Reported(instance, load):
                self.picture.report(instance, load, now)
                self.roles.look(now, out)
            case KeysChanged():
                self._keys(event, out)
            case Joined(facts):
                self.picture.join(facts, now)
                self.roles.joined(now, facts)
            case Left(instance, incarnation):
                if self.picture.incarnation(instance) == incarnation:
                    self.picture.leave(instance)
            case RoleAsked(instance):
                self.roles.order(now, instance, out)
        self.requests.handle(now, event, out)

    def _keys(self, event: KeysChanged, out: list[Action]) -> None:
        if self.picture.incarnation(event.instance) and self.picture.events(
            event.instance,
            event.sequence,
            event.stored,
            event.removed,
            event.cooled,
            snapshot_begin=event.snapshot_begin,
            snapshot_end=event.snapshot_end,
        ):
            out.append(Resync(event.instance))

    def due(self) -> float | None:
        """When the next deadline is over."""
        return self.requests.due()

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        self.picture.check_invariants()
        self.requests.check_invariants()
        assert self.picture.claims == self.requests.claims, "a claim counts that nobody holds, or the other way round"

    def digest(self) -> bytes:
        """Hash of the whole state."""
        return digest_of(self.picture, self.requests, self.roles)
