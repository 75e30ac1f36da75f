"""What travels of layers with a window, in forecasts."""

from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.proto_conversion import instance_facts
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.layouts import GROUPED


def test_only_the_last_blocks_travel() -> None:
    """Blocks of 16 tokens; windows of two blocks, and the part-filled one."""
    shape = KVShape(16, token_bytes=10, layers=4, window_blocks=2, window_bytes=1000)
    assert shape.moved_bytes(160, 0) == 160 * 10 + 3 * 1000
    assert shape.moved_bytes(160, 144) == 16 * 10 + 1000
    assert shape.moved_bytes(170, 144) == 26 * 10 + 2 * 1000
    assert shape.moved_bytes(100, 112) == 0
    assert KVShape(16, token_bytes=10, layers=4).moved_bytes(160, 16) == 1440


def test_layers_with_a_window_count_apart() -> None:
    instance = kv_pb2.Instance(id="p", kind=kv_pb2.INSTANCE_KIND_PREFILL)
    hello = conductor_pb2.JoinHello(instance=instance, model=conductor_pb2.ModelInfo(layout=GROUPED.to_proto()))
    assert instance_facts(hello).shape == KVShape(16, 2 * 1024 // 16, 4, window_blocks=2, window_bytes=2 * 2048)
