"""Names, ids and addresses are whole in every table, at 80 columns and in a pipe."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from moonpool.cli.cluster import run_explain, run_state, run_top
from moonpool.cli.contexts import print_contexts
from moonpool.cli.tables import RecordTable
from moonpool.client import Client, Context
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

KINDS = {
    "prefill-7": kv_pb2.INSTANCE_KIND_PREFILL,
    "decode-long-host-name-12": kv_pb2.INSTANCE_KIND_DECODE,
    "kvstore-with-a-name-of-many-characters-in-rack-17": kv_pb2.INSTANCE_KIND_KVSTORE,
}
ADDRESS = "node-17.cluster.example:50051"
REQUEST = "9f0b1c9e-6f35-4a57-8f3b-30c0ad0c6a7e"
CONTEXT = "ctx-0123456789abcdef0123456789abcdef"


@pytest.fixture
def client() -> Client:
    fake = FakeConductor()
    state = fake.state
    state.conductor.address, state.ready, state.model.name = "host:0", True, "tiny"
    tiers = [pb.TierLoad(name="ssd", used_bytes=3 << 40, capacity_bytes=7 << 40)]
    load = pb.LoadReport(running=1234, waiting=56789, queued_tokens=12345678, free_blocks=1, tiers=tiers)
    for name, kind in KINDS.items():
        instance = kv_pb2.Instance(id=name, kind=kind, address=ADDRESS)
        state.instances.add(instance=instance, load=load, total_blocks=1234567)
    state.recent.requests = 1
    state.recent.last.add(request_id=REQUEST, tenant="a-tenant-with-a-long-name", usage=pb.Usage(prompt_tokens=123456))
    names = list(KINDS)
    attempt = pb.Attempt(
        placement=pb.Placement(prefill=names[0], decode=names[1]),
        candidates=[pb.CandidateExplanation(instance=name, source=names[2], cold_blocks=12345) for name in names],
    )
    fake.explanations["r1"] = pb.ExplainResponse(placement=attempt.placement, attempts=[attempt])
    return fake.client()


def context() -> Context:
    return Context(
        id=CONTEXT, name="the-handbook-of-2026", status="ready", tenant="", model="tiny", created_at=0, expires_at=0,
        tokens=123456, blocks=1929, pinned_blocks=1929, pinned_bytes=1 << 30, kvstore="", hits=9, saved_tokens=99,
        tags=("handbook-latest", "handbook-stable"), messages=(), token_ids=(), description="", metadata={}, error="",
    )  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Show = Callable[[Client], object]
SHOWN: dict[str, tuple[Show, list[str]]] = {
    "state": (lambda client: run_state(client, as_json=False), [*KINDS, ADDRESS]),
    "top": (
        lambda client: run_top(client, interval_s=1.0, once=True, as_json=False),
        [*KINDS, REQUEST, "a-tenant-with-a-long-name"],
    ),
    "explain": (lambda client: run_explain(client, "r1", as_json=False), list(KINDS)),
    "context": (
        lambda client: print_contexts([context()]),
        [CONTEXT, "the-handbook-of-2026", "handbook-latest", "handbook-stable"],
    ),
}


@pytest.mark.parametrize("verb", SHOWN)
@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal(verb: str, columns: int, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    show, whole = SHOWN[verb]
    out = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", out)
    show(client)
    text = Text.from_ansi(out.getvalue()).plain
    assert "…" not in text
    assert [name for name in whole if name not in text] == []
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("verb", SHOWN)
def test_in_a_pipe(verb: str, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row is a line, whatever the terminal's width."""
    show, whole = SHOWN[verb]
    monkeypatch.setenv("COLUMNS", "80")
    with (tmp_path / "out").open("w+") as out:
        monkeypatch.setattr(sys, "stdout", out)
        show(client)
        out.seek(0)
        text = out.read()
    assert [name for name in whole if name not in text] == []
    first = whole[0]
    (row,) = [line for line in text.splitlines() if line.startswith(first)][:1]
    assert len(row.split()) > 4


def test_rows_that_do_not_fit_become_lines_of_headings_and_values() -> None:
    table = RecordTable("instance", "kind", "address", "run", "", right=("run",))
    table.add_row("prefill-0", "prefill", "127.0.0.1:50051", "3", "")
    table.add_row("[red]decode", "decode", "127.0.0.1:50052", "12", "draining")
    shown = {}
    for width in (80, 50, 30):
        out = io.StringIO()
        Console(file=out, width=width, highlight=False).print(table)
        shown[width] = [line.rstrip() for line in out.getvalue().splitlines()]
    assert shown[80] == [
        "instance     kind     address          run",
        "─" * 52,
        "prefill-0    prefill  127.0.0.1:50051    3",
        "[red]decode  decode   127.0.0.1:50052   12  draining",
    ]
    assert shown[50][3] == "[red]decode decode  127.0.0.1:50052  12 draining"
    assert shown[30] == [
        "prefill-0",
        "  kind prefill",
        "  address 127.0.0.1:50051",
        "  run 3",
        "[red]decode",
        "  kind decode",
        "  address 127.0.0.1:50052",
        "  run 12  draining",
    ]


def test_headings_of_several_words_are_stacked_where_the_rows_then_fit() -> None:
    table = RecordTable("policy", "ttft_mean_s", "goodput share")
    table.add_row("social", "1.2", "1")
    out = io.StringIO()
    Console(file=out, width=21).print(table)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "        ttft",
        "        mean  goodput",
        "policy  s     share",
        "─" * 21,
        "social  1.2   1",
    ]
