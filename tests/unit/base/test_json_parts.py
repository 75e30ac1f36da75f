"""YAML from elsewhere: references that stand for more than they show, and tags that do not fit."""

import time

import pytest

from moonpool.base.json_parts import parse_yaml

LAUGHS = ["a0: &a0 [x, x]", *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 12))]
MERGES = ["m0: &m0 {a: 1, b: 2}", *(f"m{at}: &m{at} {{<<: [{', '.join([f'*m{at - 1}'] * 99)}]}}" for at in range(1, 6))]


@pytest.mark.parametrize(
    "text",
    ["\n".join(LAUGHS), "\n".join(MERGES), "a: &a {b: *a}", "a: &a [[*a]]"],
    ids=["laughs", "merges", "within itself", "within a list of itself"],
)
def test_what_references_would_make_is_bounded(text: str) -> None:
    """An error that shows such a value would take all memory; merges are copies."""
    began = time.process_time()
    with pytest.raises(ValueError, match="parts"):
        parse_yaml(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("value", ["!!bool x", "!!int ''", "!!float ''", "!!int '-'", "!!timestamp x"])
def test_a_value_that_is_not_what_its_tag_says_is_no_yaml(value: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        parse_yaml(f"a: {value}")


@pytest.mark.parametrize("number", ["0b" + "1" * 3000, "1" + ":1" * 300_000, "1" + ":1" * 300_000 + ".5"])
def test_a_number_has_a_bounded_length(number: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="number of more than 1024 signs"):
        parse_yaml(f"a: [{number}]")
    assert time.process_time() - began < 5


def test_numbers_in_parts_of_60() -> None:
    assert parse_yaml("[1:30:00, 1:30.5, -1:1]") == [5400, 90.5, -61]
    with pytest.raises(ValueError, match="tag"):
        parse_yaml("1" + ":1" * 300 + ".5")  # more than a float holds


def test_plain_references_work() -> None:
    text = "one: &one {a: 1}\ntwo: {<<: *one, b: 2}\nthree: [*one, *one]"
    assert parse_yaml(text) == {"one": {"a": 1}, "two": {"a": 1, "b": 2}, "three": [{"a": 1}, {"a": 1}]}
    assert parse_yaml("") is None
