"""The table of formats: a row for each family of models, and the forms of thinking.

A new family whose form is of a known kind (`moonpool.base.answer_formats.syntax`) is a new row here and nothing else;
docs/extend/answer_format.md lists the steps.
"""

from __future__ import annotations

from moonpool.base.answer_formats.syntax import (
    AnswerFormat,
    ArgumentCalls,
    HarmonyCalls,
    JsonCalls,
    ReasoningFormat,
    TaggedCalls,
)

HARMONY_THINKING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    names=("openai_gptoss",),
    shown=("<|channel|>", "analysis", "<|message|>"),
)
KIMI_THINKING = ReasoningFormat(
    "<think>",
    "</think>",
    also_ends=("<|tool_calls_section_begin|>",),
    names=("kimi_k2",),
    shown=("</think>", "<|tool_calls_section_begin|>"),
)
THINK = ReasoningFormat(
    "<think>",
    "</think>",
    names=(
        *("think", "deepseek_r1", "qwen3", "deepseek_v3", "glm45", "glm47", "hunyuan_a13b", "minimax_m2", "olmo3"),
        *("ernie45", "holo2", "mimo", "nemotron_v3", "step3"),
    ),
)
MISTRAL_THINKING = ReasoningFormat("[THINK]", "[/THINK]", names=("mistral", "magistral"))
SEED_THINKING = ReasoningFormat("<seed:think>", "</seed:think>", names=("seed_oss", "seed"))
COHERE_THINKING = ReasoningFormat(
    "<|START_THINKING|>", "<|END_THINKING|>", names=("cohere_command3", "cohere_command4", "cohere")
)
GEMMA_THINKING = ReasoningFormat("<|channel>thought\n", "<channel|>", names=("gemma4",))
HYPERCLOVA_THINKING = ReasoningFormat(
    "/think\n", "<|im_end|>\n<|im_start|>assistant", names=("hyperclovax",), shown=("assistant/think",)
)
SOLAR_THINKING = ReasoningFormat(
    "<|think|>", "<|end|><|begin|>assistant", names=("solar_open",), shown=("<|think|>", "<|begin|>")
)
MINICPM_THINKING = ReasoningFormat("<|thought_start|>", "<|thought_end|>", names=("minicpm3",))
GRANITE_THINKING = ReasoningFormat("Here is my thought process:", "Here is my response:", names=("granite",))
REASONING_ROWS: tuple[ReasoningFormat, ...] = (
    HARMONY_THINKING,
    KIMI_THINKING,
    MISTRAL_THINKING,
    SEED_THINKING,
    COHERE_THINKING,
    GEMMA_THINKING,
    HYPERCLOVA_THINKING,
    SOLAR_THINKING,
    MINICPM_THINKING,
    GRANITE_THINKING,
    THINK,
)
"""Forms of thinking. Of a template that no row of calls fits, the first whose marks are there counts."""

_JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'

