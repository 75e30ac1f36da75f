"""The benchmark of KV on a device, with tiny shapes."""

from benchmarks.kv_device import Shape, decode_seconds, join


def test_a_token_and_a_join_are_measured() -> None:
    assert decode_seconds(Shape("tiny", 2, 3, 100)) > 0
    joined = join(Shape("tiny", 2, 1, 200, 64))
    assert min(joined.launching, joined.bringing, joined.copying) > 0
