from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from moonpool.client import AsyncClient, Client
from moonpool.client.testing import FakeConductor

from .either import driven

Dial = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(params=["blocking", "asyncio"])
def dial(request: pytest.FixtureRequest) -> Dial:
    """`dial(where, **settings)`: a client of one kind or the other, of fake conductors or an address."""

    def dialled(where: FakeConductor | str, *others: FakeConductor, **settings: Any) -> AbstractContextManager[Any]:
        blocking = request.param == "blocking"
        if isinstance(where, FakeConductor):
            return driven(where.client(*others, **settings) if blocking else where.async_client(*others, **settings))
        return driven(Client(where, **settings) if blocking else AsyncClient(where, **settings))

    return dialled
