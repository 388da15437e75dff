"""The driver with injected faults: of a store, of a worker's machine, of the program and of
model.toml. The cluster is in this process, and folders are its store. `test_cluster.py` has a real
cluster, whose workers are killed."""

import os
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from botocore.exceptions import EndpointConnectionError
from distributed import Client, LocalCluster
from fsspec.implementations.local import LocalFileSystem

from hatchback_trainer import cluster
from hatchback_trainer.model_sources import ChangedSource

HATCHBACK = os.environ["HATCHBACK"]
COUPON = Path(__file__).parents[3] / "demo" / "coupon"

calls = []  # the times at which `fail` was called, in seconds


class NotPicklable(Exception):
    """An error that cannot be made from its arguments, as some stores raise."""

    def __init__(self, *, problem):
        super().__init__(problem)


def fail(times, error):
    """Raises `error` at the first calls, as many as `times`. Runs on a worker."""
    calls.append(time.monotonic())
    if len(calls) <= times:
        raise error


class WithFaults(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.work = Path(tempfile.mkdtemp())
        cls.dask = LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None,
            local_directory=cls.work / "dask",
        )
        cls.client = Client(cls.dask)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.dask.close()
        shutil.rmtree(cls.work)

    def setUp(self):
        calls.clear()
        self.new_store()

    def new_store(self):
        """Makes a store with the coupon model, and a folder beside it."""
        self.folder = Path(tempfile.mkdtemp(dir=self.work))
        self.store = self.folder / "store"
        shutil.copytree(COUPON, self.store / "model")

    def program(self, at_pack="", at_version=""):
        """Returns a program that runs these lines of a shell, and then is `hatchback`."""
        path = self.folder / "hatchback"
        lines = f"pack) {at_pack or ':'} ;;\n--version) {at_version or ':'} ;;"
        path.write_text(f'#!/bin/bash\ncase "$1" in\n{lines}\nesac\nexec {HATCHBACK} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def once(self, line):
        """Returns a line of a shell that runs `line` only the first time."""
        return f"mkdir {self.folder}/begun 2>/dev/null && {{ {line}; }}"

    def pack(self, program=HATCHBACK, **options):
        paths = ("model/model.toml", "out/bundle.hatch", "shares")
        urls = [f"file://{self.store}/{path}" for path in paths]
        return cluster.pack(self.client, *urls, hatchback=program, **options)

    def assert_the_bundle_is_that_of_one_machine(self):
        one = self.folder / "one.hatch"
        command = [HATCHBACK, "pack", COUPON / "model.toml", "--out", one]
        subprocess.run(command, check=True, capture_output=True)
        self.assertTrue((self.store / "out" / "bundle.hatch").read_bytes() == one.read_bytes())

    def test_a_fault_of_the_machine_is_tried_again(self):
        full = self.once('echo "No space left on device" >&2; exit 3')
        with self.assertLogs(cluster.LOG) as logs:
            self.pack(self.program(at_pack=full))
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], r"attempt 1 of 20 failed(.|\n)*No space left on device")
        self.assert_the_bundle_is_that_of_one_machine()

    def test_the_temporary_files_of_hatchback_are_in_the_folder_of_the_worker(self):
        notes = self.folder / "notes"
        self.pack(self.program(at_pack=f'echo "$TMPDIR" >> {notes}'))
        folders = notes.read_text().split("\n")[:-1]
        self.assertGreater(len(folders), 1)
        for folder in folders:
            self.assertTrue(Path(folder).is_relative_to(self.work / "dask"), folder)

    def test_an_error_of_a_store_is_tried_again_whatever_its_type(self):
        unreachable = EndpointConnectionError(endpoint_url="http://store")
        for error in (unreachable, NotPicklable(problem="reset by peer"), OSError("reset")):
            with self.subTest(error=error):
                self.new_store()
                put, faults = LocalFileSystem.put_file, [error]

                def faulty(fs, *words, **options):
                    if faults:
                        raise faults.pop()
                    return put(fs, *words, **options)

                with mock.patch.object(LocalFileSystem, "put_file", faulty):
                    with self.assertLogs(cluster.LOG) as logs:
                        self.pack()
                self.assertEqual(len(logs.output), 1)
                self.assertIn(str(error), logs.output[0])
                self.assert_the_bundle_is_that_of_one_machine()

    def test_a_pause_before_each_attempt_doubles_up_to_a_minute(self):
        pauses = [cluster.pause_s(attempt) for attempt in (1, 2, 3, 4, 8, 100)]
        self.assertEqual(pauses, [0, 1, 2, 4, 60, 60])
        with self.assertLogs(cluster.LOG):
            cluster.run_tasks(self.client, {"one": (fail, 2, OSError("timeout"))}, 3)
        self.assertEqual(len(calls), 3)
        self.assertGreaterEqual(calls[1] - calls[0], 1)
        self.assertGreaterEqual(calls[2] - calls[1], 2)

    def test_the_last_attempt_ends_the_work_with_its_error(self):
        with self.assertLogs(cluster.LOG), self.assertRaisesRegex(OSError, "timeout"):
            cluster.run_tasks(self.client, {"one": (fail, 9, OSError("timeout"))}, 2)
        self.assertEqual(len(calls), 2)

    def test_an_error_that_no_attempt_can_heal_ends_the_work_at_once(self):
        for kind in (cluster.Refused, ChangedSource, PermissionError, ImportError):
            with self.subTest(kind=kind):
                calls.clear()
                with self.assertRaises(kind):
                    cluster.run_tasks(self.client, {"one": (fail, 9, kind("no"))}, 3)
                self.assertEqual(len(calls), 1)

    def test_a_program_that_cannot_be_started_ends_the_work_at_once(self):
        for loss in ('rm "$0"', 'chmod 644 "$0"'):
            for setpriv in (shutil.which("setpriv"), None):
                with self.subTest(loss=loss, setpriv=setpriv):
                    self.new_store()
                    program = self.program(at_version=loss)
                    with mock.patch.object(cluster.shutil, "which", return_value=setpriv):
                        with self.assertRaisesRegex(cluster.Refused, program):
                            self.pack(program, attempts_max=3)

    def test_model_toml_may_be_overwritten_while_the_driver_works(self):
        model = self.store / "model" / "model.toml"
        text, other = model.read_text(), self.folder / "other.toml"
        other.write_text(f"{text}# of the next model\n")
        self.pack(self.program(at_pack=f"cp {other} {model}"))
        self.assertEqual(model.read_text(), other.read_text())
        self.assert_the_bundle_is_that_of_one_machine()

        model.write_text(text)
        results = self.pack()
        self.assertFalse(any(done.packed for name, done in results.items() if name != "merge"))
        self.assert_the_bundle_is_that_of_one_machine()

    def test_a_put_that_fails_leaves_no_file(self):
        local, fs = self.folder / "local", LocalFileSystem()
        local.write_bytes(b"bundle")

        def half(fs, source, target, **options):
            Path(target).write_bytes(b"bun")
            raise OSError("no space")

        unnamed = mock.Mock(side_effect=OSError("no name"))
        for method, fault in (("put_file", half), ("mv", unnamed)):
            with self.subTest(method=method):
                out = Path(tempfile.mkdtemp(dir=self.folder))
                with mock.patch.object(LocalFileSystem, method, fault):
                    with self.assertRaisesRegex(OSError, "no "):
                        cluster.put(fs, local, str(out / "bundle.hatch"))
                self.assertEqual(os.listdir(out), [])


if __name__ == "__main__":
    unittest.main()
