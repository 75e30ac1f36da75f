"""Writes docs/fields.md from the gateway's bodies: `python -m tools.gen_fields`. A test compares the page with them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from moonpool.gateway.endpoints.anthropic_messages import CountTokensBody, MessagesBody
from moonpool.gateway.endpoints.classify import ClassifyBody
from moonpool.gateway.endpoints.dashboard import MarkdownBody
from moonpool.gateway.endpoints.embeddings import EmbeddingsBody
from moonpool.gateway.endpoints.lora_adapters import LoadLoraBody, UnloadLoraBody
from moonpool.gateway.endpoints.ollama import OllamaChatBody, OllamaEmbedBody, OllamaGenerateBody, OllamaShowBody
from moonpool.gateway.endpoints.openai_chat import ChatBody
from moonpool.gateway.endpoints.openai_completions import CompletionBody
from moonpool.gateway.endpoints.prefetch import PrefetchBody
from moonpool.gateway.endpoints.scores import RerankBody, ScoreBody
from moonpool.gateway.endpoints.tokenization import DetokenizeBody, TokenizeBody
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.generate_body import GenerateBody, SessionBody

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/classify": ClassifyBody,
    "/score": ScoreBody,
    "/rerank": RerankBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/embed": OllamaEmbedBody,
    "/api/show": OllamaShowBody,
    "/v1/prefetch": PrefetchBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/load_lora_adapter": LoadLoraBody,
    "/v1/unload_lora_adapter": UnloadLoraBody,
    "/moonpool/sessions/{name}": SessionBody,
    "/moonpool/markdown": MarkdownBody,
}
HEAD = """# Fields of request bodies

`python -m tools.gen_fields` writes this page from the code. [gateway.md](gateway.md) explains the fields that count.

A field of OpenAI, Anthropic, vLLM, SGLang, llama.cpp or Ollama is one of three:

- **Honoured:** the field counts.
- **Ignored:** the field does not change the answer. The response names the field in the header `warning`.
- **Refused:** the field would change the answer, and Moonpool has not built it. The response is 400 with its name.
  A value in brackets is accepted, because the value asks for what happens anyway. Null is always accepted.

Bodies are marked with \\*: there, an unknown field is ignored with the warning. In every object within a body, an
unknown field is refused. `requests` of `/v1/prefetch` are bodies of `/v1/chat/completions` and `/v1/completions`, or
lines of a batch file: there, `body` is a body of the endpoint that `url` names.
"""


def page() -> str:
    """The text of docs/fields.md."""
    shown: dict[tuple[str, str], str] = {}
    return HEAD + "".join(_table(path, body, shown) for path, body in BODIES.items())


def _table(path: str, body: type[Body], shown: dict[tuple[str, str], str]) -> str:
    """A section; `shown` has the path that has a place's cells already, by place and cells."""
    head = f"\n## `POST {path}`\n\n| object | honoured | ignored | refused |\n|---|---|---|---|\n"
    rows: dict[str, list[str]] = {}
    known: dict[str, list[str]] = {}
    for place, part in _objects("", body, ()):
        cells = _cells(part)
        first = shown.setdefault((place, cells), path)
        where = rows.setdefault(cells, []) if first == path else known.setdefault(first, [])
        name = (f"`{place}`" if place else "the body") + (" \\*" if part.contract().unknown_ignored else "")
        if name not in where:
            where.append(name)
    table = "".join(f"| {', '.join(names)} | {cells} |\n" for cells, names in rows.items())
    notes = "".join(f"\nAs at `POST {first}`: {', '.join(names)}.\n" for first, names in known.items())
    return head + table + notes


def _cells(body: type[Body]) -> str:
    contract = body.contract()
    refused = [f"`{field}`{_accepted(contract.refused[field])}" for field in sorted(contract.refused)]
    cells = [
        ", ".join(f"`{field}`" for field in sorted(contract.honoured)),
        ", ".join(f"`{field}`" for field in sorted(contract.ignored)),
        ", ".join(refused),
    ]
    return " | ".join(cells)


def _accepted(values: tuple[Any, ...]) -> str:
    return f" ({', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""


def _objects(place: str, body: type[Body], above: tuple[type[Body], ...]) -> Iterator[tuple[str, type[Body]]]:
    """The object and its inner objects, with their places."""
    yield place, body
    for name, field in body.model_fields.items():
        shown = f"{place}.{field.alias or name}" if place else field.alias or name
        for suffix, part in _parts(field.annotation, ""):
            if part not in (*above, body) and not issubclass(part, GenerateBody):  # these have tables of their own
                yield from _objects(shown + suffix, part, (*above, body))


def _parts(annotation: Any, suffix: str) -> Iterator[tuple[str, type[Body]]]:
    """The bodies in an annotation; "[]" marks those in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield suffix, annotation
    inner = suffix + "[]" if get_origin(annotation) is list else suffix
    for argument in get_args(annotation):
        yield from _parts(argument, inner)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
