"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from moonpool.config import ListenAddress, PeerAddresses, ServiceConfig
from moonpool.errors import ConfigError


def _split(value: Any) -> Any:
    """Names from text that has commas between them, given once or again."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(name for part in parts for name in (piece.strip() for piece in part.split(",")) if name)


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class GatewayConfig(ServiceConfig):
    """Serves OpenAI's and Anthropic's HTTP interface, and a page, and passes requests on to a conductor."""

    listen: ListenAddress = Field(
        "127.0.0.1:8000",
        description="HOST:PORT to listen at for HTTP; port 0 takes any free port, which `ready: HOST:PORT` tells",
    )
    conductor: PeerAddresses = Field(
        min_length=1,
        description="HOST:PORT of the conductor that serves the requests; of several, another one when it is lost",
    )
    model: str = Field(
        description="checkpoint folder, GGUF file or Hugging Face hub id, the same as the conductor's; its tokenizer "
        "answers /tokenize and /detokenize"
    )
    api_keys: Path | None = Field(
        None,
        description="file of hashed API keys and their tenants, read again when it changes; default: no key is "
        "asked for, and all requests are of one tenant",
    )
    operator_tenants: Names = Field(
        (),
        description="tenants whose API keys see the whole cluster and everybody's requests on the page; default: none. "
        "Without --api-keys everybody does",
    )
    https_cert: Path | None = Field(
        None,
        description="certificate that HTTP clients are shown (PEM), read again when it changes; default: plain HTTP",
    )
    https_key: Path | None = Field(None, description="private key of --https-cert (PEM)")
    max_body_bytes: int = Field(8 << 20, ge=1024, le=1 << 30, description="bytes of a request's body at most")
    max_connections: int = Field(
        4096, ge=1, description="connections open at once; a further one takes the place of one without a request"
    )
    read_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="seconds that the head of a request may take, and its body again"
    )
    write_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="seconds that a client may leave a piece of its answer unread"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="seconds that a request may take")
    tool_parser: Literal["auto", "hermes", "llama3", "mistral"] = Field(
        "auto", description="how the model writes calls of functions; auto: as its chat template shows"
    )
    tokenizer_threads: int = Field(
        1, ge=1, description="threads that tokenise for /tokenize, /detokenize and /v1/messages/count_tokens"
    )

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if (self.https_cert is None) != (self.https_key is None):
            lacking = "https_key" if self.https_key is None else "https_cert"
            raise ConfigError(lacking, "must be given: certificate and key go together")
        return self
