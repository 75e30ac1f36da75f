"""`moonpool health`: asks a service, once or until ready, by grpc.health.v1, or a gateway by HTTP.

A container's health check runs this command every few seconds, so the module imports little.
"""

import contextlib
import http.client
import threading
import time
from urllib.parse import urlsplit

import grpc
import typer
from grpc_health.v1 import health_pb2

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.rpc.tls import open_blocking_channel

PAUSE_S = 0.2
EXIT_UNHEALTHY = 1
HTTP, HTTPS = "http://", "https://"
MAX_ANSWER_BYTES = 4096


def run_health(address: str, *, timeout_s: float, wait_s: float, joined: int) -> int:
    """Ask whether a service serves; with `joined`, also ask a conductor how many instances have joined.

    Args:
        address: "host:port" for any gRPC service, "http://host:port" or "https://host:port" for a gateway; the name of
            a stack for that stack's conductors, "" for those of the one stack that runs.
        timeout_s: seconds one answer may take.
        wait_s: seconds to retry until the service serves.
        joined: instances that must have joined; 0 = any service will do.

    Returns:
        0 if the service serves, else 1.

    Raises:
        InvalidRequest: naming `address`: as `found_address`.
    """
    deadline = time.monotonic() + wait_s
    pause = threading.Event()
    while True:
        asked = _asked(address)  # anew: a stack that starts is found when its conductor listens
        try:
            for each in asked:
                (_ask_http if each.startswith((HTTP, HTTPS)) else _ask)(each, timeout_s)
            if joined:
                _count(asked, timeout_s, joined)
        except MoonpoolError as error:
            if time.monotonic() >= deadline:
                _say_why(error, is_found=":" not in address)
                return EXIT_UNHEALTHY
            pause.wait(PAUSE_S)
        else:
            serves = f"{', '.join(asked)} serve{'s' if len(asked) == 1 else ''}"
            typer.echo(serves + (f", {joined} instances or more have joined" if joined else ""))
            return 0


def _say_why(error: MoonpoolError, *, is_found: bool) -> None:
    """Print why a service is not healthy, with a remedy if the user named no address."""
    from moonpool.cli.whole_words import say

    remedy = "\n`moonpool ps` lists the stacks that run; `moonpool serve MODEL` starts one." if is_found else ""
    say(f"{error}{remedy}", err=True)


def _asked(address: str) -> list[str]:
    if ":" in address:
        return [address]
    from moonpool.cli.addresses import addresses

    return addresses(address)


def _ask(address: str, timeout_s: float) -> None:
    """As `moonpool.base.rpc.channels.probe`, with a third of the start-up time; raises Unavailable."""
    with open_blocking_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            from moonpool.base.rpc.errors import from_rpc_error

            raise Unavailable(f"{address} does not answer: {from_rpc_error(error)}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{address} answers that it is not serving")


def _ask_http(address: str, timeout_s: float) -> None:
    """As `_ask`, of a gateway; this machine must trust the gateway's certificate (`SSL_CERT_FILE` names others)."""
    parts = urlsplit(address)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(parts.hostname or "", parts.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            status, text = answer.status, answer.read(MAX_ANSWER_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"{address} does not answer: {error}") from error
    if status != http.HTTPStatus.OK:
        raise Unavailable(f"{address} answers that it is not serving: {text}")


def _count(asked: list[str], timeout_s: float, wanted: int) -> None:
    from moonpool.client import Client

    with Client(asked) as client:
        names = sorted(instance.id for instance in client.cluster_state(timeout_s=timeout_s).instances)
    if len(names) < wanted:
        raise Unavailable(
            f"{wanted} instances must have joined {', '.join(asked)}, {len(names)} have: {', '.join(names)}"
        )
