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
    common = {name for name in config_class("prefill").model_fields if _alike(name)}
    parts = [HEAD, "\n## Every service\n\n", _table(ServiceConfig, set(ServiceConfig.model_fields))]
    for kind in (*SERVICES, "stage", "adapter", "indexer"):
        cls = config_class(kind)
        own = {name for name in cls.model_fields if name not in ServiceConfig.model_fields or _differs(cls, name)}
        if kind == "prefill":
            parts += ["\n## prefill and decode\n\n", _table(cls, own & common)]
        parts += [f"\n## {kind}\n\n", _table(cls, own - common if kind in ("prefill", "decode") else own)]
    parts += ["\n## Former names\n\n| former | now |\n|---|---|\n"]
    parts += [f"| `{old}` | {' or '.join(f'`{name}`' for name in now)} |\n" for old, now in RENAMED.items()]
    parts += ["\n## No longer settings\n\n| former | constant |\n|---|---|\n"]
    parts += [f"| `{old}` | {_cell(now)} |\n" for old, now in REMOVED.items()]
    return "".join(parts)


def _table(cls: type[ServiceConfig], shown: set[str]) -> str:
    flags = _flags(cls)
    names = sorted((name for name in cls.model_fields if name in shown), key=lambda name: name not in flags)
    lines = ["| setting | default | meaning |\n|---|---|---|\n"]
    for name in names:
        written = f"`--{name.replace('_', '-')}`" if name in flags else f"`{name}`"
        lines.append(f"| {written} | {_default(cls, name)} | {_cell(cls.model_fields[name].description or '')} |\n")
    return "".join(lines)


def _flags(cls: type[ServiceConfig]) -> set[str]:
    return {name for names in cls.flags().values() for name in names}


def _alike(name: str) -> bool:
    """Whether prefill and decode state a setting in the same words, with the same default."""
    prefill, decode = config_class("prefill"), config_class("decode")
    if name not in decode.model_fields or (name in _flags(prefill)) != (name in _flags(decode)):
        return False
    told = [(cls.model_fields[name].description, _default(cls, name)) for cls in (prefill, decode)]
    return told[0] == told[1]


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
