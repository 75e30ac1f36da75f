"""The picture of a load test: well-formed, one point per latency, a scale that holds them."""

import xml.etree.ElementTree as ElementTree

import pytest

from moonpool.cli.load_generator.chart import HEIGHT, WIDTH, latency_chart, rounded_up
from moonpool.cli.load_generator.loops import RequestOutcome

SVG = "{http://www.w3.org/2000/svg}"


def test_every_request_has_its_points() -> None:
    outcomes = [
        RequestOutcome(due=0.0, first=0.1, ended=0.4, tokens=2),
        RequestOutcome(due=1.0, first=1.2, ended=1.9, tokens=2),
        RequestOutcome(due=2.0, ended=2.5, error="Overloaded"),
    ]
    tree = ElementTree.fromstring(latency_chart("a < b & c", outcomes))
    circles = tree.findall(f"{SVG}circle")
    assert len(circles) == 2 + 2 + 1
    assert all(0 <= float(c.attrib["cx"]) <= WIDTH and 0 <= float(c.attrib["cy"]) <= HEIGHT for c in circles)
    assert len(tree.findall(f"{SVG}polyline")) == 3
    texts = [text.text for text in tree.findall(f"{SVG}text")]
    assert "a < b & c" in texts
    assert "1 failed" in texts
    assert "to the end, ms: p50 400.0, p90 900.0, p99 900.0" in texts


def test_nothing_can_be_drawn_too() -> None:
    assert not ElementTree.fromstring(latency_chart("none", [])).findall(f"{SVG}circle")


@pytest.mark.parametrize(("most", "scale"), [(0.9, 1.0), (1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (0.06, 0.1), (70, 100)])
def test_scales_are_round(most: float, scale: float) -> None:
    assert rounded_up(most) == pytest.approx(scale)
