"""`moonpool check`: asks every service for gauges and lists gauges that are not at rest."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

import grpc
import typer

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.base.rpc.tls import Tls, open_blocking_channel
from moonpool.v1 import (
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    kv_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

CALL_TIMEOUT_S = 5.0
ASKED_AT_ONCE = 16
PAUSE_S = 0.05
EXIT_HELD = 1
EXIT_SILENT = 2
Ask = Callable[[grpc.Channel], Iterable[kv_pb2.Gauge]]


def _ask_prefill(channel: grpc.Channel) -> Iterable[kv_pb2.Gauge]:
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    return stub.PrefillStats(prefill_pb2.PrefillStatsRequest(), timeout=CALL_TIMEOUT_S).gauges


def _ask_decode(channel: grpc.Channel) -> Iterable[kv_pb2.Gauge]:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    return stub.DecodeStats(decode_pb2.DecodeStatsRequest(), timeout=CALL_TIMEOUT_S).gauges


def _ask_kvstore(channel: grpc.Channel) -> Iterable[kv_pb2.Gauge]:
    stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
    return stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest(), timeout=CALL_TIMEOUT_S).gauges


_ASK_BY_KIND: dict[int, Ask] = {
    kv_pb2.INSTANCE_KIND_PREFILL: _ask_prefill,
    kv_pb2.INSTANCE_KIND_DECODE: _ask_decode,
    kv_pb2.INSTANCE_KIND_KVSTORE: _ask_kvstore,
}


@dataclass(frozen=True, slots=True)
class GaugeReading:
    """One instance's gauge; `at_rest` is None if the gauge may rest at any value."""

    instance: str
    name: str
    value: float
    at_rest: float | None

    @property
    def resting(self) -> bool:
        """Whether the gauge has the value that is due when no request runs."""
        return self.at_rest is None or self.value == self.at_rest


@dataclass(frozen=True, slots=True)
class GaugeSurvey:
    """All services' gauges, read at one time.

    Attributes:
        readings: every gauge.
        silent: a line for each instance that does not answer.
    """

    readings: tuple[GaugeReading, ...]
    silent: tuple[str, ...] = ()

    @property
    def held(self) -> list[GaugeReading]:
        """Gauges that are not at rest."""
        return [reading for reading in self.readings if not reading.resting]

    @property
    def at_rest(self) -> bool:
        """Whether all services answered and all gauges are at rest."""
        return not self.held and not self.silent

    def trouble(self) -> str:
        """One line with the gauges that are held and the instances that are silent."""
        return "; ".join([*(describe(reading) for reading in self.held), *self.silent])


