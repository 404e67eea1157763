"""Known GPUs: what the space, the compile report and the cost model need to know of a card that is not here."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4tune.codegen.problem import Silicon
from dsv4tune.codegen.words import unknown

KB = 1024
MB = 1024 * KB


@dataclass(frozen=True)
class Device:
    """One product.

    Attributes:
        name: the word for ``--device``, or the driver's product name of the GPU here.
        silicon: what decides whether an entry applies.
        sm_shared_bytes: shared memory of a whole SM; each resident program takes 1 KB besides its own.
        l2_bytes: second-level cache.
        bandwidth: device memory, bytes a second, by the vendor's figures.
        source: where the figures come from.
        memory_gb: device memory, 0 where it isn't known.
    """

    name: str
    silicon: Silicon
    sm_shared_bytes: int
    l2_bytes: int
    bandwidth: float
    source: str
    memory_gb: float = 0.0


# Shared memory by capability: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_SHARED = {
    "8.9": (99 * KB, 100 * KB),
    "9.0": (227 * KB, 228 * KB),
    "10.0": (227 * KB, 228 * KB),
    "12.0": (99 * KB, 100 * KB),
    "12.1": (99 * KB, 100 * KB),
}


def _device(name: str, capability: str, sms: int, l2: int, bandwidth: float, gb: int, source: str) -> Device:
    program, sm = _SHARED[capability]
    return Device(name, Silicon(capability, sms, program), sm, l2, bandwidth, source, gb)


_TABLE = (
    _device("rtx-pro-6000", "12.0", 188, 128 * MB, 1.792e12, 96, "NVIDIA RTX Blackwell PRO architecture whitepaper"),
    _device("rtx-5090", "12.0", 170, 96 * MB, 1.792e12, 32, "NVIDIA RTX Blackwell architecture whitepaper"),
    _device(
        "gb10", "12.1", 48, 24 * MB, 2.73e11, 128, "NVIDIA DGX Spark datasheet and cudaGetDeviceProperties reports"
    ),
    _device("h100", "9.0", 132, 50 * MB, 3.35e12, 80, "NVIDIA H100 architecture whitepaper, SXM5"),
    _device("h200", "9.0", 132, 60 * MB, 4.8e12, 141, "NVIDIA H200 datasheet; SMs and L2 read off a card"),
    _device(
        "b200", "10.0", 148, 126 * MB, 8.0e12, 180, "NVIDIA Blackwell datasheet, HGX B200; L2 by device properties"
    ),
    _device("rtx-4090", "8.9", 128, 72 * MB, 1.008e12, 24, "NVIDIA Ada architecture whitepaper"),
)
DEVICES = {device.name: device for device in _TABLE}

#: The card that a bare ``--target`` means.
TARGETS = {
    "sm_89": "rtx-4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx-pro-6000",
    "sm_121": "gb10",
}


def named(device: str | None = None, target: str | None = None) -> Device:
    """The table's row for ``--device`` or ``--target``.

    Raises:
        ValueError: the word is not in the table, or the two name different capabilities.
    """
    if device is not None and device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if target is not None and target not in TARGETS:
        raise unknown("target", target, TARGETS)
    found = DEVICES[device or TARGETS[target or "sm_120"]]
    if target is not None and found.silicon.target != target:
        raise ValueError(f"device '{device}' is {found.silicon.target}, not {target}: drop one of the two options")
    return found


def here(index: int = 0) -> Device | None:
    """The GPU of this machine, or None where there is none.

    Raises:
        ValueError: there is one, but its tensor cores do not take fp8.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    p = torch.cuda.get_device_properties(index)
    capability = f"{p.major}.{p.minor}"
    if (p.major, p.minor) < (8, 9):
        raise ValueError(
            f"{p.name} is compute capability {capability}: its tensor cores have no fp8, which these kernels need "
            "(8.9 or newer); tune for another card with --device"
        )
    silicon = Silicon(capability, p.multi_processor_count, int(p.shared_memory_per_block_optin))  # type: ignore[attr-defined]
    # The vendor's bandwidth where the card is known by its silicon, else from the memory clock and bus.
    rate = bandwidth(silicon, p.name) or 2.0 * p.memory_clock_rate * 1e3 * p.memory_bus_width / 8
    memory = p.total_memory / (1 << 30)
    return Device(
        p.name, silicon, p.shared_memory_per_multiprocessor, p.L2_cache_size, rate, "device properties", memory
    )


def bandwidth(silicon: Silicon, product: str) -> float | None:
    """Bytes a second of a card by its silicon and its word here or the driver's name, or None where it isn't known."""
    known = (d.bandwidth for d in DEVICES.values() if d.silicon == silicon and _same_product(d.name, product))
    return next(known, None)


def _same_product(word: str, product: str) -> bool:
    return word.split("-")[-1] in product.lower()
