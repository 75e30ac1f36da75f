"""A host's place among the hosts of one engine, as what started the hosts says in its variables."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from moonpool.base.errors import ConfigError

DEFAULT_PORT: Final = 29501
"""Where stages join, if no variable says so; vLLM's default, too."""
_FIRST_HOST: Final = re.compile(r"([^,\[\]]*)(?:\[(\w+)[^\]]*\]([^,]*))?")


class GroupPlace(NamedTuple):
    """Which host this one is, and where the leader is."""

    leader: str
    port: int
    node_rank: int
    """0 = the leader's host."""


class _Launcher(NamedTuple):
    """Names of a launcher's variables; `ranks`: the first that is set counts."""

    leader: str
    ranks: tuple[str, ...]
    port: str = ""


_LAUNCHERS: Final = (
    _Launcher("LWS_LEADER_ADDRESS", ("LWS_WORKER_INDEX",)),  # Kubernetes' LeaderWorkerSet
    _Launcher("MASTER_ADDR", ("GROUP_RANK", "RANK"), "MASTER_PORT"),  # torchrun, and what sets the same
    _Launcher("SLURM_STEP_NODELIST", ("SLURM_PROCID",)),  # srun
)
VARIABLES: Final = tuple(launcher.leader for launcher in _LAUNCHERS)
"""The variables that say how the hosts were started, in the order in which they count."""


def read_place(environment: Mapping[str, str]) -> GroupPlace | None:
    """Return this host's place; None if no launcher's variables are set.

    Raises:
        ConfigError: naming a variable: one is missing or wrong.
    """
    launcher = next((launcher for launcher in _LAUNCHERS if environment.get(launcher.leader)), None)
    if launcher is None:
        return None
    given = next((name for name in launcher.ranks if environment.get(name)), None)
    if given is None:
        raise ConfigError(launcher.ranks[0], f"must be set, as {launcher.leader} is")
    port = DEFAULT_PORT
    if launcher.port and environment.get(launcher.port):
        port = _number(environment, launcher.port, 65535)
    first = _FIRST_HOST.match(environment[launcher.leader])
    assert first is not None, "the pattern fits any text"
    return GroupPlace("".join(part or "" for part in first.groups()), port, _number(environment, given, 1 << 20))


def _number(environment: Mapping[str, str], name: str, most: int) -> int:
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > most:
        raise ConfigError(name, f"must be a number from 0 to {most}, got {text!r}")
    return int(text)
