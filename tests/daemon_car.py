"""A car for the tests of the front door: a daemon that serves the coupon model under two names, the
first from a release.

It listens on a Unix socket and on a port of the loopback device that the system chooses.
"""

import json
import pathlib
import re
import subprocess
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
MODEL = "coupon"
SAMPLES = 200


class Car:
    """A daemon that serves the coupon model."""

    def __init__(self, programs: pathlib.Path, work: pathlib.Path, memory: int = 134_217_728):
        self.work, self.port = work, 0
        self.socket = work / "socket"
        bundle, models = work / "1.hatch", work / "models"
        spec = REPOSITORY / "tools/demo/coupon/model.toml"
        self.quiet([programs / "hatchback", "pack", spec, "--out", bundle])
        models.mkdir()
        hatchback, keys, repository = programs / "hatchback", work / "keys", work / "repository"
        updates, root = work / "updates", keys / "1.root.json"
        self.quiet([hatchback, "install", bundle, "--flash", models / "second"])
        self.quiet([hatchback, "keys", "new", keys, "--plain"])
        self.quiet([hatchback, "publish", bundle, "--keys", keys, "--to", repository])
        updates.mkdir()
        self.quiet([
            hatchback, "sync", "--from", repository, "--root", root, "--state", updates / MODEL,
            "--flash", models / MODEL
        ])
        for name in ("base.toml", "cpu.toml"):
            (work / name).write_text((REPOSITORY / "targets" / name).read_text())
        (work / "car.toml").write_text(
            f'inherits = "cpu"\n[budget]\nmemory_bytes_max = {memory}\n'
            "cache_bytes_max = 65_536\nresident_bytes_max = 0\n"
            f'[server]\ntcp = "127.0.0.1:0"\n[machine]\nmodels = "{models}"\n'
            f'updates = "{updates}"\n'
        )
        command = [
            programs / "hatchbackd", "--target", work / "car.toml", "serve", "--socket",
            self.socket, "--root", root
        ]
        self.log = open(work / "log", "w")
        self.daemon = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    @staticmethod
    def quiet(command: list, **options) -> None:
        subprocess.run(command, check=True, capture_output=True, **options)

    def __enter__(self) -> "Car":
        self.wait()
        return self

    def __exit__(self, *_) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def wait(self) -> None:
        """Waits until the daemon listens, and reads its port from its log."""
        while True:
            log = (self.work / "log").read_text()
            if found := re.search(r"listening on 127\.0\.0\.1:(\d+)\n", log):
                self.port = int(found[1])
                return
            assert self.daemon.poll() is None, log
            time.sleep(0.05)

    def token(self) -> str:
        return (self.work / "socket.token").read_text().strip()

    def stop(self) -> None:
        self.daemon.terminate()
        code = self.daemon.wait()
        assert code == 0, f"the daemon ended with {code}\n{(self.work / 'log').read_text()}"


def heldout(first: int = 0) -> list[dict]:
    """Returns held-out samples with the scores that PyTorch computed, from number `first`."""
    lines = (REPOSITORY / "tools/demo/coupon/heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[first : first + SAMPLES]]
