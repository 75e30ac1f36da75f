from collections.abc import AsyncIterator

import pytest

from moonpool.client.testing import FakeConductor

from .fakes import Answers, answering


@pytest.fixture
async def gateway() -> AsyncIterator[Answers]:
    """A client of a gateway in front of a conductor that answers with tokens 1, 2, 3."""
    async with answering(FakeConductor()) as running:
        yield running
