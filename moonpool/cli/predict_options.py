"""Options of the verbs that measure and predict, as their modules take them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli.options import (
    Address,
    Model,
)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Options of `bench serve`: what is sent, and where to. Conductors are asked in turn of loss, gateways in turn."""

    address: Annotated[
        str,
        typer.Option(
            help="A conductor, HOST:PORT, or a gateway, http://HOST:PORT; several of a kind with commas between them.",
            envvar="MOONPOOL_ADDRESS",
        ),
    ] = ""
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests per second, on average (Poisson); without --trace.")
    ] = 0.0
    trace: Annotated[Path | None, typer.Option(help="Times and lengths of a trace, Mooncake's form.")] = None
    requests: Annotated[int, typer.Option(min=0, help="Requests to send; of a trace the first ones, 0 = all.")] = 100
    time_scale: Annotated[float, typer.Option(help="Seconds of the trace in one second.")] = 1.0
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each prompt; of a trace's at most, 0 = all.")] = (
        512
    )
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens with which all prompts of a conversation begin.")
    ] = 0
    conversations: Annotated[int, typer.Option(min=1, help="Conversations with alternating prompts.")] = 8
    output_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each answer; of a trace's at most, 0 = all.")] = (
        64
    )
    warmup: Annotated[int, typer.Option(min=0, help="First requests that do not count.")] = 0
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="TTFT limit for goodput, s; also sent to the stack.")] = (
        math.inf
    )
    tpot_slo_s: Annotated[float, typer.Option(min=0.0, help="TPOT limit of goodput, seconds.")] = math.inf
    seed: Annotated[int, typer.Option(help="Seed of arrival times and prompts.")] = 0
    model: Annotated[str, typer.Option(help="As for `serve`; prompts are drawn from the model's vocabulary.")] = ""
    api_key: Annotated[
        str, typer.Option(help="API key, for a gateway that asks for one.", envvar="MOONPOOL_API_KEY")
    ] = ""
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None
    picture: Annotated[Path | None, typer.Option(help="Draw every request into this SVG file.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`: what is searched for."""

    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE")]
    model: Annotated[str, typer.Option(help="A model that the hardware's file names.")]
    hardware: Annotated[str, typer.Option(help="Bundled hardware's name, or a path to a YAML file.")]
    slo: Annotated[str, typer.Option(help="ttft=SECONDS,tbt=SECONDS.")]
    goodput: Annotated[float, typer.Option(help="Share of requests that must keep both limits.")] = 0.9
    rate: Annotated[float, typer.Option(min=0.001, help="Requests come so many times as fast as in the trace.")] = 1.0
    requests: Annotated[int, typer.Option(min=0, help="First requests of the trace only; 0 = all.")] = 0
    bound: Annotated[int, typer.Option(min=1, help="Instances of a kind at most.")] = 64
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `replay`: what is sent, and how."""

    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE")]
    address: Address = ""
    model: Model = ""
    requests: Annotated[int, typer.Option(min=0, help="First requests of the trace only; 0 = all.")] = 0
    time_scale: Annotated[float, typer.Option(help="Seconds of the trace, and of the report, in one second.")] = 1.0
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each prompt at most; 0 = all.")] = 0
    output_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each answer at most; 0 = all.")] = 0
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="TTFT limit of goodput, seconds.")] = 30.0
    tbt_slo_s: Annotated[float, typer.Option(min=0.0, help="TBT limit of goodput, seconds.")] = 0.1
    simulate: Annotated[str, typer.Option(help="Also simulate such a stack, with this profile; empty = do not.")] = ""
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="--max-num-batched-tokens of the prefill instances.")
    ] = 512
    calibrate_on: Annotated[
        int, typer.Option(min=0, help="Fit the simulation to so many first requests, compare the others.")
    ] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False
