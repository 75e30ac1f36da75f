"""`moonpool bench`: verbs that measure a stack that runs."""

import math
from pathlib import Path
from typing import Annotated

import typer

CONDUCTOR = "127.0.0.1:50051"

bench_app = typer.Typer(help="Measure a stack that runs.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure a stack that runs."""


@bench_app.command()
def serve(
    address: Annotated[
        str,
        typer.Option(
            help="A conductor, HOST:PORT, or a gateway, http://HOST:PORT; several of a kind with commas between them.",
            envvar="MOONPOOL_ADDRESS",
        ),
    ] = CONDUCTOR,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests per second, on average (Poisson); without --trace.")
    ] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Times and lengths of a trace, Mooncake's form.")] = None,
    requests: Annotated[int, typer.Option(min=0, help="Requests to send; of a trace its first ones, 0 = all.")] = 100,
    time_scale: Annotated[float, typer.Option(help="Seconds of the trace in one second.")] = 1.0,
    prompt_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of each prompt; of a trace's at most, 0 = all.")
    ] = 512,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens with which all prompts of a conversation begin.")
    ] = 0,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations, whose prompts alternate.")] = 8,
    output_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of each answer; of a trace's at most, 0 = all.")
    ] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="First requests that do not count.")] = 0,
    ttft_slo_s: Annotated[
        float, typer.Option(min=0.0, help="TTFT limit of goodput, s; the stack is told it, too.")
    ] = math.inf,
    tpot_slo_s: Annotated[float, typer.Option(min=0.0, help="TPOT limit of goodput, seconds.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Seed of arrival times and prompts.")] = 0,
    model: Annotated[str, typer.Option(help="As of `up`; prompts are drawn from its vocabulary.")] = "",
    api_key: Annotated[
        str, typer.Option(help="API key, for a gateway that asks for one.", envvar="MOONPOOL_API_KEY")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw every request into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Send requests when they are due, whatever the others do: TTFT, TPOT, ITL, E2E, and goodput within limits.

    Times count from when a request was due, so a stalled server cannot hide its stall.
    Exit status: 0 when every request was answered or refused for overload, 1 when not.
    """
    from moonpool.checkpoint import resolve
    from moonpool.cli.load.prompts import Shape
    from moonpool.cli.load.serve import Plan, run_serve
    from moonpool.cli.named import chosen_model
    from moonpool.cli.options import addresses

    plan = Plan(
        addresses=addresses(address), model=resolve(chosen_model(model)), requests=requests, rate=rate, trace=trace,
        time_scale=time_scale, shape=Shape(prompt_tokens, shared_tokens, conversations, output_tokens), warmup=warmup,
        ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s, seed=seed, api_key=api_key,
    )  # fmt: skip
    raise typer.Exit(run_serve(plan, as_json=as_json, out=out, picture_file=picture))
