"""The driver on a real Dask cluster of this machine, with an S3 server.

Workers are killed, a driver ends early, and files are wrong.
"""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import uuid
from pathlib import Path

import fsspec
import numpy as np
from distributed import Client, LocalCluster
from moto.server import ThreadedMotoServer

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from hatchback_trainer import cluster

HATCHBACK = os.environ["HATCHBACK"]
COUPON = Path(__file__).parents[3] / "demo" / "coupon"
KILLS = int(os.environ.get("HATCHBACK_KILLS", "8"))


def sizes(number):
    """Rows of a table: one large, some of thousands, some of a few."""
    return [60_000, 9_000, 40, 3_000][number % 4]


class OnACluster(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        cls.server = ThreadedMotoServer(port=0, verbose=False)
        cls.server.start()
        host, port = cls.server.get_host_and_port()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        cls.storage = {"endpoint_url": f"http://{host}:{port}"}
        cls.work = Path(tempfile.mkdtemp())
        cls.dask = LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None,
            local_directory=cls.work / "dask",
        )
        cls.client = Client(cls.dask)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.dask.close()
        cls.server.stop()
        shutil.rmtree(cls.work)

    def setUp(self):
        self.folder = self.work / uuid.uuid4().hex
        self.folder.mkdir()
        self.bucket = f"s3://{uuid.uuid4().hex}"
        self.store = fsspec.filesystem("s3", **self.storage)
        self.store.mkdir(self.bucket)
        self.log = self.folder / "runs"
        self.log.touch()

    def program(self, pause_s=0.0):
        """Returns a program that notes each table it packs, pauses, and then is `hatchback`."""
        path = self.folder / "hatchback"
        note = f'for word; do [ "$last" = --table ] && echo "$word" >> {self.log}; last=$word; done'
        path.write_text(
            f'#!/bin/bash\n{note}\n[ "$1" = --version ] || sleep {pause_s}\n'
            f'exec {HATCHBACK} "$@"\n'
        )
        path.chmod(0o755)
        return str(path)

    def model(self):
        """Writes the synthetic model here and into the store; returns the folder here."""
        folder = self.folder / "model"
        synthetic.write(folder, sizes)
        self.upload(folder)
        return folder

    def upload(self, folder):
        for file in Path(folder).iterdir():
            self.store.put_file(str(file), f"{self.bucket}/model/{file.name}")

    def one_machine(self, folder):
        """Returns the bytes of the bundle that one `pack` makes."""
        out = self.folder / "one.hatch"
        subprocess.run(
            [HATCHBACK, "pack", folder / "model.toml", "--out", out],
            check=True, capture_output=True,
        )
        return out.read_bytes()

    def pack(self, program, **options):
        urls = [
            f"{self.bucket}/{path}"
            for path in ("model/model.toml", "out/bundle.hatch", "shares")
        ]
        return cluster.pack(self.client, *urls, hatchback=program, storage=self.storage, **options)

    def bundle(self):
        self.store.invalidate_cache()
        return self.store.cat_file(f"{self.bucket}/out/bundle.hatch")

    def runs(self):
        return self.log.read_text().split()

    def test_the_bundle_of_a_cluster_is_that_of_one_machine_byte_for_byte(self):
        folder = self.model()
        results = self.pack(self.program())
        self.assertTrue(self.bundle() == self.one_machine(folder))
        self.assertEqual(sorted(self.runs()), sorted(f"cat_{n}" for n in range(synthetic.TABLES)))
        self.assertEqual(results["merge"].bytes_out, len(self.bundle()))

    def test_a_worker_fetches_its_own_tensors_of_a_shared_safetensors_file(self):
        shutil.copytree(COUPON, self.folder / "coupon")
        self.upload(self.folder / "coupon")
        results = self.pack(self.program())
        self.assertTrue(self.bundle() == self.one_machine(COUPON))
        tables = [done for name, done in results.items() if name != "merge"]
        file = (COUPON / "tables.safetensors").stat().st_size
        header = 8 + int.from_bytes((COUPON / "tables.safetensors").read_bytes()[:8], "little")
        moved = sum(done.bytes_in for done in tables)
        self.assertLess(
            moved, file + len(tables) * (header + (COUPON / "probe.jsonl").stat().st_size)
        )
        self.assertGreater(moved, file - header)

    def test_killed_workers_cost_their_table_and_no_other(self):
        folder, program = self.model(), self.program(pause_s=0.5)
        kills, stop = [], threading.Event()

        def kill_workers():
            seed = random.randrange(1 << 32)
            print(f"seed {seed}", file=sys.stderr)
            chance = random.Random(seed)
            while len(kills) < KILLS and not stop.is_set():
                time.sleep(chance.uniform(0.1, 1.0))
                pids = [nanny.pid for nanny in self.dask.workers.values() if nanny.pid]
                if pids and self.runs():
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    kills.append(len(self.runs()))

        killer = threading.Thread(target=kill_workers)
        killer.start()
        try:
            self.pack(program, attempts_max=100)
        finally:
            stop.set()
            killer.join()
        self.assertTrue(self.bundle() == self.one_machine(folder))
        runs = self.runs()
        self.assertEqual(set(runs), {f"cat_{n}" for n in range(synthetic.TABLES)})
        self.assertLessEqual(len(runs), synthetic.TABLES + len(kills))
        self.assertGreaterEqual(len(kills), 1)
        print(
            f"{len(kills)} workers killed, {len(runs)} runs for {synthetic.TABLES} tables",
            file=sys.stderr,
        )

    def test_a_second_driver_goes_on_where_a_first_one_ended(self):
        folder, program = self.model(), self.program()
        merge, cluster.merge = cluster.merge, None
        try:
            with self.assertRaises(Exception):
                self.pack(program, attempts_max=1)
        finally:
            cluster.merge = merge
        self.assertEqual(len(self.runs()), synthetic.TABLES)
        heads = [
            path for path in self.store.find(f"{self.bucket}/shares") if path.endswith(".head")
        ]
        self.store.rm(heads[:3])
        results = self.pack(program)
        self.assertEqual(sum(done.packed for name, done in results.items() if name != "merge"), 3)
        self.assertEqual(len(self.runs()), synthetic.TABLES + 3)
        self.assertTrue(self.bundle() == self.one_machine(folder))

        # A source that changed makes all shares anew.
        values = np.load(folder / "cat_0.npy")
        values[7] *= 2
        np.save(folder / "cat_0.npy", values)
        self.upload(folder)
        self.pack(program)
        self.assertEqual(len(self.runs()), 2 * synthetic.TABLES + 3)
        self.assertTrue(self.bundle() == self.one_machine(folder))

    def test_a_refused_table_ends_the_work_with_the_message_of_hatchback(self):
        folder, program = self.model(), self.program()
        values = np.load(folder / "cat_5.npy")
        values[3, 4] = np.nan
        np.save(folder / "cat_5.npy", values)
        self.upload(folder)
        with self.assertRaisesRegex(cluster.Refused, r"cat_5.*row 3, column 4 is NaN"):
            self.pack(program)
        self.assertEqual(self.runs().count("cat_5"), 1)
        with self.assertRaises(FileNotFoundError):
            self.bundle()


if __name__ == "__main__":
    unittest.main()
