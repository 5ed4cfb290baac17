"""Utilization and memory of a GPU while something runs on it."""

import statistics
import threading
from types import TracebackType

import torch

from tests.benchmarks import sides


class Gpu:
    """Samples the first GPU twenty times a second, from NVML. Without ``--device cuda``, nothing.

    Attributes:
        busy: Percent of the time in which a kernel runs, by NVML.
        megabytes: Memory in use, of all processes.
    """

    def __init__(self) -> None:
        self.busy: list[int] = []
        self.megabytes: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Gpu":
        if sides.device == "cuda":
            torch.cuda.empty_cache()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def summary(self) -> str:
        """Return the utilization in the last half of the samples, and the most memory."""
        if not self.busy:
            return ""
        late = statistics.mean(self.busy[len(self.busy) // 2 :])
        return f"; GPU {late:.0f} % busy, {max(self.megabytes):.0f} MB"

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            free, total = torch.cuda.mem_get_info()
            self.busy.append(torch.cuda.utilization())
            self.megabytes.append((total - free) / 1e6)
