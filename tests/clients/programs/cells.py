"""What every Python program of `make clients` shares; runs in the program's environment, with its standard library."""

import json
import os
import subprocess
import sys
import traceback

URL = os.environ["CLIENTS_URL"]
MODEL = os.environ["CLIENTS_MODEL"]
OPENAI_URL = f"{URL}/v1"
QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
CELLS = []
TASK = "Mend the greeting in greet.py."


def cell(function):
    """Add a conversation, whose name is the function's."""
    CELLS.append(function)
    return function


def run():
    """Hold all conversations; print a line of JSON for each."""
    for function in CELLS:
        error = ""
        try:
            function()
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:300]
        print(json.dumps({"cell": function.__name__, "error": error}), flush=True)


def check(holds, shown=None):
    """Fail unless something holds."""
    if not holds:
        raise AssertionError(repr(shown)[:300])


def command(*words, folder=".", seconds=240, **environment):
    """Run a program of this environment with a home of its own; return what it prints."""
    os.makedirs("home", exist_ok=True)
    home = os.path.abspath("home")
    known = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**known, "HOME": home, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    print(done.stdout, file=sys.stderr)
    check(done.returncode == 0, done.stdout[-300:])
    return done.stdout


def check_edit(*words, **environment):
    """Let an agent mend the file that the scripted model mends."""
    folder = os.environ["CLIENTS_FOLDER"]
    file = os.path.join(folder, "greet.py")
    with open(file, "w", encoding="utf-8") as wrong:
        wrong.write("print('helo')\n")
    command(*words, folder=folder, **environment)
    with open(file, encoding="utf-8") as mended:
        text = mended.read()
    check(text == "print('hello')\n", text)
