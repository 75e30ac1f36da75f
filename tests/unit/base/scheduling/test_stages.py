import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import stage_ranges


def test_layers_are_divided_evenly_and_the_last_stage_is_never_longer() -> None:
    assert stage_ranges(5, 1) == [(0, 5)]
    assert stage_ranges(5, 2) == [(0, 3), (3, 5)]
    assert stage_ranges(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert stage_ranges(3, 3) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_impossible_divisions_are_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and the model's 3 layers"):
        stage_ranges(3, stages)
