"""aider edits a file."""

from cells import MODEL, OPENAI_URL, TASK, cell, check_edit, run


@cell
def edit():
    given = ("--model", f"openai/{MODEL}", "--openai-api-base", OPENAI_URL, "--openai-api-key", "any")
    quiet = ("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable")
    check_edit(
        "aider",
        *given,
        *quiet,
        "--edit-format",
        "diff",
        "--message",
        TASK,
        "greet.py",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


run()
