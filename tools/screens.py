"""Writes docs/screens.md: `python -m tools.screens` runs verbs in tmux, 80 columns wide. A test compares help pages."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.cli.generate import CHAT_PROMPT

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "screens.md"
COLUMNS, LINES = 80, 120
LONGEST = 14
"""Lines of a screen that the page has; a help page is whole."""
STACK = "serve bundled --engine emulated:llama-70b-a800"
WAIT_S = 0.2
LONGEST_WAITS = 900
HELP = ("--help", "serve --help", "kvstore stat --help")
"""Pages that stay the same from run to run."""
BEFORE = (
    "help keys create",
    "list",
    "list --all",
    "pull bundled",
    "show bundled",
    "model inspect bundled --max-model-len 2048 --memory-bytes 2GB",
    "model create tiny-llama made",
    "rm nobody",
    "ps",
    "health",
    "serve llama9",
    "serve qwen3:0.7b",
    "generate hello",
    "keys list",
    "demo bundled",
    "run bundled 'def main(' --max-tokens 24",
    "stage --model bundled --leader a:0 --node-rank 1",
    "certs create certs",
    "certs renew certs --within-days 365",
    "calibrate --model bundled --out mine.yaml --repeats 1",
    "plan --trace trace.jsonl --model llama3-70b --hardware a800x8 --slo ttft=30,tbt=0.1",
    "simulate cache --requests 200 --capacities 200,inf",
    "simulate scale --requests 60",
    "simulate scheduling --requests 20",
    "simulate race --requests 20 --jitter-seeds 1 --policy social,kvcache_centric",
    "simulate ratio --requests 20 --instances 8",
    "simulate overload --requests 20",
    "simulate pipeline --requests 5",
    "simulate roles --parts 2 --part-s 20",
    "simulate engines --requests 20 --chunks 512",
    "simulate conductors --requests 20",
    "simulate transfer",
    "simulate scaling --requests 60",
    "simulate memory --requests 60",
    "simulate hot --requests 60",
    "simulate faults --requests 20 --seeds 3",
)
"""Without a stack; wrong uses among them."""
WHILE = (
    "ps",
    "state",
    "generate 'The moon is' --max-tokens 8",
    "explain",
    "top --once",
    "health",
    "check",
    "drain nobody",
    "role nobody decode",
    "keys create ann --rpm 60",
    "keys list",
    "keys revoke ann",
    "chat --address nobody",
    "context create system.txt --name rules --tag rules",
    "context list",
    "context show rules",
    "context renew rules",
    "context delete rules",
    "bench serve --requests 20 --rate 10 --prompt-tokens 256 --output-tokens 16 --model bundled",
    "replay --trace trace.jsonl --prompt-tokens 512 --output-tokens 16 --time-scale 10 --model bundled",
    "delete --tenant ann",
)
"""With a stack that runs."""
CHAT = ("What is a KV cache?", "/help", "/quit")
"""What a person types; then the stack is stopped."""
READY = "ready: "
SERVICES = {
    "conductor": ("conductor --model bundled --listen 127.0.0.1:0 --set journal_dir=journal", READY),
    "kvstore": ("kvstore --conductor {conductor} --data-dir blocks", READY),
    "prefill": ("prefill --model bundled --conductor {conductor}", READY),
    "decode": ("decode --model bundled --conductor {conductor}", READY),
    "gateway": ("gateway --model bundled --conductor {conductor} --listen 127.0.0.1:0", READY),
    "indexer": ("indexer --conductor {conductor} --listen 127.0.0.1:0", READY),
    "adapter": ("adapter vllm --engine http://127.0.0.1:9 --model bundled --conductor {conductor}", "waiting for"),
}
"""Services one by one, and what each says last. Names in braces are the addresses of those before."""
ALONE = (
    "generate 'def main(' --max-tokens 8 --address {conductor}",
    "kvstore stat {kvstore}",
    "kvstore compact {kvstore}",
    "kvstore warm {kvstore}",
    "kvstore advise {kvstore}",
    "kvstore add-key keys.json --tenant ann",
    "kvstore drop-keys keys.json --tenant ann",
)
"""With these services."""
ENDED = ("rerun journal", "simulate replay --journal journal --policy kvcache_centric", "kvstore verify blocks")
"""Behind these services."""
HEAD = """# Screens

