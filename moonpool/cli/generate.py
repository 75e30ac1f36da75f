"""`moonpool generate`, `run` and `chat`: one prompt or a conversation, streamed to the terminal."""

import contextlib
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import typer

from moonpool.base.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    Unavailable,
    UnsupportedModel,
)
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.remedies import remedy
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.addresses import addresses
from moonpool.cli.options import Engines
from moonpool.cli.running_stacks import running_stacks
from moonpool.cli.whole_words import say, whole_words
from moonpool.client import Client, GenerateArguments, GenerateResult, Message, MessagePart, Picture
from moonpool.client.transport import NotConnected


def error_advice(error: MoonpoolError) -> str:
    """Sentences that say what to do next; "" if the error says enough."""
    code = "unavailable" if isinstance(error, Unavailable) else "timeout" if isinstance(error, DeadlineExceeded) else ""
    place = remedy(error.message, error.reason if isinstance(error, Overloaded) else code)
    return " ".join(filter(None, (_next_step(error), f"{place} tells more." if place else "")))


def _next_step(error: MoonpoolError) -> str:
    if isinstance(error, NotConnected):
        return "`moonpool serve MODEL` starts a stack here; --address HOST:PORT names the conductor of another one."
    if isinstance(error, Overloaded):
        return f"Try again in {max(1.0, error.retry_after_s):.0f} s; `moonpool state` shows how busy it is."
    if isinstance(error, Unavailable | DeadlineExceeded):
        return "`moonpool state` shows which instances there are and how busy they are."
    if isinstance(error, UnsupportedModel):
        return "docs/models.md says which models are supported; `moonpool pull smollm2` fetches one that is."
    return ""


def run_generate(conductors: Sequence[str], asked: GenerateArguments, *, as_json: bool) -> None:
    """Stream the answer to standard output and the figures to standard error, or print one JSON object."""
    sampling = asked.get("sampling") or SamplingParams()
    with Client(conductors) as client:
        if as_json:
            answer = client.generate(**asked)
            typer.echo(json.dumps(dataclasses.asdict(answer)))
            return
        stream = client.stream(**asked)
        for event in stream:
            if _can_stream(sampling):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if (result := stream.result) is not None:
        sys.stdout.write("\n" if _can_stream(sampling) else _list_answers(result))
        sys.stdout.write(_logprob_lines("prompt", result.prompt_logprobs))
        for index, choice in enumerate(result.choices):
            sys.stdout.write(_logprob_lines(f"answer {index}", choice.logprobs))
        say(usage_line(result), err=True)


def _can_stream(sampling: SamplingParams) -> bool:
    """Whether the text is printed as produced: there is a single answer without a score."""
    return sampling.n == 1 and not sampling.deferred


def _list_answers(result: GenerateResult) -> str:
    """Several answers come mixed: they are printed whole, each under a number; hypotheses with their scores."""
    texts = []
    for index, choice in enumerate(result.choices):
        score = "" if choice.score is None else f" {choice.score:.4f}"
        texts.append(f"--- {index} [{choice.finish_reason}]{score}\n{choice.text}\n")
    return "".join(texts)


def _logprob_lines(title: str, logprobs: Sequence[TokenLogprobs | None]) -> str:
    """Log probabilities, a line for each token: id, log probability, rank, and the likely tokens. "" when none came."""
    lines = [f"--- log probabilities of {title}: token, its own, rank; likely tokens with theirs"] if logprobs else []
    for logprob in logprobs:
        if logprob is not None:
            likely = "  ".join(f"{token} {value:.4f}" for token, value in logprob.top)
            lines.append(f"{logprob.token_id} {logprob.logprob:.4f} {logprob.rank}; {likely}".rstrip("; "))
    return "".join(f"{line}\n" for line in lines)


def usage_line(result: GenerateResult) -> str:
    """A line about an answer: end reason, tokens, cached prompt tokens, and speeds."""
    usage, timing = result.usage, result.timing
    speed = f" ({1 / timing.tpot_s:.1f} tokens/s)" if timing.tpot_s else ""
    return (
        f"[{result.finish_reason}] {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; "
        f"{usage.completion_tokens} generated; TTFT {timing.ttft_s:.3f} s, TPOT {timing.tpot_s:.4f} s{speed}"
        + (" (emulated)" if result.placement.emulated else "")
    )


_COMMAND = re.compile(r"/[A-Za-z?]+")
"""What a person means as a command, not as a turn."""
CHAT_PROMPT = "\n> "
CHAT_BLOCK_SIZE = 16
"""Block size for a stack with one chat: turns are short, and only whole blocks are found again."""
CHAT_HELP = "/new begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@dataclass(slots=True)
class Conversation:
    """The turns so far, what goes before them, and how answers are sampled."""

    client: Client
    sampling: SamplingParams
    system: str = ""
    context: str = ""
    tenant: str = ""
    turns: list[Message] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    """Shown with the next turn."""

    def ask(self, text: str, out: TextIO) -> GenerateResult | None:
        """Send a turn and write the answer as produced; both stay in the conversation, also a stopped answer.

        Returns:
            The answer; None if Ctrl-C stopped the answer.

        Raises:
            MoonpoolError: there is no answer; the turn is forgotten.
        """
        turn: Message = {"role": "user", "content": text}
        if self.pictures:
            shown: list[MessagePart] = [{"picture": picture} for picture in self.pictures]
            turn = {"role": "user", "content": "", "parts": [*shown, {"text": text}]}
        asked: list[Message] = [*self.turns, turn]
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
        self.pictures = []
        return stream.result


