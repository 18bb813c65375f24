"""A page as a browser shows it: Chromium without a window, spoken to through pipes."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1000,1400", "--remote-debugging-pipe",
)  # fmt: skip
READ, WRITE = 3, 4
"""File descriptors at which Chromium reads and writes messages, each of which ends with a byte of 0."""


class Shown(NamedTuple):
    """What a browser made of a page: addresses that it asked for, errors, a picture, and nodes that are read aloud."""

    requests: list[str]
    errors: list[str]
    picture: bytes
    nodes: list[dict[str, Any]]


def show(page: Path, scheme: str, profile: Path) -> Shown:
    """Open a page.

    Args:
        scheme: "light" or "dark", which the reader prefers.
        profile: folder for the browser's own files.
    """
    (ours, theirs), (back, forth) = os.pipe(), os.pipe()

    def connect():
        # first out of the way, since one of them may be at the place of another
        read, write = os.dup(ours), os.dup(forth)
        os.dup2(read, READ)
        os.dup2(write, WRITE)

    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    events, number, waiting = [], 0, b""

    def receive() -> dict[str, Any]:
        nonlocal waiting
        while b"\0" not in waiting:
            waiting += os.read(back, 2**20)
        message, waiting = waiting.split(b"\0", 1)
        return json.loads(message)

    def call(method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(theirs, json.dumps(message).encode() + b"\0")
        while (answer := receive()).get("id") != number:
            events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    try:
        target = call("Target.createTarget", url="about:blank")["targetId"]
        session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            call(f"{domain}.enable", session)
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        call("Emulation.setEmulatedMedia", session, features=preferred)
        call("Page.navigate", session, url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in events):
            events.append(receive())
        picture = base64.b64decode(call("Page.captureScreenshot", session, captureBeyondViewport=True)["data"])
        nodes = call("Accessibility.getFullAXTree", session)["nodes"]
    finally:
        process.kill()
        process.wait()
        for descriptor in (ours, theirs, back, forth):
            os.close(descriptor)
    requests = [e["params"]["request"]["url"] for e in events if e.get("method") == "Network.requestWillBeSent"]
    errors = [str(e["params"]) for e in events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    return Shown(requests, errors, picture, nodes)
