"""The hit curve of a store, in words and as a picture."""

import re
import xml.etree.ElementTree as ET

import pytest

from moonpool.cli.kvstore import capacity_advice, draw_hit_curve, hit_share


def test_the_hit_share_between_two_points_is_that_of_the_smaller() -> None:
    curve = [(10, 0.1), (20, 0.3), (40, 0.35)]
    assert [hit_share(curve, size) for size in (9, 10, 19.9, 20, 1000)] == [0, 0.1, 0.1, 0.3, 0.35]


def test_the_picture_answers_the_question() -> None:
    curve = [(10**9, 0.1), (2 * 10**9, 0.3), (40 * 10**9, 0.35)]
    text = capacity_advice(curve, 10**9, 10**9)
    assert text == "1.0 GB hit 10.0 %; another 1.0 GB would add 20.0 points; no size hits more than 35.0 %"
    drawing = ET.fromstring(draw_hit_curve(curve, 10**9, 10**9))  # our own
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert text in texts
    assert "now" in texts
    assert "+1.0 GB" in texts
    line = drawing.find(".//{*}path[@class='curve']")
    assert line is not None
    heights = [float(step) for step in re.findall(r"V([0-9.]+)", line.attrib["d"])]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == len(curve)


@pytest.mark.parametrize("curve", [[], [(5, 0.0)], [(5, 0.5)]])
def test_a_picture_of_little_is_drawn_too(curve: list[tuple[int, float]]) -> None:
    ET.fromstring(draw_hit_curve(curve, 5, 1))  # our own
