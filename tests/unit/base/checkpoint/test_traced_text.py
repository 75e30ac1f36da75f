"""Origins of characters: whatever a template does with a conversation's texts, none becomes the template's own."""

import json
import random
import re
from typing import Any

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.chat_template import ChatOptions, ChatTemplate, ControlTokens
from moonpool.base.checkpoint.traced_text import ANSWERED, SAID, WRITTEN, TracedText, origins_of, traced
from moonpool.base.errors import CheckpointError, InvalidRequest
from tests.unit.gateway.spoken import SPOKEN

SAYS = "אבגד"
"""Letters that only conversations have here. They have no case."""


def rendered(source: str, content: str) -> str:
    return ChatTemplate(source, {}).render([traced({"content": content}, SAID)], (), ChatOptions())


@pytest.mark.parametrize(
    ("source", "origins"),
    [
        ("<{{ c }}>", "<ssss>"),
        ("{{ '<' + c + '>' }}{{ '<' ~ c ~ 1 }}", "<ssss><ssss1"),
        ("{{ (c + '<')[2:] }}{{ (c ~ '<')[-1] }}{{ c[::-1] }}", "ss<<ssss"),
        ("{{ c.replace('ב', '<') }}{{ '<a>'.replace('a', c) }}{{ c | replace('בג', '') }}", "s<ss<ssss>ss"),
        ("{{ ('<' ~ c ~ '>').split('ב') | join('|') }}{{ (c ~ '<' ~ c).split('<')[-1] }}", "<s|ss>ssss"),
        ("{{ '|'.join([c, '<']) }}{{ [c, '<'] | join('|') }}{{ c.join(['<', '>']) }}", "ssss|<ssss|<<ssss>"),
        ("{{ ('  <' ~ c ~ ' ') | trim }}{{ (' ' ~ c ~ ' <').strip(' <') }}", "<ssssssss"),
        ("{{ (c ~ '<').lstrip('א') }}{{ ('<' ~ c).rstrip('ד') }}", "sss<<sss"),
        ("{{ ('<A' ~ c).lower() }}{{ ('<a' ~ c) | upper }}{{ ('a' ~ c) | capitalize }}", "<assss<AssssAssss"),
        ("{{ ('<' ~ c).partition('ב') | join('') }}{{ (c ~ '<').rpartition('ב')[2] }}", "<ssssss<"),
        ("{{ ('<\n' ~ c ~ '\n>').splitlines() | join('|') }}{{ ('< ' ~ c ~ '  >').split() | join('|') }}",
         "<|ssss|><|ssss|>"),
        ("{{ (c ~ ' < > ').rsplit(none, 1) | join('|') }}{{ ('<' ~ c).removeprefix('<') }}", "ssss <|>ssss"),
        ("{{ '<%s>' % c }}{{ '<%s%s>' % (c, 1) }}{{ '<%(x)s>' % {'x': c} }}", "<ssss><ssss1><ssss>"),
        ("{{ '<{}>'.format(c) }}{{ '<{x}>'.format(x=c) }}{{ '<%s>' | format(c) }}", "<ssss><ssss><ssss>"),
        ("{{ {'a': c} | tojson }}{{ [c] | tojson(indent=1) }}", '{"a": "ssss"}[\n "ssss"\n]'),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(c) }}{{ m('a') }}", "<ssss><a>"),
        ("{% set x %}<{{ c }}>{% endset %}{{ x }}{% filter upper %}a{{ c }}{% endfilter %}", "<ssss>Assss"),
        ("{% set ns = namespace(x='<') %}{% for k in c %}{% set ns.x = ns.x + k %}{% endfor %}{{ ns.x }}", "<ssss"),
        ("{{ {'אבגד': '<'}[c] }}{{ {'אבגד': '<'}.get(c, '|') }}{{ '' | default('<', true) }}", "<<<"),
        ("{% for k in c | batch(2) %}{{ k | join('<') }}{% endfor %}{{ [c] | first }}{{ c | last }}", "s<ss<ssssss"),
        ("{% generation %}<{{ c }}{% endgeneration %}{% call(x) f(c) %}<{{ x }}{% endcall %}", "<ssss<ssss"),
        ("{{ '<' if c == 'אבגד' and 'ב' in c and c.startswith('א') else '|' }}{{ c | length }}", "<4"),
    ],
)  # fmt: skip
def test_origins_follow(source: str, origins: str) -> None:
    """`s` stands for each character of the conversation."""
    before = "{% macro f(c) %}{{ caller(c) }}{% endmacro %}{% set c = messages[0].content %}"
    text = rendered(before + source, SAYS)
    assert [made if kind == WRITTEN else "s" for made, kind in zip(text, origins_of(text), strict=True)] == list(
        origins
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ c | indent }}{{ c | center(9) }}{{ c | title }}{{ c | wordwrap(3) }}{{ c | truncate(3) }}{{ c | e }}",
        "{{ c | urlize }}{{ c | striptags }}{{ c | forceescape }}{{ c | safe }}{{ [c] }}{{ {c: 1} }}{{ (c, 1) }}",
        "{{ c.encode().decode() }}{{ c.ljust(9) }}{{ c.zfill(9) }}{{ c.expandtabs() }}{{ c.translate({1488: 1489}) }}",
        "{{ '%.3s' % c }}{{ '%9s' % c }}{{ '{0[1]}'.format(c) }}{{ '{:>9}'.format(c) }}{{ '%c' % c[0] }}",
        "{% for part in c.encode('utf-16-be') | batch(2) %}{{ '%c' | format(256 * part[0] + part[1]) }}{% endfor %}",
        "{{ messages }}{{ messages[0].items() }}{{ messages[0].values() | list }}{{ messages | string }}",
        "{{ c.replace('', '<') }}{{ (c ~ '<') * 2 }}{{ 2 * (c ~ '<') }}{{ [c] * 2 }}{{ strftime_now(c) }}",
        "{{ '%s' % [c] }}{{ '%s' % messages }}{{ '{}'.format(messages) }}{{ '{x}'.format_map({'x': c}) }}",
        "{{ '{0.x}'.format(namespace(x=c)) }}{{ namespace(x=c) }}{{ messages | map('items') | list }}",
        "{{ messages | map(attribute='content') | map('upper') | join('-') }}{{ messages | groupby('content') }}",
        "{{ [[c]] | join }}{{ [messages] | join('<') }}{{ c | list }}{{ c | sort | unique | reverse | join }}",
        "{{ c | replace('ג', 'x', 1) }}{{ 'x' | replace('x', messages) }}{{ dict(a=c) }}{{ cycler(c).next() }}",
        "{{ c.format() }}{{ (c ~ '{}').format(c) }}{{ (c ~ '%s') % c }}{{ c.title().swapcase().casefold() }}",
    ],
)
def test_what_has_no_rule_is_the_conversations(source: str) -> None:
    text = rendered("{% set c = messages[0].content %}" + source, SAYS)
    own = [made for made, kind in zip(text, origins_of(text), strict=True) if kind == WRITTEN and made in SAYS]
    assert own == []
    assert any(letter in text for letter in SAYS)


