"""`moonpool chat`: turns, what stays in the conversation, figures, errors and pipes."""

import io
from collections.abc import Iterable

import pytest

from moonpool.base.errors import (
    ConfigError,
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    Unavailable,
    UnsupportedModel,
)
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.generate import Conversation, error_advice, run_chat
from moonpool.client import Picture
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.transport import NotConnected
from moonpool.v1 import conductor_pb2 as pb


def talk(
    fake: FakeConductor, lines: Iterable[str], *, system: str = "", context: str = "", forgiving: bool = True
) -> tuple[str, str]:
    """What a conversation writes."""
    out, err = io.StringIO(), io.StringIO()
    with fake.client() as client:
        conversation = Conversation(client, SamplingParams(max_tokens=8), system, context, "ann")
        run_chat(conversation, lines, out, err, forgiving=forgiving)
    return out.getvalue(), err.getvalue()


def turns(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_pictures_are_shown_with_the_first_turn() -> None:
    fake, cat = FakeConductor(), Picture(b"cat", 3, 2)
    with fake.client() as client:
        conversation = Conversation(client, SamplingParams(max_tokens=8), pictures=[cat])
        run_chat(conversation, ["What is it?", "Why?"], io.StringIO(), io.StringIO(), forgiving=True)
    for request in fake.requests:
        picture, text = request.chat.messages[0].parts
        assert (picture.picture.content, picture.picture.width, text.text) == (b"cat", 3, "What is it?")
    assert [(turn.content, len(turn.parts)) for turn in fake.requests[1].chat.messages[2:]] == [("Why?", 0)]


def test_turns_add_up_and_figures_follow_each_answer() -> None:
    fake = FakeConductor(lambda request: answer((7, 8), prompt_tokens=100, cached_tokens=64))
    out, err = talk(fake, ["Hi\n", "\n", "And?\n", "/quit\n", "never"], system="Be brief.", context="law")
    assert out == "7 8 \n7 8 \n"
    assert turns(fake.requests[0]) == [("system", "Be brief."), ("user", "Hi")]
    assert turns(fake.requests[1])[1:] == [("user", "Hi"), ("assistant", "7 8 "), ("user", "And?")]
    assert [(request.context.id, request.tenant) for request in fake.requests] == [("law", "ann")] * 2
    assert err.splitlines()[0] == (
        "[stop] 100 prompt tokens, 64 cached; 2 generated; TTFT 0.010 s, TPOT 0.0010 s (1000.0 tokens/s)"
    )


def test_new_forgets_and_help_helps() -> None:
    fake = FakeConductor()
    _, err = talk(fake, ["Hi", "/new", "/help", "Again"])
    assert turns(fake.requests[1]) == [("user", "Again")]
    assert "a new conversation" in err
    assert "Ctrl-C stops" in err


def test_an_unknown_command_is_no_turn() -> None:
    fake = FakeConductor()
    out, err = talk(fake, ["/nwe", "/etc/hosts is a file?", "/"])
    assert err.startswith("moonpool: chat: there is no command /nwe. /new begins")
    assert [turns(request)[-1][1] for request in fake.requests] == ["/etc/hosts is a file?", "/"]
    assert out
    with pytest.raises(InvalidRequest, match="no command /nwe"):
        talk(fake, ["/nwe"], forgiving=False)


def test_a_failed_turn_is_forgotten_and_says_what_to_do() -> None:
    scripts: list[Script] = [answer(), [InvalidRequest("messages", "the prompt has 9000 tokens")], answer()]
    fake = FakeConductor(lambda request: scripts[len(fake.requests) - 1])
    _, err = talk(fake, ["Hi", "much", "Again"])
    assert "moonpool: messages: the prompt has 9000 tokens\n/new begins a new conversation.\n" in err
    assert turns(fake.requests[2]) == [("user", "Hi"), ("assistant", "1 2 3 "), ("user", "Again")]


def test_a_pipe_ends_at_the_first_error() -> None:
    fake = FakeConductor(lambda request: [InvalidRequest("messages", "no")])
    with pytest.raises(InvalidRequest):
        talk(fake, ["Hi", "Again"], forgiving=False)
    assert len(fake.requests) == 1


class Interrupting(io.StringIO):
    """Ctrl-C when the second piece of the first answer is written."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 2:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_an_answer_and_keeps_what_came() -> None:
    fake = FakeConductor()
    out, err = Interrupting(), io.StringIO()
    with fake.client() as client:
        conversation = Conversation(client, SamplingParams())
        run_chat(conversation, ["Hi"], out, err, forgiving=True)
        assert conversation.turns == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "1 2 "}]
        run_chat(conversation, ["Go on"], out, err, forgiving=True)
    assert err.getvalue().splitlines()[0] == "[stopped]"
    assert turns(fake.requests[1])[1] == ("assistant", "1 2 ")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotConnected("nobody"), "`moonpool serve MODEL` starts a stack"),
        (Overloaded("full", reason="queue_full", retry_after_s=7.2), "in 7 s"),
        (Overloaded("full", reason="queue_full", retry_after_s=7.2), "docs/errors.md#queue_full"),
        (Unavailable("no instance"), "`moonpool state` shows"),
        (Unavailable("no instance"), "docs/errors.md#unavailable"),
        (ConfigError("listen", "another program listens at 127.0.0.1:1"), "docs/errors.md#port-taken"),
        (UnsupportedModel("hidden_act", "gelu"), "docs/models.md"),
        (InvalidRequest("prompt", "is empty"), ""),
    ],
)
def test_errors_say_what_to_do_next(error: MoonpoolError, words: str) -> None:
    assert words in error_advice(error)
    assert bool(error_advice(error)) == bool(words)
