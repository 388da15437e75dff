from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str

class Error(Exception): ...
class Busy(Error): ...
class RequestError(Error): ...
class OpenError(Error): ...
class Failed(Error): ...
class NotFinite(Error): ...
class DeadlineExceeded(Error): ...
class Closed(Error): ...

class Answer:
    scores: npt.NDArray[np.float32]
    statuses: npt.NDArray[np.uint32]
    generation: int

class Model:
    dense_features: list[str]
    features: list[str]
    outputs: int
    output_names: list[str]
    batch_max: int
    generation: int
    @staticmethod
    def open(
        path: str | PathLike[str],
        target: str | PathLike[str] | None = None,
        *,
        flash: str | PathLike[str] | None = None,
        name: str | None = None,
    ) -> Model: ...
    def score(
        self,
        dense: npt.NDArray[np.float32],
        keys: npt.NDArray[np.int64] | npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint32],
        *,
        weights: npt.NDArray[np.float32] | None = None,
        timeout: float | None = None,
    ) -> Answer: ...
    def key(self, feature: str, value: str | int | float) -> int: ...
    def prefetch(
        self, feature: str, keys: npt.NDArray[np.int64] | npt.NDArray[np.uint64]
    ) -> int: ...
    def statistics(self) -> dict[str, int]: ...
    def memory(self) -> list[tuple[str, int]]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Model: ...
    def __exit__(self, *args: object) -> None: ...

def run_command(arguments: Sequence[str]) -> None: ...
def pack(
    spec: str | PathLike[str],
    out: str | PathLike[str],
    *,
    parent: str | PathLike[str] | None = None,
    codec: str | None = None,
    placement: str | None = None,
) -> dict[str, Any]: ...
def inspect(path: str | PathLike[str]) -> dict[str, Any]: ...
def evaluate(
    path: str | PathLike[str],
    *,
    samples: str | PathLike[str] | None = None,
    batch: int | None = None,
    target: str | PathLike[str] | None = None,
    flash: str | PathLike[str] | None = None,
) -> dict[str, Any]: ...
def main() -> None: ...
