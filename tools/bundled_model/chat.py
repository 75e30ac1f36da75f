"""Conversations: the chat template that the folder ships, and the training conversations derived from docstrings.

Works on text alone; ``tokenizer`` turns conversations into tokens.
"""

from __future__ import annotations

import ast
import textwrap

from tools.bundled_model.text import Document

#: What the user says and what the model replies.
Turn = tuple[str, str]

#: The conversation format. Words of the user are comments, and a reply is plain source text that ends with ``</s>``.
#: A finished conversation is a prefix of its continuation, so a KV cache of earlier turns stays valid.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set content = message['content'] -%}"
    "{%- if content is none -%}{%- set content = '' -%}{%- endif -%}"
    "{%- if content is not string -%}"
    "{%- set parts = namespace(text='') -%}"
    "{%- for part in content if part['type'] == 'text' -%}{%- set parts.text = parts.text + part['text'] -%}"
    "{%- endfor -%}"
    "{%- set content = parts.text -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '# assistant:\\n' + content + eos_token + '\\n' }}"
    "{%- else -%}"
    "{{ '# ' + message['role'] + ': ' + content.replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '# assistant:\\n' }}{%- endif -%}"
)


def chat_header(question: str) -> str:
    """Render one user turn and the opening of the reply, as ``CHAT_TEMPLATE`` does."""
    return "# user: " + question.replace("\n", "\n# ") + "\n# assistant:\n"


def conversations(document: Document) -> list[list[Turn]]:
    """Derive short conversations from a document: the summary line of a docstring asks for its function.

    Each conversation is a list of (question, reply) turns, one to three of them, from one file. A chapter of the
    language reference answers one question; the test suite answers none.
    """
    if document.name.startswith("pydoc_data/"):
        topic = document.name.rsplit("/", 1)[1]
        reply = document.text.strip()
        return [[(f"Explain {topic}.", reply)]] if len(reply) <= 6000 else []
    if document.is_test:
        return []
    turns = _docstring_turns(document.text)
    result = []
    start = 0
    while start < len(turns):
        length = 1 + (len(turns[start][0]) + len(turns[start][1])) % 3
        result.append(turns[start : start + length])
        start += length
    return result


def _docstring_turns(source: str) -> list[Turn]:
    """Return a turn for each documented, not too long function or class; none if ``source`` is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.splitlines()
    turns: list[Turn] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.end_lineno is None:
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if not 12 <= len(summary) <= 160 or not 3 <= node.end_lineno - first + 1 <= 50:
            continue
        reply = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        if not reply[:1].isspace():
            turns.append((summary, reply))
    return turns
