"""What a row of a page costs an SM when its bytes lie in shared memory: product and weighted sum over and over.

Prints cycles, nanoseconds and the clock that follows from both, by resident programs an SM and rows a product. The
loads of the real kernel are left out, so this is what they could at best be hidden behind. sm_90.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
SHARED_BYTES = 227 * 1024
SMS = 132
REPEATS = 3000


@gluon.jit
def clock(x):
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [x], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def kernel(k, q, weights, out, cycles, repeats, ROWS: gl.constexpr, PADDING: gl.constexpr, num_warps: gl.constexpr):
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64 * ROWS, 32])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    TOKENS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))[:, None]
    head = gl.arange(0, 64 * ROWS, layout=gl.SliceLayout(1, COPY))[:, None]
    dim = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))[None, :]
    keys = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], SHARED, gl.load(k + token * 128 + dim))
    queries = gl.allocate_shared_memory(gl.float8e4nv, [64 * ROWS, 128], SHARED, gl.load(q + head * 128 + dim))
    # Keeps more programs off the SM.
    padding = gl.allocate_shared_memory(gl.int8, [PADDING], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    padding.slice(0, 128).store(gl.full([128], 0, gl.int8, LINE))
    w = gl.load(weights + gl.arange(0, 64 * ROWS, layout=gl.SliceLayout(0, PRODUCT)))[None, :]
    fence_async_shared()
    cta_barrier()
    none = gl.full([64, 64 * ROWS], 0.0, gl.float32, PRODUCT)
    total = gl.full([64], 0.0, gl.float32, TOKENS)
    lane = gl.arange(0, 128, layout=LINE)
    start = clock(lane)
    for _ in range(repeats):
        acc = warpgroup_mma(keys, queries.permute((1, 0)), none, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        score = gl.sum((gl.maximum(acc, 0.0) * w).reshape([64, ROWS, 64]), axis=2)
        total += gl.convert_layout(gl.sum(score, axis=1), TOKENS)
    spent = clock(lane) - start
    program = gl.program_id(0)
    gl.store(out + program * 64 + gl.arange(0, 64, layout=TOKENS), total)
    gl.store(cycles + program * 128 + lane, spent)


def main() -> None:
    torch.manual_seed(0)
    k = torch.randn(64, 128, device="cuda").to(torch.float8_e4m3fn)
    q = torch.randn(256, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(256, device="cuda")
    for resident in (1, 2, 3, 4, 6):
        for rows in (1, 2, 4):
            programs = SMS * resident
            out = torch.empty(programs * 64, device="cuda")
            cycles = torch.empty(programs, 128, dtype=torch.int64, device="cuda")
            room = SHARED_BYTES // resident - 8192 * (1 + rows) - 4096
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(2):
                start.record()
                kernel[(programs,)](
                    k, q, weights, out, cycles, REPEATS,
                    ROWS=rows, PADDING=1 << (max(256, room).bit_length() - 1), num_warps=4,
                )  # fmt: skip
                end.record()
                torch.cuda.synchronize()
            spent, us = cycles[:, 0].double().mean().item(), start.elapsed_time(end) * 1e3
            done = REPEATS * rows * resident
            print(
                f"{resident} programs an SM, {rows} rows a product: {spent / done:6.1f} cycles, {us * 1e3 / done:6.1f} "
                f"ns a row, {spent / us / 1e3:.2f} GHz (below 1.2: not all were resident)",
                flush=True,
            )


if __name__ == "__main__":
    main()
