"""tools/sbom.py: what an image's bill of materials lists."""

import json
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest

from tools.sbom import bill, debian_packages

ROOT = Path(__file__).parents[3]
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u7
Description: a library
 Status: of no matter

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def test_an_environment_is_listed_with_versions_licences_and_what_needs_what(tmp_path: Path) -> None:
    (status := tmp_path / "status").write_text(STATUS)
    command = [sys.executable, "-I", str(ROOT / "tools" / "sbom.py"), "--dpkg", str(status)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert found["metadata"]["component"]["purl"] == f"pkg:pypi/moonpool@{version('moonpool')}"
    assert found["metadata"]["component"]["type"] == "application"
    refs = [each["bom-ref"] for each in found["components"]]
    assert len(refs) == len(set(refs))
    grpcio = f"pkg:pypi/grpcio@{version('grpcio')}"
    [component] = [each for each in found["components"] if each["bom-ref"] == grpcio]
    assert component["licenses"]
    needs = {each["ref"]: each["dependsOn"] for each in found["dependencies"]}
    base = f"pkg:pypi/moonpool-base@{version('moonpool-base')}"
    assert base in needs[found["metadata"]["component"]["purl"]]
    assert grpcio in needs[base]
    assert needs.keys() == {found["metadata"]["component"]["purl"], *(ref for ref in refs if ":pypi/" in ref)}
    assert {ref for all_of in needs.values() for ref in all_of} <= needs.keys()
    assert [ref for ref in refs if ref.startswith("pkg:deb/")] == ["pkg:deb/debian/libc6@2.36-9%2Bdeb12u7?arch=amd64"]


def test_the_same_packages_give_the_same_bill_and_others_another_number(tmp_path: Path) -> None:
    (status := tmp_path / "status").write_text(STATUS)
    packages = [distribution("grpcio"), distribution("moonpool")]
    assert bill(packages) == bill(packages[::-1])
    assert bill(packages)["serialNumber"] != bill(packages, debian_packages(status))["serialNumber"]
    with pytest.raises(ValueError, match="moonpool is not installed"):
        bill(packages[:1])
