"""Where a search runs: on this machine with one or more of its GPUs, or elsewhere; see `ray_pool` for a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dsv4tune.codegen import devices
from dsv4tune.codegen.devices import Device
from dsv4tune.tools import gpu
from dsv4tune.tools.evaluate import Pools, default_jobs


class Site(Protocol):
    """Machines with GPUs, or without."""

    def devices(self) -> Sequence[Device]:
        """The GPUs that a search may measure on; the first is meant where none is named.

        Raises:
            ValueError: there is one, but it can't serve.
        """

    def pools(self, jobs: int | None, device: Device, on_gpu: bool, say: Callable[[str], None]) -> Pools:
        """Processes for a search: `jobs` compilers a machine, one a core if None, and a judge for each GPU of the
        device's silicon.

        Raises:
            ValueError: a GPU that was named is of another silicon.
        """


class Local:
    """This machine: its first GPU, or those that ``--gpus`` names."""

    def __init__(self, gpus: str | None = None) -> None:
        """Look the named GPUs up.

        Raises:
            ValueError: no such words, or no such GPU.
        """
        self.gpus = gpus
        self.cards = [] if gpus is None else gpu.cards(gpus)

    def devices(self) -> Sequence[Device]:
        if self.cards:
            return [card.device for card in self.cards]
        here = devices.here()
        return [] if here is None else [here]

    def pools(self, jobs: int | None, device: Device, on_gpu: bool, say: Callable[[str], None]) -> Pools:
        # No result goes to another silicon than it was measured on.
        cards = [c for c in self.cards or gpu.cards() if c.device.silicon == device.silicon] if on_gpu else []
        for card in self.cards:
            if card not in cards:
                other = f"GPU {card.index} is {card.device.name} ({card.device.silicon.target}), not {device.name}"
                if self.gpus != "all":
                    raise ValueError(f"{other}: search for it in a run of its own")
                say(f"{other}: left out; search for it with --gpus {card.index}")
        if len(cards) > 1:
            say(f"one process measures on each of GPUs {', '.join(str(card.index) for card in cards)}")
        pools = Pools.of(jobs or default_jobs(), on_gpu, cards)
        pools.compilers.say = pools.judges.say = say
        return pools