class GaugeReader:
    """Reads a cluster's gauges, repeatedly over the same connections; a context manager."""

    def __init__(self, conductors: str | Sequence[str], tls: Tls | None = None) -> None:
        """Take the conductors' addresses; the instances are all that any conductor knows.

        Without `tls` connections are secured as the environment says.
        """
        self._tls = tls
        self._conductors = [conductors] if isinstance(conductors, str) else conductors
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._channels:
            self._channels.popitem()[1].close()

    def survey(self) -> GaugeSurvey:
        """Read all gauges once.

        Raises:
            Unavailable: no conductor answers.
        """
        readings: list[GaugeReading] = []
        silent: list[str] = []
        members: dict[str, kv_pb2.Instance] = {}
        for address in self._conductors:
            try:
                readings += self._ask_conductor(address, members)
            except Unavailable as error:
                silent.append(error.message)
        if not readings:
            raise Unavailable("; ".join(silent))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            answers = list(pool.map(lambda member: _ask(member, self._channel(member.address)), members.values()))
        for answer in answers:
            if isinstance(answer, str):
                silent.append(answer)
            else:
                readings += answer
        return GaugeSurvey(tuple(readings), tuple(silent))

    def _ask_conductor(self, address: str, members: dict[str, kv_pb2.Instance]) -> list[GaugeReading]:
        """A conductor's own gauges; adds the members that the conductor knows.

        Raises:
            Unavailable: the conductor does not answer.
        """
        stub = conductor_pb2_grpc.ConductorServiceStub(self._channel(address))
        try:
            own = stub.ConductorStats(conductor_pb2.ConductorStatsRequest(), timeout=CALL_TIMEOUT_S)
            state = stub.ClusterState(conductor_pb2.ClusterStateRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise Unavailable(f"the conductor at {address} does not answer: {from_rpc_error(error)}") from error
        members |= {member.instance.id: member.instance for member in state.instances}
        return [_reading(own.instance.id, gauge) for gauge in own.gauges]

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = open_blocking_channel(address, self._tls)
        return self._channels[address]


def _ask(instance: kv_pb2.Instance, channel: grpc.Channel) -> list[GaugeReading] | str:
    """Return an instance's readings, or the reason why there are none."""
    ask = _ASK_BY_KIND.get(instance.kind)
    if ask is None:
        return f"{instance.id} is of unknown kind {instance.kind}"
    try:
        return [_reading(instance.id, gauge) for gauge in ask(channel)]
    except grpc.RpcError as error:
        return f"{instance.id} at {instance.address} does not answer: {from_rpc_error(error)}"


def _reading(instance: str, gauge: kv_pb2.Gauge) -> GaugeReading:
    return GaugeReading(instance, gauge.name, gauge.value, gauge.at_rest if gauge.HasField("at_rest") else None)


def read_gauges(conductors: str | Sequence[str], tls: Tls | None = None) -> list[GaugeReading]:
    """The gauges from conductors and from every instance that they know; `tls` as of `GaugeReader`.

    Raises:
        Unavailable: a service does not answer.
    """
    with GaugeReader(conductors, tls) as surveyor:
        survey = surveyor.survey()
    if survey.silent:
        raise Unavailable("; ".join(survey.silent))
    return list(survey.readings)


def wait_at_rest(conductors: str | Sequence[str], timeout_s: float, tls: Tls | None = None) -> list[GaugeReading]:
    """Read gauges until all are at rest; releases travel between processes, so the first reading may be too early.

    Returns:
        The last readings.

    Raises:
        Unavailable: something is held, or a service does not answer, when the time is over; the message has details.
    """
    survey = _survey_until_rest(conductors, timeout_s, tls)
    if not survey.at_rest:
        raise Unavailable(f"not at rest: {survey.trouble()}")
    return list(survey.readings)


def _survey_until_rest(conductors: str | Sequence[str], timeout_s: float, tls: Tls | None = None) -> GaugeSurvey:
    """The first survey that finds everything at rest, or the last before the time is over.

    Raises:
        Unavailable: no conductor answered the last time.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    with GaugeReader(conductors, tls) as surveyor:
        while True:
            try:
                survey = surveyor.survey()
                if survey.at_rest or time.monotonic() >= deadline:
                    return survey
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
            pause.wait(PAUSE_S)


def describe(reading: GaugeReading) -> str:
    """One text line."""
    rest = "" if reading.at_rest is None else f" (at rest {reading.at_rest:g})"
    return f"{reading.instance}: {reading.name} = {reading.value:g}{rest}"


def run_check(conductors: Sequence[str], *, wait_s: float = 0.0, as_json: bool = False) -> int:
    """Print what is held, for people, or all gauges as one JSON object.

    Args:
        conductors: their addresses, "host:port".
        wait_s: seconds to wait for gauges to come to rest.
        as_json: print `{"at_rest", "held", "silent", "gauges"}`.

    Returns:
        0 when everything is at rest, 1 when something is held, 2 when a service does not answer.
    """
    try:
        survey = _survey_until_rest(conductors, wait_s)
    except MoonpoolError as error:
        typer.echo(f"moonpool: {error}", err=True)
        if as_json:
            typer.echo(_to_json(GaugeSurvey((), (str(error),))))
        return EXIT_SILENT
    if as_json:
        typer.echo(_to_json(survey))
    else:
        _print(survey)
    return EXIT_SILENT if survey.silent else EXIT_HELD if survey.held else 0


def _to_json(survey: GaugeSurvey) -> str:
    return json.dumps(
        {
            "at_rest": survey.at_rest,
            "held": [asdict(reading) for reading in survey.held],
            "silent": list(survey.silent),
            "gauges": [asdict(reading) for reading in survey.readings],
        }
    )


def _print(survey: GaugeSurvey) -> None:
    for instance in dict.fromkeys(reading.instance for reading in survey.readings):
        own = [reading for reading in survey.readings if reading.instance == instance]
        held = [reading for reading in own if not reading.resting]
        typer.echo(f"{instance}: {len(held) or 'nothing'} held")
        for reading in held:
            typer.echo(f"HELD  {describe(reading)}")
    for line in survey.silent:
        typer.echo(f"SILENT {line}")
    if survey.at_rest:
        typer.echo("everything is at rest")
    else:
        typer.echo(f"not at rest: {len(survey.held)} held, {len(survey.silent)} silent")
