"""Writes docs/flags.md from the settings classes: `python -m tools.gen_flags`. A test compares the page with them."""

import re
from pathlib import Path

from moonpool.base.config import REMOVED, RENAMED, SERVICES, ServiceConfig, config_class, default_text

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
HEAD = """# Flags and settings

`python -m tools.gen_flags` writes this page from the code.

Each service has settings. You set a setting in four ways; an earlier way goes before a later one:

1. On the command line: `--max-num-seqs 32` if the setting has a flag, or `--set max_num_seqs=32` for every setting.
2. In the environment: `MOONPOOL_MAX_NUM_SEQS=32`.
3. In a YAML file, `--config FILE`: `max_num_seqs: 32`.
4. The default.

A size in bytes is a number or has a unit: `4GiB`, `500MB`, `4096`. An unknown `MOONPOOL_*` variable is an error.

`moonpool serve` passes settings to its services: `--set decode.max_num_seqs=32`, or `--config FILE` with a section for
each service. The section `engine` is for prefill and decode, `all` for every service. A narrower section goes before a
wider one.

```yaml
conductor:
  admission: early
  tenant_weights: {ann: 2, "*": 1}
engine:
  block_size: 32
```
"""


def page() -> str:
    """The text of docs/flags.md."""
    parts = [HEAD, "\n## Every service\n\n", _table(ServiceConfig, {})]
    for kind in (*SERVICES, "stage", "adapter", "indexer"):
        parts += [f"\n## {kind}\n\n", _table(config_class(kind), ServiceConfig.model_fields)]
    parts += ["\n## Former names\n\n| former | now |\n|---|---|\n"]
    parts += [f"| `{old}` | {' or '.join(f'`{name}`' for name in now)} |\n" for old, now in RENAMED.items()]
    parts += ["\n## No longer settings\n\n| former | constant |\n|---|---|\n"]
    parts += [f"| `{old}` | {_cell(now)} |\n" for old, now in REMOVED.items()]
    return "".join(parts)


def _table(cls: type[ServiceConfig], common: object) -> str:
    flags = {name for names in cls.flags().values() for name in names}
    names = sorted(
        (
            name
            for name in cls.model_fields
            if not isinstance(common, dict) or name not in common or _differs(cls, name)
        ),
        key=lambda name: name not in flags,
    )
    lines = ["| setting | default | meaning |\n|---|---|---|\n"]
    for name in names:
        shown = f"`--{name.replace('_', '-')}`" if name in flags else f"`{name}`"
        lines.append(f"| {shown} | {_default(cls, name)} | {_cell(cls.model_fields[name].description or '')} |\n")
    return "".join(lines)


def _differs(cls: type[ServiceConfig], name: str) -> bool:
    return bool(cls.model_fields[name].default != ServiceConfig.model_fields[name].default)


def _default(cls: type[ServiceConfig], name: str) -> str:
    field = cls.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    value = getattr(value, "value", value)
    if value in (None, "", (), {}):
        return ""
    return f"`{default_text(name, value)}`"


def _cell(text: str) -> str:
    """A description in a cell; a page of docs becomes a link."""
    return re.sub(r"docs/((?:\w+/)?([a-z0-9_-]+\.md))", r"[\2](\1)", text.replace("|", "\\|").replace("*", "\\*"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
