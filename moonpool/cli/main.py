"""The `moonpool` command: its verbs and their flags.

Each verb imports what it needs when it runs, so that `moonpool generate` needs no torch and `--help` is quick.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli import chat_verb, traces
from moonpool.cli import model as model_verbs
from moonpool.cli.bench import bench_app
from moonpool.cli.lazy import group_of
from moonpool.cli.options import (
    LOOK,
    OPERATE,
    PASS_THROUGH,
    PREDICT,
    SINGLE,
    START,
    Address,
    KVDtype,
    Model,
    UsedContext,
    UsedContextTtl,
    addresses,
    text_of,
)
from moonpool.errors import MoonpoolError
from moonpool.rpc.tuning import quiet_grpc

app = typer.Typer(
    name="moonpool",
    help="KVCache-centric serving of large language models. `moonpool VERB --help` explains a verb.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
HTTP_PORT = 8000


@app.command(rich_help_panel=START)
def up(
    model: Model = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: KVDtype = "auto",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    kvstore: Annotated[int, typer.Option(min=0, help="kvstore instances.")] = 1,
    conductors: Annotated[int, typer.Option(min=1, max=16, help="Conductors, side by side.")] = 1,
    kvstore_replicas: Annotated[int, typer.Option(min=1, max=8, help="kvstores that hold a copy of each prefix.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of each prefill instance.")] = 1,
    engine: Annotated[str, typer.Option(help="real, or emulated:PROFILE to emulate compute.")] = "real",
    time_scale: Annotated[float, typer.Option(min=0, help="Emulated seconds per second; 0 = the profile's own.")] = 0.0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of store and logs; default: a temporary one.")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The first conductor's port; others take the next ones. 0 = any free.")
    ] = 50051,
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The gateway's port; 0 = any free. Default: 8000, or 0 with --port 0."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="Threads of each engine process at most; 0 = all cores, which engines lend each other."
        ),
    ] = 0,
    core_page: Annotated[
        Path | None, typer.Option(help="File by which engines lend each other cores; default: one of all your stacks.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens per KV block.")] = 64,
    kv_bytes: Annotated[int, typer.Option(help="Bytes of each KV pool; 0 = 256 MiB, or the emulated hardware's.")] = 0,
    dram_bytes: Annotated[int, typer.Option(help="Bytes of each kvstore's DRAM tier.")] = 256 << 20,
    ssd_bytes: Annotated[int, typer.Option(help="Bytes of each kvstore's SSD tier.")] = 4 << 30,
    spans_dir: Annotated[
        Path | None, typer.Option(help="Folder in which services record spans (Chrome trace events).")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    restart: Annotated[bool, typer.Option(help="Restart a service that ends by itself; else the stack stops.")] = True,
    swap_roles: Annotated[
        bool, typer.Option("--swap-roles", help="Instances change between prefill and decode as load wants it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Run a local stack in the foreground, until Ctrl-C."""
    from moonpool.cli.named import chosen_model
    from moonpool.cli.stack import StackPlan
    from moonpool.cli.up import run_up

    served = chosen_model(model)

    def plan(folder: Path) -> StackPlan:
        return StackPlan(
            model=served, data_dir=folder, dtype=dtype, kv_dtype=kv_dtype, prefill=prefill, decode=decode,
            kvstore=kvstore, conductors=conductors, kvstore_replicas=kvstore_replicas, stages=stages, engine=engine,
            time_scale=time_scale, threads=threads, core_page=core_page,
            port=port, http_port=(HTTP_PORT if port else 0) if http_port is None else http_port,
            block_tokens=block_tokens, kv_bytes=kv_bytes, dram_bytes=dram_bytes,
            ssd_bytes=ssd_bytes, log_level=log_level, spans_dir=spans_dir,
            swap_roles=swap_roles,
        )  # fmt: skip

    raise typer.Exit(run_up(plan, data_dir, restart=restart, as_json=as_json))


@app.command(rich_help_panel=START)
def down(
    data_dir: Annotated[Path | None, typer.Option(help="The --data-dir of the stack; default: the last `up`.")] = None,
) -> None:
    """Stop the stack that `moonpool up` started on this machine, and wait for its end."""
    from moonpool.cli.up import run_down

    raise typer.Exit(run_down(data_dir))


