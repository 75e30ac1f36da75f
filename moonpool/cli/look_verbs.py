"""The verbs that look at a stack: check, state, top, explain, health."""

from typing import Annotated

import typer

from moonpool.cli.addresses import addresses
from moonpool.cli.options import LOOK, Address

app = typer.Typer()


@app.command(rich_help_panel=LOOK)
def check(
    address: Address = "",
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for gauges to come to rest.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Check that no service holds blocks, sessions or reservations while no request runs.

    Exit status: 0 when everything is at rest, 1 when something is held, 2 when a service does not answer.
    """
    from moonpool.cli.check import run_check

    raise typer.Exit(run_check(addresses(address), wait_s=wait_s, as_json=as_json))


@app.command(rich_help_panel=LOOK)
def state(
    address: Address = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show the cluster according to the conductor: the model, and every instance with load and blocks."""
    from moonpool.cli.cluster import run_state
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_state(client, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def top(
    address: Address = "",
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
) -> None:
    """Show the cluster live: instances, queues, KV by tier, hit rate, TTFT and TPOT of the last minute; Ctrl-C ends."""
    from moonpool.cli.cluster import run_top
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_top(client, interval_s=interval_s, once=once, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            help="The request's id: `moonpool top` lists them, `generate --json` prints it. Default: the newest that "
            "has ended."
        ),
    ] = "",
    address: Address = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show why a request was placed there: every candidate, the predictions, and the later measurements."""
    from moonpool.cli.cluster import run_explain
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_explain(client, request_id, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def health(
    address: Annotated[
        str,
        typer.Option(
            help="A service, HOST:PORT; a gateway, http(s)://HOST:PORT; a stack. Default: the one stack that runs.",
            envvar="MOONPOOL_ADDRESS",
            show_default=False,
        ),
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 5.0,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to retry until the service serves.")] = 0.0,
    joined: Annotated[int, typer.Option(min=0, help="Instances that must have joined (conductor only).")] = 0,
) -> None:
    """Ask a service whether it serves (grpc.health.v1, or /health). Exit status: 0 if the service serves, else 1."""
    from moonpool.cli.health import run_health

    raise typer.Exit(run_health(address, timeout_s=timeout_s, wait_s=wait_s, joined=joined))