FORMAT_ROWS: tuple[AnswerFormat, ...] = (
    AnswerFormat(
        names=("kimi_k2",),
        models="Kimi K2, Kimi Linear",
        example="<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
        calls=JsonCalls(
            ("<|tool_call_begin|>",),
            heads=(
                ("functions.{name}:{number}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
                ("{name}:{number}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            ),
            only_heads=True,
            around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            closers=("<|tool_call_end|>",),
        ),
        needs=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
        architectures=("KimiK2ForCausalLM", "KimiLinearForCausalLM", "kimi-linear"),
        call_id="functions.{name}:{number}",
        own_ids=r"functions\.[^:]+:\d+",
        reasoning=(KIMI_THINKING,),
    ),
    AnswerFormat(
        names=("glm45", "glm47"),
        models="GLM-4.5, 4.6, 4.7",
        example="<tool_call>weather <arg_key>city</arg_key> <arg_value>Paris</arg_value> </tool_call>",
        calls=TaggedCalls(
            "",
            "",
            "<tool_call>{name}\n",
            "</tool_call>",
            "<arg_key>{key}</arg_key>\n<arg_value>",
            "</arg_value>\n",
        ),
        needs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
        architectures=("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "glm4moe"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("openai",),
        models="gpt-oss",
        example="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>",
        calls=HarmonyCalls(),
        needs=(("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),),
        architectures=("GptOssForCausalLM", "gpt-oss"),
        always=True,
        reasoning=(HARMONY_THINKING,),
    ),
    AnswerFormat(
        names=("minimax_m2",),
        models="MiniMax M2",
        example='<minimax:tool_call><invoke name="weather"><parameter name="city">Paris</parameter></invoke>'
        "</minimax:tool_call>",
        calls=TaggedCalls(
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            '<invoke name="{name}">\n',
            "</invoke>\n",
            '<parameter name="{key}">',
            "</parameter>\n",
            grouped=True,
        ),
        needs=(("<minimax:tool_call>", "<invoke name="),),
        architectures=("MiniMaxM2ForCausalLM", "minimax-m2"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("dots",),
        models="dots",
        example='<dots_function_call><invoke name="weather"><parameter name="city">Paris</parameter></invoke>'
        "</dots_function_call>",
        calls=TaggedCalls(
            "<dots_function_call>\n",
            "</dots_function_call>",
            '<invoke name="{name}">\n',
            "</invoke>\n",
            '<parameter name="{key}">',
            "</parameter>\n",
            grouped=True,
        ),
        needs=(("<dots_function_call>",),),
        architectures=("Dots1ForCausalLM", "dots1"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("deepseek_v32",),
        models="DeepSeek V3.2",
        example='<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        calls=TaggedCalls(
            "<｜DSML｜function_calls>\n",
            "</｜DSML｜function_calls>",
            '<｜DSML｜invoke name="{name}">\n',
            "</｜DSML｜invoke>\n",
            '<｜DSML｜parameter name="{key}" string="{string}">',
            "</｜DSML｜parameter>\n",
            grouped=True,
        ),
        needs=(("DSML", "function_calls", "invoke"),),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("qwen3_coder", "qwen3_xml", "mimo"),
        models="Qwen3-Coder, Qwen3.5, Nemotron 3",
        example="<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>",
        calls=TaggedCalls(
            "<tool_call>\n",
            "</tool_call>",
            "<function={name}>\n",
            "</function>\n",
            "<parameter={key}>",
            "</parameter>\n",
            padded=True,
            bare=True,
        ),
        needs=(("<tool_call>", "<function=", "<parameter="),),
        lacks=("<seed:tool_call>",),
        architectures=(
            *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "qwen3next"),
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("seed_oss",),
        models="Seed-OSS",
        example="<seed:tool_call><function=weather><parameter=city>Paris</parameter></function></seed:tool_call>",
        calls=TaggedCalls(
            "<seed:tool_call>\n",
            "</seed:tool_call>",
            "<function={name}>\n",
            "</function>\n",
            "<parameter={key}>",
            "</parameter>\n",
            bare=True,
        ),
        needs=(("<seed:tool_call>", "<function="),),
        architectures=("SeedOssForCausalLM", "seed_oss"),
        reasoning=(SEED_THINKING,),
    ),
    AnswerFormat(
        names=("gemma4",),
        models="Gemma 4",
        example='<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
        calls=ArgumentCalls(("<|tool_call>",), "<tool_call|>", language="gemma", layout="alone"),
        needs=(("<|tool_call>", "call:", '<|"|>'),),
        architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "gemma4"),
        reasoning=(GEMMA_THINKING,),
    ),
    AnswerFormat(
        names=("functiongemma",),
        models="FunctionGemma",
        example="<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
        calls=ArgumentCalls(
            ("<start_function_call>",), "<end_function_call>", language="gemma", layout="alone", quote="<escape>"
        ),
        needs=(("<start_function_call>", "<escape>"),),
    ),
    AnswerFormat(
        names=("granite",),
        models="Granite 3",
        example=f"<|tool_call|>[{_JSON_CALL}]",
        calls=JsonCalls(("<|tool_call|>", "<tool_call>"), listed=True),
        needs=(("<|start_of_role|>", "<|tool_call|>"), ("<|start_of_role|>", "<tool_call>", "JSON list")),
        lacks=("</tool_call>", "<|/tool_call|>"),
        architectures=("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "granite"),
        hidden=("<response>", "</response>"),
        reasoning=(GRANITE_THINKING, THINK),
    ),
    AnswerFormat(
        names=("cohere_command3", "cohere_command4"),
        models="Command R7B, Command A",
        example='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {...}}]<|END_ACTION|>',
        calls=JsonCalls(
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            listed=True,
            name_key="tool_name",
            arguments_key="parameters",
            first_members='"tool_call_id": "{number}", ',
        ),
        needs=(("<|START_ACTION|>", '"tool_name"'),),
        architectures=("Cohere2ForCausalLM", "cohere2"),
        hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        always=True,
        reasoning=(COHERE_THINKING,),
    ),
    AnswerFormat(
        names=("command_r",),
        models="Command R, Command R+",
        example='Action: ```json [{"tool_name": "weather", "parameters": {...}}]```',
        calls=JsonCalls(
            ("Action:\n```json", "Action: ```json", "Action:```json"),
            "```",
            listed=True,
            name_key="tool_name",
            arguments_key="parameters",
            spread=True,
        ),
        needs=(("<|START_OF_TURN_TOKEN|>", "Action:", '"tool_name"'),),
        lacks=("<|START_ACTION|>",),
        architectures=("CohereForCausalLM", "command-r"),
    ),
    AnswerFormat(
        names=("lfm2",),
        models="LFM2, LFM2.5",
        example='<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
        calls=ArgumentCalls(("<|tool_call_start|>",), "<|tool_call_end|>", json=True),
        needs=(
            ("<|tool_call_start|>", "<|tool_call_end|>"),
            ("<|tool_list_start|>", "<|tool_list_end|>"),
            ("List of tools: [", "keep_past_thinking"),
        ),
        lacks=("<|thought_start|>",),
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "lfm2", "lfm2moe"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("minicpm3",),
        models="MiniCPM3",
        example='<|tool_call_start|> ```python weather(city="Paris") ``` <|tool_call_end|>',
        calls=ArgumentCalls(("<|tool_call_start|>\n```python",), "```\n<|tool_call_end|>", layout="lines"),
        needs=(("<|tool_call_start|>", "<|thought_start|>"),),
        architectures=("MiniCPM3ForCausalLM", "minicpm3"),
        reasoning=(MINICPM_THINKING,),
    ),
    AnswerFormat(
        names=("hunyuan_a13b", "jamba"),
        models="Hunyuan",
        example=f"<tool_calls>[{_JSON_CALL}]</tool_calls>",
        calls=JsonCalls(("<tool_calls>",), "</tool_calls>", listed=True),
        needs=(("<tool_calls>", "</tool_calls>", '"arguments"'),),
        architectures=("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "hunyuan-moe", "hunyuan-dense"),
        hidden=("<answer>", "</answer>"),
        always=True,
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("phi4_mini_json",),
        models="Phi-4-mini",
        example=f"<|tool_call|>[{_JSON_CALL}]<|/tool_call|>",
        calls=JsonCalls(("<|tool_call|>",), "<|/tool_call|>", listed=True, at_start=("functools",)),
        needs=(("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "<|/tool_call|>")),
        architectures=("Phi3ForCausalLM", "phi3"),
    ),
    AnswerFormat(
        names=("olmo3",),
        models="OLMo 3",
        example='<function_calls>weather(city="Paris")</function_calls>',
        calls=ArgumentCalls(("<function_calls>",), "</function_calls>", layout="lines"),
        needs=(("<function_calls>", "<functions>"), ("<function_calls>", "</function_calls>")),
        lacks=("DSML", "<invoke"),
        architectures=("Olmo3ForCausalLM", "olmo3"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("deepseek_v3", "deepseek_v31", "deepseek"),
        models="DeepSeek V3, V3.1, R1",
        example="<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
        calls=JsonCalls(
            ("<｜tool▁call▁begin｜>",),
            heads=(
                ("{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
                ("function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
            ),
            only_heads=True,
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            closers=("```", "<｜tool▁call▁end｜>"),
        ),
        needs=(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),),
        architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "YoutuForCausalLM", "deepseek2"),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("gigachat3",),
        models="GigaChat 3",
        example=f"function call<|role_sep|>{_JSON_CALL}",
        calls=JsonCalls(("function call<|role_sep|>", "<|function_call|>"), space="\n", closers=("<|message_sep|>",)),
        needs=(("<|role_sep|>", "<|message_sep|>"), ("role_sep", "message_sep", "function result")),
        hidden=("<|message_sep|>",),
    ),
    AnswerFormat(
        names=("solar_open",),
        models="Solar Open",
        example="<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>weather<|tool_call:args|>{...}<|tool_call:end|>",
        calls=JsonCalls(
            ("<|tool_call:begin|>",),
            heads=(("{id}<|tool_call:name|>{name}<|tool_call:args|>", "<|tool_call:end|>"),),
            only_heads=True,
            around=("<|tool_calls|>", ""),
            closers=("<|tool_call:end|>", "<|calls|>"),
        ),
        needs=(("<|tool_call:begin|>", "<|tool_call:args|>"),),
        architectures=("SolarOpenForCausalLM",),
        hidden=("<|content|>", "<|end|>", "<|begin|>assistant", "<|flush|>"),
        always=True,
        reasoning=(SOLAR_THINKING,),
    ),
    AnswerFormat(
        names=("hyperclovax",),
        models="HyperCLOVA X SEED Think",
        example=f"<|im_end|> <|im_start|>assistant -> tool/function_call [{_JSON_CALL}]",
        calls=JsonCalls((" -> tool/function_call\n", "-> tool/function_call\n"), listed=True),
        needs=(("tool/function_call", "<|im_start|>"),),
        architectures=("HyperCLOVAXForCausalLM",),
        hidden=("<|im_end|>", "<|im_start|>assistant"),
        opens_line=True,
        always=True,
        reasoning=(HYPERCLOVA_THINKING,),
    ),
    AnswerFormat(
        names=("nemotron_json", "llama_nemotron_json"),
        models="Llama Nemotron, Nemotron Nano 2",
        example=f"<TOOLCALL>[{_JSON_CALL}]</TOOLCALL>",
        calls=JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", listed=True),
        needs=(("<TOOLCALL>", "</TOOLCALL>"),),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("functionary_v3", "functionary"),
        models="Functionary 3.1, Llama 3.1 with functions of its own",
        example='<function=weather>{"city": "Paris"}</function>',
        calls=JsonCalls(
            ("<function=",), heads=(("{name}>", "</function>"),), only_heads=True, closers=("</function>",)
        ),
        needs=(("<function=example_function_name>{",),),
    ),
    AnswerFormat(
        names=("glm4",),
        models="GLM-4",
        example='weather {"city": "Paris"}',
        calls=JsonCalls((), heads=(("{name}\n", ""),), only_heads=True, unmarked=True),
        needs=(("[gMASK]<sop>", "在调用上述函数时"),),
        lacks=("<arg_key>",),
        architectures=("GlmForCausalLM", "Glm4ForCausalLM", "chatglm", "glm4"),
    ),
    AnswerFormat(
        names=("mistral",),
        models="Mistral, Ministral, Magistral, Devstral",
        example="[TOOL_CALLS]weather[ARGS]{...}",
        calls=JsonCalls(
            ("[TOOL_CALLS]",),
            listed=True,
            heads=(("{name}[ARGS]", ""), ("{name}[CALL_ID]{id}[ARGS]", ""), ("{name}", "")),
        ),
        needs=(("[TOOL_CALLS]",),),
        architectures=("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM", "MixtralForCausalLM"),
        call_id="{digits:.9}",  # Mistral's chat templates refuse other ids
        own_ids="[a-zA-Z0-9]{9}",
        reasoning=(MISTRAL_THINKING, THINK),
    ),
    AnswerFormat(
        names=("ernie45",),
        models="ERNIE 4.5",
        example=f"<tool_call>{_JSON_CALL}</tool_call>",
        calls=JsonCalls(("<tool_call>",), "</tool_call>", space="\n", between="\n"),
        needs=(("<tool_call>", "</tool_call>", '"arguments"', "<response>"),),
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "ernie4_5", "ernie4_5-moe"),
        hidden=("<response>", "</response>"),
        always=True,
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("hermes", "granite4", "qwen"),
        models="Hermes, Qwen 2.5, Qwen 3, Granite 4, SmolLM3, EXAONE 4, and chat templates without tools",
        example=f"<tool_call>{_JSON_CALL}</tool_call>",
        calls=JsonCalls(("<tool_call>",), "</tool_call>", space="\n", between="\n"),
        needs=(
            ("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
            ("<tool_call>", "</tool_call>", "['function'] | tojson"),
            ("<tool_call>", "</tool_call>", "tool_call.function | tojson"),
            ("<tool_call>", "</tool_call>", "tool_call | tojson"),
        ),
        lacks=("<function=", "<arg_key>", "<tool_calls>", "<|tool_call|>", "<response>", "<minimax:tool_call>"),
        architectures=(
            *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
            *("SmolLM3ForCausalLM", "GraniteMoeHybridForCausalLM", "Exaone4ForCausalLM", "ExaoneMoeForCausalLM"),
            *("qwen2", "qwen3", "qwen2moe", "qwen3moe", "smollm3", "granitehybrid", "exaone4"),
        ),
        reasoning=(THINK,),
    ),
    AnswerFormat(
        names=("pythonic", "llama4_pythonic"),
        models="Llama 4, Llama 3.2",
        example='[weather(city="Paris")]',
        calls=ArgumentCalls(("<|python_start|>",), "<|python_end|>", unmarked=True),
        needs=(("[func_name1(",), ("<|python_start|>",)),
        architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4"),
    ),
    AnswerFormat(
        names=("llama3_json", "llama4_json", "llama3"),
        models="Llama 3",
        example='{"name": "weather", "parameters": {"city": "Paris"}}',
        calls=JsonCalls(("<|python_tag|>",), arguments_key="parameters", unmarked=True, between="; ", closers=(";",)),
        needs=(
            ("<|python_tag|>",),
            ('"parameters"', "<|start_header_id|>"),
            ('"parameters"', "<|header_start|>"),
        ),
        lacks=("[func_name1(", "<|python_start|>", "<tool_call>", "<function=", "<TOOLCALL>"),
        architectures=("LlamaForCausalLM", "CwmForCausalLM", "llama"),
        reasoning=(THINK,),
    ),
)
"""Formats of answers. A test tries every two rows against each other's chat templates, so the order decides nothing."""
