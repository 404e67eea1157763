"""Which calls a server of given arguments will make, from its arguments and from its model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import serving
import torch

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.models import PRO
from dsv4tune.runtime import runner, wanted
from dsv4tune.runtime.kernels import key_of

SILICON = DEVICES["h200"].silicon
BOTH = ("indexer", "mla_decode")


def test_a_million_tokens_of_context() -> None:
    server = wanted.server(1 << 20, tp=8)
    found = server.wanted(SILICON, BOTH)
    assert len(server.rows) == 52 and server.columns == 262_208 == ops.get("indexer").width(1 << 20, 0)
    assert len(found) == 52 * 4
    keys = {key for one in found for key in one.keys}
    assert ("indexer", 512, 64, 262_208) in keys
    assert ("mla_decode", 64, 8, (128, 256, 512, 64)) in keys  # as sm_120 calls above 64 rows
    assert ("mla_decode", 64, 64, (128, 256, 8256, 2)) in keys  # padded
    assert ("mla_decode", 1, 64, (128, 256, 0, 0)) in keys  # the window alone


def test_draft_tokens_multiply_rows() -> None:
    server = wanted.server(131_072, tp=1, draft_tokens=4)
    assert server.rows == tuple(4 * size for size in wanted.CAPTURED_DRAFTS) and server.heads == (64,)
    assert all(not one.shown for one in server.wanted(SILICON, BOTH))  # 64 heads are not padded


def test_prefill_chunks_are_wanted_too() -> None:
    found = wanted.server(131_072, rows=[1], chunk=8192).wanted(SILICON, ["indexer"])
    assert [(one.problem.rows, one.width) for one in found] == [(1, 32_832), (8192, 0)]
    assert found[1].keys == [("indexer", 8192, 64, None)]


@pytest.mark.parametrize(("tp", "heads", "shown"), [(1, 128, ()), (2, 64, ()), (4, 32, (64,)), (8, 16, (64,))])
def test_pro_has_twice_the_heads_and_twice_the_entries(tp: int, heads: int, shown: tuple[int, ...]) -> None:
    server = wanted.server(131_072, tp=tp, rows=[1], model=PRO)
    assert server.heads == (heads,) and server.extras == ((64, 1024), (2, 1088))
    found = server.wanted(SILICON, ["mla_decode"])
    assert [getattr(one.problem, "heads", 0) for one in found] == [heads] * 2
    # What SGLang 0.5.23 pads to (deepseek_v4.py, _kernel_num_heads): 64, and a rank with 128 has no padding.
    assert all(one.shown == shown for one in found)
    assert {key[2] for one in found for key in one.keys} == {heads, *shown}


def test_ranks_that_do_not_divide_the_heads() -> None:
    with pytest.raises(ValueError, match="--tp 3 doesn't divide the 64 query heads of DeepSeek-V4-Flash"):
        wanted.server(131_072, tp=3)
    with pytest.raises(ValueError, match="--tp 256 doesn't divide the 128 query heads of DeepSeek-V4-Pro"):
        wanted.server(131_072, tp=256, model=PRO)


def test_shapes_that_no_kernel_serves_are_left_out() -> None:
    server = wanted.Server(12, (1, 1 << 20), (), (8,), ((64, 512), (3, 512)))
    assert [one.problem.rows for one in server.wanted(SILICON, BOTH)] == [1, 1]


# -- read off a model runner ------------------------------------------------------------------------------------


def test_a_runner_says_what_it_will_call(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(model_type="deepseek_v4", compress_ratios=[0, 4, 128, 4], index_topk=1024)
    one = serving.model_runner(
        model_config=SimpleNamespace(hf_text_config=config),
        decode_num_tokens_per_req=lambda: 4,
        server_args=SimpleNamespace(chunked_prefill_size=8192),
    )
    server, notes = runner.server_of(one, [1, 2, 8])
    assert server.rows == (1, 2, 4, 8, 32) and server.prefill_rows == (8192,) and server.heads == (8,)
    assert server.extras == ((0, 0), (64, 1024), (2, 64)) and server.window == (128, 256)
    assert notes == []


def test_pages_of_the_window_are_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(get_swa_key_bytes_per_token=lambda: 584, get_swa_key_page_size=lambda: 64)
    assert runner.server_of(serving.model_runner(token_to_kv_pool=pool), [1])[0].window == (128, 64)


def test_what_is_unknown_is_assumed_and_said() -> None:
    def broken() -> int:
        raise RuntimeError("no bags")

    server, notes = runner.server_of(serving.model_runner(decode_num_tokens_per_req=broken))
    assert server.rows == wanted.CAPTURED
    assert len(notes) == 2 and "no bags" in notes[0] and "default ones assumed" in notes[1]


def test_real_heads_are_those_of_mla_layers() -> None:
    class Other(torch.nn.Module):
        tp_q_head_num, qk_head_dim = 32, 128

    model = torch.nn.Sequential(serving.Layer(8), Other(), serving.Layer(8))
    assert runner.real_heads(serving.model_runner(model=model)) == (8,)
    assert runner.real_heads(SimpleNamespace()) == ()


def test_keys_of_an_op_are_those_that_its_calls_look_for() -> None:
    problem: Any = serving.problem_of("mla_decode")
    assert key_of(problem, 0) == ("mla_decode", 3, 8, (128, 256, 512, 64))
    assert key_of(problem, 0, 64) == ("mla_decode", 3, 64, (128, 256, 512, 64))
