"""The verbs that one starts with, from serve to model."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from moonpool.base.quantization import Quantization
from moonpool.base.sizes import size_option
from moonpool.cli.addresses import addresses
from moonpool.cli.options import (
    MODEL_HELP,
    START,
    Address,
    AnswerTokens,
    EngineChoice,
    ModelArgument,
    Seed,
    SystemTurn,
    Temperature,
    TopP,
    UsedContext,
    UsedContextTtl,
    prompt_text,
    same_fields,
    text_of,
    verb,
)
from moonpool.cli.serve_options import ServeOptions
from moonpool.cli.settings import ServeCommand

app = typer.Typer()


def _stop_start(number: int, frame: FrameType | None) -> None:
    """End a start at once, with a word."""
    from moonpool.cli.interrupts import tell

    tell("stopping")
    signal.default_int_handler(number, frame)


@app.command(cls=ServeCommand, rich_help_panel=START)
@verb
def serve(options: ServeOptions) -> None:
    """Serve a model on this machine, in the foreground, until Ctrl-C: HTTP on port 8000."""
    signal.signal(signal.SIGINT, _stop_start)  # a shell's background job ignores it
    from moonpool.cli.serve import run_serve
    from moonpool.cli.serve_plan import movable_ports, serve_plan

    plan = serve_plan(options)
    movable = movable_ports(options)
    ended = run_serve(plan, options.data_dir, movable=movable, restart=options.restart, as_json=options.as_json)
    raise typer.Exit(ended)


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
    engines: EngineChoice = "auto",
    image: Annotated[
        list[Path] | None, typer.Option(help="Picture shown with the first turn; may be given several times.")
    ] = None,
) -> None:
    """Chat with a model, or answer one prompt; starts a stack unless one that serves the model runs."""
    from moonpool.base.sampling_params import SamplingParams
    from moonpool.cli.generate import Conversation, run_model
    from moonpool.cli.models import pulled_model
    from moonpool.client import own_picture

    pictures = [own_picture(path) for path in image or ()]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = "" if not prompt and sys.stdin.isatty() else prompt_text(prompt)
    run_model(
        pulled_model(model), text, lambda client: Conversation(client, sampling, system, pictures=pictures), engines
    )


@app.command(rich_help_panel=START)
def chat(
    address: Address = "",
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
    from moonpool.cli.generate import Conversation
    from moonpool.cli.generate import run_terminal_chat as run_chat

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    run_chat(address, lambda client: Conversation(client, sampling, system, context, tenant))


@app.command(rich_help_panel=START)
def pull(
    model: Annotated[str, typer.Argument(help="A model's name, for example smollm2, or a hub id, owner/name.")],
) -> None:
    """Fetch a model for later, and print the folder."""
    from moonpool.base.checkpoint import resolve

    typer.echo(resolve(model))


@app.command("list", rich_help_panel=START)
def list_(
    known: Annotated[bool, typer.Option("--all", help="Also list names of models that can be fetched.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models on this machine."""
    from moonpool.cli.models import run_list

    run_list(known=known, as_json=as_json)


@app.command(rich_help_panel=START)
def show(model: Annotated[str, typer.Argument(help=MODEL_HELP)]) -> None:
    """Show a model: parameters, context, memory that it takes; `model inspect` has options."""
    from moonpool.cli.models import chosen_model, run_inspect

    run_inspect(chosen_model(model), "auto", None, None, max_model_len=None, quantization="auto", as_json=False)


@app.command(rich_help_panel=START)
def rm(model: Annotated[str, typer.Argument(help="The model's name, as `moonpool list` says.")]) -> None:
    """Remove a fetched model from this machine."""
    from moonpool.cli.models import run_rm

    run_rm(model)


@app.command(rich_help_panel=START)
def ps(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the stacks of yours that run on this machine."""
    from moonpool.cli.running_stacks import run_ps

    run_ps(as_json=as_json)


@app.command(rich_help_panel=START)
def stop(
    name: Annotated[str, typer.Argument(help="The stack's name or process number, as `moonpool ps` says.")] = "",
    data_dir: Annotated[Path | None, typer.Option(help="The --data-dir of the stack.")] = None,
) -> None:
    """Stop the stack that `moonpool serve` started on this machine, and wait until all processes have ended."""
    from moonpool.cli.running_stacks import run_stop

    raise typer.Exit(run_stop(name, data_dir and data_dir.resolve()))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `generate`."""

    prompt: Annotated[str, typer.Argument(help="The prompt; - or a pipe: standard input.")] = "-"
    address: Address = ""
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
    grammar = text_of(options.grammar[1:], "grammar") if options.grammar.startswith("@") else options.grammar
    own = {"beam_width": options.beams, "grammar": grammar}
    asked: GenerateArguments = {
        "sampling": SamplingParams(**same_fields(options, SamplingParams) | own),
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


@app.command(rich_help_panel=START)
def demo(
    model: Annotated[
        str, typer.Argument(help="As for `serve`, but empty = smollm2 if available, else the bundled model.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request at most.")] = 48,
    engines: EngineChoice = "auto",
) -> None:
    """Start a local stack, serve some prompts, show what the KV pool saves, stop."""
    from moonpool.base.checkpoint.named_models import BUNDLED
    from moonpool.cli.demo import run_demo
    from moonpool.cli.models import best_model, chosen_model

    served, instead = (chosen_model(model), "") if model else best_model()
    name = model or (BUNDLED if instead else "smollm2")
    raise typer.Exit(run_demo(served, name, max_tokens, instead, engines))


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
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Show what each process has where so many share the layers.")
    ] = 1,
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
        ranks=tensor_parallel_size,
        as_json=as_json,
    )


app.add_typer(model_app, name="model", rich_help_panel=START)


@app.command("help", rich_help_panel=START)
def help_(
    context: typer.Context,
    verb: Annotated[
        list[str] | None, typer.Argument(metavar="[VERB]", help="For example serve, or bench serve.")
    ] = None,
) -> None:
    """Explain a verb: the same as `moonpool VERB --help`."""
    root = context.find_root()
    root.command.main([*(verb or ()), "--help"], prog_name=root.info_name)
