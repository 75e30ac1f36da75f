"""Versions of a cluster are at most one minor apart."""

import pytest

from moonpool.base.version import version_conflict


@pytest.mark.parametrize(
    ("own", "other"),
    [("1.4.0", "1.4.7"), ("1.4.0", "1.5.0"), ("1.4.0", "1.3.9"), ("1.4.0", ""), ("0", "2.0.0"), ("1.4", "1.5.0rc1")],
)
def test_one_minor_apart_works(own: str, other: str) -> None:
    assert version_conflict(own, other) == ""


@pytest.mark.parametrize(("own", "other"), [("1.4.0", "1.6.0"), ("1.4.0", "1.2.0"), ("1.4.0", "2.4.0")])
def test_others_are_refused_in_a_sentence(own: str, other: str) -> None:
    assert version_conflict(own, other).startswith(f"version {other} does not work with {own}: in a cluster, versions")
