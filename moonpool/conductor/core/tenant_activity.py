"""What conductors tell each other of their tenants, by way of instances, and tenants' budgets, as plain data."""

from moonpool.base.frozen import frozen

OTHER_TENANTS = "*"
"""Stands for each tenant without a separate weight or budget."""


@frozen
class TenantBudget:
    """What a tenant may use; None = any number.

    Attributes:
        requests: answers a minute.
        tokens: tokens of prompts and answers a minute.
        concurrent: answers at once.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


UNLIMITED = TenantBudget()


@frozen
class TenantActivity:
    """What a conductor's requests of one tenant use; sums are since the conductor's start.

    Attributes:
        tenant: the tenant.
        version: grows with each change of a row of the conductor.
        weight: the tenant's share.
        requests: answers that were admitted.
        tokens: tokens of prompts and answers.
        work_s: predicted instance seconds of what was placed.
        running: answers that have not ended.
        waiting: requests that wait for decode memory.
        waiting_blocks: blocks that these are expected to need.
        waiting_s: predicted instance seconds of these.
        requests_owed: requests that the budget lacks to be full, by all conductors' use.
        tokens_owed: the same of tokens.
        age_s: seconds since the conductor has told this.
    """

    tenant: str
    version: int
    weight: float = 1.0
    requests: int = 0
    tokens: int = 0
    work_s: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_blocks: int = 0
    waiting_s: float = 0.0
    requests_owed: float = 0.0
    tokens_owed: float = 0.0
    age_s: float = 0.0


@frozen
class ConductorActivity:
    """What another conductor has told an instance, or this one before its start.

    Attributes:
        conductor: id.
        epoch: the conductor's start.
        age_s: seconds since the last message.
        tenants: rows that have changed since the instance's last report.
        more: further rows follow with the next report.
    """

    conductor: str
    epoch: int
    age_s: float
    tenants: tuple[TenantActivity, ...] = ()
    more: bool = False


@frozen
class TellActivity:
    """Tell an instance what tenants use here, for the other conductors.

    Attributes:
        instance: the instance.
        number: grows with each message.
        tenants: rows that have changed since the last message.
        more: further rows follow with the next message.
    """

    instance: str
    number: int
    tenants: tuple[TenantActivity, ...]
    more: bool = False
