"""The compose files, the container file and the scripts say what the code means; and a fault in them does not pass."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from moonpool.base.config import parse_address
from moonpool.base.errors import ConfigError
from moonpool.cli.main import app
from tests.unit.deploy.compose import ROOT, duration_s, replaced, services, substituted, substitutions
from tests.unit.deploy.containerfile import parse
from tests.unit.deploy.rules import KINDS, STACK_PREFIX, complaints, kernels_folder, load, of_service, texts

COMPOSE, CONTAINERFILE, SCRIPTS = texts()
runner = CliRunner()
STACK_SH = SCRIPTS["deploy/stack.sh"]
LISTEN = '"--listen=0.0.0.0:50053"'


def test_files_are_right() -> None:
    """Nothing to complain about."""
    assert complaints(COMPOSE, CONTAINERFILE, SCRIPTS) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("--data-dir=", "--data-folder=", "no such flag"),
        ("--set=drain_s=30]", "--set=drain_s=soon]", "drain_s: "),
        ("--id=prefill,", "--id=prefill, --max-num-batched-tokens=512, --lease=3,", "prefill: --lease: no such flag"),
        (LISTEN, '"--listen=127.0.0.1:50053"', "where no other container reaches it"),
        (LISTEN, '"--listen=0.0.0.0:50059"', "its health check asks prefill:50053, it listens at prefill:50059"),
        (LISTEN, '"--listen=0.0.0.0:0"', "any free port"),
        (' "--advertise=${MOONPOOL_STACK_HOST:-prefill}",', "", "advertise: "),
        ("HOST:-prefill}\",", "HOST:-decode}\",", "advertises decode:50053, others know it as prefill:50053"),
        ("CONDUCTOR:-conductor:50051}", "CONDUCTOR:-conductor:50052}", "joins conductor:50052, where no"),
        ("50051}:50051", "50051}:50052", "publishes 127.0.0.1:50051 from port 50052, but listens at 50051"),
        ("MOONPOOL_MAX_NUM_SEQS: ${MOONPOOL_MAX_NUM_SEQS:-}", "MOONPOOL_SEQS: ''", "MOONPOOL_SEQS is no setting of"),
        ("MOONPOOL_BLOCK_SIZE: ${MOONPOOL_BLOCK_SIZE:-}", "MOONPOOL_BLOCK_SIZE: many", "block_size: "),
        ("${MOONPOOL_PIPELINE_PARALLEL_SIZE:-}", "${STAGES:-}", "takes its value from another variable"),
        ("${MOONPOOL_PIPELINE_PARALLEL_SIZE:-}", "${MOONPOOL_STACK_SIZE:-}", "MOONPOOL_STACK_SIZE is not explained"),
        ("#   MOONPOOL_STACK_PUBLISH", "#   MOONPOOL_STACK_PUBLIC", "MOONPOOL_STACK_PUBLIC is explained and not used"),
        ("HOST:-decode}:50054", "HOST:-decode}:50053", "its health check asks decode:50053"),
        ("--address=${MOONPOOL_STACK_HOST:-dec", "--url=${MOONPOOL_STACK_HOST:-dec", "health check: No such option"),
        ('[CMD, moonpool, health, "--address=${MOON', '["true", "${MOON', "is not `moonpool health`"),
        ("timeout: 15s", "timeout: 2s", "ended before it can say why"),
        ("stop_grace_period: 60s", "stop_grace_period: 10s", "is killed after 10 s, may drain for 45 s"),
        ("restart: unless-stopped", 'restart: "no"', "is not started again"),
        ("max-size: 50m, ", "", "its log grows without bound"),
        ("mem_limit", "mem_limits", "its memory cannot be bounded"),
        ("target: light", "target: engine", "its image has the engine extra"),
        ("target: engine", "target: light", "its image lacks the engine extra"),
        ("target: engine", "target: heavy", "the container file has no target heavy"),
        ("bookworm}", "trixie}", "build argument BASE is python:3.11-slim-trixie"),
        ("PIP_NO_INDEX:", "PIP_NOINDEX:", "build argument PIP_NOINDEX is not declared"),
        ('["kv:/var/lib/moonpool/kv", ', "[", "which is no volume"),
        ("KV_TRANSPORTS_DIR: /var/lib/moonpool/transports", "KV_TRANSPORTS_DIR: ''", "in None, which no other"),
        ('  - "transports:/var/lib/moonpool/transports"', "", "which no other container sees"),
        ("kv:/var/lib/moonpool/kv", "kv:/var/lib/moonpool/store", "is not a folder of the image"),
        ("/opt/moonpool/model/tiny", "/opt/moonpool/model/small", "the image has no /opt/moonpool/model/small"),
        ("condition: service_healthy", "condition: service_started", "does not wait until its conductor is healthy"),
        ("--address=http://", "--address=", "it listens at http://gateway:8000"),
        ("    depends_on: *joined", "    privileged: true", "states prefill itself, instead of extending"),
        ("decode/compose.yaml, service: decode", "prefill/compose.yaml, service: prefill", "states decode itself"),
        ("[decode, --id=decode", "[prefill, --id=decode", "has the service decode, which runs prefill"),
        ("  kv:\n  transports:\n", "  transports:\n", "kvstore/compose.yaml: volume kv is not declared"),
        ("  hub:\n", "  hub:\n  old:\n", "prefill/compose.yaml: volume old is declared and not used"),
    ],
)  # fmt: skip
def test_fault_in_compose(old: str, new: str, complaint: str) -> None:
    """Each is found, by name."""
    broken = replaced(COMPOSE, old, new)
    try:
        found = complaints(broken, CONTAINERFILE, SCRIPTS)
    except KeyError as error:  # a target that is not there
        found = [f"the container file has no target {error.args[0]}"]
    assert [text for text in found if complaint in text], found


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("USER 10001:10001", "USER root", "runs as root"),
        ("USER 10001:10001", "USER 0", "runs as 0"),
        ('ENTRYPOINT ["moonpool"]', 'ENTRYPOINT ["moonpoold"]', "no command of the project"),
        ("PIP_CONSTRAINT=/src/constraints.txt", "X=1", "stage light-packages installs without constraints.txt"),
        ("COPY kernels/ kernels/", "COPY kernel/ kernels/", "there is no kernel/ to copy"),
        ("COPY kernels/ kernels/", "COPY tests/ tests/", "tests/ is not in the build context"),
        (
            "--require-hashes --no-deps --requirement requirements.lock",
            "--requirement some.txt",
            "without hashes",
        ),
        ("pip install torch", "pip install torch numpy", "stage engine-packages installs packages without hashes"),
        ("image.licenses", "image.license", "image engine-cuda has no label licenses"),
        ("COPY tools/sbom.py", "COPY tools/bom.py", "there is no tools/bom.py to copy"),
        ("sbom.py --dpkg", "sbom.py --deb", "has no bill of materials"),
        ("FROM ${BASE} AS runtime", "FROM debian AS runtime", "starts from debian"),
        ("PIP_NO_INDEX=${PIP_NO_INDEX}", "X=1", "PIP_NO_INDEX is not known in the stages that start from build"),
        ("ARG PIP_NO_INDEX\n", "", "build argument PIP_NO_INDEX is not declared"),
        (
            "PREBUILT=/opt/moonpool/kernels",
            "PREBUILT=/opt/kernels",
            "nothing is copied to /opt/kernels, where the loader",
        ),
        ("ENV MOONPOOL_KERNELS_PREBUILT", "ENV MOONPOOL_KERNELS", "nothing is copied to nowhere, where the loader"),
        (
            "--from=kernels /kernels",
            "--from=kernels /lib",
            "stage kernels does not build the kernels of all processors",
        ),
        ("--all /kernels", "", "stage kernels does not build the kernels of all processors into /kernels"),
        ("--all /landing", "--all /lib", "stage landing does not build what copies and hashes KV"),
        ("PREBUILT=/opt/moonpool/landing", "PREBUILT=/opt/landing", "image light: what copies and hashes KV is not"),
        ("/landing /opt/moonpool/kernels", "/landing /opt/kernels", "image engine: what copies and hashes KV is not"),
        ("COPY --from=kernels /kernels", "COPY --from=native /kernels", "there is no stage native"),
        ("USER 10001:10001\n# Fails", "# Fails", "no step tries whether its user gets the kernels"),
    ],
)
def test_fault_in_containerfile(old: str, new: str, complaint: str) -> None:
    """Each is found, by name."""
    assert old in CONTAINERFILE
    found = complaints(COMPOSE, CONTAINERFILE.replace(old, new), SCRIPTS)
    assert [text for text in found if complaint in text], found


def test_the_stack_within_tls_shows_the_certificates_that_the_command_makes(tmp_path: Path) -> None:
    runner.invoke(app, ["certs", "create", str(tmp_path)], catch_exceptions=False)
    body = yaml.safe_load(substituted((ROOT / "compose.tls.yaml").read_text().replace(":?a folder that moonpool certs create has filled", ""), {"MOONPOOL_STACK_CERTS": str(tmp_path)}))  # fmt: skip  # noqa: E501
    assert body["services"].keys() == services(COMPOSE).keys()
    for name, service in services(COMPOSE).items():
        own = body["services"][name]
        (folder, mounted, mode) = own["volumes"][0].split(":")
        assert (folder, mode) == (str(tmp_path), "ro")
        config = load(service, own["environment"])
        for path in (config.tls_cert, config.tls_key, config.tls_ca):
            assert (tmp_path / Path(str(path)).relative_to(mounted)).is_file(), path
        assert Path(str(config.tls_cert)).stem == service.command[0]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("--address conductor:50051", "--address conductor:50055", "no service listens at conductor:50055"),
        ("--joined", "--members", "No such option"),
        ("INSTANCES=3", "INSTANCES=2", "3 instances join"),
        ("moonpool health", "moonpool healthy", "no such verb: healthy"),
    ],
)
def test_fault_in_scripts(old: str, new: str, complaint: str) -> None:
    """Commands in the scripts are real ones too."""
    assert old in STACK_SH
    found = complaints(COMPOSE, CONTAINERFILE, {"stack.sh": STACK_SH.replace(old, new)})
    assert [text for text in found if complaint in text], found


def test_user_variables_reach_the_settings() -> None:
    """What a user puts into the environment arrives, and an empty variable is the default."""
    given = {
        "MOONPOOL_KV_CACHE_MEMORY_BYTES": "4096",
        "MOONPOOL_MODEL": "/var/lib/moonpool/models/m",
        "MOONPOOL_STACK_MODELS": "/m",
    }
    stack = services(COMPOSE, given)
    assert getattr(load(stack["decode"]), "kv_cache_memory_bytes") == 4096  # noqa: B009
    assert getattr(load(stack["conductor"]), "model") == "/var/lib/moonpool/models/m"  # noqa: B009
    assert stack["prefill"].volumes[0] == ("/m", "/var/lib/moonpool/models", "ro")
    with pytest.raises(ConfigError, match="dtype"):
        load(services(COMPOSE, {"MOONPOOL_DTYPE": "int3"})["decode"])


def test_light_depends_on_nothing_heavy() -> None:
    """Builders that build a target and all stages before it build no torch for the light image."""
    stages = list(parse(CONTAINERFILE).stages)
    heavy = [name for name in stages if name.startswith("engine")]
    assert stages.index("light") < min(stages.index(name) for name in heavy)


def test_kernels_are_found_in_the_image(tmp_path: Path) -> None:
    """What the stage's own command makes, copied as the file says, is what the loader takes: with no compiler there."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library >"$2"\n')
    compiler.chmod(0o755)
    images = parse(CONTAINERFILE)
    (command,) = set(
        re.findall(
            r"python3 (-P -m moonpool\.base\.native\.build --all) (/\w+)", " ".join(images.all("kernels", "RUN"))
        )
    )
    made, place = tmp_path / command[1].strip("/"), tmp_path / kernels_folder(images).strip("/")

    def python(*words: str | Path, **environment: str) -> str:
        given = {"HOME": str(tmp_path / "nonexistent"), **environment}
        done = subprocess.run([sys.executable, *words], env=given, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    python(*command[0].split(), made, CXX=str(compiler), PATH=os.environ["PATH"])
    shutil.copytree(made, place)
    found = Path(python("-m", "moonpool.base.native.build", PATH="", MOONPOOL_KERNELS_PREBUILT=str(place)))
    assert found.parent == place
    assert found.read_text() == "library\n"


def test_documented() -> None:
    """docs/deploy.md names the variables, the verbs and the folders of the container files."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    wanted = {name for text in COMPOSE.values() for name in substitutions(text) if name.startswith(STACK_PREFIX)}
    for word in (
        *wanted,
        "make up",
        "make down",
        "make up-local",
        "make test-containers",
        "deploy/wheels",
        "deploy/wheels/kernels",
    ):
        assert word in page, word


@pytest.mark.parametrize("kind", KINDS)
def test_documented_in_its_folder(kind: str) -> None:
    """The README of a service names the port, the health check and the variables that the service alone has."""
    page = (ROOT / "services" / kind / "README.md").read_text()
    service = services(COMPOSE)[kind]
    _, port = parse_address(load(service).listen)
    own = [name for name in service.environment if not re.search("LOG_|KV_TRANSPORTS|ENGINE|TIME_SCALE", name)]
    for word in (f"moonpool {kind} ", f"| port | {port} |", *service.health[2:], *own):
        assert word.replace("--address=", "--address ") in page, word


def test_documented_overrides() -> None:
    """The page's second prefill instance fits into the stack, and its store has one disk more."""
    instance, disk = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    stack = services(COMPOSE)
    kvstore = yaml.safe_load(disk)["services"]["kvstore"]
    folder = kvstore["volumes"][0].split(":")[1]
    assert kvstore["command"] == [*stack["kvstore"].command, f"--data-dir={folder}"]
    (more,) = services({"compose.yaml": instance}).values()
    assert more.rest["image"] == stack["prefill"].rest["image"]
    own = {key: stack["prefill"].rest[key] for key in ("build", "logging", "mem_limit")}
    built = dataclasses.replace(more, rest=more.rest | own)
    assert list(of_service(built, stack | {more.name: built}, parse(CONTAINERFILE))) == []


def test_scripts_parse() -> None:
    """bash takes the scripts."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    for name in SCRIPTS:
        subprocess.run([bash, "-n", ROOT / name], check=True)


DOCKER = """#!/bin/sh
echo "$@ [$MOONPOOL_STACK_MODELS $MOONPOOL_MODEL]" >>"$CALLS"
case "$*" in *" run "*) echo fetching; echo /hub/the.gguf;; esac
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("smollm2", " /hub/the.gguf"),
        ("owner/name", " owner/name"),
        ("{folder}/some", "{folder} /var/lib/moonpool/models/some"),
        ("{folder}/one.gguf", "{folder} /var/lib/moonpool/models/one.gguf"),
        ("", " "),
    ],
)
def test_models_that_make_up_takes(model: str, served: str, tmp_path: Path) -> None:
    """What the containers are told of a folder, a file, a hub id and a name; the name is fetched before they start."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "some").mkdir()
    (tmp_path / "one.gguf").touch()
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    given["MODEL"] = model.format(folder=tmp_path)
    subprocess.run(["bash", ROOT / "deploy" / "stack.sh", "up"], env=given, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count(f"compose --project-name moonpool up -d [{served.format(folder=tmp_path)}]") == 1
    assert sum(" run " in call for call in calls) == (model == "smollm2")


def test_substitution() -> None:
    """As compose does it: empty counts as unset."""
    assert substituted("${A:-x}/${B}/${C:-}", {"A": "", "B": "b"}) == "x/b/"
    assert substitutions("${A:-x} ${B} $C") == {"A", "B"}


def test_durations() -> None:
    """Compose's way of writing them."""
    assert duration_s("1m30s") == 90
    with pytest.raises(ValueError, match="no duration"):
        duration_s("90")


def test_no_registry_or_host_of_ours() -> None:
    """The files say nothing of where they were written: addresses are the stack's own or loopback."""
    for text in (*COMPOSE.values(), CONTAINERFILE, *SCRIPTS.values()):
        assert not re.search(r"https?://(?!gateway:|\$)|/root/|/home/", text)
