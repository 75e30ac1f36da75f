"""Whose request it is, by its API key, and on whose budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.rpc.keys import ApiKeys, KeyFile, hashed
from services.gateway.budgets import Budgets, Owner, Spending


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant, and where it is counted what the request uses."""

    tenant: str = ""
    spending: Spending = field(default_factory=Spending)


class BudgetedKeys:
    """The keys of a file, and what their owners have used."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the file; `clock` gives seconds.

        Raises:
            ConfigError: naming `api_keys`: it cannot be read or is wrong.
        """
        self._keys = ApiKeys(path)
        self._file = self._keys.file
        self._budgets = Budgets(clock)

    def tenant(self, key: str) -> str:
        """The tenant of a key.

        Raises:
            Unauthenticated: no key was given, or there is no such key.
        """
        return self._keys.tenant(key)

    def admit(self, key: str) -> Caller:
        """Let in a request that uses something.

        Raises:
            Unauthenticated: as of `tenant`.
            BudgetSpentError: the key or its tenant has used up its budget.
        """
        tenant, file = self._keys.tenant(key), self._keys.file
        if file is not self._file:
            self._file = file
            self._budgets.keep(names_in(file))
        return Caller(tenant, self._budgets.admit(owners_of(file, hashed(key))))


def owners_of(file: KeyFile, key_hash: str) -> list[Owner]:
    """Whose budgets a request with this key is on."""
    tenant = file.tenants[key_hash]
    own, shared = file.limits.get(key_hash), file.shared.get(tenant)
    found = [(f"key {key_hash}", "this key", own), (f"tenant {tenant}", "this key's tenant", shared)]
    return [Owner(name, told, limits) for name, told, limits in found if limits is not None]


def names_in(file: KeyFile) -> set[str]:
    """Names of all owners."""
    return {f"key {key_hash}" for key_hash in file.limits} | {f"tenant {tenant}" for tenant in file.shared}
