"""Gaps between tokens while prompts arrive: which count, and what is drawn."""

import argparse
import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.lending import Figures, draw, gaps_of, observed, rows
from moonpool.base.errors import Unsupported
from moonpool.client.testing import FakeConductor

FIXED = Figures([(0.1 * n, 0.02) for n in range(98)] + [(9.8, 0.2), (9.9, 0.4)], [0.5, 0.5], 2.0)
LENT = Figures([(0.1 * n, 0.01) for n in range(98)] + [(9.8, 0.1), (9.9, 0.1)], [0.25] * 4, 2.0)


def test_a_gap_counts_by_its_end() -> None:
    assert gaps_of([0.0, 1.0, 1.5, 3.0, 9.0], 1.25, 4.0) == [(0.25, 0.5), (1.75, 1.5)]
    assert gaps_of([1.0], 0.0, 4.0) == []


def test_lent_stands_beside_fixed() -> None:
    p50, p99, rate = rows("small", argparse.Namespace(sequences=8), [(FIXED, LENT)])
    assert (p50.value, p50.limit_value, p50.ratio) == pytest.approx((10.0, 20.0, 2.0))
    assert (p99.value, p99.limit_value, p99.ratio) == pytest.approx((100.0, 400.0, 4.0))
    assert (rate.value, rate.ratio) == pytest.approx((4096.0, 2.0))


def test_each_way_has_a_picture_with_both_limits(tmp_path: Path) -> None:
    draw(tmp_path / "new" / "tbt.svg", (FIXED, LENT))
    for way in ("fixed", "lent"):
        drawn = (tmp_path / "new" / f"tbt-{way}.svg").read_text()
        assert f"cores {way}" in drawn
        assert "p99 fixed: 400 ms" in drawn
        assert "p99 lent: 100 ms" in drawn


async def test_a_sequence_that_fails_ends_the_measurement() -> None:
    """It is not waited for, nor are the gaps of the others taken for those of all."""
    fake = FakeConductor(lambda _: [Unsupported("a test says so")])
    async with fake.async_client() as client, asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as failed:
            await observed(client, 2, 0.0, random.Random(1))
    assert failed.group_contains(Unsupported)