def run_chat(conversation: Conversation, lines: Iterable[str], out: TextIO, err: TextIO, *, forgiving: bool) -> None:
    """Answer each line; figures and remarks go to `err`.

    Args:
        conversation: to go on with.
        lines: what the person says, a turn a line; empty ones are skipped.
        out: takes the answers.
        err: takes the rest.
        forgiving: go on after a request that failed; otherwise the error is raised.

    Raises:
        MoonpoolError: a request failed, or a line is an unknown command.
    """
    for line in lines:
        text = line.strip()
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            conversation.turns = []
            print("a new conversation", file=err)
        elif text == "/help":
            print(CHAT_HELP, file=err)
        elif _COMMAND.fullmatch(text):
            error = InvalidRequest("chat", f"there is no command {text}. {CHAT_HELP}")
            if not forgiving:
                raise error
            print(whole_words(f"moonpool: {error}", err), file=err)
        elif text:
            _answer_line(conversation, text, out, err, forgiving=forgiving)


def _answer_line(conversation: Conversation, text: str, out: TextIO, err: TextIO, *, forgiving: bool) -> None:
    try:
        run_chat_turn(conversation, text, out, err)
    except MoonpoolError as error:
        if not forgiving:
            raise
        next_step = error_advice(error)
        if isinstance(error, InvalidRequest) and conversation.turns:
            next_step = "/new begins a new conversation."
        print(whole_words("\n".join(filter(None, (f"moonpool: {error}", next_step))), err), file=err)


@contextlib.contextmanager
def serving_address(model: str, engines: Engines = "auto") -> Iterator[str]:
    """Conductor addresses for a stack that serves `model`: this user's running stack, or a temporary stack.

    `engines`: of a temporary stack, as `StackPlan.engines`.
    """
    found = next((stack.address for stack in running_stacks() if stack.model == model and stack.address), "")
    if found:
        yield found
        return
    from moonpool.cli.engine_plan import decide_engines
    from moonpool.cli.serve import started_stack
    from moonpool.cli.stack import StackPlan

    print(f"starting a stack that serves {Path(model).name} ...", file=sys.stderr)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-run-"))
        asked = StackPlan(model=model, data_dir=Path(folder), block_size=CHAT_BLOCK_SIZE, engines=engines)
        plan, chosen = decide_engines(asked, one_client=True)
        if chosen:
            say(chosen, err=True)
        yield running.enter_context(started_stack(plan, lambda service: None)).address


def run_model(model: str, prompt: str, converse: Callable[[Client], Conversation], engines: Engines = "auto") -> None:
    """Answer a prompt as a user's turn, or chats.

    Args:
        model: see `serving_address`.
        prompt: "" = chat.
        converse: begins the conversation.
        engines: see `serving_address`.

    Raises:
        MoonpoolError: no stack, or the request failed.
    """
    with serving_address(model, engines) as address:
        if not prompt:
            run_terminal_chat(address, converse)
            return
        with Client(addresses(address)) as client:
            run_chat_turn(converse(client), prompt, sys.stdout, sys.stderr)


def run_chat_turn(conversation: Conversation, text: str, out: TextIO, err: TextIO) -> None:
    """Answer one turn; the figures go to `err`.

    Raises:
        MoonpoolError: there is no answer.
    """
    result = conversation.ask(text, out)
    print("[stopped]" if result is None else whole_words(usage_line(result), err), file=err)


def typed_lines() -> Iterator[str]:
    """What a person types, until Ctrl-D or Ctrl-C; lines can be edited and called back where readline is there."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # changes what `input` does
    print(CHAT_HELP, file=sys.stderr)
    while True:
        try:
            yield input(CHAT_PROMPT)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return


def run_terminal_chat(address: str, converse: Callable[[Client], Conversation]) -> None:
    """Chat on the terminal, or with a pipe: then each line is a turn, and the first error ends the chat.

    Args:
        address: conductors, with commas between them.
        converse: begins the conversation.

    Raises:
        MoonpoolError: no stack, or a request of a pipe failed.
    """
    typed, conductors = sys.stdin.isatty(), addresses(address)
    with Client(conductors) as client:
        served = client.cluster_state().model
        say(f"{served or 'a model that is still loading'} at {', '.join(conductors)}", err=True)
        lines = typed_lines() if typed else sys.stdin
        run_chat(converse(client), lines, sys.stdout, sys.stderr, forgiving=typed)
