"""What a remembered call must have in common with a new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4tune.runtime import launch


def tensors() -> list[torch.Tensor | None]:
    aligned = torch.zeros(4096, dtype=torch.uint8)
    return [aligned[:2048].view(16, 128), torch.arange(32, dtype=torch.int32).view(4, 8), None]


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same tensor one element into its memory: not aligned."""
    return torch.zeros(t.numel() + 16, dtype=t.dtype)[1 : 1 + t.numel()].view(t.shape)


OTHERS: dict[str, Callable[[list[torch.Tensor | None]], None]] = {
    "shape": lambda t: t.__setitem__(1, torch.zeros(4, 9, dtype=torch.int32)),
    "stride": lambda t: t.__setitem__(1, torch.zeros(4, 16, dtype=torch.int32)[:, :8]),
    "dtype": lambda t: t.__setitem__(1, torch.zeros(4, 8)),
    "device": lambda t: t.__setitem__(1, torch.zeros(4, 8, dtype=torch.int32, device="meta")),
    "alignment": lambda t: t.__setitem__(0, shifted(t[0])),  # type: ignore[arg-type]
    "one more": lambda t: t.__setitem__(2, torch.zeros(1)),
    "one less": lambda t: t.__setitem__(1, None),
}


@pytest.mark.parametrize("guards", [True, False], ids=["torch's check", "without it"])
@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_call_is_bound_anew(guards: bool, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", None)
    first = tensors()
    known = launch._Known(tuple(first), [t for t in first if t is not None], 1.0, [])

    def fits(call: list[torch.Tensor | None], scalars: float = 1.0) -> bool:
        return known.fits(tuple(call), [t for t in call if t is not None], scalars)

    assert fits(first) and fits(tensors())
    assert not fits(first, 2.0)
    other = tensors()
    OTHERS[what](other)
    assert not fits(other)
