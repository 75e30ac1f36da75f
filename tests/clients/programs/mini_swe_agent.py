"""mini-swe-agent edits a file."""

from cells import MODEL, OPENAI_URL, TASK, cell, check_edit, run


@cell
def edit():
    environment = {
        "OPENAI_API_BASE": OPENAI_URL,
        "OPENAI_API_KEY": "any",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    check_edit("mini", "--yolo", "--exit-immediately", "-m", f"openai/{MODEL}", "-t", TASK, **environment)


run()
