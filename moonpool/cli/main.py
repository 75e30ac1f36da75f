"""The `moonpool` command: verbs and their flags.

Each verb imports its modules on running, so that `moonpool generate` needs no torch and `--help` is quick.
"""

import functools
import importlib
import importlib.metadata
import math
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from moonpool.base.checkpoint.tensor_info import Quantization
from moonpool.base.config import ENGINE_PACKAGES, SERVICE_MODULES, refuse_unknown_variables
from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.rpc.tuning import quiet_grpc
from moonpool.base.sizes import size_option
from moonpool.cli.options import (
    HELP,
    LOOK,
    OPERATE,
    PASS_THROUGH,
    PREDICT,
    SINGLE,
    START,
    Address,
    AnswerTokens,
    KVDtype,
    Model,
    ModelArgument,
    RootGroup,
    Seed,
    SystemTurn,
    Temperature,
    TopP,
    UsedContext,
    UsedContextTtl,
    addresses,
    prompt_text,
    text_of,
    verb,
)
from moonpool.cli.settings import ServeCommand


def lazy_group(module: str) -> type[TyperGroup]:
    """The class for a group with the verbs in `module.app`."""

    class Lazy(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return _load_group(module).list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _load_group(module).get_command(ctx, cmd_name)

    return Lazy


@functools.cache
def _load_group(module: str) -> TyperGroup:
    found = typer.main.get_command(importlib.import_module(module).app)
    assert isinstance(found, TyperGroup)
    return found


LOCAL_CONDUCTOR = "127.0.0.1:50051"
bench_app = typer.Typer(help="Measure a stack that runs.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure a stack that runs."""


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Options of `bench serve`."""

    address: Annotated[
        str,
        typer.Option(
            help="A conductor, HOST:PORT, or a gateway, http://HOST:PORT; several of a kind with commas between them.",
            envvar="MOONPOOL_ADDRESS",
        ),
    ] = LOCAL_CONDUCTOR
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


@bench_app.command("serve")
@verb
def bench_serve(options: BenchServeOptions) -> None:
    """Send requests when they are due, whatever the others do: TTFT, TPOT, ITL, E2E, and goodput within limits.

    Times count from when a request was due, so a stalled server cannot hide the stall.
    Exit status: 0 when every request was answered or refused for overload, 1 when not.
    """
    from moonpool.base.checkpoint import resolve
    from moonpool.cli.bench_serve import BenchPlan, run_serve
    from moonpool.cli.load_generator.prompts import PromptShape
    from moonpool.cli.models import chosen_model
    from moonpool.cli.options import addresses

    plan = BenchPlan(
        addresses=addresses(options.address),
        model=resolve(chosen_model(options.model)),
        requests=options.requests,
        rate=options.rate,
        trace=options.trace,
        time_scale=options.time_scale,
        shape=PromptShape(options.prompt_tokens, options.shared_tokens, options.conversations, options.output_tokens),
        warmup=options.warmup,
        ttft_slo_s=options.ttft_slo_s,
        tpot_slo_s=options.tpot_slo_s,
        seed=options.seed,
        api_key=options.api_key,
    )
    raise typer.Exit(run_serve(plan, as_json=options.as_json, out=options.out, picture_file=options.picture))


model_app = typer.Typer(help="Create and inspect checkpoints.", no_args_is_help=True)


@model_app.command("create")
def create_(
    shape: Annotated[str, typer.Argument(help="Named shape, for example tiny-llama or qwen2.5-0.5b.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
) -> None:
    """Write a checkpoint with random weights in Hugging Face format."""
    from moonpool.engine.models.random_checkpoint import create

    create(shape, folder, seed=seed, dtype=dtype)
    typer.echo(f"{folder}: {shape}, {dtype}, seed {seed}")


@model_app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Hugging Face folder, GGUF file, hub id or a model's name.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block; default: as services have.")] = None,
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Show how many tokens fit in this memory beside weights, work space and program.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Show the KV of a sequence of so many tokens; default: the model's longest.")
    ] = None,
    quantization: Annotated[
        Quantization, typer.Option(help="How engines hold the weights: auto, file, int8, int4 or none.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a checkpoint's parameters, KV, how layers compute, what an engine takes, and what fits a given memory."""
    from moonpool.cli.models import chosen_model, run_inspect

    run_inspect(
        chosen_model(model),
        dtype,
        block_size,
        memory_bytes,
        max_model_len=max_model_len,
        quantization=quantization,
        as_json=as_json,
    )


def _add_trace_verbs(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(rich_help_panel=PREDICT)(plan)
    app.command(rich_help_panel=PREDICT)(replay)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

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


@verb
def plan(options: PlanOptions) -> None:
    """Find the least-cost mix of prefill, decode and kvstore instances that serves a trace within the limits."""
    from moonpool.cli.simulate import PlanRequest, run_plan

    wanted = PlanRequest(
        trace=options.trace,
        model=options.model,
        hardware=options.hardware,
        slo=options.slo,
        goodput=options.goodput,
        rate=options.rate,
        requests=options.requests,
        bound=options.bound,
    )
    run_plan(wanted, report=options.report, as_json=options.as_json)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `replay`."""

    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE")]
    address: Address = LOCAL_CONDUCTOR
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


@verb
def replay(options: ReplayOptions) -> None:
    """Send a trace to a running stack; report latencies and predictions as the simulator does, beside the simulator's.

    Exit status: 0 when every request was answered, 1 when not.
    """
    from moonpool.cli.models import chosen_model
    from moonpool.cli.replay import ReplayPlan, run_replay
    from moonpool.simulator.cluster.config import SloTargets

    plan = ReplayPlan(
        trace=options.trace,
        addresses=addresses(options.address),
        model=chosen_model(options.model),
        requests=options.requests,
        time_scale=options.time_scale,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        slo=SloTargets(options.ttft_slo_s, options.tbt_slo_s),
        profile=options.simulate,
        max_num_batched_tokens=options.max_num_batched_tokens,
        calibrate_on=options.calibrate_on,
    )
    raise typer.Exit(run_replay(plan, as_json=options.as_json))


app = typer.Typer(
    name="moonpool",
    cls=RootGroup,
    help="KVCache-centric serving of large language models. `moonpool VERB --help` explains a verb.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
HTTP_PORT, CONDUCTOR_PORT = 8000, 50051


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moonpool {importlib.metadata.version('moonpool')}")
        raise typer.Exit


@app.callback()
def moonpool(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KVCache-centric serving of large language models. `moonpool VERB --help` explains a verb."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    model: ModelArgument = ""
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The gateway's port, which speaks HTTP; 0 = any free one.")
    ] = HTTP_PORT
    conductor_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="The first conductor's port; others take the next ones. 0 = any free ones. Default: 50051, or 0 with "
            "--port 0.",
        ),
    ] = None
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1
    kvstore: Annotated[int, typer.Option(min=0, help="kvstore instances.")] = 1
    conductors: Annotated[int, typer.Option(min=1, max=16, help="Conductors, side by side.")] = 1
    engine: Annotated[str, typer.Option(help="real, or emulated:PROFILE to emulate compute.")] = "real"
    time_scale: Annotated[float, typer.Option(min=0, help="Emulated seconds per second; 0 = the profile's own.")] = 0.0
    data_dir: Annotated[Path | None, typer.Option(help="Folder of store and logs; default: a temporary one.")] = None
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="Threads of each engine process at most; 0 = all cores, which engines lend each other."
        ),
    ] = 0
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of hashed API keys and their tenants, for clients over HTTP. Default: no key is needed."
        ),
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template (Jinja) in place of the model's.")
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="LoRA adapter that requests may name as model (may be given again)."),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.NAME=VALUE",
            help="A setting (docs/flags.md) of conductor, prefill, decode, kvstore, gateway, engine (prefill and "
            "decode) or all; may be given again.",
        ),
    ] = None
    config: Annotated[Path | None, typer.Option(help="YAML file of such settings: {SERVICE: {NAME: VALUE}}.")] = None
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    restart: Annotated[bool, typer.Option(help="Restart a service that ends unasked; else the stack stops.")] = True
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False


@app.command(cls=ServeCommand, rich_help_panel=START)
@verb
def serve(options: ServeOptions) -> None:
    """Serve a model on this machine, in the foreground, until Ctrl-C: HTTP on port 8000."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    from moonpool.cli.models import pulled_model
    from moonpool.cli.serve import run_serve
    from moonpool.cli.settings import lora_settings, stack_settings
    from moonpool.cli.stack import StackPlan

    settings = list(options.settings or ())
    if options.api_keys is not None:
        settings.append(f"gateway.api_keys={options.api_keys.resolve()}")
    if options.chat_template is not None:
        settings += [
            f"{service}.chat_template={options.chat_template.resolve()}" for service in ("conductor", "gateway")
        ]
    settings = [*lora_settings(options.lora_modules or ()), *settings]
    plan = StackPlan(
        model=pulled_model(options.model),
        data_dir=options.data_dir or Path(),
        prefill=options.prefill,
        decode=options.decode,
        kvstore=options.kvstore,
        conductors=options.conductors,
        engine=options.engine,
        time_scale=options.time_scale,
        threads=options.threads,
        port=(CONDUCTOR_PORT if options.port else 0) if options.conductor_port is None else options.conductor_port,
        http_port=options.port,
        log_level=options.log_level,
        extra=stack_settings(options.config, settings) if options.config or settings else {},
    )
    raise typer.Exit(run_serve(plan, options.data_dir, restart=options.restart, as_json=options.as_json))


@app.command(rich_help_panel=START)
def run(
    model: ModelArgument = "",
    prompt: Annotated[
        str, typer.Argument(help="Answer this and end; - or a pipe: standard input. Without: chat.")
    ] = "",
    system: SystemTurn = "",
    max_tokens: AnswerTokens = 512,
    temperature: Temperature = 0.2,
    top_p: TopP = 0.9,
    seed: Seed = None,
) -> None:
    """Chat with a model, or answer one prompt; starts a stack unless one that serves the model runs."""
    from moonpool.base.sampling_params import SamplingParams
    from moonpool.cli.generate import ChatSession, run_model
    from moonpool.cli.models import pulled_model

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = "" if not prompt and sys.stdin.isatty() else prompt_text(prompt)
    run_model(pulled_model(model), text, lambda client: ChatSession(client, sampling, system))


@app.command(rich_help_panel=START)
def chat(
    address: Address = LOCAL_CONDUCTOR,
    system: SystemTurn = "",
    max_tokens: AnswerTokens = 512,
    temperature: Temperature = 0.2,
    top_p: TopP = 0.9,
    seed: Seed = None,
    context: UsedContext = "",
    tenant: Annotated[str, typer.Option(help="Tenant of the chat and the context.")] = "",
) -> None:
    """Chat with a stack that runs; after each answer: what the cache saved, and the speeds.

    In a pipe each line is a turn.
    """
    from moonpool.base.sampling_params import SamplingParams
    from moonpool.cli.generate import ChatSession
    from moonpool.cli.generate import run_terminal_chat as run_chat

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    run_chat(address, lambda client: ChatSession(client, sampling, system, context, tenant))


@app.command(rich_help_panel=START)
def pull(
    model: Annotated[str, typer.Argument(help="A model's name, for example smollm2, or a hub id, owner/name.")],
) -> None:
    """Fetch a model for later, and print the folder."""
    from moonpool.base.checkpoint import resolve

    typer.echo(resolve(model))


@app.command("list", rich_help_panel=START)
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the models on this machine."""
    from moonpool.cli.models import run_list

    run_list(as_json=as_json)


@app.command(rich_help_panel=START)
def ps(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the stacks of yours that run on this machine."""
    from moonpool.cli.running_stacks import run_ps

    run_ps(as_json=as_json)


@app.command(rich_help_panel=START)
def stop(
    data_dir: Annotated[Path | None, typer.Option(help="The --data-dir of the stack; default: the only stack.")] = None,
) -> None:
    """Stop the stack that `moonpool serve` started on this machine, and wait until all processes have ended."""
    from moonpool.cli.running_stacks import run_stop

    raise typer.Exit(run_stop(data_dir))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `generate`."""

    prompt: Annotated[str, typer.Argument(help="The prompt; - or a pipe: standard input.")] = "-"
    address: Address = LOCAL_CONDUCTOR
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's turn through the chat template.")] = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to generate; printed one after the other.")] = 1
    beams: Annotated[int, typer.Option(min=0, help="Beams of a beam search; the --n best are printed. 0 = none.")] = 0
    length_penalty: Annotated[float, typer.Option(help="Beams are ranked by score / tokens ^ this.")] = 1.0
    logprobs: Annotated[
        int | None, typer.Option(help="Print log probabilities, and this many of the likeliest tokens.")
    ] = None
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None
    response_format: Annotated[str, typer.Option(help="json_object, json_schema, regex or lark.")] = ""
    grammar: Annotated[str, typer.Option(help="The schema, expression or grammar of --response-format; or @FILE.")] = ""
    ttft_slo_s: Annotated[
        float | None, typer.Option(help="Refuse the request if the first token is predicted later than this, seconds.")
    ] = None
    queue_s: Annotated[
        float | None, typer.Option(min=0.0, help="Longest wait before a refusal, seconds; default: the conductor's.")
    ] = None
    tenant: Annotated[str, typer.Option(help="Tenant that the request belongs to.")] = ""
    context: UsedContext = ""
    context_ttl_s: UsedContextTtl = 0.0
    priority: Annotated[int, typer.Option(help="Lower goes first among a tenant's requests.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False


@app.command(rich_help_panel=START)
@verb
def generate(options: GenerateOptions) -> None:
    """Generate text from a prompt."""
    from moonpool.base.sampling_params import SamplingParams
    from moonpool.cli.generate import run_generate
    from moonpool.client import GenerateArguments, Slo

    text = prompt_text(options.prompt)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        n=options.n,
        beam_width=options.beams,
        length_penalty=options.length_penalty,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        response_format=options.response_format,  # type: ignore[arg-type]  # the conductor names unknown fields
        grammar=text_of(options.grammar[1:], "grammar") if options.grammar.startswith("@") else options.grammar,
    )
    asked: GenerateArguments = {
        "sampling": sampling,
        "slo": Slo(ttft_s=options.ttft_slo_s, queue_s=options.queue_s),
        "tenant": options.tenant,
        "priority": options.priority,
        "context": options.context,
        "context_ttl_s": options.context_ttl_s,
    }
    if options.chat:
        asked["messages"] = [{"role": "user", "content": text}]
    else:
        asked["prompt"] = text
    run_generate(addresses(options.address), asked, as_json=options.as_json)


@app.command(rich_help_panel=LOOK)
def check(
    address: Address = LOCAL_CONDUCTOR,
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
    address: Address = LOCAL_CONDUCTOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show the cluster according to the conductor: the model, and every instance with load and blocks."""
    from moonpool.cli.cluster import run_state
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_state(client, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def top(
    address: Address = LOCAL_CONDUCTOR,
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
        str, typer.Argument(help="The request's id: `moonpool top` lists them, `generate --json` prints it.")
    ],
    address: Address = LOCAL_CONDUCTOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show why a request was placed there: every candidate, the predictions, and the later measurements."""
    from moonpool.cli.cluster import run_explain
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_explain(client, request_id, as_json=as_json)


@app.command("delete", context_settings=PASS_THROUGH, rich_help_panel=OPERATE)
def delete_(context: typer.Context) -> None:
    """Delete KV from every tier of every instance: delete --tenant NAME|--key HEX|--namespace HEX."""
    from moonpool.cli import contexts

    contexts.run_delete(context.args)


@app.command(rich_help_panel=OPERATE)
def role(
    instance: Annotated[str, typer.Argument(help="Id of a prefill or decode instance, as in `moonpool state`.")],
    kind: Annotated[str, typer.Argument(help="prefill or decode.")],
    address: Address = LOCAL_CONDUCTOR,
) -> None:
    """Change an engine instance's role: the instance drains, and comes back in the other role."""
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        client.change_role(instance, kind)
    typer.echo(f"{instance} drains, and comes back as {kind}")


@app.command("rerun", rich_help_panel=PREDICT)
def rerun_(
    journal: Annotated[Path, typer.Argument(help="A journal's file, or the folder that journal_dir names.")],
    events: Annotated[bool, typer.Option(help="Print each event with its actions.")] = False,
    check: Annotated[bool, typer.Option(help="Look at the core's invariants after each event (slow).")] = False,
    policy: Annotated[
        str, typer.Option(metavar="MODULE", help="A conductor's own policy, MODULE:OBJECT; its code runs.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per file.")] = False,
) -> None:
    """Run a service's recorded decisions again and stop at the first that differs.

    Exit status: 0 when all are equal, 1 when one differs, 2 when the journal is missing or damaged.
    """
    from moonpool.cli.rerun import run_rerun

    raise typer.Exit(run_rerun(journal, events=events, check=check, as_json=as_json, policy=policy))


_add_trace_verbs(app)


@app.command(rich_help_panel=LOOK)
def health(
    address: Annotated[
        str,
        typer.Option(help="A service, HOST:PORT; a gateway, http(s)://HOST:PORT.", envvar="MOONPOOL_ADDRESS"),
    ] = "127.0.0.1:50051",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 5.0,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to retry until the service serves.")] = 0.0,
    joined: Annotated[int, typer.Option(min=0, help="Instances that must have joined (conductor only).")] = 0,
) -> None:
    """Ask a service whether it serves (grpc.health.v1, or /health). Exit status: 0 if the service serves, else 1."""
    from moonpool.cli.health import run_health

    raise typer.Exit(run_health(address, timeout_s=timeout_s, wait_s=wait_s, joined=joined))


@app.command(rich_help_panel=PREDICT)
def calibrate(
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    model: Model = "",
    name: Annotated[str, typer.Option(help="Name of the profile; default: the file's.")] = "",
    hardware: Annotated[str, typer.Option(help="The class of machine, in words.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: KVDtype = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = all cores.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each size; the median counts.")] = 5,
    url: Annotated[str, typer.Option(help="Measure a running engine of another make at this URL instead.")] = "",
    make: Annotated[str, typer.Option(help="Make of the engine at --url: vllm or sglang.")] = "vllm",
) -> None:
    """Measure a model on this machine, or a running engine, and write a profile for emulation, simulator and `plan`."""
    from moonpool.cli.calibrate import run_calibrate, run_calibrate_engine
    from moonpool.cli.models import chosen_model

    if url:
        if make not in ("vllm", "sglang"):
            raise ConfigError("make", f"must be vllm or sglang, is {make!r}")
        run_calibrate_engine(make, url, chosen_model(model), out, name=name, hardware=hardware, repeats=repeats)
        return
    run_calibrate(chosen_model(model), out, name=name, hardware=hardware, dtype=dtype,
                  kv_cache_dtype=kv_cache_dtype, threads=threads, repeats=repeats)  # fmt: skip


@app.command(rich_help_panel=START)
def demo(
    model: Annotated[
        str, typer.Argument(help="As for `serve`, but empty = smollm2 if available, else the bundled model.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request at most.")] = 48,
) -> None:
    """Start a local stack, serve some prompts, show the results, stop."""
    from moonpool.cli.models import best_model, chosen_model
    from moonpool.cli.serve import run_demo

    served, instead = (chosen_model(model), "") if model else best_model()
    raise typer.Exit(run_demo(served, max_tokens, instead))


def _add_lazy_group(name: str, module: str, panel: str, summary: str) -> None:
    """Adds a verb with sub-verbs, in one of the command's modules."""
    verbs = typer.Typer(cls=lazy_group(f"moonpool.cli.{module}"), help=summary, no_args_is_help=True)
    app.add_typer(verbs, name=name, rich_help_panel=panel)


app.add_typer(model_app, name="model", rich_help_panel=START)


app.add_typer(bench_app, name="bench", rich_help_panel=START)


_add_lazy_group("certs", "certs", OPERATE, "A local certificate authority for TLS between services.")


_add_lazy_group("context", "contexts", OPERATE, "Named contexts: beginnings of prompts that are kept, with their KV.")


_add_lazy_group(
    "simulate", "simulate", PREDICT, "Experiments in virtual time. Without --trace, requests are made up from --seed."
)


def _add_service_verb(kind: str, summary: str) -> None:
    """Adds a verb that runs one service, with the service's own flags."""

    @app.command(kind, help=summary, context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
    def run(context: typer.Context) -> None:
        status: int = importlib.import_module(f"{SERVICE_MODULES[kind]}.__main__").main(context.args)
        raise typer.Exit(status)


_add_service_verb("conductor", "Run one conductor.")


_add_service_verb("prefill", "Run one prefill instance.")


_add_service_verb("decode", "Run one decode instance.")


_add_service_verb(
    "gateway", "Run one gateway: the HTTP interfaces of OpenAI and Anthropic, Kimi's context caching, a page."
)


ADAPTER_PACKAGES = ("aiohttp", "msgspec", "zmq")
"""Modules of the extra `adapter`."""


@app.command("adapter", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def adapter_(context: typer.Context) -> None:
    """Join a vLLM or SGLang server to the cluster: adapter vllm --engine URL --model MODEL --conductor ADDRESS."""
    args = context.args
    if args and not args[0].startswith("-"):
        args = ["--set", f"kind={args[0]}", *args[1:]]
    raise typer.Exit(_main_with_extra("adapter")(args))


@app.command("indexer", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def indexer_(context: typer.Context) -> None:
    """Tell other routers which engine holds which KV: HTTP as Mooncake's conductor, KV events as vLLM."""
    raise typer.Exit(_main_with_extra("indexer")(context.args))


def _main_with_extra(service: str) -> Any:
    """A service's `main`. Raises ConfigError if the extra `adapter` is not installed."""
    try:
        return importlib.import_module(f"{SERVICE_MODULES[service]}.__main__").main
    except ModuleNotFoundError as error:
        if error.name not in ADAPTER_PACKAGES:
            raise
        raise ConfigError(service, f"needs {error.name}: pip install 'moonpool[adapter]'") from error


@app.command("kvstore", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def kvstore_(context: typer.Context) -> None:
    """Run a kvstore, or operate on a kvstore: kvstore stat|verify|compact|warm|advise|add-key|drop-keys."""
    from moonpool.cli import kvstore

    if context.args and context.args[0] in kvstore.VERBS:
        kvstore.run_kvstore(context.args)
    else:
        raise typer.Exit(importlib.import_module("moonpool.kvstore.__main__").main(context.args))


def main() -> None:
    """Entry point: prints an error with a remedy, and exits with 2; a signal ends children first."""
    quiet_grpc()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        refuse_unknown_variables()
        app()
    except MoonpoolError as error:
        from moonpool.cli.generate import error_advice

        typer.echo("\n".join(filter(None, (f"moonpool: {error}", error_advice(error)))), err=True)
        _leave(2)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_PACKAGES:
            raise
        typer.echo(f"moonpool: this needs {error.name}: pip install 'moonpool[engine]'", err=True)
        _leave(2)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0)


def _leave(status: int) -> NoReturn:
    """Ends the process; does not wait for threads, which may be downloading."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(not thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