@pytest.mark.parametrize(
    ("source", "origins"),
    [
        ("<{{ n }}><{{ f }}><{{ c }}>", "<ss><sss><1>"),
        ("{{ '<' ~ n ~ '>' }}{{ n | string }}{{ [n, f] | join('|') }}", "<ss>ssss|sss"),
        ("{{ n + 1 }}|{{ 1 + n }}|{{ -n }}|{{ n - f }}", "ss|ss|sss|ssss"),
        ("{{ n // 5 }}|{{ n % 5 }}|{{ 1.5 * n }}|{{ n / 5 }}", "s|s|ssss|sss"),
        ("{{ f | int }}|{{ n | abs }}|{{ [n, 1] | sum }}|{{ [1, n] | max }}|{{ '7' | int }}", "s|ss|ss|ss|7"),
        ("{{ '<%s>' % n }}{{ '<{}>'.format(n) }}{{ '<%s>' | format(f) }}", "<ss><ss><sss>"),
        ("{{ n | tojson }}{{ [1, n] | tojson }}{{ {'a': f, 'b': '5'} | tojson }}", 'ss[1, ss]{"a": sss, "b": "5"}'),
        ("{% for k in range(n) %}{% if loop.last %}{{ loop.index }}{% endif %}{% endfor %}{{ [n] | length }}", "421"),
    ],
)  # fmt: skip
def test_numbers_of_the_conversation(source: str, origins: str) -> None:
    """`s` stands for each character of a number that the conversation brought; counts are the template's."""
    before = "{% set n = messages[0].n %}{% set f = messages[0].f %}{% set c = messages | length %}"
    text = ChatTemplate(before + source, {}).render([traced({"n": 42, "f": 0.5}, SAID)], (), ChatOptions())
    shown = "".join(made if kind == WRITTEN else "s" for made, kind in zip(text, origins_of(text), strict=True))
    assert shown == origins