@app.command(rich_help_panel=START)
def generate(
    prompt: Annotated[str, typer.Option(help="The prompt; - reads standard input.")],
    address: Address = "127.0.0.1:50051",
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's turn through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to generate; printed one after the other.")] = 1,
    beams: Annotated[int, typer.Option(min=0, help="Beams of a beam search; the --n best are printed. 0 = none.")] = 0,
    length_penalty: Annotated[float, typer.Option(help="Beams are ranked by score / tokens ^ this.")] = 1.0,
    logprobs: Annotated[
        int | None, typer.Option(help="Print log probabilities, and this many of the likeliest tokens.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    response_format: Annotated[str, typer.Option(help="json_object, json_schema, regex or lark.")] = "",
    grammar: Annotated[
        str, typer.Option(help="The schema, expression or grammar of --response-format; or @FILE.")
    ] = "",
    ttft_slo_s: Annotated[
        float | None, typer.Option(help="Refuse it if its first token is predicted later than this, seconds.")
    ] = None,
    queue_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds it may wait before it is refused; default: the conductor's.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the request belongs to.")] = "",
    context: UsedContext = "",
    context_ttl_s: UsedContextTtl = 0.0,
    priority: Annotated[int, typer.Option(help="Lower goes first among a tenant's requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
) -> None:
    """Generate text from a prompt."""
    from moonpool.cli.generate import run_generate
    from moonpool.client import GenerateArguments, SamplingParams, Slo

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, n=n, beam_width=beams,
        length_penalty=length_penalty, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        response_format=response_format,  # type: ignore[arg-type]  # the conductor names what it does not know
        grammar=text_of(grammar[1:], "grammar") if grammar.startswith("@") else grammar,
    )  # fmt: skip
    asked: GenerateArguments = {
        "sampling": sampling, "slo": Slo(ttft_s=ttft_slo_s, queue_s=queue_s), "tenant": tenant, "priority": priority,
        "context": context, "context_ttl_s": context_ttl_s,
    }  # fmt: skip
    if chat:
        asked["messages"] = [{"role": "user", "content": text}]
    else:
        asked["prompt"] = text
    run_generate(addresses(address), asked, as_json=as_json)


app.command(rich_help_panel=START)(chat_verb.chat)


@app.command(rich_help_panel=LOOK)
def check(
    address: Address = "127.0.0.1:50051",
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
    address: Address = "127.0.0.1:50051",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show the cluster as its conductor sees it: the model, every instance, its load and its blocks."""
    from moonpool.cli.cluster import run_state
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_state(client, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def top(
    address: Address = "127.0.0.1:50051",
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
) -> None:
    """Show the cluster live: instances, queues, KV by tier, hit rate, TTFT and TPOT of the last minute; Ctrl-C ends."""
    from moonpool.cli.top import run_top
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        run_top(client, interval_s=interval_s, once=once, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def explain(
    request_id: Annotated[
        str, typer.Argument(help="The request's id: `moonpool top` lists them, `generate --json` prints it.")
    ],
    address: Address = "127.0.0.1:50051",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show why a request was placed as it was: every candidate, what was predicted, and what was then measured."""
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
    instance: Annotated[str, typer.Argument(help="Id of a prefill or decode instance, as `moonpool state` shows it.")],
    kind: Annotated[str, typer.Argument(help="prefill or decode.")],
    address: Address = "127.0.0.1:50051",
) -> None:
    """Let an engine instance change its role: it drains, and comes back as an instance of the other kind."""
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        client.change_role(instance, kind)
    typer.echo(f"{instance} drains, and comes back as {kind}")


@app.command("rerun", rich_help_panel=PREDICT)
def rerun_(
    journal: Annotated[Path, typer.Argument(help="A journal's file, or a service's --journal-dir.")],
    events: Annotated[bool, typer.Option(help="Print each event and its actions.")] = False,
    check: Annotated[bool, typer.Option(help="Look at the core's invariants after each event (slow).")] = False,
    policy: Annotated[str, typer.Option(metavar="MODULE", help="A conductor's own policy; its code is run.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per file.")] = False,
) -> None:
    """Run a service's recorded decisions again and stop at the first that differs.

    Exit status: 0 when all are equal, 1 when one differs, 2 when there is no journal or it is damaged.
    """
    from moonpool.cli.rerun import run_rerun

    raise typer.Exit(run_rerun(journal, events=events, check=check, as_json=as_json, policy=policy))


traces.add_to(app)


@app.command(rich_help_panel=LOOK)
def health(
    address: Annotated[
        str,
        typer.Option(help="A service, HOST:PORT; a gateway, http(s)://HOST:PORT.", envvar="MOONPOOL_ADDRESS"),
    ] = "127.0.0.1:50051",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 5.0,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to retry until it serves.")] = 0.0,
    joined: Annotated[int, typer.Option(min=0, help="Instances that must have joined (conductor only).")] = 0,
) -> None:
    """Ask a service whether it serves (grpc.health.v1, or /health). Exit status: 0 when it does, 1 when not."""
    from moonpool.cli.health import run_health

    raise typer.Exit(run_health(address, timeout_s=timeout_s, wait_s=wait_s, joined=joined))


@app.command(rich_help_panel=PREDICT)
def calibrate(
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    model: Model = "",
    name: Annotated[str, typer.Option(help="Name of the profile; default: the file's.")] = "",
    hardware: Annotated[str, typer.Option(help="The class of machine, in words.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: KVDtype = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = all cores.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each size; the median counts.")] = 5,
) -> None:
    """Measure a model on this machine and write a profile for `--engine emulated:FILE`."""
    from moonpool.cli.calibrate import run_calibrate
    from moonpool.cli.named import chosen_model

    run_calibrate(chosen_model(model), out, name=name, hardware=hardware, dtype=dtype, kv_dtype=kv_dtype,
                  threads=threads, repeats=repeats)  # fmt: skip


@app.command(rich_help_panel=START)
def demo(
    model: Annotated[
        str, typer.Option(help="As of `up`, but empty = smollm2 where it can be had, else the bundled one.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request at most.")] = 48,
) -> None:
    """Start a local stack, serve some prompts, show the results, stop."""
    from moonpool.cli.demo import run_demo
    from moonpool.cli.named import best_model, chosen_model

    served, instead = (chosen_model(model), "") if model else best_model()
    raise typer.Exit(run_demo(served, max_tokens, instead))


def _verbs(name: str, module: str, panel: str, summary: str) -> None:
    """Adds a verb that has verbs of its own, in a module of the command's."""
    verbs = typer.Typer(cls=group_of(f"moonpool.cli.{module}"), help=summary, no_args_is_help=True)
    app.add_typer(verbs, name=name, rich_help_panel=panel)


app.add_typer(model_verbs.app, name="model", rich_help_panel=START)
app.add_typer(bench_app, name="bench", rich_help_panel=START)
_verbs("certs", "certs", OPERATE, "A local certificate authority for TLS between services.")
_verbs("context", "contexts", OPERATE, "Named contexts: beginnings of prompts that are kept, with their KV.")
_verbs(
    "simulate", "simulate", PREDICT, "Experiments in virtual time. Without --trace, requests are made up from --seed."
)


def _service(kind: str, summary: str) -> None:
    """Adds a verb that runs one service; its flags are the service's own."""

    @app.command(kind, help=summary, context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
    def run(context: typer.Context) -> None:
        status: int = importlib.import_module(f"services.{kind}.__main__").main(context.args)
        raise typer.Exit(status)


_service("conductor", "Run one conductor.")
_service("prefill", "Run one prefill instance.")
_service("decode", "Run one decode instance.")
_service("gateway", "Run one gateway: the HTTP interfaces of OpenAI and Anthropic, Kimi's context caching, a page.")


@app.command("kvstore", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def kvstore_(context: typer.Context) -> None:
    """Run one kvstore, or operate on one: kvstore stat|verify|compact|warm|advise."""
    from moonpool.cli import kvstore

    if context.args and context.args[0] in kvstore.VERBS:
        kvstore.run(context.args)
    else:
        raise typer.Exit(importlib.import_module("services.kvstore.__main__").main(context.args))


def main() -> None:
    """Entry point: prints an error and what to do about it, and exits with 2."""
    quiet_grpc()
    try:
        app()
    except MoonpoolError as error:
        from moonpool.cli.advice import advice

        typer.echo("\n".join(filter(None, (f"moonpool: {error}", advice(error)))), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
