"""Lanes that break on purpose, so that fault storms can show that nothing is lost by it.

Off unless the environment asks for it:

    MOONPOOL_FAULT_BREAK_LANES   share of the payloads before which this process breaks their lane, 0 to 1
    MOONPOOL_FAULT_SEED          seed of the choice (default 0)
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger

BREAK_LANES = "MOONPOOL_FAULT_BREAK_LANES"
SEED = "MOONPOOL_FAULT_SEED"

LANE_BROKEN = "lane broken on purpose"
"""The event that is logged once for each lane that is broken."""

log = get_logger(__name__)


class Breaker:
    """Says when a lane is to break."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)

    def __call__(self) -> bool:
        """Whether it breaks before the next payload."""
        if self._random.random() >= self._share:
            return False
        log.warning(LANE_BROKEN, because=BREAK_LANES)
        return True


def share_from(environment: Mapping[str, str], name: str) -> float:
    """A share that the environment asks for; 0 unless it does.

    Raises:
        ConfigError: it cannot be understood.
    """
    share = _number(environment, name, float)
    if not 0.0 <= share <= 1.0:
        raise ConfigError(name, f"must be in [0, 1], is {share:g}")
    return share


def seed_from(environment: Mapping[str, str]) -> int:
    """The seed that the environment gives; raises as `share_from`."""
    return int(_number(environment, SEED, int))


def breaker_from(environment: Mapping[str, str]) -> Breaker | None:
    """What the environment asks for; None for nothing; raises as `share_from`."""
    share = share_from(environment, BREAK_LANES)
    return Breaker(share, seed_from(environment)) if share else None


def _number(environment: Mapping[str, str], name: str, kind: type[int] | type[float]) -> float:
    text = environment.get(name, "") or "0"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, f"must be a number, is {text!r}") from None


breaker = breaker_from(os.environ)
"""This process' own; None when no lane is to break."""
