"""Verbs that play traces: in virtual time, or at a running stack. Each imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli.options import PREDICT, Address, Model, addresses


def add_to(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(rich_help_panel=PREDICT)(plan)
    app.command(rich_help_panel=PREDICT)(replay)


def plan(
    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE")],
    model: Annotated[str, typer.Option(help="A model that the hardware's file names.")],
    hardware: Annotated[str, typer.Option(help="Bundled hardware's name, or a path to a YAML file.")],
    slo: Annotated[str, typer.Option(help="ttft=SECONDS,tbt=SECONDS.")],
    goodput: Annotated[float, typer.Option(help="Share of requests that must keep both limits.")] = 0.9,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests come so many times as fast as in the trace.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="First requests of the trace only; 0 = all.")] = 0,
    bound: Annotated[int, typer.Option(min=1, help="Instances of a kind at most.")] = 64,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Find the least-cost mix of prefill, decode and kvstore instances that serves a trace within its limits."""
    from moonpool.cli.plan import run_plan

    run_plan(trace, model=model, hardware=hardware, slo=slo, goodput=goodput, rate=rate, requests=requests,
             bound=bound, report=report, as_json=as_json)  # fmt: skip


def replay(
    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE")],
    address: Address = "127.0.0.1:50051",
    model: Model = "",
    requests: Annotated[int, typer.Option(min=0, help="First requests of the trace only; 0 = all.")] = 0,
    time_scale: Annotated[float, typer.Option(help="Seconds of the trace, and of the report, in one second.")] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each prompt at most; 0 = all.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each answer at most; 0 = all.")] = 0,
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="TTFT limit of goodput, seconds.")] = 30.0,
    tbt_slo_s: Annotated[float, typer.Option(min=0.0, help="TBT limit of goodput, seconds.")] = 0.1,
    simulate: Annotated[str, typer.Option(help="Also simulate such a stack, with this profile; empty = do not.")] = "",
    step_tokens: Annotated[int, typer.Option(min=1, help="--step-tokens of the prefill instances.")] = 512,
    calibrate_on: Annotated[
        int, typer.Option(min=0, help="Fit the simulation to so many first requests, compare the others.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Send a trace to a running stack; report latencies and predictions as the simulator does, and beside it.

    Exit status: 0 when every request was answered, 1 when not.
    """
    from moonpool.cli.named import chosen_model
    from moonpool.cli.replay import run_replay
    from simulator.cluster.config import Slo

    status = run_replay(
        trace, addresses(address), model=chosen_model(model), requests=requests, time_scale=time_scale,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, slo=Slo(ttft_slo_s, tbt_slo_s), profile=simulate,
        step_tokens=step_tokens, calibrate_on=calibrate_on, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)
