"""Commands that talk to several conductors: their addresses, and a check of all of them."""

import json
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.cli.addresses import addresses
from moonpool.cli.check import EXIT_HELD, EXIT_SILENT, run_check
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.unit.client.test_grpc import Scripted, served

NOBODY = "127.0.0.1:1"


class Told(Scripted):
    """A conductor with one gauge, and without instances."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.name, self.value = name, value

    async def ConductorStats(
        self, request: conductor_pb2.ConductorStatsRequest, context: Any
    ) -> conductor_pb2.ConductorStatsResponse:
        gauge = kv_pb2.Gauge(name="requests_running", value=self.value, at_rest=0)
        return conductor_pb2.ConductorStatsResponse(instance=kv_pb2.Instance(id=self.name), gauges=[gauge])


def test_addresses_are_parted_by_commas() -> None:
    assert addresses("a:1") == ["a:1"]
    assert addresses("a:1, b:2,c:3") == ["a:1", "b:2", "c:3"]
    for wrong in ("a:1,", ",a:1", "a:1,,b:2"):
        with pytest.raises(InvalidRequest, match="address"):
            addresses(wrong)


def test_every_conductor_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Told("conductor", 0.0)) as first, served(Told("conductor-1", 2.0)) as second:
        assert run_check([first], as_json=True) == 0
        assert run_check([first, second], as_json=True) == EXIT_HELD
        assert run_check([NOBODY, second], as_json=True) == EXIT_SILENT
        assert run_check([NOBODY], as_json=True) == EXIT_SILENT
    rest, held, silent, nothing = map(json.loads, capsys.readouterr().out.splitlines())
    assert rest["at_rest"]
    assert [gauge["instance"] for gauge in held["gauges"]] == ["conductor", "conductor-1"]
    assert [gauge["instance"] for gauge in held["held"]] == ["conductor-1"]
    assert ([gauge["instance"] for gauge in silent["gauges"]], len(silent["silent"])) == (["conductor-1"], 1)
    assert nothing["gauges"] == []
