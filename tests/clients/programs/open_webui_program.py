"""Open WebUI, a web front end: its server lists the models and answers what its page asks."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time

from cells import MODEL, OPENAI_URL, QUESTION, cell, check, run

READY_LIMIT_S = 800
SETTINGS = {
    "OPENAI_API_BASE_URL": OPENAI_URL,
    "OPENAI_API_KEY": "any",
    "ENABLE_OLLAMA_API": "false",
    "RAG_EMBEDDING_ENGINE": "openai",
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": "any",
    "DATA_DIR": os.path.abspath("data"),
    "HOME": os.path.abspath("home"),
    "PATH": os.environ["PATH"],
}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


PORT = free_port()


def ask(method, path, body=None, token=""):
    """What the server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=240)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    connection.request(method, path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    check(response.status == 200, text)
    return text


def token():
    return json.loads(ask("POST", "/api/v1/auths/signin", {"email": "", "password": ""}))["token"]


def wait_until_ready(server):
    until = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            return ask("GET", "/health")
        except OSError:
            check(server.poll() is None and time.monotonic() < until, "the server does not start")
            time.sleep(0.5)


@cell
def models():
    found = json.loads(ask("GET", "/api/models", token=token()))["data"]
    check([each["id"] for each in found] == [MODEL], found)


@cell
def chat():
    answer = json.loads(ask("POST", "/api/chat/completions", ASKED, token()))
    check(answer["choices"][0]["message"]["content"], answer)


@cell
def stream():
    text = ask("POST", "/api/chat/completions", ASKED | {"stream": True}, token())
    check(0 < text.count('"content"') <= ASKED["max_tokens"] and text.rstrip().endswith("[DONE]"), text)


words = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(PORT)]
with subprocess.Popen(words, env=SETTINGS, stdout=sys.stderr, stderr=sys.stderr) as server:
    try:
        wait_until_ready(server)
        run()
    finally:
        server.terminate()
