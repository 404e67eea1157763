"""How a time is taken: captured graphs on cold caches, replayed in turn. Written down in benchmarks/README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4tune.codegen.devices import Device

#: Launches of one captured graph, and the microseconds that they should take together.
MOST_LAUNCHES, FEWEST_LAUNCHES, GRAPH_US = 64, 4, 300.0
#: Replays of each graph.
ROUNDS = 9
#: Seconds of work after which an idle card's clocks are up.
WARM_S = 0.2
#: A launch of nothing takes about this long.
LAUNCH_US = 2.0


@dataclass(frozen=True)
class Captured:
    """A graph and what it replays; the runs own tensors that a peer made for itself and the graph reads."""

    graph: Any
    launches: int
    runs: tuple[Callable[[], Any], ...]


class Timer:
    """Times graphs on one GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._flush = torch.ones(2 * device.l2_bytes // 4, dtype=torch.int32, device="cuda")

    def launches(self, moved: int) -> int:
        """Launches of a graph whose launches move so many bytes each."""
        about = LAUNCH_US + moved / self.device.bandwidth * 1e6
        return max(FEWEST_LAUNCHES, min(MOST_LAUNCHES, int(GRAPH_US / about)))

    def sets(self, moved: int) -> int:
        """Input sets that rotate inside a graph, so that no launch finds its bytes in the cache."""
        return max(1, min(self.launches(moved), -(-2 * self.device.l2_bytes // moved)))

    def capture(self, runs: Sequence[Callable[[], Any]], launches: int) -> Captured:
        """A graph of `launches` calls that walk through `runs`, after one warm call of each."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(launches):
                runs[number % len(runs)]()
        return Captured(graph, launches, tuple(runs))

    def warm(self, graphs: Sequence[Captured]) -> None:
        """Replay for as long as clocks take to rise."""
        until = time.perf_counter() + WARM_S
        while time.perf_counter() < until:
            for captured in graphs:
                captured.graph.replay()
            torch.cuda.synchronize()

    def time(self, graphs: Sequence[Captured], rounds: int = ROUNDS, flush: bool = True) -> list[list[float]]:
        """Microseconds of one launch for each round, by graph; graphs take turns, in rotating and reversed order.

        Each finds cold caches or, without `flush`, those that its own last replay left.
        """
        events: list[list[tuple[Any, Any]]] = [[] for _ in graphs]
        for captured in graphs:
            captured.graph.replay()
        for number in range(rounds):
            turns = [(step + number // 2) % len(graphs) for step in range(len(graphs))]
            for which in turns if number % 2 == 0 else reversed(turns):
                if flush:
                    # Read, not written: dirty lines would be written back while the kernel runs.
                    self._flush.sum()
                else:
                    graphs[which].graph.replay()
                start, end = _events()
                start.record()
                graphs[which].graph.replay()
                end.record()
                events[which].append((start, end))
        torch.cuda.synchronize()
        return [
            [start.elapsed_time(end) * 1e3 / captured.launches for start, end in pairs]
            for pairs, captured in zip(events, graphs, strict=True)
        ]


def middle(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the interquartile range over it."""
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return median, (high - low) / median


def _events() -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


def copy_gb_per_s() -> float:
    """The card's bandwidth: best of 20 copies of 1 GiB, bytes read plus written."""
    source = torch.ones(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        start, end = _events()
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * source.nbytes / best / 1e6
