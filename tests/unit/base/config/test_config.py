"""ServiceConfig: precedence, refusals that name the setting, help, addresses."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from moonpool.base.config import (
    REMOVED,
    SERVICE_MODULES,
    SERVICES,
    PeerAddresses,
    ServiceConfig,
    config_class,
    format_address,
    is_size,
    parse_address,
    refuse_unknown_variables,
)
from moonpool.base.errors import ConfigError
from moonpool.base.sizes import format_size, parse_size
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.kvstore.config import KVStoreConfig

ROOT = Path(__file__).parents[4]


class PoolConfig(ServiceConfig):
    """Runs a pool."""

    flag_groups: ClassVar = {"pool": ("conductor", "kv_bytes", "dtype", "labels", "shared", "block_size")}
    conductor: PeerAddresses = Field(min_length=1, description="conductor to join, HOST:PORT")
    kv_bytes: int = Field(1024, gt=0, description="memory for KV, bytes (100% of it)")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="element type")
    rate: float | None = Field(None, description="bytes per second; default: unlimited")
    labels: tuple[str, ...] = Field((), description="labels")
    shared: bool = Field(True, description="share it")
    block_size: int = Field(64, description="tokens per block")
    max_model_len: int = Field(0, description="longest sequence")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("MOONPOOL_"):
            monkeypatch.delenv(name)


ARGV = ["--conductor", "127.0.0.1:50051"]


def refused(argv: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        PoolConfig.load(argv)
    return caught.value


def test_defaults() -> None:
    config = PoolConfig.load(ARGV)
    assert (config.listen, config.conductor, config.kv_bytes) == ("127.0.0.1:0", ("127.0.0.1:50051",), 1024)
    assert (config.log_level, config.log_json, config.spans_dir, config.rate) == ("info", False, None, None)
    assert config.id.startswith("pool-")


def test_several_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is given again, or they stand in one value; each counts once, and a wrong one is named."""
    file = tmp_path / "pool.yaml"
    file.write_text("conductor: [a:1, b:2]\n")
    assert PoolConfig.load(["--conductor", "a:1", "--conductor=b:2, a:1"]).conductor == ("a:1", "b:2")
    assert PoolConfig.load(["--config", str(file)]).conductor == ("a:1", "b:2")
    monkeypatch.setenv("MOONPOOL_CONDUCTOR", "c:3,d:4")
    assert PoolConfig.load(["--config", str(file)]).conductor == ("c:3", "d:4")
    error = refused(["--conductor", "a:1", "--conductor", "b"])
    assert (error.field, "HOST:PORT" in str(error)) == ("conductor", True)
    assert "at least 1 item" in str(refused(["--conductor", ","]))


def test_precedence_is_flag_environment_file_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("kv_bytes: 1\nrate: 1.5\nlog_level: debug\nlabels: [a, b]\n")
    monkeypatch.setenv("MOONPOOL_KV_BYTES", "2")
    monkeypatch.setenv("MOONPOOL_RATE", "2.5")
    monkeypatch.setenv("MOONPOOL_MAX_NUM_SEQS", "7")  # another service's
    config = PoolConfig.load([*ARGV, "--config", str(file), "--kv-bytes", "3"])
    assert (config.kv_bytes, config.rate, config.log_level, config.dtype) == (3, 2.5, "debug", "float32")
    assert config.labels == ("a", "b")
    assert PoolConfig.load([*ARGV, "--config", str(file)]).kv_bytes == 2
    monkeypatch.delenv("MOONPOOL_KV_BYTES")
    assert PoolConfig.load([*ARGV, "--config", str(file)]).kv_bytes == 1


def test_forms_of_flags(tmp_path: Path) -> None:
    lists = ["--labels", "a", "--labels", "b"]
    config = PoolConfig.load(
        [
            "--conductor=h:1",
            "--kv-bytes=1_000",
            "--no-shared",
            "--set=log_json=true",
            *lists,
            "--set",
            f"spans_dir={tmp_path}",
            "--id=prefill-0",
        ]
    )
    assert (config.kv_bytes, config.shared, config.log_json, config.labels) == (1000, False, True, ("a", "b"))
    assert (config.spans_dir, config.id) == (tmp_path, "prefill-0")


