"""What must be true of compose.yaml, services/, deploy/Containerfile and deploy/*.sh, each fault as one line of text.

Everything is compared with the code itself: the services' settings classes, the command line's verbs, pyproject.toml.
"""

import functools
import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
import yaml
from typer.exceptions import TyperException

from moonpool.base.config import SERVICE_MODULES, ServiceConfig, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.rpc import process
from moonpool.cli.main import app
from tests.unit.deploy.compose import ROOT, Service, compose_files, services, substitutions
from tests.unit.deploy.containerfile import Containerfile, Stage, parse

PREFIX = "MOONPOOL_"
STACK_PREFIX = "MOONPOOL_STACK_"
LOOPBACK = ("127.", "localhost", "::1")
TORCH_FREE = ("conductor", "kvstore", "gateway")
HTTP = ("gateway",)
"""Services that are asked for their health by HTTP."""
JOIN_NOT = ("conductor", "gateway")
"""Services that do not join a conductor."""
LANDING = "landing"
"""The stage that builds what copies and hashes KV."""
KINDS = tuple(sorted(SERVICE_MODULES.keys() - {"adapter", "indexer", "stage"}))


def config_class(kind: str) -> type[ServiceConfig]:
    """The settings class of one kind of service."""
    module = importlib.import_module(f"{SERVICE_MODULES[kind]}.config")
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value.__module__ == module.__name__
    ]
    return found


def load(service: Service, changes: Mapping[str, str] | None = None) -> ServiceConfig:
    """The settings that a service would run with.

    Raises:
        ConfigError: it would refuse to start.
    """
    with patch.dict(os.environ, service.environment | dict(changes or {}), clear=True):
        return config_class(service.command[0]).load(service.command[1:])


