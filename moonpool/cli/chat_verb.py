"""`moonpool chat`: its flags."""

from typing import Annotated

import typer

from moonpool.cli.options import Address, UsedContext


def chat(
    address: Address = "127.0.0.1:50051",
    model: Annotated[
        str,
        typer.Option(help="As of `up`: start a stack that serves this, and stop it at the end; empty = ask --address."),
    ] = "",
    system: Annotated[str, typer.Option(help="The system turn: what the model is told first.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.2,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that together have this share.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    context: UsedContext = "",
    tenant: Annotated[str, typer.Option(help="Tenant that the chat and its context belong to.")] = "",
) -> None:
    """Chat with the model; after each answer: what the cache saved, and the speeds. In a pipe each line is a turn."""
    from moonpool.cli.chat import Conversation
    from moonpool.cli.chat import chat as run_chat
    from moonpool.cli.named import chosen_model
    from moonpool.client import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    run_chat(
        address,
        chosen_model(model) if model else "",
        lambda client: Conversation(client, sampling, system, context, tenant),
    )
