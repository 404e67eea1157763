"""Autotuning and code generation for DeepSeek-V4's decode kernels under SGLang."""

from importlib import metadata

try:
    __version__ = metadata.version("dsv4tune")
except metadata.PackageNotFoundError:  # an uninstalled clone
    __version__ = "0+unknown"
