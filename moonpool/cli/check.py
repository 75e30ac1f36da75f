"""`moonpool check`: asks every service for its gauges and names what has not come back to rest."""

import threading
import time
from dataclasses import dataclass

import grpc
import typer

from moonpool.errors import MoonpoolError, Unavailable
from moonpool.rpc.errors import from_rpc_error
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


@dataclass(frozen=True, slots=True)
class Reading:
    """One gauge of one instance; `at_rest` is None where it may rest anywhere."""

    instance: str
    name: str
    value: float
    at_rest: float | None

    @property
    def resting(self) -> bool:
        """Whether it is where it must be when no request runs."""
        return self.at_rest is None or self.value == self.at_rest


def read_gauges(conductor_address: str) -> list[Reading]:
    """The gauges of the conductor and of every instance that it knows.

    Raises:
        Unavailable: a service does not answer.
    """
    readings: list[Reading] = []
    with grpc.insecure_channel(conductor_address) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        try:
            own = stub.ConductorStats(conductor_pb2.ConductorStatsRequest(), timeout=CALL_TIMEOUT_S)
            state = stub.ClusterState(conductor_pb2.ClusterStateRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    readings += [_reading("conductor", gauge) for gauge in own.gauges]
    for member in state.instances:
        readings += [_reading(member.instance.id, gauge) for gauge in _member_gauges(member.instance)]
    return readings


def _reading(instance: str, gauge: kv_pb2.Gauge) -> Reading:
    return Reading(instance, gauge.name, gauge.value, gauge.at_rest if gauge.HasField("at_rest") else None)


def _member_gauges(instance: kv_pb2.Instance) -> list[kv_pb2.Gauge]:
    with grpc.insecure_channel(instance.address) as channel:
        try:
            match instance.kind:
                case kv_pb2.INSTANCE_KIND_PREFILL:
                    prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
                    return list(prefill.PrefillStats(prefill_pb2.PrefillStatsRequest(), timeout=CALL_TIMEOUT_S).gauges)
                case kv_pb2.INSTANCE_KIND_DECODE:
                    decode = decode_pb2_grpc.DecodeServiceStub(channel)
                    return list(decode.DecodeStats(decode_pb2.DecodeStatsRequest(), timeout=CALL_TIMEOUT_S).gauges)
                case kv_pb2.INSTANCE_KIND_KVSTORE:
                    store = kvstore_pb2_grpc.KVStoreServiceStub(channel)
                    return list(store.KVStoreStats(kvstore_pb2.KVStoreStatsRequest(), timeout=CALL_TIMEOUT_S).gauges)
                case kind:
                    raise Unavailable(f"{instance.id} is of unknown kind {kind}")
        except grpc.RpcError as error:
            raise Unavailable(
                f"{instance.id} at {instance.address} does not answer: {from_rpc_error(error)}"
            ) from error


def wait_at_rest(conductor_address: str, timeout_s: float) -> list[Reading]:
    """Reads gauges until all are at rest; releases travel between processes, so the first look may come too early.

    Returns:
        The last readings.

    Raises:
        Unavailable: something is still held when the time is over; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        readings = read_gauges(conductor_address)
        held = [reading for reading in readings if not reading.resting]
        if not held:
            return readings
        if time.monotonic() > deadline:
            raise Unavailable("not at rest: " + "; ".join(describe(reading) for reading in held))
        pause.wait(0.05)


def describe(reading: Reading) -> str:
    """One line of text."""
    rest = "" if reading.at_rest is None else f" (at rest {reading.at_rest:g})"
    return f"{reading.instance}: {reading.name} = {reading.value:g}{rest}"


def run_check(address: str) -> int:
    """Prints all gauges.

    Returns:
        0 when everything is at rest, 1 when something is still held, 2 when somebody does not answer.
    """
    try:
        readings = read_gauges(address)
    except MoonpoolError as error:
        typer.echo(f"moonpool: {error}", err=True)
        return 2
    held = [reading for reading in readings if not reading.resting]
    for reading in readings:
        typer.echo(("HELD  " if not reading.resting else "      ") + describe(reading))
    typer.echo("everything is at rest" if not held else f"{len(held)} not at rest")
    return 1 if held else 0
