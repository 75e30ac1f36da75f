"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moonpool.config import ListenAddress, PeerAddresses, ServiceConfig


class GatewayConfig(ServiceConfig):
    """Serves OpenAI's HTTP interface and passes requests on to a conductor."""

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
    tokenizer_threads: int = Field(1, ge=1, description="threads that tokenise for /tokenize and /detokenize")
