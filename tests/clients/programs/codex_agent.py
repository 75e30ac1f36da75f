"""Codex edits a file."""

from pathlib import Path

from cells import MODEL, OPENAI_URL, TASK, cell, check_edit, run

SETTINGS = f"""
model = "{MODEL}"
model_provider = "moonpool"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.moonpool]
name = "moonpool"
base_url = "{OPENAI_URL}"
wire_api = "responses"
"""


@cell
def edit():
    home = Path("codex").absolute()
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(SETTINGS, encoding="utf-8")
    check_edit("codex", "exec", "--skip-git-repo-check", TASK, CODEX_HOME=str(home))


run()
