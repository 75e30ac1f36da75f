"""Tokens of Mistral 3's pictures, from width and height alone, beside transformers' processor."""

import random
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.pictures.pixtral import LOW_SIDE, PixtralRule
from tests.pictures import CELL, CELL_PROCESSOR, CELLS_LONGEST, cell_model

SEED = 20_27


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> PixtralRule:
    folder: Path = cell_model(tmp_path_factory.mktemp("model"))
    found = read_rule(folder, lambda: Tokenizer.load(folder))
    assert isinstance(found, PixtralRule), found
    return found


def test_rows_end_with_a_token_and_the_last_with_another(rule: PixtralRule) -> None:
    mark, row_end, end = rule.mark, rule.row_end, rule.end
    assert (rule.cell, rule.longest) == (CELL, CELLS_LONGEST)
    assert list(rule.tokens((2, 3))) == [mark, mark, mark, row_end, mark, mark, mark, end]
    assert list(rule.tokens((1, 1))) == [mark, end]


def test_grids_are_those_of_transformers_processor(rule: PixtralRule) -> None:
    pytest.importorskip("PIL")
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor: Any = PixtralImageProcessorPil(**CELL_PROCESSOR)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    sizes = [(draw.randrange(1, 300), draw.randrange(1, 300)) for _ in range(200)]
    sizes += [(1, 1), (1, 90), (4000, 50), (3, 299), (1, 300), (97, 96), (16, 17), (CELLS_LONGEST, CELLS_LONGEST)]
    for width, height in sizes:
        image = np.zeros((3, height, width), np.uint8)
        if max(width, height) / min(width, height) > CELLS_LONGEST < max(width, height):
            with pytest.raises(ValueError, match="too thin"):
                rule.grid(width, height, "auto")
            continue
        made = processor([image], patch_size=CELL, input_data_format="channels_first")
        (found,) = made["image_sizes"]
        assert rule.grid(width, height, "auto") == (found[0] // CELL, found[1] // CELL), (width, height)


def test_low_detail_is_a_smaller_picture(rule: PixtralRule) -> None:
    assert rule.longest_side("low") == min(LOW_SIDE, CELLS_LONGEST)
    larger = PixtralRule(rule.mark, rule.settings, CELL, 4 * LOW_SIDE, rule.row_end, rule.end)
    assert larger.grid(2048, 1024, "low") == (16, 32)
    assert larger.grid(2048, 1024, "high") == (64, 128)
