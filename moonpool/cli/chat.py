"""`moonpool chat`: a conversation with the model, streamed, with what the cache saved after each answer."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from moonpool.cli.advice import advice
from moonpool.cli.generate import figures
from moonpool.cli.loading import loading_bars
from moonpool.cli.options import addresses
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Client, GenerateResult, Message, SamplingParams
from moonpool.errors import InvalidRequest, MoonpoolError

PROMPT = "\n> "
BLOCK_TOKENS = 16
"""Of a stack for one chat: turns are short, and only whole blocks are found again."""
HELP = "/new begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@dataclass(slots=True)
class Conversation:
    """The turns so far, what goes before them, and how answers are sampled."""

    client: Client
    sampling: SamplingParams
    system: str = ""
    context: str = ""
    tenant: str = ""
    turns: list[Message] = field(default_factory=list)

    def ask(self, text: str, out: TextIO) -> GenerateResult | None:
        """Sends a turn and writes the answer as it comes; both stay in the conversation, also a stopped answer.

        Returns:
            The answer; None when Ctrl-C stopped it.

        Raises:
            MoonpoolError: there is no answer; the turn is forgotten.
        """
        asked: list[Message] = [*self.turns, {"role": "user", "content": text}]
        begin: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        said: list[str] = []
        stream = self.client.stream(
            messages=[*begin, *asked], sampling=self.sampling, context=self.context, tenant=self.tenant
        )
        with contextlib.suppress(KeyboardInterrupt), stream:
            for event in stream:
                said.append(event.text)
                out.write(event.text)
                out.flush()
        out.write("\n")
        out.flush()
        self.turns = [*asked, {"role": "assistant", "content": "".join(said)}]
        return stream.result


def run_chat(conversation: Conversation, lines: Iterable[str], out: TextIO, err: TextIO, *, forgiving: bool) -> None:
    """Answers each line; figures and remarks go to `err`.

    Args:
        conversation: to go on with.
        lines: what the person says, a turn a line; empty ones are skipped.
        out: takes the answers.
        err: takes the rest.
        forgiving: go on after a request that failed; otherwise the error is raised.

    Raises:
        MoonpoolError: a request failed.
    """
    for line in lines:
        text = line.strip()
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            conversation.turns = []
            print("a new conversation", file=err)
        elif text == "/help":
            print(HELP, file=err)
        elif text:
            _answer(conversation, text, out, err, forgiving=forgiving)


def _answer(conversation: Conversation, text: str, out: TextIO, err: TextIO, *, forgiving: bool) -> None:
    try:
        result = conversation.ask(text, out)
    except MoonpoolError as error:
        if not forgiving:
            raise
        next_step = advice(error)
        if isinstance(error, InvalidRequest) and conversation.turns:
            next_step = "/new begins a new conversation."
        print("\n".join(filter(None, (f"moonpool: {error}", next_step))), file=err)
        return
    print("[stopped]" if result is None else figures(result), file=err)


@contextlib.contextmanager
def serving(address: str, model: str) -> Iterator[str]:
    """The address of the conductor to talk to: `address`, or that of a stack which serves `model` meanwhile."""
    if not model:
        yield address
        return
    print(f"starting a stack that serves {Path(model).name} ...", file=sys.stderr)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-chat-"))
        plan = StackPlan(model=model, data_dir=Path(folder), block_tokens=BLOCK_TOKENS)
        with loading_bars() as on_loading:
            stack = running.enter_context(LocalStack(plan, on_loading=on_loading))
        yield stack.address


def typed_lines() -> Iterator[str]:
    """What a person types, until Ctrl-D or Ctrl-C; lines can be edited and called back where readline is there."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # changes what `input` does
    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return


def chat(address: str, model: str, converse: Callable[[Client], Conversation]) -> None:
    """Chats on the terminal, or with a pipe: then each line is a turn, and the first error ends it.

    Args:
        address: see `serving`.
        model: see `serving`.
        converse: begins the conversation.

    Raises:
        MoonpoolError: no stack, or a request of a pipe failed.
    """
    typed = sys.stdin.isatty()
    with serving(address, model) as there, Client(addresses(there)) as client:
        served = client.cluster_state().model
        print(f"{served or 'a model that is still loading'} at {there}", file=sys.stderr)
        lines = typed_lines() if typed else sys.stdin
        run_chat(converse(client), lines, sys.stdout, sys.stderr, forgiving=typed)
