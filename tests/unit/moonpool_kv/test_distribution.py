"""The distribution `moonpool-kv`: it holds what the connector imports, and allows the versions that vLLM pins."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "packages" / "moonpool_kv"
SHIPPED = ("moonpool", "kernels")


def project() -> dict[str, Any]:
    return tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))


def modules_of_ours(path: Path) -> set[str]:
    """Modules of Moonpool that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case ast.Import(names=names):
                found.update(alias.name for alias in names)
    return {module for module in found if module.split(".")[0] in SHIPPED}


def test_the_wheel_holds_every_module_that_the_connector_imports() -> None:
    included = project()["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all((PACKAGE / path).exists() for path in included)
    places = [Path(inside) for inside in included.values()]
    wanted = sorted(set().union(*[modules_of_ours(path) for path in (PACKAGE / "moonpool_kv").glob("*.py")]))
    program = f"import sys\nfor name in {wanted}: __import__(name)\nprint(*[m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)])"  # fmt: skip  # noqa: E501
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    paths = [Path(path).relative_to(ROOT) for path in run.stdout.split() if Path(path).is_relative_to(ROOT)]
    ours = [path for path in paths if path.parts[0] in SHIPPED]
    assert len(ours) > 50
    assert [path for path in ours if not any(path.is_relative_to(place) for place in places)] == []


def test_no_version_that_vllm_pins_is_refused() -> None:
    text = (ROOT / "tests" / "engines" / "vllm.txt").read_text(encoding="utf-8")
    pairs: list[tuple[str, str]] = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    names = {name.lower().replace("_", "-"): version for name, version in pairs}
    requirements = [Requirement(one) for one in project()["project"]["dependencies"]]
    assert [str(one) for one in requirements if names[one.name] not in one.specifier] == []
