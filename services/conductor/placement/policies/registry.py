"""The placement policies by name: built-in, installed by other packages, and `MODULE:OBJECT`."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from blake3 import blake3

from moonpool.errors import ConfigError
from services.conductor.placement.base import PlacementPolicy
from services.conductor.placement.policies import POLICIES

ENTRY_POINT_GROUP = "moonpool.policies"
"""Entry points of this group are policies that other packages bring along."""


def seed_of(conductor: str) -> int:
    """Seed of the draws of a conductor of this name. Another name gives another one."""
    return int.from_bytes(blake3(conductor.encode()).digest(8), "little")


def load_policy(name: str) -> PlacementPolicy:
    """The policy of a name, or the object of `MODULE:OBJECT`; of a class, one that is made without arguments.

    Raises:
        ConfigError: naming `policy`: there is none of this name, it cannot be loaded, or it is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = _policy_object(name) if ":" in name else _installed_policy(name)
    try:
        policy = found() if isinstance(found, type) else found
    except Exception as error:  # of the class: whatever it raises, the setting is wrong
        raise ConfigError("policy", f"{name!r} cannot be made: {error!r}") from error
    if not callable(getattr(policy, "order", None)) or not isinstance(getattr(policy, "stores", None), bool):
        raise ConfigError("policy", f"{name!r} is no policy: it needs a method `order` and a bool `stores`")
    checked: PlacementPolicy = policy
    return checked


def _installed_policy(name: str) -> Any:
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        raise ConfigError(
            "policy", f"there is no policy {name!r}; there are {', '.join([*POLICIES, *sorted(installed)])}"
        )
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("policy", f"{name!r} of {ENTRY_POINT_GROUP} cannot be loaded: {error}") from error


def _policy_object(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the module has no name
        raise ConfigError("policy", f"{name!r} cannot be loaded: {error}") from error
    return found
