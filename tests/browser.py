"""The system's Chromium, without a window, steered through its DevTools protocol."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--window-size=1400,1000",
    "--remote-debugging-port=0",
)  # fmt: skip


def wait_for(condition, what, seconds=300):
    """What `condition()` returns once it is true; raises TimeoutError that says what was awaited."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.1)
    return value


@contextmanager
def open_browser(folder: Path):
    """A browser with its profile in `folder`; yields the address of its DevTools."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with one
    command = [CHROMIUM, *OPTIONS, *sandbox, f"--user-data-dir={folder}", "about:blank"]
    with open(folder.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        port = folder / "DevToolsActivePort"
        number = wait_for(lambda: port.exists() and port.read_text().split("\n")[0], "Chromium's DevTools")
        yield f"http://127.0.0.1:{number}"
    finally:
        process.terminate()
        process.wait()


class Tab:
    """A tab of the browser at `tools`, the address of its DevTools."""

    def __init__(self, tools: str) -> None:
        request = urllib.request.Request(f"{tools}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        self.socket = websocket.create_connection(address, timeout=600, suppress_origin=True)
        self.calls = 0
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def call(self, method: str, **params):
        """Call a method of the protocol; raises RuntimeError with its error."""
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": params}))
        while (message := json.loads(self.socket.recv())).get("id") != self.calls:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def run(self, script: str):
        """The value of a JavaScript expression, awaited if it is a promise; raises RuntimeError for an exception."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["result"].get("description", result["exceptionDetails"]))
        return result["result"].get("value")