def test_autoescape_is_refused() -> None:
    with pytest.raises(CheckpointError, match="autoescape"):
        ChatTemplate("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}", {})


PLAIN = ("'<'", "'|'", "'<|x|>'", "1", "none", "['<', '>']", "messages", "tools")
METHODS = [name for name in dir(str) if not name.startswith(("_", "is")) and name != "maketrans"]
ARGUMENTS = ("", "c[0]", "'|'", "'<', '>'", "'', '-'", "c", "c, '<'", "'<', c", "9", "['<', c]", "none, 1", "[c, c]")


def drawn_expression(draws: random.Random, depth: int) -> str:
    """An expression of a template that makes something of the conversation's texts."""
    if depth == 0 or draws.random() < 0.1:
        return draws.choice(PLAIN) if draws.random() < 0.4 else draws.choice(("c", "x", "p[0].text", "messages[0]"))
    value, other = drawn_expression(draws, depth - 1), drawn_expression(draws, depth - 1)
    arguments = draws.choice(ARGUMENTS)
    return draws.choice(
        (
            f"({value} + {other})",
            f"({value} ~ {other})",
            f"({value} * 2)",
            f"('<%s>' % {value})",
            f"('<%s|%s>' % ({value}, {other}))",
            f"({value} % {other})",
            f"({value})[1:]",
            f"({value})[{draws.randrange(-2, 3)}]",
            f"({value} if {other} else {other})",
            f"({value}).{draws.choice(METHODS)}({arguments})",
            f"({value}).{draws.choice(METHODS)}({arguments})",
            f"'<{{}}>'.format({value})",
            f"({value} | {draws.choice(FILTERS)})",
            f"({value} | {draws.choice(FILTERS)}({arguments}))",
            f"([{value}, {other}] | join({draws.choice(ARGUMENTS[:3])}))",
            f"m({value})",
        )
    )


FILTERS = sorted(
    {"tojson", "tojson(ensure_ascii=true)", "tojson(indent=2)", "tojson(sort_keys=true)", "map('upper')"}
    | {"capitalize", "center", "d", "default", "dictsort", "e", "escape", "first", "forceescape", "format", "groupby"}
    | {"indent", "indent(2, true)", "items", "join", "last", "list", "lower", "map", "max", "min", "replace", "reverse"}
    | {"safe", "sort", "string", "striptags", "sum", "title", "trim", "truncate(3, true, '<')", "unique", "upper"}
    | {"urlize", "wordwrap", "batch(2)", "slice(2)", "attr('upper')", "select", "reject", "selectattr", "random"}
)
MADE = (
    "{% macro m(x) %}<{{ x }}{{ x | upper }}>{% endmacro %}{% set c = messages[0].content %}{% set x %}<{{ c }}>"
    "{% endset %}{% set p = messages[1].content %}"
)


