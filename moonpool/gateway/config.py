"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from moonpool.base.answer_formats import FORMATS, REASONING_FORMATS
from moonpool.base.config import ByteSize, ListenAddress, PeerAddresses, ServiceConfig
from moonpool.base.errors import ConfigError


def _split(value: Any) -> Any:
    """Split names at commas; a setting may be given several times."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(name for part in parts for name in (piece.strip() for piece in part.split(",")) if name)


def _one_of(*names: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


ToolParserName = Annotated[str, _one_of("auto", "none", *FORMATS)]
ReasoningParserName = Annotated[str, _one_of("auto", "none", *REASONING_FORMATS)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class GatewayConfig(ServiceConfig):
    """Serves the HTTP APIs of OpenAI and Anthropic and a dashboard page, and sends the requests to a conductor."""

    flag_groups: ClassVar = {
        "cluster": ("conductor",),
        "model": ("model", "served_model_name", "chat_template", "tool_call_parser", "reasoning_parser"),
        "HTTP": ("api_keys", "allowed_hosts", "allowed_origins", "ssl_certfile", "ssl_keyfile"),
    }
    listen: ListenAddress = Field(
        "127.0.0.1:8000",
        description="HOST:PORT to listen at for HTTP; port 0 takes a free port, shown in the line `ready: HOST:PORT`",
    )
    conductor: PeerAddresses = Field(
        min_length=1,
        description=(
            "HOST:PORT of the conductor; with several, the gateway spreads requests and uses another conductor "
            "when one is lost"
        ),
    )
    model: str = Field(
        description=(
            "the same checkpoint folder, GGUF file or Hugging Face hub id as the conductor's; the tokenizer "
            "answers /tokenize and /detokenize"
        )
    )
    served_model_name: Names = Field(
        (),
        description="names by which clients know the model; responses have the first. Default: the checkpoint's name",
    )
    any_model_name: bool = Field(
        False,
        description="a request may name any model, for programs that insist on a name of theirs: each name but those "
        "of LoRA adapters stands for the served model; responses have the served model's name",
    )
    allowed_hosts: Names = Field(
        (),
        description='host names by which clients reach the gateway, for example llm.example.com; "*" for all. Default: '
        "with --api-keys all; else localhost, IP addresses, this machine's name, and the hosts of --listen and "
        "--advertise, so that no web page reaches the gateway by a name that its owner points here",
    )
    allowed_origins: Names = Field(
        (),
        description='origins whose web pages may use the HTTP APIs, for example https://chat.example.com; "*" for '
        "all. Default: none but the gateway's own page",
    )
    picture_hosts: Names = Field(
        (),
        description="names of hosts from which pictures in requests may be fetched by URL, for example "
        "images.example.com; default: none, pictures are in the requests themselves",
    )
    api_keys: Path | None = Field(
        None,
        description="file of hashed API keys and their tenants, read again when the file changes; default: no key is "
        "needed, and all requests belong to one tenant",
    )
    operator_tenants: Names = Field(
        (),
        description=(
            "tenants whose API keys see the whole cluster and all requests on the page; default: none. Without "
            "--api-keys, every caller does"
        ),
    )
    ssl_certfile: Path | None = Field(
        None,
        description="certificate of the HTTP server (PEM), read again when the file changes; default: plain HTTP",
    )
    ssl_keyfile: Path | None = Field(None, description="private key of --ssl-certfile (PEM)")
    max_body_bytes: ByteSize = Field(
        8 << 20, ge=1024, le=1 << 30, description="maximum size of a request body, in bytes"
    )
    body_memory_bytes: ByteSize = Field(
        512 << 20,
        ge=1 << 20,
        description="memory that the bodies of all requests in progress may take, in bytes: four times their size; a "
        "tenant may take as much as is still free; a request beyond that is refused with 503",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="maximum number of open connections; if there are more, an idle connection is closed, "
        "else the one whose body has been coming for longest",
    )
    read_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="seconds in which the head of a request must arrive, and again for the body"
    )
    write_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="seconds after which a client that does not read its response is disconnected"
    )
    response_store_bytes: ByteSize = Field(
        256 << 20,
        ge=0,
        description=(
            "maximum size of the stored responses and conversations, in bytes; if there is no room, the tenant "
            "with most bytes loses the least recently used ones; 0 = no storing"
        ),
    )
    response_ttl_s: float = Field(
        86400.0, gt=0, description="seconds after the last use for which a response or conversation stays stored"
    )
    response_pin_s: float = Field(
        600.0,
        ge=0,
        le=7 * 86400,
        description=(
            "seconds for which a conversation's KV stays pinned after a turn that continued the conversation by an "
            "id; 0 = no pins"
        ),
    )
    response_store_file: Path | None = Field(
        None,
        description="SQLite file of the stored responses and conversations, which outlives the gateway; gateways of "
        "one machine may share the file. Default: in memory",
    )
    batch_dir: Path | None = Field(
        None,
        description="folder of files and batches (/v1/files, /v1/batches), which outlive the gateway; one gateway to a "
        "folder. Default: the gateway keeps none",
    )
    batch_bytes: ByteSize = Field(1 << 30, ge=1 << 10, description="bytes of files that a tenant may keep in batch_dir")
    batch_concurrency: int = Field(
        16, ge=1, description="requests of batches that run at the same time; none begins while other requests wait"
    )
    speculative_prefill: Literal["asked", "auto", "none"] = Field(
        "asked",
        description="when a chat's next turn is begun ahead, where the chat template leaves thinking out: asked: for "
        "requests that ask for it; auto: also behind any answer with thinking, unless requests wait; none: never",
    )
    max_background_responses: int = Field(
        64, ge=0, description="background responses of one tenant that may be under way at the same time"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="time limit of a request, in seconds")
    log_requests: bool = Field(
        False, description="log a line for every request; refused, wrong and failed requests always have one"
    )
    chat_template: Path | None = Field(
        None,
        description=(
            "file with a chat template (Jinja) in place of the checkpoint's; give the file to the conductor, too"
        ),
    )
    tool_call_parser: ToolParserName = Field(
        "auto",
        description="format of the model's tool calls, by vLLM's name, for example hermes, kimi_k2 or qwen3_coder "
        "(gateway.md lists all); auto: derived from the chat template; none: unknown",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="marks around the model's thinking, by vLLM's name, for example deepseek_r1, mistral or gemma4; "
        "auto: derived from the chat template; none: the model does not think",
    )

    embedding_dimensions: Literal["auto", "any", "none"] = Field(
        "auto",
        description="sizes to which `dimensions` of a request may cut embeddings; auto: as the checkpoint "
        "says (is_matryoshka, matryoshka_dimensions); any: any size; none: none",
    )

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError(missing, "must be given, too: certificate and key go together")
        return self
