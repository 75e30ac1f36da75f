"""What `moonpool demo` asks, and the picture at its end."""

from moonpool.cli.demo import BAR_WIDTH, demo_prompts, next_steps, picture
from moonpool.client import GenerateResult, Timing, Usage
from moonpool.client.types import Placement


def result(ttft_s: float, cached: int) -> GenerateResult:
    return GenerateResult(
        "id", [1], "x", "stop", Usage(2310, cached, 1), Timing(ttft_s=ttft_s), Placement("engine-0", "engine-0"), 7
    )


def test_two_bars() -> None:
    lines = picture(result(2.31, 0), result(0.0305, 2304)).splitlines()
    first, again = (line for line in lines if "█" in line)
    assert first == f"  the first time  {'█' * BAR_WIDTH} 2.31 s"
    assert again == "  the same again  █ 30 ms"
    assert "75.7 times sooner: 2,304 of 2,310 prompt tokens were in the KV pool." in lines
    assert max(map(len, lines)) <= 80


def test_prompts_suit_the_model() -> None:
    chat, code = demo_prompts(chat=True, max_tokens=9), demo_prompts(chat=False, max_tokens=9)
    turns = chat.second_turn("It wraps text.")["messages"]
    assert [turn["role"] for turn in turns or ()] == ["user", "assistant", "user"]
    assert all("messages" in asked for asked in (chat.first(), *chat.short()))
    first, second = code.first()["prompt"], code.second_turn("x")["prompt"]
    assert (second or "").startswith(f"{first}x"), "the second turn finds the first one's KV"
    assert len(chat.short()) == len(code.short()) == 8


def test_next_serves_the_same_model() -> None:
    assert "serve qwen3:0.6b\n" in next_steps("qwen3:0.6b")
