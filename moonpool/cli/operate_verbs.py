"""The verbs that operate a stack: keys, delete, role, certs, context."""

from typing import Annotated

import typer

from moonpool.cli.addresses import addresses
from moonpool.cli.lazy_verbs import add_lazy_group
from moonpool.cli.options import OPERATE, PASS_THROUGH, Address
from moonpool.cli.whole_words import say

app = typer.Typer()


@app.command("delete", context_settings=PASS_THROUGH, rich_help_panel=OPERATE)
def delete_(context: typer.Context) -> None:
    """Delete KV from every tier of every instance: delete --tenant NAME|--key HEX|--namespace HEX."""
    from moonpool.cli import contexts

    contexts.run_delete(context.args)


@app.command(rich_help_panel=OPERATE)
def role(
    instance: Annotated[str, typer.Argument(help="Id of a prefill or decode instance, as in `moonpool state`.")],
    kind: Annotated[str, typer.Argument(help="prefill or decode.")],
    address: Address = "",
) -> None:
    """Change an engine instance's role: the instance drains, and comes back in the other role."""
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        client.change_role(instance, kind)
    say(f"{instance} drains, and comes back as {kind}")


@app.command(rich_help_panel=OPERATE)
def drain(
    instance: Annotated[str, typer.Argument(help="Id of an instance, as in `moonpool state`.")],
    address: Address = "",
    wait_s: Annotated[float, typer.Option(help="Seconds to wait until nothing runs there; 0 = do not wait.")] = 0.0,
) -> None:
    """Let an instance take nothing new before the instance is ended; what runs there ends or goes on elsewhere."""
    from moonpool.cli.drain import drained
    from moonpool.client import Client

    with Client(addresses(address)) as client:
        client.drain(instance)
        if not wait_s:
            say(f"{instance} drains")
        elif drained(client, instance, wait_s):
            say(f"{instance} has drained")
        else:
            say(f"{instance} has not drained within {wait_s:g} s", err=True)
            raise typer.Exit(1)


add_lazy_group(app, "keys", "keys", OPERATE, "API keys for clients over HTTP: make, list, revoke.")
add_lazy_group(app, "certs", "certs", OPERATE, "A local certificate authority for TLS between services.")
add_lazy_group(
    app, "context", "contexts", OPERATE, "Named contexts: beginnings of prompts that are kept, with their KV."
)
