"""What one conductor decides."""

from moonpool.base.scheduling.state_machine import Tick, digest_of
from moonpool.conductor.core.actions import Action, Resync
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.events import (
    Event,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    LoadReported,
    RoleChangeRequested,
    TokensArrived,
)
from moonpool.conductor.core.roles import FIXED_ROLES, RoleBalancer, RoleLimits
from moonpool.conductor.core.scheduler import RequestScheduler, SchedulerLimits


class ConductorCore:
    """What one conductor decides. The cluster view and the roles take an event before the requests do."""

    def __init__(self, limits: SchedulerLimits, cluster: ClusterView, roles: RoleLimits = FIXED_ROLES) -> None:
        self.cluster = cluster
        self.roles = RoleBalancer(roles, cluster.prefills, cluster.decodes)
        self.scheduler = RequestScheduler(limits, cluster)

    def handle(self, now: float, event: Event | Tick, out: list[Action]) -> None:
        match event:
            case TokensArrived():  # most events: not compared with the others
                pass
            case LoadReported(instance, load):
                self.cluster.report(instance, load, now)
                self.roles.load_reported(now, out)
            case KeysChanged(instance):
                if self.cluster.epoch(instance) and self.cluster.keys_changed(event):
                    out.append(Resync(instance))
            case InstanceJoined(facts):
                self.cluster.join(facts, now)
                self.roles.joined(now, facts)
            case InstanceLeft(instance, epoch):
                if self.cluster.epoch(instance) == epoch:
                    self.cluster.leave(instance)
            case RoleChangeRequested(instance):
                self.roles.order(now, instance, out)
        self.scheduler.handle(now, event, out)

    def due(self) -> float | None:
        """Return the time at which the core wants a `Tick`; None = never."""
        return self.scheduler.due()

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.cluster.check_invariants()
        self.scheduler.check_invariants()
        assert self.cluster.claims == self.scheduler.claims, "the cluster and the requests disagree about claims"

    def digest(self) -> bytes:
        """Return the hash of the whole state."""
        return digest_of(self.cluster, self.scheduler, self.roles)