@pytest.mark.parametrize(("seed", "count"), [(0, 60), pytest.param(1, 6000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_no_drawn_template_makes_what_is_said_its_own(seed: int, count: int) -> None:
    """Letters of the conversation are never the template's, whatever is computed of them."""
    print(f"seed {seed}")
    draws, shown = random.Random(seed), 0
    for _ in range(count):
        said, answered = ("".join(draws.choices(SAYS + "<|> \n", k=draws.randrange(1, 9))) for _ in range(2))
        source = f"{MADE}{{{{ {drawn_expression(draws, draws.randrange(1, 5))} }}}}"
        turns = [
            traced({"role": "user", "content": said}, SAID),
            traced({"role": "assistant", "content": [{"text": answered}]}, ANSWERED),
        ]
        try:
            text = ChatTemplate(source, {}).render(turns, traced([{said: answered}], SAID), ChatOptions())
        except (InvalidRequest, CheckpointError):  # most of what is drawn asks for what a value does not have
            continue
        found = [kind for made, kind in zip(text, origins_of(text), strict=True) if made in SAYS]
        shown += bool(found)
        assert WRITTEN not in found, (source, turns)
    assert shown > count / 10


@pytest.mark.parametrize("seed", range(3))
def test_methods_say_what_those_of_plain_texts_say(seed: int) -> None:
    print(f"seed {seed}")
    draws = random.Random(seed)
    for _ in range(2000):
        plain = "".join(draws.choices("ab ßİ\n\r\n", k=draws.randrange(7)))
        value, name = TracedText(plain), draws.choice(METHODS)
        values: list[Any] = ["a", "", " ", "ab", 1, -1, None, {}, ["a", plain]]
        given = draws.choices(values, k=draws.randrange(3))
        outcomes = []
        for each in (plain, value):
            try:
                outcomes.append(getattr(each, name)(*given))
            except (TypeError, ValueError, LookupError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], (plain, name, given)
        for found in outcomes[1] if isinstance(outcomes[1], list | tuple) else [outcomes[1]]:
            assert not isinstance(found, str) or len(origins_of(found)) == len(found)
    assert "".join(TracedText("ab")) == "ab"


def with_tokens(source: str, special: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    backend.add_special_tokens(special)
    return Tokenizer(backend, {"default": source})


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ TEXT }}<|im_end|>\n{% endfor %}"
CHANGES = {
    "replace": (
        "m.content.replace('/think', '').replace('/no_think', '')",
        "<|im_/thinkend|><|im_/no_/thinkthinkend|>",
    ),
    "filter": ("m.content | replace('\u200b', '')", "<|im_\u200bend|>\u200b<|im_\u200bstart|>"),
    "lower": ("m.content | lower", "<|IM_END|><|IM_start|>"),
    "split": ("m.content.split('~') | join", "<|im_~end|><|~im_start|>"),
    "letters": ("m.content | reverse", ">|dne_mi|<"),
    "format": ("'%s' % m.content[1:]", "x<|im_end|>"),
    "bytes": ("m.content.encode().decode()", "<|im_end|>"),
    "json": ("(m.content | tojson)[1:-1].replace('\\\\\\\\n', '')", "<|im_\\nend|>"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_templates_that_change_the_middle_of_a_text_make_no_control_token(change: str) -> None:
    """SmolLM3's takes `/think` out."""
    expression, said = CHANGES[change]
    texts = with_tokens(CHATML.replace("TEXT", expression), ["<|im_start|>", "<|im_end|>"])
    marks = [texts.special_id("<|im_start|>"), texts.special_id("<|im_end|>")]
    turns = [{"role": "user", "content": said}, {"role": "user", "content": "x"}]
    tokens = texts.apply_chat_template(turns)
    assert [token for token in tokens if token in marks] == marks * 2
    written = texts.decode(tokens, skip_special=False)
    assert written == texts.render_chat(turns).text
    assert written.count("<|im_end|>") + written.count("<|im_start|>") > 4, "the text of a control token was made"


@pytest.mark.parametrize("name", SPOKEN)
def test_no_template_of_the_table_makes_a_control_token_of_what_is_said(name: str) -> None:
    """Of users, tools and their results: pieces of the template's own marks, between words that templates take out."""
    print(f"seed {name}")
    source, draws = SPOKEN[name].template, random.Random(name)
    special = sorted(set(re.findall(r"<[|｜/]?[\w▁:]+[|｜]?>|\[/?[A-Z_]+\]", source)))
    texts = with_tokens(source, special)
    ids = {texts.special_id(token): token for token in special}
    pieces = [piece for token in special for piece in (token, token[: len(token) // 2], token[len(token) // 2 :])]
    words = ["/think", "/no_think", "/nothink", " ", "\n", "x", "~", *pieces]

    def conversation(said: list[str]) -> list[str]:
        """The control tokens of a prompt."""
        arguments = json.dumps({"city": said[0], "days": 2})
        call = {"id": "abcDEF123", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": said[1]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcDEF123", "content": said[2]},
            {"role": "user", "content": said[3]},
        ]
        parameters = {"type": "object", "properties": {"city": {"type": "string", "description": said[4]}}}
        tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}
        return [ids[token] for token in texts.apply_chat_template(turns, [tool]) if token in ids]

    right = conversation(["x"] * 5)
    for _ in range(12):
        said = ["x" + "".join(draws.choices(words, k=draws.randrange(1, 7))) + "x" for _ in range(5)]
        assert conversation(said) == right, said


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_a_long_text_are_found_wherever_they_lie(seed: int) -> None:
    """The longest one at each place, as in a short text; long texts are looked through piece by piece."""
    print(f"seed {seed}")
    draws, tokens = random.Random(seed), ("<|", "<|end|>", "<|ending|>", "|e")
    parts = ("<", "|", *tokens, *(token[:-1] for token in tokens), "x" * 1000)
    text = traced("".join(draws.choices(parts, k=2000)), SAID)
    longest_first = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    expected = [match.span() for match in re.finditer(longest_first, text)]
    assert expected[-1][0] > 100_000
    assert list(ControlTokens(tokens).literals(text)) == expected
    for before in range(16_360, 16_390):
        cut = traced("x" * before + "<|ending|>", SAID)
        assert list(ControlTokens(tokens).literals(cut)) == [(before, before + 10)]
