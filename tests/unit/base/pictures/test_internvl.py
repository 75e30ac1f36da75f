"""Tokens of InternVL's pictures, from width and height alone, beside transformers' processor."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.pictures.internvl import InternVLRule
from tests.pictures import ARRANGED_PROCESSOR, ARRANGED_ROWS, SIDE, arranged_model

SEED = 20_28


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> InternVLRule:
    folder: Path = arranged_model(tmp_path_factory.mktemp("model"))
    found = read_rule(folder, lambda: Tokenizer.load(folder))
    assert isinstance(found, InternVLRule), found
    return found


def test_a_cut_picture_is_shown_once_more(rule: InternVLRule) -> None:
    assert (rule.rows, rule.height, rule.width, rule.squares) == (ARRANGED_ROWS, SIDE, SIDE, (1, 6))
    assert list(rule.tokens((1, 1))) == [rule.begin, *[rule.mark] * ARRANGED_ROWS, rule.end]
    assert len(rule.tokens((2, 3))) == 2 + 7 * ARRANGED_ROWS
    assert rule.grid(3000, 1000, "low") == (1, 1)


def test_grids_are_those_of_transformers_processor(rule: InternVLRule) -> None:
    pytest.importorskip("PIL")
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
        get_optimal_tiled_canvas,
    )

    processor: Any = GotOcr2ImageProcessorPil(**ARRANGED_PROCESSOR)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    sizes = [(draw.randrange(1, 900), draw.randrange(1, 900)) for _ in range(400)]
    sizes += [(1, 1), (1, 90), (4000, 50), (64, 64), (45, 45), (46, 46), (64, 32), (128, 64)]
    for width, height in sizes:
        columns, rows = get_optimal_tiled_canvas((height, width), (SIDE, SIDE), 1, 6)
        assert rule.grid(width, height, "auto") == (rows, columns), (width, height)
        squares = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert sum(token == rule.mark for token in rule.tokens((rows, columns))) == ARRANGED_ROWS * squares


@pytest.mark.parametrize(("changed", "name"), [({"max_patches": 10**9}, "max_patches"), ({}, "")])
def test_no_picture_has_tokens_without_end(changed: dict[str, int], name: str, tmp_path: Path) -> None:
    folder = arranged_model(tmp_path)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    found = read_rule(folder, lambda: Tokenizer.load(folder))
    assert name in str(found) if name else isinstance(found, InternVLRule)


def test_a_picture_of_many_squares_is_cut_soon(rule: InternVLRule) -> None:
    begun = time.thread_time()
    rows, columns = replace(rule, squares=(1, 1 << 14)).grid(3000, 1000, "auto")
    assert columns == 3 * rows
    assert time.thread_time() - begun < 5
