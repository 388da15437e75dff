"""Tests interoperation with python-tuf, the reference implementation of The Update Framework.

python-tuf reads what `hatchback publish` signed. Hatchback's client reads what python-tuf signs.
Prints SKIPPED if python-tuf is missing and cannot be installed.

Usage: python3 tests/python_tuf.py HATCHBACK, with the path of the program.
The virtual environment is target/python-tuf.
"""

import functools
import hashlib
import http.server
import pathlib
import subprocess
import sys
import tempfile
import threading
from datetime import datetime, timedelta, timezone

from daemon_car import REPOSITORY
from virtual_env import run_inside

PACKAGES = ["tuf==7.0.1", "securesystemslib[crypto]==1.4.0"]


def serve(folder: pathlib.Path) -> str:
    """Serves `folder` over HTTP and returns the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def python_tuf_reads_our_repository(hatchback: str, work: pathlib.Path) -> None:
    from tuf.api.exceptions import RepositoryError
    from tuf.ngclient import Updater

    run = functools.partial(subprocess.run, check=True, capture_output=True)
    keys, repository, bundle = work / "keys", work / "repository", work / "1.hatch"
    run([hatchback, "keys", "new", keys, "--plain", "--role-keys", "2", "--role-threshold", "2"])
    run([hatchback, "pack", REPOSITORY / "tools/demo/coupon/model.toml", "--out", bundle])
    run([hatchback, "publish", bundle, "--keys", keys, "--to", repository])
    address = serve(repository)
    (work / "metadata").mkdir()
    (work / "targets").mkdir()

    def updater():
        root = (keys / "1.root.json").read_bytes()
        return Updater(
            str(work / "metadata"),
            f"{address}/metadata/",
            str(work / "targets"),
            f"{address}/targets/",
            bootstrap=root,
        )

    client = updater()
    client.refresh()
    name = "coupon-dlrm/000000000001-snapshot"
    info = client.get_targetinfo(name)
    assert info is not None, "the release is not listed"
    client.download_target(info)
    run([hatchback, "keys", "rotate", keys, "timestamp"])
    run([hatchback, "publish", "--keys", keys, "--to", repository])
    updater().refresh()
    stamp = repository / "metadata" / "timestamp.json"
    stamp.write_bytes(stamp.read_bytes().replace(b'"version": 2', b'"version": 3'))
    try:
        updater().refresh()
    except RepositoryError:
        print("python-tuf reads what `publish` signs, follows its rotation, refuses a changed byte")
    else:
        raise AssertionError("a changed timestamp was accepted")


def we_read_the_repository_of_python_tuf(hatchback: str, work: pathlib.Path) -> None:
    from securesystemslib.signer import CryptoSigner
    from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

    repository = work / "theirs"
    (repository / "metadata").mkdir(parents=True)
    (repository / "targets").mkdir()
    expires = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=3)
    roles = ("root", "targets", "snapshot", "timestamp")
    signers = {role: CryptoSigner.generate_ed25519() for role in roles}
    content = b"a target"
    digest = hashlib.sha256(content).hexdigest()
    (repository / "targets" / f"{digest}.file.txt").write_bytes(content)

    def publish(version: int) -> None:
        root = Root(version=1, expires=expires, consistent_snapshot=True)
        for role, signer in signers.items():
            root.add_key(signer.public_key, role)
        targets = Targets(version=version, expires=expires)
        targets.targets["file.txt"] = TargetFile.from_data("file.txt", content, ["sha256"])
        snapshot = Snapshot(
            version=version, expires=expires, meta={"targets.json": MetaFile(version)}
        )
        timestamp = Timestamp(version=version, expires=expires, snapshot_meta=MetaFile(version))
        for role, signed, name in [
            ("root", root, "1.root.json"),
            ("targets", targets, f"{version}.targets.json"),
            ("snapshot", snapshot, f"{version}.snapshot.json"),
            ("timestamp", timestamp, "timestamp.json"),
        ]:
            metadata = Metadata(signed)
            metadata.sign(signers[role])
            metadata.to_file(str(repository / "metadata" / name))

    def ours(*command) -> int:
        client = pathlib.Path(hatchback).with_name("tuf_client")
        tuf = [client, "--metadata-dir", work / "car", *command]
        return subprocess.run(tuf, capture_output=True).returncode

    publish(2)
    address = serve(repository)
    assert ours("init", repository / "metadata" / "1.root.json") == 0
    assert ours("--metadata-url", f"{address}/metadata", "refresh") == 0
    (work / "out").mkdir()
    download = [
        "--metadata-url", f"{address}/metadata", "--target-name", "file.txt",
        "--target-base-url", f"{address}/targets", "--target-dir", work / "out", "download",
    ]  # fmt: skip
    assert ours(*download) == 0
    assert (work / "out" / "file.txt").read_bytes() == content
    publish(1)
    assert ours("--metadata-url", f"{address}/metadata", "refresh") != 0, "a rollback was accepted"
    signers["timestamp"] = CryptoSigner.generate_ed25519()
    publish(3)
    assert ours("--metadata-url", f"{address}/metadata", "refresh") != 0, "another key was accepted"
    print("Hatchback reads what python-tuf signs, refuses a rollback and a key of no role")


def main() -> None:
    if "--inside" not in sys.argv:
        run_inside("python-tuf", PACKAGES, "tuf, securesystemslib")
    hatchback = str(pathlib.Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        python_tuf_reads_our_repository(hatchback, pathlib.Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        we_read_the_repository_of_python_tuf(hatchback, pathlib.Path(folder))


if __name__ == "__main__":
    main()
