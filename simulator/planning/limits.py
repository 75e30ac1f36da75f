"""What a plan must keep: limits of latency, and the share of requests that keep them."""

import math

from moonpool.cost import decode_step_seconds, prefill_seconds
from moonpool.engine.emulated.profile import Profile
from moonpool.errors import ConfigError
from simulator.cluster.config import Slo

MOST_S = {"ttft": 3600.0, "tbt": 60.0}
"""A longer limit is none."""


def parse_slo(text: str) -> Slo:
    """Reads "ttft=30,tbt=0.1", seconds.

    Raises:
        ConfigError: a part is unknown, missing, twice there, or no sensible time.
    """
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in MOST_S or name in given:
            raise ConfigError("slo", f"wants ttft=SECONDS,tbt=SECONDS, has {part.strip()!r} in {text!r}")
        given[name] = _seconds(name, value)
    for name in MOST_S:
        if name not in given:
            raise ConfigError("slo", f"{name} is missing in {text!r}; it wants ttft=SECONDS,tbt=SECONDS")
    return Slo(given["ttft"], given["tbt"])


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_S[name]:
        raise ConfigError("slo", f"{name} must be between 0 and {MOST_S[name]:g} seconds, is {text!r}")
    return value


def check_possible(profile: Profile, slo: Slo) -> None:
    """Refuses limits that no number of instances can keep.

    Raises:
        ConfigError: a single token on an idle instance takes longer.
    """
    fastest = {
        "ttft": (prefill_seconds(profile.speeds, 1, 0) + profile.speeds.prefill_base_s, slo.ttft_s),
        "tbt": (decode_step_seconds(profile.speeds, 1, 1), slo.tbt_s),
    }
    for name, (least, limit) in fastest.items():
        if least > limit:
            raise ConfigError(
                "slo", f"{name}={limit:g} cannot be kept: on {profile.hardware} one token alone takes {least:.3g} s"
            )