`python -m tools.screens` writes this page: every verb as a terminal of 80 columns shows it. Compute of the stack is
emulated, times are those of one run, and keys are masked. Long tables end in "...".
"""


@dataclass(frozen=True)
class Terminal:
    """A server of tmux of its own, with a session for each command."""

    folder: Path

    def tmux(self, *arguments: str) -> str:
        """What a command of tmux prints."""
        command = ["tmux", "-S", str(self.folder / "tmux"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def begin(self, name: str, command: str) -> None:
        """Run `moonpool COMMAND` in a session that stays when the command has ended."""
        run = f"exec {shlex.quote(str(self.folder / 'bin' / 'moonpool'))} {command}"
        # The window stays open behind the command, also behind Ctrl-C, so that all of it can be read.
        kept = f"trap : INT; sh -c {shlex.quote(run)}; exec cat"
        self.tmux("new-session", "-d", "-s", name, "-x", str(COLUMNS), "-y", str(LINES), kept)

    def screen(self, name: str) -> str:
        """What the session shows."""
        shown = self.tmux("capture-pane", "-p", "-J", "-t", name)
        return "\n".join(map(str.rstrip, shown.rstrip().split("\n")))

    def run(self, name: str, command: str) -> str:
        """What `moonpool COMMAND` has shown when it has ended."""
        self.begin(name, command)
        self.wait(name, self.ended)
        return self.screen(name)

    def talk(self, name: str, command: str, lines: Sequence[str]) -> str:
        """What `moonpool COMMAND` has shown when each line was typed at a prompt, and it has ended."""
        self.begin(name, command)
        for line in lines:
            self.shows(name, f"\n{CHAT_PROMPT}".rstrip())
            self.tmux("send-keys", "-t", name, "-l", line)
            self.shows(name, line)
            self.tmux("send-keys", "-t", name, "Enter")
        self.wait(name, self.ended)
        return self.screen(name)

    def shows(self, name: str, end: str) -> None:
        """Wait until the screen ends with a text."""
        self.wait(name, lambda name: self.screen(name).endswith(end))

    def serve(self, name: str, command: str, ready: str) -> str:
        """What a verb that goes on shows when a text is there.

        Raises:
            RuntimeError: the verb has ended.
        """
        self.begin(name, command)
        self.wait(name, lambda name: ready in self.screen(name) or self.ended(name))
        if self.ended(name):
            raise RuntimeError(f"{command} has ended: {self.screen(name)}")
        return self.screen(name)

    def ended(self, name: str) -> bool:
        """Whether the session's command has ended."""
        return self.tmux("display", "-p", "-t", name, "#{pane_current_command}").strip() == "cat"

    def wait(self, name: str, done: Callable[[str], bool]) -> None:
        """Wait until a function of the session's name returns true."""
        pause = threading.Event()
        for _ in range(LONGEST_WAITS):
            if done(name):
                return
            pause.wait(WAIT_S)
        raise TimeoutError(f"a command does not end: {self.screen(name)}")


def shim(folder: Path) -> None:
    """Write the command that `Terminal` runs: Moonpool of this checkout, whose own files are in the folder."""
    command = folder / "bin" / "moonpool"
    command.parent.mkdir()
    command.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))} XDG_RUNTIME_DIR={folder} XDG_CONFIG_HOME={folder}\n"
        f"export NO_COLOR=1 HF_HUB_OFFLINE=1\ncd {folder}\n"
        f"exec {sys.executable} -c \"import sys; sys.argv[0] = 'moonpool'; "
        f'from moonpool.cli.main import main; main()" "$@"\n'
    )
    command.chmod(0o755)


def page() -> str:
    """The text of the page, from runs of the verbs."""
    with tempfile.TemporaryDirectory(prefix="screens-") as name:
        folder = Path(name)
        shim(folder)
        (folder / "system.txt").write_text("You answer in one sentence.\n" * 40)
        (folder / "trace.jsonl").write_text(trace())
        terminal = Terminal(folder)
        try:
            shown = [*screens(terminal)]
        finally:
            terminal.tmux("kill-server")
    parts = [f"\n```\n$ moonpool {verb}\n{text if verb in HELP else shortened(text)}\n```\n" for verb, text in shown]
    text = re.sub(r"\bmp-[\w-]{32}\b", f"mp-{'x' * 32}", "".join(parts))
    return HEAD + text.replace(name, "/tmp").replace(str(Path.home()), "~").replace(str(ROOT), "~/moonpool")


def shortened(text: str) -> str:
    """At most `LONGEST` lines of a text."""
    lines = text.split("\n")
    return text if len(lines) <= LONGEST else "\n".join([*lines[: LONGEST - 1], "..."])


def screens(terminal: Terminal) -> Iterator[tuple[str, str]]:
    """Verbs, and what the terminal shows of each."""
    number = itertools.count()

    def run(verb: str) -> tuple[str, str]:
        return verb, terminal.run(f"verb{next(number)}", verb)

    for verb in (*HELP, *BEFORE):
        yield run(verb)
    yield STACK, terminal.serve("stack", STACK, "Ctrl-C stops.")
    for verb in WHILE:
        yield run(verb)
    yield "chat --max-tokens 8", terminal.talk("chat", "chat --max-tokens 8", CHAT)
    yield run("stop")
    addresses: dict[str, str] = {}
    for service, (verb, last) in SERVICES.items():
        command = f"{verb.format_map(addresses)} --log-level error"
        text = terminal.serve(service, command, last)
        addresses[service] = text.rpartition(READY)[2].partition("\n")[0]
        yield command, text
    for verb in ALONE:
        yield run(verb.format_map(addresses))
    for service in reversed(SERVICES):
        terminal.tmux("send-keys", "-t", service, "C-c")
        terminal.wait(service, terminal.ended)
    for verb in ENDED:
        yield run(verb)


def trace() -> str:
    """A trace of Mooncake's form: forty requests in twenty seconds, of eight conversations."""
    requests = (
        {
            "timestamp": 500 * at,
            "input_length": 4096,
            "output_length": 64,
            "hash_ids": [*range(at % 8 * 8, at % 8 * 8 + 8)],
        }
        for at in range(40)
    )
    return "".join(f"{json.dumps(request)}\n" for request in requests)


def help_pages(text: str) -> dict[str, str]:
    """The help pages on the page, by verb."""
    found = re.findall(r"```\n\$ moonpool ([^\n]*--help)\n(.*?)\n```", text, re.DOTALL)
    return dict(found)


if __name__ == "__main__":
    os.environ.pop("TMUX", None)
    PAGE.write_text(page(), encoding="utf-8")
