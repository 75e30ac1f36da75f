"""LlamaIndex's OpenAI-like model."""

from cells import MODEL, OPENAI_URL, QUESTION, cell, check, run
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=OPENAI_URL, api_key="any", is_chat_model=True, temperature=0, max_tokens=40, timeout=300
)


@cell
def complete():
    check(model.complete(QUESTION).text.strip())


@cell
def chat():
    check(model.chat([ChatMessage(role="user", content=QUESTION)]).message.content.strip())


@cell
def stream():
    check("".join(piece.delta for piece in model.stream_chat([ChatMessage(role="user", content=QUESTION)])))


run()
