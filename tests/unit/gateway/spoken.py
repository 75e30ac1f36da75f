"""What models of each family say, and chat templates in their style: written by hand, apart from the table of formats.

The templates are short forms of the published ones: how functions are shown, how past calls and thoughts are written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, Mapping[str, Any]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{as_json(arguments)}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def openai(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls
    kind = "<|constrain|>json<|message|>"
    return f"<|channel|>commentary to=functions.{name} {kind}{as_json(arguments)}<|call|>"


def invoked(calls: Sequence[Call], begin: str, mark: str, end: str, more: Callable[[Any], str]) -> str:
    inner = "".join(
        f'<{mark}invoke name="{name}">\n'
        + "".join(
            f'<{mark}parameter name="{key}"{more(value)}>{as_text(value)}</{mark}parameter>\n'
            for key, value in arguments.items()
        )
        + f"</{mark}invoke>\n"
        for name, arguments in calls
    )
    return f"{begin}\n{inner}{end}"


def minimax_m2(calls: Sequence[Call]) -> str:
    return invoked(calls, "<minimax:tool_call>", "", "</minimax:tool_call>", lambda value: "")


def deepseek_v32(calls: Sequence[Call]) -> str:
    return invoked(
        calls,
        "<｜DSML｜function_calls>",
        "｜DSML｜",
        "</｜DSML｜function_calls>",
        lambda value: f' string="{as_json(isinstance(value, str))}"',
    )


def tagged(calls: Sequence[Call], begin: str, end: str, pad: str) -> str:
    return "\n".join(
        f"{begin}\n<function={name}>\n"
        + "".join(f"<parameter={key}>{pad}{as_text(value)}{pad}</parameter>\n" for key, value in arguments.items())
        + f"</function>\n{end}"
        for name, arguments in calls
    )


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(item, quote)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(item, quote) for item in value)}]"
    return as_json(value)


def gemma(calls: Sequence[Call], begin: str, end: str, quote: str) -> str:
    return "".join(f"{begin}call:{name}{gemma_value(arguments, quote)}{end}" for name, arguments in calls)


def listed(calls: Sequence[Call], begin: str, end: str) -> str:
    return f"{begin}{as_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}{end}"


def cohere(calls: Sequence[Call]) -> str:
    inner = ",\n".join(
        f'    {{"tool_call_id": "{at}", "tool_name": "{name}", "parameters": {as_json(arguments)}}}'
        for at, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{inner}\n]<|END_ACTION|>"


def command_r(calls: Sequence[Call]) -> str:
    inner = ",\n".join(
        f'    {{\n        "tool_name": "{name}",\n        "parameters": {as_json(arguments)}\n    }}'
        for name, arguments in calls
    )
    return f"Action: ```json\n[\n{inner}\n]```"


def solar_open(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call:begin|>abcdefghi<|tool_call:name|>{name}<|tool_call:args|>{as_json(arguments)}<|tool_call:end|>"
        for name, arguments in calls
    )
    return f"<|tool_calls|>{inner}"


def functionary_v3(calls: Sequence[Call]) -> str:
    return "".join(f"<function={name}>{as_json(arguments)}</function>" for name, arguments in calls)


def glm4(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls
    return f"{name}\n{as_json(arguments)}"


def gigachat3(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls
    return f"function call<|role_sep|>\n{as_json({'name': name, 'arguments': arguments})}"


def python_calls(calls: Sequence[Call]) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{as_json({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


@dataclass(frozen=True)
class Spoken:
    """How a family speaks.

    Attributes:
        write: writes calls.
        shown: how the chat template shows the form, as far as the table looks at it.
        history: the chat template's text of past calls (Jinja).
        thought: what stands before and behind a thought; None = the family does not think.
        text: what stands before and behind the text of an answer.
        several: an answer may have several calls.
        is_whole: calls are the whole answer.
    """

    write: Callable[[Sequence[Call]], str]
    shown: str
    history: str
    thought: tuple[str, str] | None = None
    text: tuple[str, str] = ("", "")
    several: bool = True
    is_whole: bool = False

    @property
    def template(self) -> str:
        thinking = f"{{% if m.reasoning_content %}}{'@'.join(self.thought)}{{% endif %}}" if self.thought else ""
        return (
            f"{{% if tools %}}{self.shown}{{{{ tools | tojson }}}}{{% endif %}}"
            "{% for m in messages %}[{{ m.role }}]"
            f"{thinking.replace('@', '{{ m.reasoning_content }}')}{{{{ m.content }}}}{{% if m.tool_calls %}}"
            f"{self.history}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
        )


EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
THINK = ("<think>", "</think>")
_OBJECT = '{"name": <function-name>, "arguments": <args-json-object>}'
_MORE = "{% if not loop.last %}, {% endif %}{% endfor %}"
_JSON_ITEM = '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}' + _MORE
_HERMES_HISTORY = (
    EACH + '{% if not loop.first %}\n{% endif %}<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": '
    "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_VALUE = "{{ v if v is string else v | tojson }}"
_TAGGED = EACH + (
    "{% if not loop.first %}\n{% endif %}{{ BEGIN }}\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>PAD" + _VALUE + "PAD</parameter>\n{% endfor %}</function>\n{{ END }}{% endfor %}"
)
_PYTHON = (
    EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}SEP{% endif %}{% endfor %}"
)
_GEMMA = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{ {%- for k, i in v.items() %}"
    "{{ k }}:{{ value(i) }}{% if not loop.last %},{% endif %}{% endfor %}}{% elif v is iterable %}[{% for i in v %}"
    "{{ value(i) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    + EACH + "BEGINcall:{{ f.name }}{{ value(f.arguments) }}END{% endfor %}"
)  # fmt: skip


def gemma_history(begin: str, end: str, quote: str) -> str:
    return _GEMMA.replace("BEGIN", begin).replace("END", end).replace("QUOTE", quote)


def tags(begin: str, end: str, pad: str) -> str:
    return _TAGGED.replace("{{ BEGIN }}", begin).replace("{{ END }}", end).replace("PAD", pad)


def invocations(begin: str, mark: str, end: str, more: str = "") -> str:
    return (
        begin + "\n" + EACH + f'<{mark}invoke name="{{{{ f.name }}}}">\n'
        "{% for k, v in f.arguments.items() %}" + f'<{mark}parameter name="{{{{ k }}}}"{more}>{_VALUE}'
        f"</{mark}parameter>\n{{% endfor %}}</{mark}invoke>\n{{% endfor %}}{end}"
    )  # fmt: skip


SPOKEN: dict[str, Spoken] = {
    "kimi_k2": Spoken(
        kimi_k2,
        "",
        "<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        THINK,
    ),
    "glm45": Spoken(
        glm45,
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
        EACH + "{% if not loop.first %}\n{% endif %}<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
        THINK,
    ),
    "openai": Spoken(
        openai,
        "",
        "<|start|>assistant" + EACH + "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% endfor %}",
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("<|channel|>final<|message|>", ""),
        several=False,
    ),
    "minimax_m2": Spoken(
        minimax_m2,
        "",
        invocations("<minimax:tool_call>", "", "</minimax:tool_call>"),
        THINK,
    ),
    "deepseek_v32": Spoken(
        deepseek_v32,
        "",
        invocations(
            "<｜DSML｜function_calls>",
            "｜DSML｜",
            "</｜DSML｜function_calls>",
            ' string="{{ (v is string) | tojson }}"',
        ),
        THINK,
    ),
    "qwen3_coder": Spoken(
        lambda calls: tagged(calls, "<tool_call>", "</tool_call>", "\n"),
        "",
        tags("<tool_call>", "</tool_call>", "\n"),
    ),
    "seed_oss": Spoken(
        lambda calls: tagged(calls, "<seed:tool_call>", "</seed:tool_call>", ""),
        "",
        tags("<seed:tool_call>", "</seed:tool_call>", ""),
        ("<seed:think>", "</seed:think>"),
    ),
    "gemma4": Spoken(
        lambda calls: gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
        "",
        gemma_history("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|channel>thought\n", "<channel|>"),
    ),
    "functiongemma": Spoken(
        lambda calls: gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
        "",
        gemma_history("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "dots": Spoken(
        lambda calls: invoked(calls, "<dots_function_call>", "", "</dots_function_call>", lambda value: ""),
        "",
        invocations("<dots_function_call>", "", "</dots_function_call>"),
        THINK,
    ),
    "command_r": Spoken(
        command_r,
        "<|START_OF_TURN_TOKEN|>",
        "\nAction:\n```json\n[\n"
        + EACH
        + '{"tool_name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}'
        + _MORE
        + "\n]```\n",
    ),
    "minicpm3": Spoken(
        lambda calls: "<|tool_call_start|>\n```python\n" + "\n".join(python_calls(calls)) + "\n```\n<|tool_call_end|>",
        "",
        "<|tool_call_start|>\n```python\n" + _PYTHON.replace("SEP", "\n") + "\n```\n<|tool_call_end|>",
        ("<|thought_start|>", "<|thought_end|>"),
    ),
    "gigachat3": Spoken(
        gigachat3,
        "<|role_sep|><|message_sep|>",
        EACH + 'function call<|role_sep|>\n{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
        "{% endfor %}",
        several=False,
    ),
    "solar_open": Spoken(
        solar_open,
        "<|begin|>",
        "<|tool_calls|>" + EACH + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
        "{{ f.arguments | tojson }}<|tool_call:end|>{% endfor %}",
        ("<|think|>", "<|end|><|begin|>assistant"),
        ("<|content|>", "<|end|>"),
    ),
    "hyperclovax": Spoken(
        lambda calls: listed(calls, " -> tool/function_call\n", ""),
        "<|im_start|>assistant/think",
        " -> tool/function_call\n[" + EACH + _JSON_ITEM + "]",
        ("/think\n", "<|im_end|>\n<|im_start|>assistant"),
        ("\n", "<|im_end|>\n<|im_start|>assistant"),
    ),
    "nemotron_json": Spoken(
        lambda calls: listed(calls, "<TOOLCALL>", "</TOOLCALL>"),
        "",
        "<TOOLCALL>[" + EACH + _JSON_ITEM + "]</TOOLCALL>",
        THINK,
    ),
    "functionary_v3": Spoken(
        functionary_v3,
        '<function=example_function_name>{"example_name": "example_value"}</function>',
        EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
    ),
    "glm4": Spoken(
        glm4,
        "[gMASK]<sop>在调用上述函数时 Json",
        EACH + "{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}",
        several=False,
        is_whole=True,
    ),
    "granite": Spoken(
        lambda calls: listed(calls, "<|tool_call|>", ""),
        "<|start_of_role|>respond with <|tool_call|> followed by a JSON list of tools used.",
        "<|tool_call|>[" + EACH + _JSON_ITEM + "]",
        ("Here is my thought process:", "Here is my response:"),
    ),
    "cohere_command3": Spoken(
        cohere,
        "",
        "<|START_ACTION|>[" + EACH + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ f.name | tojson }}, '
        '"parameters": {{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]<|END_ACTION|>',
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "lfm2": Spoken(
        lambda calls: f"<|tool_call_start|>[{', '.join(python_calls(calls))}]<|tool_call_end|>",
        "",
        "<|tool_call_start|>[" + _PYTHON.replace("SEP", ", ") + "]<|tool_call_end|>",
        THINK,
    ),
    "hunyuan_a13b": Spoken(
        lambda calls: listed(calls, "<tool_calls>", "</tool_calls>"),
        "",
        "<tool_calls>[" + EACH + _JSON_ITEM + "]</tool_calls>",
        THINK,
        ("<answer>\n", "\n</answer>"),
    ),
    "phi4_mini_json": Spoken(
        lambda calls: listed(calls, "<|tool_call|>", "<|/tool_call|>"),
        "<|tool|><|/tool|>",
        "<|tool_call|>[" + EACH + _JSON_ITEM + "]<|/tool_call|>",
    ),
    "olmo3": Spoken(
        lambda calls: "<function_calls>\n" + "\n".join(python_calls(calls)) + "\n</function_calls>",
        "<functions></functions>",
        "<function_calls>\n" + _PYTHON.replace("SEP", "\n") + "\n</function_calls>",
        THINK,
    ),
    "deepseek_v3": Spoken(
        deepseek_v3,
        "",
        "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
        THINK,
    ),
    "mistral": Spoken(
        lambda calls: listed(calls, "[TOOL_CALLS] ", ""),
        "",
        "[TOOL_CALLS] [" + EACH + _JSON_ITEM + "]",
        ("[THINK]", "[/THINK]"),
    ),
    "ernie45": Spoken(
        hermes,
        _OBJECT + "<response></response>",
        _HERMES_HISTORY,
        THINK,
        ("<response>\n", "\n</response>"),
    ),
    "hermes": Spoken(hermes, _OBJECT, _HERMES_HISTORY, THINK),
    "pythonic": Spoken(
        lambda calls: f"[{', '.join(python_calls(calls))}]",
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        "[" + _PYTHON.replace("SEP", ", ") + "]",
        is_whole=True,
    ),
    "llama3_json": Spoken(
        lambda calls: "; ".join(as_json({"name": name, "parameters": arguments}) for name, arguments in calls),
        '<|start_header_id|>Respond in the format {"name": function name, "parameters": dictionary of arguments}.',
        EACH + '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}; {% endif %}{% endfor %}",
        is_whole=True,
    ),
}
"""By the row's name."""
