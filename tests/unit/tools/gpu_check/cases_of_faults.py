"""Tests that end as tests may, for stages that run tests. Collected only where they are named."""

import pytest


def test_that_fails() -> None:
    raise AssertionError


@pytest.mark.skipif(True, reason="needs what is not here")
def test_that_is_skipped() -> None:
    raise AssertionError


def test_that_passes() -> None:
    pass
