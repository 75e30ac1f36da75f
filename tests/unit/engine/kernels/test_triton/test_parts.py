"""How long the parts of a split context are."""

import pytest

from moonpool.engine.kernels.triton.tiles import MIN_PART, part_keys

PROCESSORS = 132


@pytest.mark.parametrize(
    ("programs", "context", "parts"),
    [(2, 1024, 4), (2, 8192, 16), (64, 4096, 5), (256, 4096, 4), (512, 1024, 1), (1024, 8192, 2), (4096, 8192, 1)],
)
def test_parts_that_were_fastest_on_an_h200(programs: int, context: int, parts: int) -> None:
    """Short where processors would have no work, long where they have; fewer the longer the context is."""
    assert -(-context // part_keys(programs, context, PROCESSORS, 64)) == parts


@pytest.mark.parametrize("programs", [1, 100, 132, 1000])
@pytest.mark.parametrize("context", [1, 255, 4096, 131_072])
def test_a_part_is_of_whole_tiles_and_not_too_short(programs: int, context: int) -> None:
    keys = part_keys(programs, context, PROCESSORS, 64)
    assert keys % 64 == 0
    assert keys >= MIN_PART
