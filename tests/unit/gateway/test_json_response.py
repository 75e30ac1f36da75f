"""JSON of responses: in pieces as whole."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.gateway.serving.json_response import to_json_bytes, to_json_in_pieces
from tests.examples import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(100))
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.integers(0, 8))
def test_pieces_put_together_are_the_whole(content: dict[str, Any], depth: int) -> None:
    assert to_json_in_pieces(content, depth) == to_json_bytes(content)
