"""Settings of services through `moonpool serve`: `--set SERVICE.NAME=VALUE` and a file with a section per service."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.config import config_class
from moonpool.base.errors import ConfigError
from moonpool.cli.main import app
from moonpool.cli.settings import KINDS, stack_settings
from tools.gen_flags import PAGE, page


def test_sections_and_values() -> None:
    found = stack_settings(None, ["conductor.admission=early", "engine.block_size=16", "all.drain_s=3"])
    drain = ["--set", "drain_s=3"]
    engine = [*drain, "--set", "block_size=16"]
    assert found == {
        "conductor": [*drain, "--set", "admission=early"],
        "prefill": engine,
        "decode": engine,
        "kvstore": drain,
        "gateway": drain,
    }


def test_a_narrower_section_and_the_command_line_go_before(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(
        "conductor:\n  tenant_weights: {ann: 2}\n  peers: false\n"
        "decode:\n  chunked_prefill_size: 7\nall:\n  chunked_prefill_size: 5\n  log_json: true\n"
        "kvstore:\n  data_dir: [/a, /b]\n"
    )
    found = stack_settings(file, ["conductor.peers=true"])
    assert found["decode"] == ["--set", "chunked_prefill_size=7", "--set", "log_json=true"]
    assert "chunked_prefill_size=5" not in found["conductor"], "only decode has this setting"
    config = config_class("conductor").load(["--model", "m", *found["conductor"]])
    assert (config.model_dump()["tenant_weights"], config.model_dump()["peers"]) == ({"ann": 2.0}, True)
    store = config_class("kvstore").load(found["kvstore"])
    assert store.model_dump()["data_dir"] == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(
    ("given", "field", "part"),
    [
        ("conductor.admission=soon", "conductor.admission", "'early' or 'predictive', got 'soon' (from --set)"),
        ("conductor.admision=early", "conductor.admision", "did you mean admission?"),
        ("engine.block_tokens=16", "engine.block_tokens", "it is now block_size"),
        ("decode.watermark=0", "decode.watermark", "is no longer a setting: it is 0.01 of the pool"),
        ("decode.max_num_seqs=0", "decode.max_num_seqs", "greater than or equal to 1"),
        ("conducter.admission=early", "conducter", "did you mean conductor?"),
        ("decode.id=x", "decode.id", "`moonpool serve` decides this itself"),
        ("admission=early", "set", "must be SERVICE.NAME=VALUE, got 'admission=early'"),
        ("conductor.admission", "set", "must be SERVICE.NAME=VALUE"),
    ],
)
def test_errors_name_service_and_setting(given: str, field: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stack_settings(None, [given])
    assert caught.value.field == field
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "field"),
    [("- a", "config"), ("conductor: 1", "config"), ("store:\n  x: 1", "store"), ("a: [", "config")],
)
def test_a_bad_file(text: str, field: str, tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        stack_settings(file, [])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("flag", "now"),
    [
        ("--block-size=32", "--set engine.block_size=VALUE"),
        ("--kv-bytes", "--set engine.kv_cache_memory_bytes=VALUE"),
        ("--swap-roles", "--set conductor.swap_roles=VALUE"),
        ("--no-log-json", "--set all.log_json=VALUE"),
        ("--dram-bytes", "--set kvstore.dram_bytes=VALUE"),
    ],
)
def test_a_flag_of_a_service_says_how_serve_sets_it(flag: str, now: str) -> None:
    done = CliRunner().invoke(app, ["serve", flag, "1"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message == f"{flag.partition('=')[0]} is a setting of services: {now}"


def test_an_unknown_flag_is_no_setting() -> None:
    done = CliRunner().invoke(app, ["serve", "--nonsense", "1"])
    assert (done.exit_code, "No such option: --nonsense" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("verb", "old", "now"),
    [
        ("calibrate", "--kv-dtype", "--kv-cache-dtype"),
        ("model inspect", "--block-tokens", "--block-size"),
        ("replay", "--step-tokens", "--max-num-batched-tokens"),
        ("generate", "--prompt", "the argument PROMPT"),
        ("demo", "--model", "the argument MODEL"),
    ],
)
def test_renamed_flags_of_other_verbs_say_the_new_name(verb: str, old: str, now: str) -> None:
    done = CliRunner().invoke(app, [*verb.split(), f"{old}=1"])
    assert isinstance(done.exception, ConfigError)
    assert (done.exception.field, done.exception.message) == (verb, f"{old} is now {now}")
    assert CliRunner().invoke(app, [*verb.split(), "--no-such-flag"]).exit_code == 2


def test_few_flags() -> None:
    """What `--help` of the five services shows, `--help`, `--config` and `--set` among them."""
    counts = {kind: 3 + sum(map(len, config_class(kind).flags().values())) for kind in KINDS}
    assert sum(counts.values()) <= 98, counts
    for kind in KINDS:
        names = [name for group in config_class(kind).flags().values() for name in group]
        assert len(names) == len(set(names))
        assert set(names) <= set(config_class(kind).model_fields)


def test_the_page_of_flags_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.gen_flags writes the page"
