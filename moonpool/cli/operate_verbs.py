"""The verbs that operate a stack: keys, delete, role, certs, context."""

from typing import Annotated

import typer

from moonpool.cli.addresses import addresses
from moonpool.cli.lazy_verbs import add_lazy_group
from moonpool.cli.options import OPERATE, PASS_THROUGH, Address

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
    typer.echo(f"{instance} drains, and comes back as {kind}")


add_lazy_group(app, "keys", "keys", OPERATE, "API keys for clients over HTTP: make, list, revoke.")
add_lazy_group(app, "certs", "certs", OPERATE, "A local certificate authority for TLS between services.")
add_lazy_group(
    app, "context", "contexts", OPERATE, "Named contexts: beginnings of prompts that are kept, with their KV."
)
