"""What beginning the next turn ahead saves: `python -m benchmarks.next_turn --json`.

An agent's conversation: a task, then calls with thoughts and long results, of a model whose chat template leaves
thoughts out as soon as the user writes again. With the user's next message, all from the first thought on has other
tokens. Told is the time to the first token of that turn, with `speculative_prefill` `auto` and `none`. Engines are
emulated: the cache is real, the time is a profile's.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.bundled import model_dir
from moonpool.cli.stack import LocalStack, StackPlan

ENDPOINT = "/v1/chat/completions"
WORDS = tuple("the tide of a moon pool turns when ships lie still and every rope hangs down".split())  # noqa: SIM905
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}\
{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set last.user = loop.index %}{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]\
{% if m.reasoning_content and loop.index > last.user %}<think>{{ m.reasoning_content }}</think>{% endif %}\
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}[end]{% endfor %}\
{% if add_generation_prompt %}[assistant]<think>{% endif %}"""
"""Takes tools, so that results are turns of a tool. Opens the thinking, and leaves out the thinking before the user's
last message, as Qwen3's template does.
"""


@contextmanager
def stack(options: argparse.Namespace, when: str) -> Iterator[LocalStack]:
    """A fresh stack whose gateway begins next turns ahead, or not."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        ahead = ["--chat-template", str(template), "--set", f"speculative_prefill={when}"]
        plan = StackPlan(
            model=str(model_dir()), data_dir=Path(folder), engine=options.engine, http_port=0, log_level="warning",
            time_scale=options.time_scale, kvstore=0,
            extra={"gateway": ahead, "conductor": ["--chat-template", str(template)]},
        )  # fmt: skip
        with LocalStack(plan) as running:
            yield running


def conversation(options: argparse.Namespace, drawn: random.Random) -> list[dict[str, Any]]:
    """A task, and some calls with thoughts and results behind it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the tide."}]
    for number in range(options.calls):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = " ".join(drawn.choice(WORDS) for _ in range(options.words))
        messages += [
            {"role": "assistant", "content": "", "reasoning_content": f"Look {number}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    return messages


def first_token_s(http: httpx2.Client, messages: list[dict[str, Any]]) -> float:
    """Seconds to the first token of an answer."""
    began = time.perf_counter()
    body = {"messages": messages, "max_tokens": 1, "stream": True, "temperature": 0, "ignore_eos": True}
    with http.stream("POST", ENDPOINT, json=body) as response:
        lines = response.raise_for_status().iter_lines()
        next(line for line in lines if line.startswith("data: "))
        seconds = time.perf_counter() - began
        for _ in lines:
            pass
    return seconds


def next_turn_s(running: LocalStack, options: argparse.Namespace, seed: int) -> float:
    """Seconds to the first token of the user's next turn, after a pause in which the user reads and writes."""
    messages = conversation(options, random.Random(seed))
    with httpx2.Client(base_url=f"http://{running.http_address}", timeout=600) as http:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post(ENDPOINT, json=body).raise_for_status().json()["choices"][0]["message"]
        time.sleep(options.pause_s)
        return first_token_s(http, [*messages, answer, {"role": "user", "content": "And tomorrow?"}])


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """The time to the first token of next turns, begun ahead and not, in turn."""
    times = list[tuple[float, float]]()
    for number in range(options.runs):
        found = []
        for when in ("auto", "none"):
            with stack(options, when) as running:
                found.append(next_turn_s(running, options, number))
        times.append((found[0], found[1]))
        progress(f"run {number + 1} of {options.runs}: {found[0]:.3f} s and {found[1]:.3f} s")
    name = f"next turn behind {options.calls} results of {options.words} words: time to the first token"
    return [paired(name, "s", times, "not begun ahead", less_is_better=True)]


def flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags."""
    add = parser.add_argument
    add("--calls", type=int, default=6)
    add("--words", type=int, default=150, help="words of a call's result")
    add("--pause-s", type=float, default=10.0, help="seconds between an answer and the user's next turn")
    add("--engine", default="emulated:llama-70b-a800")
    add("--time-scale", type=float, default=1.0, help="emulated seconds per second")


if __name__ == "__main__":
    run("next_turn", measure, flags=flags)
