import pytest

from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.errors import InvalidRequest
from moonpool.v1 import kv_pb2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "decode-0.cluster.local:50053", "a_b:1"])
def test_addresses_that_can_be(address: str) -> None:
    check_instance(kv_pb2.Instance(id="decode-0", address=address))


NOWHERE = ["", "host", "host:0", "host:65536", "0.0.0.0:1", "[::]:1", ":1", "a b:1", "a\0b:1", "ü:1", "unix:/a:1"]


@pytest.mark.parametrize("address", [*NOWHERE, "h" * 600 + ":1"])
def test_addresses_that_cannot(address: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_instance(kv_pb2.Instance(id="decode-0", address=address), "target.decode")
    assert caught.value.field == "target.decode.address"


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257])
def test_names(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_instance(kv_pb2.Instance(id=name, address="127.0.0.1:1"))
    assert caught.value.field == "instance.id"
