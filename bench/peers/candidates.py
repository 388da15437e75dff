"""Runs the dense networks of `hatchback-bench request --shared` in ONNX Runtime on one core.

It gets the same ONNX files as our engine, and a copy of the driver's inputs for each candidate.
"""

from pathlib import Path

import peer

peer.restart_tuned()

import numpy as np
import onnxruntime as ort


class Candidates:
    def setup(self, folder):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.families = {}
        for path in sorted(Path(folder).glob("*.onnx")):
            session = ort.InferenceSession(path, options, providers=providers)
            feeds = {}
            for one in session.get_inputs():
                values = np.fromfile(path.with_suffix("." + one.name), np.float32)
                feeds[one.name] = values.reshape(-1, *one.shape[1:])
            self.families[path.stem] = session, feeds
        return {"engines": list(self.families), "about": f"ONNX Runtime {ort.__version__}"}

    def run(self, family):
        session, feeds = self.families[family]
        return session.run(None, feeds)[0]

    def scores(self, family):
        return {"scores": self.run(family).flatten().tolist()}

    def round(self, family):
        return {"times_us": peer.times_us(lambda _: self.run(family), 1)}


peer.serve(Candidates())
