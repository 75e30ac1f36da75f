"""Claude Code edits a file."""

from cells import MODEL, TASK, URL, cell, check_edit, run


@cell
def edit():
    environment = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": "any",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    check_edit("claude", "-p", TASK, "--permission-mode", "acceptEdits", **environment)


run()
