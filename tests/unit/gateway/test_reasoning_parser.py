"""Thinking and answers, whatever the pieces in which a text comes."""

import random

import pytest

from moonpool.base.answer_formats import REASONING_FORMATS, found_format
from moonpool.gateway.reasoning_parsers.base import ReasoningParser, ReasoningText

CASES = [
    ("think", False, "<think>\nWell, 1 < 2.\n</think>\n\nYes. </think>", ("Well, 1 < 2.", "Yes. </think>")),
    ("think", False, "  <think></think>Yes", ("", "Yes")),
    ("think", False, "No <think>x</think>", ("", "No <think>x</think>")),
    ("think", False, "<thin", ("", "<thin")),
    ("think", False, "<think>cut", ("cut", "")),
    ("think", False, "<think>cut </thi", ("cut </thi", "")),
    ("think", True, "\nWell.\n</think>\n\nYes", ("Well.", "Yes")),
    ("think", True, "Well.</think>", ("Well.", "")),
    ("magistral", False, "[THINK]a b[/THINK] c", ("a b", "c")),
    ("think", False, "", ("", "")),
    ("kimi_k2", False, "<think>Hm.<|tool_calls_section_begin|>x", ("Hm.", "<|tool_calls_section_begin|>x")),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes", ("Hm.", "Yes")),
    ("granite", False, "Here is my thought process: Hm. Here is my response: Yes", ("Hm.", "Yes")),
    ("cohere", False, "<|START_THINKING|>Hm.<|END_THINKING|>Yes", ("Hm.", "Yes")),
]


def read(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.end()
    thinking = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return thinking, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), CASES, ids=range(len(CASES)))
def test_thinking_is_split_off(name: str, is_open: bool, text: str, expected: tuple[str, str]) -> None:
    def made() -> ReasoningParser:
        return ReasoningParser(REASONING_FORMATS[name], is_open=is_open)

    assert read(made(), [text]) == read(made(), list(text)) == expected
    draw = random.Random(5)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(made(), pieces) == expected


def test_thinking_is_not_held_back() -> None:
    parser = ReasoningParser(REASONING_FORMATS["think"], is_open=False)
    assert parser.push("<think>I see") == [ReasoningText("I see")]
    assert parser.push(" </th") == []
    assert parser.push("ree") == [ReasoningText(" </three")]
    assert parser.push("</think>") == []
    assert parser.push("\nYes") == ["Yes"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("{{ '[/THINK]' }}", "mistral"),
        ("{{ '<seed:think>' + thought + '</seed:think>' }}", "seed_oss"),
        ("<|channel|>analysis<|message|> <|end|>", "openai_gptoss"),
        ("<|channel>thought <channel|>", "gemma4"),
        ("{{ content }}", ""),
    ],
)
def test_the_thinking_of_a_template(template: str, name: str) -> None:
    found = found_format(template).reasoning
    assert (found.names[0] if found is not None else "") == name


def test_a_prompt_that_begins_the_thinking() -> None:
    think = REASONING_FORMATS["think"]
    assert think.is_open("<|im_start|>assistant\n<think>\n")
    assert not think.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
