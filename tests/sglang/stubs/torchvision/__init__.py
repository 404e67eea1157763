"""Stands in for torchvision, whose wheels need CUDA torch: SGLang imports its names, and these tests call none."""

from typing import Any


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Names):
    """Every name of these modules, and every attribute of it."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
