"""What the workers of a Ray cluster say of themselves where there is no GPU."""

from __future__ import annotations

import os

from dsv4tune.codegen.devices import DEVICES
from dsv4tune.tools.ray_pool import Facts, versions


def of_node() -> Facts:
    """The GPU that the node's environment names, for processes that see one."""
    name = os.environ["NODE_GPU"]
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return Facts(None, "", versions())
    return Facts(DEVICES[name], f"GPU-{name}", versions())
