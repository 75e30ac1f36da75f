"""A bill of materials (CycloneDX 1.6, JSON) of the environment that runs this: `python sbom.py [--dpkg STATUS] >FILE`.

Lists the installed Python packages with licences and what needs what, and, with `--dpkg`, the system's Debian packages.
Uses the standard library only, because images run it with their own Python. The same packages give the same bytes.
"""

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = "moonpool"
"""The distribution that the bill is about."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """A package's name as in package URLs: lower case, with dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def purl(found: Distribution) -> str:
    """The package URL of an installed distribution."""
    return f"pkg:pypi/{canonical(found.name)}@{found.version}"


def licences(found: Distribution) -> list[dict[str, Any]]:
    """An SPDX expression, or the names that the package gives."""
    metadata = found.metadata
    if expressions := metadata.get_all("License-Expression"):
        return [{"expression": expressions[0]}]
    classifiers = (text for text in metadata.get_all("Classifier") or () if text.startswith("License ::"))
    names = [text.rpartition("::")[2].strip() for text in classifiers]
    if not names:
        names = [text for text in metadata.get_all("License") or () if text and len(text.splitlines()) == 1]
    return [{"license": {"name": name}} for name in dict.fromkeys(names)]


def component(found: Distribution) -> dict[str, Any]:
    """One installed Python package."""
    kind = "application" if canonical(found.name) == ROOT else "library"
    told = {"type": kind, "bom-ref": purl(found), "name": canonical(found.name), "version": found.version}
    return {**told, "purl": purl(found), "licenses": licences(found)}


def needs(found: Distribution, installed: dict[str, Distribution]) -> list[str]:
    """The installed packages that a package names, extras included."""
    names = (match[0] for text in found.requires or () if (match := _NAME.match(text)))
    there = {installed[name] for name in map(canonical, names) if name in installed}
    return sorted(map(purl, there - {found}))


def debian_packages(status: Path) -> Iterator[dict[str, Any]]:
    """The installed packages in dpkg's file of states."""
    for stanza in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            url = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={fields['Architecture']}"
            yield {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


def bill(found: Iterable[Distribution], system: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """The bill of some distributions, one of them Moonpool's.

    Raises:
        ValueError: Moonpool is not among them.
    """
    installed = {canonical(package.name): package for package in found}
    if ROOT not in installed:
        raise ValueError(f"{ROOT} is not installed here")
    packages = sorted((package for name, package in installed.items() if name != ROOT), key=purl)
    components = [*map(component, packages), *system]
    depends = [
        {"ref": purl(package), "dependsOn": needs(package, installed)} for package in (installed[ROOT], *packages)
    ]
    content = {"metadata": {"component": component(installed[ROOT])}, "components": components, "dependencies": depends}
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        **content,
    }


def main(arguments: list[str]) -> None:
    """Print the bill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dpkg", type=Path, help="dpkg's file of states, usually /var/lib/dpkg/status")
    options = parser.parse_args(arguments)
    system = debian_packages(options.dpkg) if options.dpkg is not None and options.dpkg.exists() else ()
    json.dump(bill(distributions(), system), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
