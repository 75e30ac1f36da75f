"""The benchmark of decode's memory loses nothing and gives the same figures each time."""

import pytest

from benchmarks.decode_memory import crowd
from moonpool.engine.decode.core.settings import Preemption


@pytest.mark.parametrize("way", Preemption)
def test_a_small_crowd(way: Preemption) -> None:
    found = crowd(40, 12, 500, way)
    assert found.ended == 12
    assert found.preemptions > 0
    assert found == crowd(40, 12, 500, way)