def complaints(compose: Mapping[str, str], container: str, scripts: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with the texts of the compose files, the container file and the shell scripts."""
    stack = services(compose)
    images = parse(container)
    found = [*_of_stack(stack, compose), *_of_files(compose), *_of_containerfile(images, container)]
    for service in stack.values():
        found += [f"{service.name}: {text}" for text in of_service(service, stack, images)]
    for name, script in scripts.items():
        found += [f"{name}: {text}" for text in _of_script(script, stack)]
    return found


def _of_stack(stack: Mapping[str, Service], files: Mapping[str, str]) -> Iterator[str]:
    kinds = tuple(sorted({service.command[0] for service in stack.values()}))
    if kinds != KINDS:
        yield f"the services are {', '.join(KINDS)}; compose.yaml runs {', '.join(kinds)}"
    named = set(re.findall(rf"^#\s+({STACK_PREFIX}\w+)", files["compose.yaml"], re.MULTILINE))
    asked = set[str]().union(*(substitutions(text) for text in files.values()))
    used = {name for name in asked if name.startswith(STACK_PREFIX)}
    for name in sorted(named ^ used):
        yield f"{name} is {'not explained at the head' if name in used else 'explained and not used'}"
    for name in sorted(asked - used):
        if not any(f"${{{name}" in service.raw_environment.get(name, "") for service in stack.values()):
            yield f"${{{name}}} is not the variable of that name of any service"


def _of_files(files: Mapping[str, str]) -> Iterator[str]:
    """A folder of services/ has its service whole, and compose.yaml adds nothing but the order of starting."""
    top = yaml.safe_load(files["compose.yaml"])
    for name, body in top["services"].items():
        path = f"services/{name}/compose.yaml"
        if body.get("extends") != {"file": path, "service": name} or not body.keys() <= {"extends", "depends_on"}:
            yield f"compose.yaml states {name} itself, instead of extending {path} alone"
    for path in [path for path in files if path.endswith("/compose.yaml")]:
        (service,) = services(files, path=path).values()
        if path != f"services/{service.name}/compose.yaml" or service.command[0] != service.name:
            yield f"{path} has the service {service.name}, which runs {service.command[0]}"
        declared = set(yaml.safe_load(files[path]).get("volumes", {}))
        used = {source for source, _, _ in service.volumes}
        for volume in sorted(used ^ declared):
            yield f"{path}: volume {volume} is {'not declared' if volume in used else 'declared and not used'}"
        for volume in sorted(declared - set(top["volumes"])):
            yield f"compose.yaml: volume {volume} is not declared"


def of_service(service: Service, stack: Mapping[str, Service], images: Containerfile) -> Iterator[str]:
    """Everything that is wrong with one service of a stack."""
    yield from _of_variables(service)
    try:
        config = load(service)
    except ConfigError as error:
        yield str(error)
        return
    yield from _of_addresses(service, config, stack)
    yield from _of_health(service, config, images)
    yield from _of_life(service, config)
    yield from _of_image(service, images)
    yield from _of_volumes(service, config, images)


def _of_variables(service: Service) -> Iterator[str]:
    settings = config_class(service.command[0]).model_fields
    for name, value in service.raw_environment.items():
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX).lower() not in settings:
            yield f"{name} is no setting of {service.command[0]}"
        if substitutions(value) - {name}:
            yield f"{name} takes its value from another variable: {value}"


def _of_addresses(service: Service, config: ServiceConfig, stack: Mapping[str, Service]) -> Iterator[str]:
    host, port = parse_address(config.listen)
    if host.startswith(LOOPBACK):
        yield f"listens at {config.listen}, where no other container reaches it"
    if port == 0:
        yield "listens at any free port, so that others cannot know it"
    if config.advertised(port) != f"{service.name}:{port}":
        yield f"advertises {config.advertised(port)}, others know it as {service.name}:{port}"
    for published, inside in service.ports:
        if inside != port:
            yield f"publishes {published} from port {inside}, but listens at {port}"
    if service.command[0] in JOIN_NOT and not service.ports:
        yield "is what clients talk to, and publishes no port"
    conductors = getattr(config, "conductor", None)
    if conductors is None:
        return
    there = {address(other) for other in stack.values() if other.command[0] == "conductor"}
    if not conductors:
        yield "joins no conductor"
    for conductor in conductors:
        if conductor not in there:
            yield f"joins {conductor}, where no conductor listens"
        wanted = service.rest.get("depends_on", {}).get(parse_address(conductor)[0], {})
        if wanted.get("condition") != "service_healthy":
            yield "does not wait until its conductor is healthy"


def address(service: Service) -> str:
    """Where other containers reach a service, "name:port", with "http://" before it where it speaks that."""
    listen = next((word for word in service.command if word.startswith("--listen=")), "")
    return f"{'http://' if service.command[0] in HTTP else ''}{service.name}:{listen.rpartition(':')[2]}"


def _of_health(service: Service, config: ServiceConfig, images: Containerfile) -> Iterator[str]:
    if service.health[:1] != images.entrypoint(service.rest["build"]["target"]) or service.health[1:2] != ["health"]:
        yield f"its health check is not `moonpool health`: {service.rest.get('healthcheck')}"
        return
    try:
        given = verb_arguments(service.health[1:])
    except TyperException as error:
        yield f"health check: {error}"
        return
    if given["address"] != address(service):
        yield f"its health check asks {given['address']}, it listens at {address(service)}"
    if not float(str(given["timeout_s"])) < service.seconds("healthcheck", "timeout"):
        yield "its health check is ended before it can say why"
    if service.seconds("healthcheck", "interval") <= 0 or service.rest["healthcheck"].get("retries", 0) < 1:
        yield "its health check has no interval or no retries"


def _of_life(service: Service, config: ServiceConfig) -> Iterator[str]:
    if not {"max-size", "max-file"} <= service.rest.get("logging", {}).get("options", {}).keys():
        yield "its log grows without bound"
    if "mem_limit" not in service.rest:
        yield "its memory cannot be bounded"
    drain_s = config.drain_s + process.AFTER_DRAIN_S + process.CANCEL_GRACE_S
    if service.seconds("stop_grace_period") <= drain_s:
        yield f"is killed after {service.seconds('stop_grace_period'):g} s, may drain for {drain_s:g} s"
    if service.rest.get("restart") not in ("unless-stopped", "always"):
        yield "is not started again when it fails"
    if not config.id or config.id != service.name:
        yield "has no --id that stays through restarts"


def _of_image(service: Service, images: Containerfile) -> Iterator[str]:
    build = service.rest["build"]
    if not (ROOT / build["context"] / build["dockerfile"]).is_file():
        yield f"there is no {build['dockerfile']}"
    target = build["target"]
    if target not in images.stages:
        yield f"the container file has no target {target}"
        return
    declared = set(images.arguments) | {rest for stage in images.stages.values() for rest in stage.all("ARG")}
    for name in set(build["args"]) - declared:
        yield f"build argument {name} is not declared"
    for name, default in images.arguments.items():
        if default and build["args"].get(name) != default:
            yield f"build argument {name} is {build['args'].get(name)}, the container file says {default}"
    torch = any("pip install torch" in rest for stage in images.everything(target) for rest in stage.all("RUN"))
    if torch == (service.command[0] in TORCH_FREE):
        yield f"its image {'has' if torch else 'lacks'} the engine extra"


def _of_volumes(service: Service, config: ServiceConfig, images: Containerfile) -> Iterator[str]:
    made = " ".join(images.all(service.rest["build"]["target"], "RUN"))
    for source, folder, _ in service.volumes:
        if f" {folder}" not in made:
            yield f"{folder} is not a folder of the image, so that {source} would be root's there"
    writable = [folder for _, folder, mode in service.volumes if mode == "rw"]
    for data in getattr(config, "data_dir", ()):
        if str(data) not in writable:
            yield f"writes to {data}, which is no volume"
    if hasattr(config, "kv_transports_dir") and str(config.kv_transports_dir) not in writable:
        yield f"has its transports' sockets in {config.kv_transports_dir}, which no other container sees"
    model = getattr(config, "model", None)
    if model is not None and f" {model}" not in made:
        yield f"the image has no {model}"


def _of_containerfile(images: Containerfile, text: str) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for stage in images.stages.values():
        if stage.base not in images.stages and stage.base != "${BASE}":
            yield f"stage {stage.name} starts from {stage.base}, not from the base image that was asked for"
        for rest in stage.all("COPY"):
            *sources, _ = rest.split()
            for source in sources if not rest.startswith("--from") else ():
                if not (ROOT / source).exists():
                    yield f"there is no {source} to copy"
                folders = [source.rstrip("/"), *map(str, Path(source).parents)]
                context = [line[1:] for line in ignored if line.startswith("!")]
                if not any(fnmatch(folder, line) for folder in folders for line in context):
                    yield f"{source} is not in the build context"
        kept = " ".join(stage.all("ENV"))
        for argument in stage.all("ARG"):
            if f"{argument}=${{{argument}}}" not in kept:
                yield f"{argument} is not known in the stages that start from {stage.name}: only ENV is"
    yield from _of_kernels(images)
    yield from _of_landing(images)
    for name in ("light", "engine", "engine-cuda"):
        told = " ".join(images.all(name, "LABEL"))
        for label in ("title", "licenses", "revision"):
            if f"org.opencontainers.image.{label}=" not in told:
                yield f"image {name} has no label {label}"
        user = images.last(name, "USER").partition(":")[0]
        if not user.isdecimal() or int(user) == 0:
            yield f"image {name} runs as {user or 'root'}; it wants a number that is not 0"
        if images.entrypoint(name) not in [[script] for script in project["scripts"]]:
            yield f"image {name} starts {images.entrypoint(name)}, which is no command of the project"
        for stage in images.everything(name):
            yield from _of_packages(images, stage)
        bill = "/sbom.py --dpkg /var/lib/dpkg/status >/opt/moonpool/"
        if not any(bill in rest for rest in images.all(name, "RUN")):
            yield f"image {name} has no bill of materials"


def _of_packages(images: Containerfile, stage: Stage) -> Iterator[str]:
    """Packages come by the hashes of a lock; what no lock has, by constraints.txt."""
    installs = [part for rest in stage.all("RUN") for part in rest.split("&&") if "pip install" in part]
    indexed = [part for part in installs if "--no-index" not in part]
    if indexed and not any("PIP_CONSTRAINT=/src/constraints.txt" in rest for rest in images.all(stage.name, "ENV")):
        yield f"stage {stage.name} installs without constraints.txt"
    for part in indexed:
        if not re.search(r"--require-hashes --no-deps --requirement \S+\.lock\b|pip install torch\s*$", part):
            yield f"stage {stage.name} installs packages without hashes: {part.strip()}"


def _of_kernels(images: Containerfile) -> Iterator[str]:
    """The engine's image gets the native kernels where their loader looks, from a stage that light does not need."""
    where = kernels_folder(images)
    copies = [
        rest.removeprefix("--from=").split() for rest in images.all("engine", "COPY") if rest.startswith("--from=")
    ]
    found = [(stage, folder) for stage, folder, target in copies if target == where and stage != LANDING]
    if not found:
        yield f"image engine: nothing is copied to {where or 'nowhere'}, where the loader of native kernels looks"
        return
    ((stage, folder),) = found
    if stage not in images.stages:
        yield f"image engine: there is no stage {stage}"
        return
    if f"python3 -P -m moonpool.base.native.build --all {folder}" not in " ".join(images.stages[stage].all("RUN")):
        yield f"stage {stage} does not build the kernels of all processors into {folder}"
    if "kernels/ kernels/" not in images.stages[stage].all("COPY"):
        yield f"stage {stage} builds other kernels than those that the image has"
    if not any("library as l; assert l.get()" in rest for rest in _after_user(images.stages["engine"])):
        yield "image engine: no step tries whether its user gets the kernels"
    if stage in [part.name for part in images.everything("light")]:
        yield f"image light is made from stage {stage}"


def _of_landing(images: Containerfile) -> Iterator[str]:
    """Every image gets the library that copies and hashes KV, where its loader looks."""
    made = " ".join(images.stages[LANDING].all("RUN"))
    if "python3 -P -m moonpool.base.native.build --all /landing --sources kernels/kv" not in made:
        yield f"stage {LANDING} does not build what copies and hashes KV into /landing"
    for image in ("light", "engine"):
        where = kernels_folder(images, image)
        if f"--from={LANDING} /landing {where}" not in images.all(image, "COPY"):
            yield f"image {image}: what copies and hashes KV is not copied to {where or 'nowhere'}"


def kernels_folder(images: Containerfile, image: str = "engine") -> str:
    """Where the loader looks for native code in an image; "" = nowhere."""
    for rest in images.all(image, "ENV"):
        for word in shlex.split(rest):
            if word.startswith("MOONPOOL_KERNELS_PREBUILT="):
                return word.partition("=")[2]
    return ""


def _after_user(stage: Stage) -> list[str]:
    """What a stage runs as its last user."""
    words = [word for word, _ in stage.instructions]
    last = len(words) - words[::-1].index("USER") if "USER" in words else len(words)
    return [rest for word, rest in stage.instructions[last:] if word == "RUN"]


def _of_script(text: str, stack: Mapping[str, Service]) -> Iterator[str]:
    addresses = {address(service) for service in stack.values()}
    variables = dict(re.findall(r"^(\w+)=(?:\$\{\w+:-)?(\d+)", text, re.MULTILINE))
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        found = re.search(r"(?<![`\w/.-])moonpool(?:\.cli\.main)? (\w[^;|)]*)", line.partition(" #")[0])
        if line.lstrip().startswith("#") or not found:
            continue
        words = shlex.split(re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), found[1]))
        try:
            given = verb_arguments(words)
        except TyperException as error:
            yield f"`moonpool {' '.join(words)}`: {error}"
            continue
        where = str(given.get("address", ""))
        if "$" not in where and where not in addresses:
            yield f"`moonpool {' '.join(words)}`: no service listens at {where}"
        joining = sum(service.command[0] not in JOIN_NOT for service in stack.values())
        if given.get("joined") not in (None, 0, joining):
            yield f"`moonpool {' '.join(words)}`: {joining} instances join"


def verb_arguments(words: list[str]) -> dict[str, object]:
    """The parsed arguments of a verb of the command line.

    Raises:
        TyperException: no such verb or flag, or a wrong value.
    """
    command = _verbs().get(words[0])
    if command is None:
        raise TyperException(f"no such verb: {words[0]}")
    return dict(command.make_context(words[0], words[1:]).params)


@functools.cache
def _verbs() -> dict[str, Any]:
    verbs: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009  # typer's types hide it
    return verbs


def texts() -> tuple[dict[str, str], str, dict[str, str]]:
    """The project's own files, as `complaints` takes them."""
    scripts = {str(path.relative_to(ROOT)): path.read_text() for path in Path(ROOT, "deploy").glob("*.sh")}
    return compose_files(), (ROOT / "deploy" / "Containerfile").read_text(), scripts
