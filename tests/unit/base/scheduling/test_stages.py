import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import stage_ranges


def test_layers_are_divided_evenly_and_the_last_stage_is_never_longer() -> None:
    assert stage_ranges(5, 1) == [(0, 5)]
    assert stage_ranges(5, 2) == [(0, 3), (3, 5)]
    assert stage_ranges(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert stage_ranges(3, 3) == [(0, 1), (1, 2), (2, 3)]


def test_no_stage_begins_with_a_joined_layer() -> None:
    assert stage_ranges(8, 2, {1, 3, 5, 7}) == [(0, 4), (4, 8)]
    assert stage_ranges(6, 2, {1, 3, 5}) == [(0, 4), (4, 6)]
    assert stage_ranges(6, 2, {2, 3, 4, 5}) == [(0, 1), (1, 6)]
    assert stage_ranges(122, 4, range(1, 122, 2)) == [(0, 32), (32, 62), (62, 92), (92, 122)]
    assert stage_ranges(7, 3, {1, 2, 3, 4}) == [(0, 5), (5, 6), (6, 7)]
    with pytest.raises(ConfigError, match="between 1 and 3, with which a stage can begin"):
        stage_ranges(6, 4, {1, 3, 5})


def test_the_longest_stage_is_as_short_as_can_be() -> None:
    assert stage_ranges(4, 2, costs=(5, 5, 5, 6)) == [(0, 2), (2, 4)]
    assert stage_ranges(4, 2, costs=(5, 5, 5, 20)) == [(0, 3), (3, 4)], "the last has a large output head"
    assert stage_ranges(6, 2, costs=(1, 1, 1, 1, 4, 4)) == [(0, 5), (5, 6)]
    assert stage_ranges(6, 2, {5}, costs=(1, 1, 1, 1, 4, 4)) == [(0, 4), (4, 6)]
    assert stage_ranges(6, 3, costs=(9, 1, 1, 1, 1, 1)) == [(0, 1), (1, 4), (4, 6)], "the others as even as can be"


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_impossible_divisions_are_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and the model's 3 layers"):
        stage_ranges(3, stages)
