"""The plugin in SGLang's real code: its hook registry, its `forward_c4_indexer` and its torch references."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import serving
import sglang_server as server
import torch
from serving import HEADS, PAGES, ROWS, WIDTH

from dsv4tune.codegen import ops
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.runtime import targets

#: All of sm_120's; what needs FlashMLA's CUDA library is none of them.
TARGETS = {target.path for target in targets.TARGETS if 12 in target.majors}


def function(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_every_target_is_hooked_in_this_process(hooked: set[str]) -> None:
    assert hooked == TARGETS


def test_hooks_reach_a_spawned_process(database: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server.worker, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(240), "no answer"
    found, right, launches = ours.recv()
    process.join(30)
    assert found == TARGETS and right and launches > 0


def test_our_kernel_answers_the_real_indexer(served: None) -> None:
    call = serving.indexer_call(server.LENGTHS)
    before = server.Interpreter.launches
    assert server.slots(server.forward_c4_indexer(call)) == server.expected_slots(call)
    assert server.Interpreter.launches == before + 1


def test_rows_that_are_not_ready_take_the_servers_own_function(served: None) -> None:
    call = serving.indexer_call((700, 20))
    before = server.Interpreter.launches
    selected = server.slots(server.forward_c4_indexer(call))
    assert server.Interpreter.launches == before
    expected = server.expected_slots(call)
    # Its arithmetic is bf16: near the 512th score it may choose others.
    assert len(selected[0] & expected[0]) >= 500 and selected[1] == expected[1]


@pytest.mark.parametrize("name", ["fp8_paged_mqa_logits_torch", "fp8_paged_mqa_logits_torch_sm120"])
def test_the_servers_torch_references_agree_within_their_rounding(served: None, name: str) -> None:
    """Ours and theirs on the same tensors, and both beside float64."""
    reference = function(f"sglang.srt.layers.attention.dsv4.indexer.{name}")
    reference = getattr(reference, "__wrapped__", reference)
    call = serving.indexer_call(server.LENGTHS, seed=3)
    arguments = serving.indexer_arguments(call)
    theirs, mine = reference(*arguments), function(targets.TILELANG.path)(*arguments)
    problem: Any = serving.problem_of("indexer")
    for row, length in enumerate(server.LENGTHS):
        if length:
            want = indexer_check.reference(problem, call, row, length)[0]
            ours = (mine[row, :length].double() - want).norm() / want.norm()
            rounded = (theirs[row, :length].double() - want).norm() / want.norm()
            assert ours < 1e-6 and 1e-4 < rounded < 2e-2


def test_a_call_of_more_than_1024_rows_enters_its_hook_for_each_part(served: None) -> None:
    """The torch function calls itself through its module; none of the parts has an entry, and all are right."""
    hooked = function(targets.TORCH_SM120.path)
    rows = 1025
    call = serving.indexer_call([5] * rows)
    got = hooked(*serving.indexer_arguments(call))
    assert got.shape == (rows, WIDTH)
    problem: Any = ops.get("indexer").problem(rows, serving.CARD.silicon)
    want = indexer_check.reference(problem, call, rows - 1, 5)[0]
    torch.testing.assert_close(got[-1, :5].double(), want, rtol=5e-2, atol=0.5)


@pytest.mark.parametrize("padded", [HEADS, 64])
def test_our_kernel_answers_the_real_attention_entry(served: None, padded: int) -> None:
    """Beside SGLang's own torch implementation, on queries padded with NaN."""
    words = serving.mla_words(padded)
    before = server.Interpreter.launches
    out = function(targets.FLASH_MLA_SM120.path)(**words)[0]
    assert server.Interpreter.launches > before
    torch_reference = function("sglang.kernels.ops.attention.flash_mla_sm120._sm120_sparse_decode_fwd")
    # Theirs reads slots past a row's length and multiplies what it masks: as a server has them, without poison.
    clean = serving.clean_words(words)
    names = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
    extra = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    theirs = torch_reference(*(clean[name] for name in (*names, *extra)))[0][:, 0, :HEADS].float()
    mine = function(targets.FLASH_MLA_SM120.path)(**clean)[0][:, 0, :HEADS].float()
    torch.testing.assert_close(out[:, 0, :HEADS].float(), mine, rtol=0, atol=0)
    assert float((mine - theirs).norm() / theirs.norm()) < 1e-2


def test_the_width_of_the_table_is_the_runners(served: None) -> None:
    from dsv4tune.runtime import kernels

    assert ("indexer", ROWS, 64, PAGES * 64) in kernels.TABLE.ready
