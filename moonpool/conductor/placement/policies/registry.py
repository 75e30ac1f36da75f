"""The placement policies by name: built-in, installed by other packages, and `MODULE:OBJECT`."""

from collections.abc import Collection
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from blake3 import blake3

from moonpool.base.errors import ConfigError
from moonpool.conductor.placement.base import DecodePolicy, PlacementPolicy
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES
from moonpool.conductor.placement.policies import POLICIES

ENTRY_POINT_GROUP = "moonpool.policies"
"""Entry points of this group are policies for prefill that other packages bring along."""
DECODE_ENTRY_POINT_GROUP = "moonpool.decode_policies"
"""The same for decode."""


def seed_of(conductor: str) -> int:
    """Return the seed for draws by a conductor with this name. Another name gives another one."""
    return int.from_bytes(blake3(conductor.encode()).digest(8), "little")


def load_policy(name: str) -> PlacementPolicy:
    """The prefill policy with a name, or the object at `MODULE:OBJECT`; for a class, an object made without arguments.

    Raises:
        ConfigError: naming `policy`: no policy has this name, the object cannot be loaded, or the object is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    policy = _loaded("policy", name, ENTRY_POINT_GROUP, POLICIES)
    if not callable(getattr(policy, "order", None)) or not isinstance(getattr(policy, "stores", None), bool):
        raise ConfigError("policy", f"{name!r} is no policy: it needs a method `order` and a bool `stores`")
    checked: PlacementPolicy = policy
    return checked


def load_decode_policy(name: str) -> DecodePolicy:
    """Return the policy for decode of a name, likewise.

    Raises:
        ConfigError: naming `decode_policy`.
    """
    if name in DECODE_POLICIES:
        return DECODE_POLICIES[name]
    policy = _loaded("decode_policy", name, DECODE_ENTRY_POINT_GROUP, DECODE_POLICIES)
    if not callable(getattr(policy, "order", None)):
        raise ConfigError("decode_policy", f"{name!r} is no policy: it needs a method `order`")
    checked: DecodePolicy = policy
    return checked


def _loaded(field: str, name: str, group: str, built_in: Collection[str]) -> Any:
    found = _policy_object(field, name) if ":" in name else _installed_policy(field, name, group, built_in)
    try:
        return found() if isinstance(found, type) else found
    except Exception as error:  # raised by the class: whatever the error, the setting is wrong
        raise ConfigError(field, f"{name!r} cannot be made: {error!r}") from error


def _installed_policy(field: str, name: str, group: str, built_in: Collection[str]) -> Any:
    installed = {point.name: point for point in entry_points(group=group)}
    if name not in installed:
        raise ConfigError(field, f"there is no policy {name!r}; there are {', '.join([*built_in, *sorted(installed)])}")
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(field, f"{name!r} of {group} cannot be loaded: {error}") from error


def _policy_object(field: str, name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the module has no name
        raise ConfigError(field, f"{name!r} cannot be loaded: {error}") from error
    return found
