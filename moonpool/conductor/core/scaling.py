"""How many instances of each role the offered work asks for, for the platform's scaler."""

from __future__ import annotations

from moonpool.base.frozen import frozen
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.instances import InstanceKind
from moonpool.conductor.core.roles import QUEUE_S

TARGET_PRESSURE = 0.8
"""Pressure that a pool of the wanted size has: room for bursts until a further instance has started."""
QUEUE_PRESSURE = 1.0
"""The same of prefill where prompts may wait longer than `QUEUE_S`: a burst has its room in the queue."""
MIN_LIMIT_S = 1.0
"""TTFT limits below count as this one."""


@frozen
class PoolDemand:
    """What a role's pool has to do.

    Attributes:
        kind: prefill or decode.
        instances: instances that take requests; those that drain are left out.
        pressure: offered work as a share of the pool's capacity (`moonpool.conductor.core.roles`); 1 = full.
        backlog_s: mean predicted seconds until the prompts that wait are computed (prefill).
        free_share: share of the pool's blocks that hold nothing that a request needs (decode).
        wanted: instances at which the pressure would be `TARGET_PRESSURE`, or `QUEUE_PRESSURE`; at least 1. The scaler
            rounds up.
    """

    kind: InstanceKind
    instances: int
    pressure: float
    backlog_s: float = 0.0
    free_share: float = 0.0
    wanted: float = 1.0


def demands(core: ConductorCore, now: float) -> tuple[PoolDemand, PoolDemand]:
    """Return the demand of prefill and of decode, by this conductor's view of reports and own placements.

    Pressure is what the pool would need if the work went on as now. Average the values over a minute before scaling.
    Instances in the role both count as decode, by the prompts or the answers there, whichever are more.
    Queues at prefill are measured by the TTFT limits that requests have.
    """
    usual_s = core.scheduler.usual_ttft_s
    limit_s = core.roles.limits.ttft_s if usual_s is None else max(usual_s, MIN_LIMIT_S)
    prefills = [instance for instance in core.cluster.prefills if not instance.load.draining]
    decodes = [instance for instance in core.cluster.decodes if not instance.load.draining]
    busy = {instance.facts.id: core.roles.busy(instance, now, limit_s) for instance in prefills}
    alone = [instance for instance in prefills if not instance.facts.computes_prompts]
    used = [max(core.roles.utilization(decode), busy.get(decode.facts.id, 0.0)) for decode in decodes]
    blocks = sum(instance.facts.total_blocks for instance in decodes)
    kept = sum(instance.load.free_blocks + instance.load.cached_blocks for instance in decodes)
    prefill, decode = sum(busy[instance.facts.id] for instance in alone), sum(used)
    return (
        PoolDemand(
            InstanceKind.PREFILL,
            len(alone),
            prefill / max(len(alone), 1),
            backlog_s=sum(max(0.0, instance.free_at - now) for instance in prefills) / max(len(prefills), 1),
            wanted=max(1.0, prefill / (QUEUE_PRESSURE if limit_s > QUEUE_S else TARGET_PRESSURE)),
        ),
        PoolDemand(
            InstanceKind.DECODE,
            len(decodes),
            decode / max(len(decodes), 1),
            free_share=kept / blocks if blocks else 0.0,
            wanted=max(1.0, decode / TARGET_PRESSURE),
        ),
    )