@pytest.mark.parametrize("argument", ["", None])
def test_empty_means_unset(argument: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_SPANS_DIR", "")
    argv = [*ARGV, "--set", f"spans_dir={argument}"] if argument is not None else ARGV
    assert PoolConfig.load(argv).spans_dir is None


@pytest.mark.parametrize(
    ("argv", "field", "part"),
    [
        ([], "conductor", "is needed; give --conductor or MOONPOOL_CONDUCTOR"),
        ([*ARGV, "--kv-bytes", "many"], "kv_bytes", "got 'many' (from --kv-bytes)"),
        ([*ARGV, "--kv-bytes", "-1"], "kv_bytes", "greater than 0"),
        ([*ARGV, "--kv-bytes"], "kv_bytes", "expected one argument"),
        ([*ARGV, "--dtype", "int4"], "dtype", "'float32' or 'bfloat16'"),
        ([*ARGV, "--kv-byte", "1"], "--kv-byte", "no such flag; did you mean --kv-bytes?"),
        ([*ARGV, "--kv_bytes", "1"], "--kv_bytes", "did you mean --kv-bytes?"),
        ([*ARGV, "stray"], "stray", "no such flag"),
        ([*ARGV, "--listen", "0.0.0.0:1"], "advertise", "must be set when listening at '0.0.0.0:1'"),
        ([*ARGV, "--listen", "localhost"], "listen", "must be HOST:PORT"),
        ([*ARGV, "--listen", "h:70000"], "listen", "port in [0, 65535]"),
        ([*ARGV, "--advertise", "0.0.0.0"], "advertise", "others can reach"),
        ([*ARGV, "--advertise", "[::]:5"], "advertise", "others can reach"),
        ([*ARGV, "--advertise", "http://x"], "advertise", "got 'http://x'"),
        ([*ARGV, "--id", "a/b"], "id", "got 'a/b'"),
        ([*ARGV, "--log-level", "loud"], "log_level", "got 'loud'"),
        (["--conductor", "h:0"], "conductor", "can be reached"),
        ([*ARGV, "--config", "/nowhere.yaml"], "config", "cannot read /nowhere.yaml"),
        ([*ARGV, "--no-shared=1"], "shared", "explicit argument"),
        ([*ARGV, "--rate", "1"], "rate", "has no flag; give --set rate=VALUE, or `rate` in the file of --config"),
        ([*ARGV, "--no-log-json"], "log_json", "has no flag; give --set log_json=VALUE"),
        ([*ARGV, "--block-tokens=16"], "block_tokens", "is now --block-size"),
        ([*ARGV, "--max-tokens", "1"], "max_tokens", "has no flag; give --set max_model_len=VALUE"),
        ([*ARGV, "--stages", "1"], "--stages", "no such flag"),
        ([*ARGV, "--set", "rate"], "set", "must be NAME=VALUE, got 'rate'"),
        ([*ARGV, "--set", "rat=1"], "rat", "no such setting (from --set); did you mean rate?"),
        ([*ARGV, "--set", "block_tokens=1"], "block_tokens", "no such setting (from --set); it is now block_size"),
        (
            [*ARGV, "--set", "role_ratio=2"],
            "role_ratio",
            "is no longer a setting: it is 1.5 (docs/roles.md) (from --set)",
        ),
        ([*ARGV, "--role-ratio", "2"], "role_ratio", "is no longer a setting: it is 1.5 (docs/roles.md)"),
        ([*ARGV, "--set", "rate=fast"], "rate", "got 'fast' (from --set)"),
    ],
)
def test_every_refusal_names_the_setting(argv: list[str], field: str, part: str) -> None:
    error = refused(argv)
    assert error.field == field
    assert part in error.message
    assert str(error) == f"{field}: {error.message}"


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("kv_byte: 1", "kv_byte", "did you mean kv_bytes?"),
        ("kv-bytes: 1", "kv-bytes", "did you mean kv_bytes?"),
        ("- a", "config", "mapping"),
        ("a: [", "config", "cannot read"),
        ("1: 2", "config", "mapping"),
        ("kv_bytes: many", "kv_bytes", "(from the file of --config)"),
        ("config: other.yaml", "config", "no such setting"),
        ("block_tokens: 16", "block_tokens", "it is now block_size"),
        ("watermark: 0.1", "watermark", "is no longer a setting: it is 0.01 of the pool"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str, field: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    error = refused([*ARGV, "--config", str(file)])
    assert error.field == field
    assert part in error.message


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("# nothing\n")
    assert PoolConfig.load([*ARGV, "--config", str(file)]).kv_bytes == 1024


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KV_BYTES", "x")
    error = refused(ARGV)
    assert error.field == "kv_bytes"
    assert "from MOONPOOL_KV_BYTES" in error.message
    monkeypatch.setenv("MOONPOOL_KV_BYTES", "1")
    monkeypatch.setenv("MOONPOOL_LABELS", "not json")
    error = refused(ARGV)
    assert (error.field, error.message) == ("labels", "must be JSON (from MOONPOOL_LABELS)")


def test_help_tells_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        PoolConfig.load(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: moonpool pool ")
    assert "Runs a pool." in text
    with_flags = {name for names in PoolConfig.flags().values() for name in names}
    assert with_flags == {
        *("conductor", "kv_bytes", "dtype", "labels", "shared", "block_size"),
        *("listen", "advertise", "metrics_listen", "id", "log_level"),
    }
    for name, field in PoolConfig.model_fields.items():
        shown = re.search(rf"^  --{name.replace('_', '-')}[ /\n]", text, re.MULTILINE) is not None
        assert shown == (name in with_flags), name
        assert field.description
    assert text.index("\nPool:") < text.index("\nNetwork:")
    told = " ".join(text.split())
    assert "memory for KV, bytes (100% of it) [default: 1KiB]" in told
    assert "conductor to join, HOST:PORT [required]" in told
    assert "--config" in text
    assert "MOONPOOL_" in text


def test_any_setting_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_RATE", "1")
    config = PoolConfig.load(["--set", "rate=2.5", "--kv-bytes", "1", "--set=kv_bytes=2", "--set", "conductor=a:1,b:2"])
    assert (config.rate, config.kv_bytes, config.conductor) == (2.5, 2, ("a:1", "b:2"))


def test_a_variable_of_an_old_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_BLOCK_TOKENS", "16")
    assert refused(ARGV).message == "MOONPOOL_BLOCK_TOKENS is now MOONPOOL_BLOCK_SIZE"
    monkeypatch.setenv("MOONPOOL_BLOCK_TOKENS", "")
    assert PoolConfig.load(ARGV).block_size == 64


@pytest.mark.parametrize(
    ("kind", "former", "now"),
    [
        ("prefill", "step_tokens", "max_num_batched_tokens"),
        ("decode", "step_tokens", "chunked_prefill_size"),
        ("kvstore", "max_sessions", "max_transfers"),
        ("kvstore", "session_timeout_s", "transfer_timeout_s"),
    ],
)
def test_a_former_name_leads_to_the_services_own_setting(kind: str, former: str, now: str) -> None:
    with pytest.raises(ConfigError, match=f"it is now {now}"):
        config_class(kind).load(["--set", f"{former}=3"])


def test_a_variable_of_a_former_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_ROLE_RATIO", "2")
    assert refused(ARGV).message == "is no longer a setting: it is 1.5 (docs/roles.md)"


def test_no_service_has_a_setting_that_is_said_to_be_constant() -> None:
    for kind in SERVICE_MODULES:
        assert not REMOVED.keys() & config_class(kind).model_fields.keys()


def test_frozen_and_closed() -> None:
    config = PoolConfig.load(ARGV)
    with pytest.raises(ValidationError):
        config.kv_bytes = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        PoolConfig(conductor="h:1", unknown=1)  # type: ignore[call-arg]


def test_the_id_is_the_one_given_or_made() -> None:
    assert PoolConfig(conductor="h:1", id="x").id == "x"

    class NamedConfig(ServiceConfig):
        id: str = Field("conductor", description="name")

    assert NamedConfig.load([]).id == "conductor"
    assert NamedConfig.service() == "named"


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:5"),
        ("[::1]:0", "", "[::1]:5"),
        ("0.0.0.0:0", "node-1", "node-1:5"),
        ("0.0.0.0:0", "node-1:80", "node-1:80"),
        ("0.0.0.0:0", "node-1:0", "node-1:5"),
        ("0.0.0.0:0", "[fd00::1]:80", "[fd00::1]:80"),
    ],
)
def test_advertised(listen: str, advertise: str, told: str) -> None:
    assert ServiceConfig(listen=listen, advertise=advertise).advertised(5) == told


@pytest.mark.parametrize("address", ["h:1", "127.0.0.1:65535", "[::1]:0", ":80"])
def test_addresses_round_trip(address: str) -> None:
    assert format_address(*parse_address(address)) == address


@pytest.mark.parametrize(
    "address", ["", "h", "h:", "h:x", "::1:5", "h:65536", "http://h:1", "a b:1", "h:-1", "h:\u0661"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="got"):
        parse_address(address)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("1.5 gib", 3 << 29),
        ("500MB", 500_000_000),
        ("64kib", 65536),
        ("1_000", 1000),
    ],
)
def test_sizes(text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every service, by every way, also of a rate."""
    file = tmp_path / "store.yaml"
    file.write_text(f"dram_bytes: {text}\nlease_bytes: {text}\ntenants: {{ann: {{dram_quota_bytes: {text}}}}}\n")
    store = KVStoreConfig.load(["--config", str(file), "--ssd-bytes", text])
    assert (store.dram_bytes, store.lease_bytes, store.ssd_bytes) == (size, size, size)
    assert store.tenants["ann"].dram_quota_bytes == size
    monkeypatch.setenv("MOONPOOL_LINK_BYTES_PER_S", text)
    monkeypatch.setenv("MOONPOOL_KV_CACHE_MEMORY_BYTES", text)
    engine = PrefillConfig.load(["--conductor", "h:1", "--model", "m"])
    assert (engine.link_bytes_per_s, engine.kv_cache_memory_bytes) == (size, size)
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["4G", "many", "4 GiBs", "-1GiB", "1,5GB", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="dram_bytes: must be a size in bytes, for example 4GiB, 500MB or 4096, got"):
        KVStoreConfig.load([f"--dram-bytes={text}"])


@pytest.mark.parametrize("kind", SERVICES)
def test_every_setting_of_bytes_is_a_size(kind: str) -> None:
    for name, field in config_class(kind).model_fields.items():
        if is_size(name):
            kind_of_field: Any = Annotated[field.annotation, *field.metadata]
            assert TypeAdapter(kind_of_field).validate_python("32MiB") == 32 << 20, name


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MOONPOOL_MAX_NUM_SEQ", "; did you mean MOONPOOL_MAX_NUM_SEQS?"),
        ("MOONPOOL_KERNEL", "; did you mean MOONPOOL_KERNELS?"),
        ("MOONPOOL_QQQQQQQ", ""),
    ],
)
def test_an_unknown_variable_is_refused(variable: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    error = refused(ARGV)
    assert str(error) == f"{variable}: nothing reads this environment variable{hint}"


@pytest.mark.parametrize("service", ["MOONPOOL", "MOONPOOL_KV"])
def test_variables_of_a_service_in_kubernetes_are_not_ours(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container of a namespace gets them, for each Service there; other unknown names stay errors."""
    links = {
        "SERVICE_HOST": "10.0.0.7", "SERVICE_PORT": "50051", "SERVICE_PORT_GRPC": "50051",
        "PORT": "tcp://10.0.0.7:50051", "PORT_50051_TCP": "tcp://10.0.0.7:50051", "PORT_50051_TCP_PROTO": "tcp",
        "PORT_50051_TCP_PORT": "50051", "PORT_50051_TCP_ADDR": "10.0.0.7",
    }  # fmt: skip
    for name, value in links.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    refuse_unknown_variables()
    monkeypatch.setenv(f"{service}_SERVICE", "1")
    with pytest.raises(ConfigError, match=f"{service}_SERVICE: nothing reads"):
        refuse_unknown_variables()


def test_a_port_without_a_service_is_an_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KV_PORT", "tcp://10.0.0.7:50051")
    with pytest.raises(ConfigError, match="MOONPOOL_KV_PORT: nothing reads"):
        refuse_unknown_variables()


def test_every_variable_of_this_repository_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        *ROOT.glob("*.yaml"),
        ROOT / "Makefile",
        *ROOT.glob("deploy/*"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
        *(ROOT / "moonpool").rglob("*.py"),
    ]
    named = {
        name for file in files if file.is_file() for name in re.findall(r"\bMOONPOOL_[A-Z_]*[A-Z]\b", file.read_text())
    }
    assert len(named) > 20
    for name in named:
        monkeypatch.setenv(name, "1")
    refuse_unknown_variables()
