"""`moonpool context create|list|show|renew|delete` and `moonpool delete`: named contexts, and KV that shall be gone."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import parse_json
from moonpool.cli.addresses import addresses
from moonpool.cli.help_pages import with_pages
from moonpool.cli.options import HELP, Address, text_of
from moonpool.cli.tables import RecordTable, size_text, stdout_console
from moonpool.cli.whole_words import say
from moonpool.client import Client, Context, DeletedKV, Message

EXIT_INCOMPLETE = 1

app = typer.Typer()
delete_app = typer.Typer(
    name="moonpool delete", add_completion=False, pretty_exceptions_enable=False, context_settings=HELP
)

Tenant = Annotated[str, typer.Option(help="Tenant that the context belongs to.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
Name = Annotated[str, typer.Argument(help="The context's id or tag.")]


@app.command()
def create(
    file: Annotated[
        str, typer.Argument(help="Text of a system turn, or with --messages a JSON list of turns; - = standard input.")
    ],
    address: Address = "",
    tenant: Tenant = "",
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="A further name for requests; may be given again.")] = None,
    ttl_s: Annotated[float, typer.Option(min=0.0, help="Time to live, seconds; 0 = an hour.")] = 0.0,
    messages: Annotated[bool, typer.Option(help="The file is a JSON list of turns with role and content.")] = False,
    tools: Annotated[str, typer.Option(help="File with a JSON list of functions, as requests have them.")] = "",
    as_json: Json = False,
) -> None:
    """Keep the beginning of conversations; the KV is computed now, and pinned."""
    text = sys.stdin.read() if file == "-" else text_of(file, "file")
    turns = _turns(text) if messages else [Message(role="system", content=text)]
    functions = _tools(text_of(tools, "tools")) if tools else None
    with Client(addresses(address)) as client:
        context = client.contexts.create(
            messages=turns, tools=functions, name=name, tags=tag or [], ttl_s=ttl_s, tenant=tenant
        )
    _print(context, as_json=as_json)


@app.command("list")
def list_(address: Address = "", tenant: Tenant = "", as_json: Json = False) -> None:
    """List a tenant's contexts with their size, their hits and what these saved."""
    with Client(addresses(address)) as client:
        found = client.contexts.list(tenant=tenant)
    if as_json:
        typer.echo(json.dumps([_plain(context) for context in found]))
        return
    print_contexts(found)


def print_contexts(found: Iterable[Context]) -> None:
    """Print a table of contexts."""
    figures = ("tokens", "pinned", "size", "hits", "saved tokens", "ends in")
    table = RecordTable("id", "name", "tags", "status", *figures, right=figures)
    for context in found:
        counts = (
            context.tokens,
            f"{context.pinned_blocks}/{context.blocks}",
            size_text(context.pinned_bytes),
            context.hits,
        )
        figures_of = (*map(str, counts), str(context.saved_tokens), _left(context))
        table.add_row(context.id, context.name, ", ".join(context.tags), context.status, *figures_of)
    stdout_console().print(table)


@app.command()
def show(name: Name, address: Address = "", tenant: Tenant = "", as_json: Json = False) -> None:
    """Show one context."""
    with Client(addresses(address)) as client:
        _print(client.contexts.get(name, tenant=tenant), as_json=as_json)


@app.command()
def renew(
    name: Name,
    ttl_s: Annotated[float, typer.Option(min=1.0, help="Time to live from now on, seconds.")] = 3600.0,
    address: Address = "",
    tenant: Tenant = "",
    as_json: Json = False,
) -> None:
    """Extend a context's time to live; a context that expired within the last day is revived."""
    with Client(addresses(address)) as client:
        _print(client.contexts.update(name, ttl_s=ttl_s, tenant=tenant), as_json=as_json)


@app.command()
def delete(name: Name, address: Address = "", tenant: Tenant = "", as_json: Json = False) -> None:
    """End a context, and delete the context's KV from every tier. Exits with 1 when an instance has not done so."""
    with Client(addresses(address)) as client:
        gone, deleted = client.contexts.delete(name, tenant=tenant)
    if not as_json:
        say(f"{gone} is deleted")
    _print_deleted(deleted, as_json=as_json, context=gone)


@delete_app.command()
def delete_kv(
    key: Annotated[list[str] | None, typer.Option(help="A block key, 64 hexadecimal digits; may be repeated.")] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="All KV of this tenant; may be repeated.")] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(help="All KV of this namespace, 64 hexadecimal digits; may be repeated.")
    ] = None,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Delete KV from every tier of every instance; what is on disk is overwritten.

    Exit status: 0 if every instance has deleted the KV, 1 if an instance has not yet.
    """
    keys, namespaces = _bytes("key", key or []), _bytes("namespace", namespace or [])
    with Client(addresses(address)) as client:
        deleted = client.delete_kv(keys=keys, tenants=tenant or [], namespaces=namespaces)
    _print_deleted(deleted, as_json=as_json)


def _print_deleted(deleted: DeletedKV, *, as_json: bool, **more: str) -> None:
    if as_json:
        sums = {"blocks": deleted.blocks, "bytes": deleted.bytes, "complete": deleted.complete}
        typer.echo(json.dumps({**more, **dataclasses.asdict(deleted), **sums}))
    else:
        for instance in deleted.instances:
            what = (
                f"not done yet: {instance.error}"
                if instance.error
                else f"{instance.blocks:,} blocks, {size_text(instance.bytes)}"
            )
            say(f"{instance.instance}: {what}")
        say(f"kvstores that repeat the deletion to instances that join later: {deleted.recorded}")
    raise typer.Exit(0 if deleted.complete else EXIT_INCOMPLETE)


def _turns(text: str) -> list[Message]:
    try:
        found = parse_json(text)
        return [Message(role=str(turn["role"]), content=str(turn["content"])) for turn in found]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest("file", f"must be a JSON list of turns with role and content: {error}") from None


def _tools(text: str) -> list[dict[str, Any]]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidRequest("tools", f"must be a JSON list of functions: {error}") from None
    if not isinstance(found, list) or not all(isinstance(value, dict) for value in found):
        raise InvalidRequest("tools", "must be a JSON list of functions")
    return found


def _bytes(option: str, given: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(text) for text in given]
    except ValueError:
        raise InvalidRequest(option, "must be hexadecimal digits") from None


def _plain(context: Context) -> dict[str, Any]:
    return {**dataclasses.asdict(context), "keys": [key.hex() for key in context.keys]}


def _print(context: Context, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(context)))
        return
    tags = f", tags {', '.join(context.tags)}" if context.tags else ""
    say(f"{context.id}: {context.status}{tags}; {context.tokens:,} tokens, ends in {_left(context)}")
    say(f"{context.pinned_blocks} of {context.blocks} blocks pinned, {size_text(context.pinned_bytes)}")
    say(f"{context.hits} hits saved {context.saved_tokens:,} tokens")
    if context.error:
        say(context.error)


def _left(context: Context) -> str:
    seconds = max(0, round(context.expires_at - time.time()))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s"


def run_delete(args: list[str]) -> None:
    """Run `moonpool delete ...`; errors are raised, for the caller to print."""
    with_pages(typer.main.get_command(delete_app)).main(args, prog_name="moonpool delete")
