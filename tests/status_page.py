"""Tests the status page in a real browser: Debian's chromium, headless, over its debugging pipe.

The page must show the model live, work by keyboard, follow light and dark, and load a model with
the token. Prints SKIPPED if there is no chromium.

Usage: python3 tests/status_page.py FOLDER [SCREENSHOTS], the folder of the programs hatchback and
hatchbackd, and a folder for screenshots.
"""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from daemon_car import MODEL, Car, heldout

WAIT_S = 60
HISTORY_S = 25


class Browser:
    """A headless chromium with one page. Commands go over a pipe, one JSON text
    each, ended by 0."""

    def __init__(self, program: str, profile: str):
        (their_in, to), (from_, their_out) = os.pipe(), os.pipe()

        def give_pipes() -> None:
            os.dup2(their_in, 3)
            os.dup2(their_out, 4)

        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"
        ]
        command += [
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "--no-first-run", "about:blank"
        ]
        self.process = subprocess.Popen(
            command, preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL
        )
        os.close(their_in), os.close(their_out)
        self.to, self.from_ = os.fdopen(to, "wb", 0), os.fdopen(from_, "rb")
        self.number, self.answers, self.problems, self.dialogs = 0, {}, [], []
        self.arrived = threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    session = None

    def read(self) -> None:
        rest = b""
        while chunk := self.from_.read1(65536):
            *texts, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, texts):
                with self.arrived:
                    self.take(message)
                    self.arrived.notify_all()

    def take(self, message: dict) -> None:
        method, details = message.get("method"), message.get("params", {})
        if "id" in message:
            self.answers[message["id"]] = message
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(details["message"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"])
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.problems.append(details["entry"])

    def call(self, method: str, **details):
        self.number += 1
        message = {"id": self.number, "method": method, "params": details}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        with self.arrived:
            assert self.arrived.wait_for(lambda: message["id"] in self.answers, WAIT_S), (
                f"{method}: no answer"
            )
            answer = self.answers.pop(message["id"])
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def value(self, expression: str):
        return self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )["result"].get("value")

    def wait(self, expression: str) -> None:
        start = time.monotonic()
        while not self.value(expression):
            text = self.value("document.body.innerText")
            assert time.monotonic() - start < WAIT_S, (
                f"never true: {expression}\n{text}\n{self.problems}"
            )
            time.sleep(0.1)

    def key(self, name: str, text: str = "", **details) -> None:
        for kind in ("keyDown", "keyUp"):
            press = {"text": text} if kind == "keyDown" and text else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, **press, **details)

    def scheme(self, name: str) -> None:
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False
        )

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def request_of(sample: dict) -> bytes:
    dense = {
        "name": "dense", "datatype": "FP32", "shape": [1, len(sample["dense"])],
        "data": sample["dense"]
    }
    keys = [
        {"name": name, "datatype": "INT64", "shape": [1, len(bag)], "data": bag}
        for name, bag in sample["sparse"].items()
    ]
    return json.dumps({"id": "page-test", "inputs": [dense, *keys]}).encode()


def ask(car: Car, over: threading.Event) -> None:
    """Asks for scores until `over` is set, at a rate that changes."""
    url = f"http://127.0.0.1:{car.port}/v2/models/{MODEL}/infer"
    bodies = [request_of(sample) for sample in heldout()]
    for number in range(10**9):
        if over.is_set():
            return
        urllib.request.urlopen(urllib.request.Request(url, bodies[number % len(bodies)])).read()
        time.sleep(0.002 + 0.01 * (number // 300 % 2))


def check(browser: Browser, car: Car, screenshots: pathlib.Path | None) -> None:
    browser.size(1280, 900)
    browser.scheme("light")
    browser.call("Page.navigate", url=f"http://127.0.0.1:{car.port}/")
    browser.wait(f"document.body.innerText.includes('{MODEL}')")
    browser.wait("document.querySelectorAll('polyline').length >= 10")
    before = browser.value("document.querySelector('polyline').getAttribute('points')")
    browser.wait(
        f"document.querySelector('polyline').getAttribute('points') != {json.dumps(before)}"
    )

    browser.wait("document.body.innerText.includes('committed coupon-dlrm@1')")
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.scheme("dark")
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    assert light != dark, "the page does not follow the dark scheme"
    browser.scheme("light")
    print("the page is live, in light and dark")

    # By keyboard: the first stop skips to the models; a summary opens with Enter and stays open.
    browser.key("Tab", windowsVirtualKeyCode=9)
    assert browser.value("document.activeElement.textContent") == "Skip to the models"
    stops = 0
    while browser.value("document.activeElement.textContent") != "Tables":
        browser.key("Tab", windowsVirtualKeyCode=9)
        stops += 1
        assert stops < 40, "no summary is reached by keyboard"
    browser.key("Enter", "\r", windowsVirtualKeyCode=13)
    browser.wait("document.querySelector('details[open] td') != null")
    time.sleep(2.5)
    assert browser.value("document.activeElement.textContent") == "Tables", (
        "a refresh loses the focus"
    )
    assert browser.value("document.querySelector('details[open] td') != null"), (
        "a refresh closes a fold"
    )
    assert browser.value("document.body.scrollWidth <= innerWidth"), (
        "the page is wider than its window"
    )
    browser.key("Enter", "\r", windowsVirtualKeyCode=13)
    print("the page works by keyboard")

    browser.size(480, 800)
    assert browser.value("document.body.scrollWidth <= innerWidth"), (
        "the page is wider than a small window"
    )
    browser.size(1280, 900)
    if screenshots:
        # As a user first sees the page: its top, without the focus of the keys above.
        browser.value("document.activeElement.blur(), scrollTo(0, 0)")
        time.sleep(HISTORY_S)
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            time.sleep(0.3)
            browser.screenshot(screenshots / f"status-{scheme}.png")
        browser.scheme("light")

    # The owner loads a model that was unloaded, with the token.
    owner = {"authorization": f"Bearer {car.token()}"}
    unload = f"http://127.0.0.1:{car.port}/v2/repository/models/second/unload"
    urllib.request.urlopen(urllib.request.Request(unload, b"{}", owner)).read()
    for token, outcome in (("wrong", "may not do this"), (car.token(), "`second` is loaded")):
        browser.wait("document.querySelector('button:not([disabled])') != null")
        seen = len(browser.dialogs)
        browser.value("setTimeout(() => document.querySelector('button').click(), 0)")
        with browser.arrived:
            assert browser.arrived.wait_for(lambda: len(browser.dialogs) > seen, WAIT_S), (
                "no question for the token"
            )
        browser.call("Page.handleJavaScriptDialog", accept=True, promptText=token)
        browser.wait(f"document.getElementById('link').textContent.includes({json.dumps(outcome)})")
    problems = [p for p in browser.problems if "403" not in json.dumps(p)]
    assert not problems, problems
    print("a model is loaded with the token, and refused without it")


def main() -> None:
    chromium = shutil.which("chromium")
    if not chromium:
        print("SKIPPED: the status page: chromium is not installed (apt install chromium)")
        return
    programs = pathlib.Path(sys.argv[1]).resolve()
    screenshots = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    work = tempfile.TemporaryDirectory()
    with (
        work as folder, tempfile.TemporaryDirectory() as profile,
        Car(programs, pathlib.Path(folder)) as car
    ):
        over = threading.Event()
        asking = threading.Thread(target=ask, args=(car, over))
        asking.start()
        browser = Browser(chromium, profile)
        try:
            check(browser, car, screenshots)
        finally:
            over.set()
            asking.join()
            browser.close()
        car.stop()


if __name__ == "__main__":
    main()
