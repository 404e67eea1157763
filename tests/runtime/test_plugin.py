"""What a server gets when all is well: prepared before capture, answered from the table, its own kernels elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import serving
import torch
from serving import HEADS, ROWS, THEIRS, WIDTH, FakeMachine

from dsv4tune.codegen import ops
from dsv4tune.codegen.ops import indexer_check, mla_decode_check
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeCall
from dsv4tune.runtime import NotReadyError, kernels, paged_mqa_logits, plugin, prepare, sparse_mla_decode
from dsv4tune.tuned.records import Range


def prepared(database: Path, runner: Any = None, **entry: Any) -> None:
    for kernel in ("indexer", "mla_decode"):
        serving.write_entry(database, kernel, **entry)
    plugin.prepare_runner(runner or serving.model_runner(), [ROWS], FakeMachine())


def test_calls_are_answered_from_the_table(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(database)
    call = serving.indexer_call()
    got = plugin.indexer(serving.their_indexer, *serving.indexer_arguments(call))
    problem: Any = serving.problem_of("indexer")
    for row, length in enumerate(call.seq_lens.tolist()):
        want = indexer_check.reference(problem, call, row, length)[0]
        torch.testing.assert_close(got[row, :length].double(), want, rtol=1e-6, atol=1e-6)
    assert not [record for record in caplog.records if record.levelname != "INFO"]
    choices = [record.message for record in caplog.records if "tuned.db" in record.message]
    assert len(choices) == 2 and "3.00/4.00 us at 128" in choices[0] and "0.900 of tilelang" in choices[0]
    assert sum("table " in record.message and "2 of 2 shapes" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("padded", [HEADS, 64])
def test_padded_heads_are_known_from_the_runner(database: Path, padded: int) -> None:
    prepared(database)
    words = serving.mla_words(padded)
    out, lse = plugin.mla_decode(serving.their_mla_decode, **words)
    assert lse is None and out.shape == (ROWS, 1, padded, 512)
    call = MlaDecodeCall(
        words["q"][:, 0], words["k_cache"], words["indices"][:, 0], words["topk_length"], words["extra_k_cache"],
        words["extra_indices_in_kvcache"][:, 0], words["extra_topk_length"], words["attn_sink"], 512**-0.5, out[:, 0],
    )  # fmt: skip
    problem: Any = serving.problem_of("mla_decode")
    short = MlaDecodeCall(**{**vars(call), "q": call.q[:, :HEADS], "sink": call.sink[:HEADS]})
    assert mla_decode_check.verify(problem, call, mla_decode_check.expect(problem, short)).ok


def test_shapes_of_calls_that_are_taken(database: Path) -> None:
    """Lengths as DeepGEMM gets them, with stride 2, and fp8 caches are those of SGLang too."""
    prepared(database)
    call = serving.indexer_call()
    arguments = serving.indexer_arguments(call)
    want = paged_mqa_logits(*arguments)
    live = torch.arange(WIDTH)[None] < call.seq_lens[:, None]
    spaced = torch.stack([call.seq_lens, call.seq_lens], dim=1)[:, 0]
    for lens in (call.seq_lens[:, None], spaced, spaced[:, None]):
        got = paged_mqa_logits(*[*arguments[:3], lens, *arguments[4:]])
        assert torch.equal(got[live], want[live])
    words = serving.mla_words()
    fp8 = {name: words[name].view(torch.float8_e4m3fn) for name in ("k_cache", "extra_k_cache")}
    a, b = sparse_mla_decode(**words)[0], sparse_mla_decode(**{**words, **fp8})[0]
    assert torch.equal(a[:, :, :HEADS], b[:, :, :HEADS])


def test_drop_in_functions_say_what_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match=f"{ROWS} rows of {WIDTH} columns"):
        paged_mqa_logits(*serving.indexer_arguments(serving.indexer_call()))
    with pytest.raises(NotReadyError, match="64 heads, window 128 in pages of 256, extra 512 in pages of 64"):
        sparse_mla_decode(**serving.mla_words())


def test_prepare_fills_the_table_without_a_plugin(database: Path) -> None:
    for kernel in ("indexer", "mla_decode"):
        serving.write_entry(database, kernel)
    problems = [serving.problem_of("indexer"), serving.problem_of("mla_decode")]
    choices = prepare(problems, WIDTH, machine=FakeMachine())
    assert [choice.variant is not None for choice in choices] == [True, True]
    assert paged_mqa_logits(*serving.indexer_arguments(serving.indexer_call())).shape == (ROWS, WIDTH)
    words = serving.mla_words()
    with pytest.raises(NotReadyError):
        sparse_mla_decode(**words)  # who passes padded heads says how many are real
    assert sparse_mla_decode(**words, heads=HEADS)[0].shape == (ROWS, 1, 64, 512)


def test_prepare_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fast'"):
        prepare([], policy="fast")  # type: ignore[arg-type]
    other = ops.get("indexer").problem(1, serving.DEVICES["h200"].silicon)
    with pytest.raises(ValueError, match="different silicon"):
        prepare([serving.problem_of("indexer"), other], WIDTH)
    with pytest.raises(ValueError, match="needs width"):
        prepare([serving.problem_of("indexer")])
    assert prepare([]) == []


def test_a_prompts_chunk_is_served_whatever_its_columns(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up to those that its entry was timed over; a launch that depends on them is none for prompts."""
    rows, op = 1024, ops.get("indexer")
    problem: Any = serving.problem_of("indexer", rows)
    independent = op.default(problem, serving.CARD).with_(schedule="split", splits=1, programs_per_sm=0)
    over = Range(width=2048, lengths=[2048], weights=[1.0], causal=True)
    runner = serving.model_runner(server_args=SimpleNamespace(chunked_prefill_size=rows))
    serving.write_entry(database, rows=rows, config=dict(independent), range=over)
    plugin.prepare_runner(runner, [ROWS], FakeMachine())
    variant = kernels.TABLE.find(("indexer", rows, 64, None))
    assert variant is not None and variant.width == 2048
    call = serving.indexer_call([5] * rows)
    arguments = serving.indexer_arguments(call)
    for width in (WIDTH, 640):
        got = paged_mqa_logits(*[*arguments[:6], width, False])
        want = indexer_check.reference(problem, call, rows - 1, 5)[0]
        torch.testing.assert_close(got[-1, :5].double(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotReadyError):
        paged_mqa_logits(*[*arguments[:6], 2112, False])


def test_a_launch_that_depends_on_the_columns_is_none_for_prompts(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = 1024
    over = Range(width=2048, lengths=[2048], weights=[1.0], causal=True)
    serving.write_entry(database, rows=rows, range=over)  # a page grid
    runner = serving.model_runner(server_args=SimpleNamespace(chunked_prefill_size=rows))
    plugin.prepare_runner(runner, [ROWS], FakeMachine())
    assert kernels.TABLE.find(("indexer", rows, 64, None)) is None
    assert any("differ from prompt to prompt" in record.message for record in caplog.records)


def test_a_draft_model_extends_the_table_and_replaces_nothing(database: Path) -> None:
    prepared(database)
    first = dict(kernels.TABLE.ready)
    serving.write_entry(database, "indexer", rows=5)
    plugin.prepare_runner(serving.model_runner(is_draft_worker=True), [ROWS, 5], FakeMachine())
    assert all(kernels.TABLE.ready[key] is variant for key, variant in first.items())
    assert kernels.TABLE.find(("indexer", 5, 64, WIDTH)) is not None


def test_heads_that_two_models_mean_differently_are_served_to_neither(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(database)
    problem: Any = ops.get("mla_decode").problem(ROWS, serving.CARD.silicon, heads=16, extra_width=512)
    serving.write_entry(database, "mla_decode", problem=problem.to_json(), problem_key=problem.key)
    runner = serving.model_runner(model=torch.nn.Sequential(serving.Layer(16)))
    plugin.prepare_runner(runner, [ROWS], FakeMachine())
    assert sum("two models mean different heads" in record.message for record in caplog.records) == 1
    out, _ = plugin.mla_decode(serving.their_mla_decode, **serving.mla_words(64))
    assert bool((out == THEIRS).all())
    out, _ = plugin.mla_decode(serving.their_mla_decode, **serving.mla_words(HEADS))
    assert not bool((out == THEIRS).any())


def test_a_role_switch_prepares_its_sizes(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.write_entry(database)
    asked: list[Any] = []
    monkeypatch.setattr(plugin, "prepare_runner", lambda runner, sizes=None: asked.append(sizes))
    runner = SimpleNamespace(decode_cuda_graph_captured=False)
    assert plugin.before_later_capture(lambda runner, bs: bs, runner, [4, 8]) == [4, 8]
    runner.decode_cuda_graph_captured = True
    assert plugin.before_later_capture(lambda runner, capture_bs: 7, runner, capture_bs=[4]) == 7
    assert asked == [[4, 8]]


def test_a_model_of_another_kind_is_left_alone(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="llama"))
    plugin.prepare_runner(serving.model_runner(model=torch.nn.Linear(1, 1), model_config=config), [ROWS], FakeMachine())
    assert [record.message for record in caplog.records] == ["dsv4tune: this model is not DeepSeek-V4: nothing to do"]


def test_other_uses_of_the_shared_attention_function_are_not_ours(database: Path) -> None:
    prepared(database)
    dense = {"q": torch.zeros(ROWS, 1, 64, 512), "indices": None, "block_table": torch.zeros(1)}
    assert bool((plugin.mla_decode(serving.their_mla_decode, **dense)[0] == THEIRS).all())


# -- switches ---------------------------------------------------------------------------------------------------


def answers(kernel: str) -> bool:
    """Whether ours did."""
    if kernel == "indexer":
        got = plugin.indexer(serving.their_indexer, *serving.indexer_arguments(serving.indexer_call()))
    else:
        got = plugin.mla_decode(serving.their_mla_decode, **serving.mla_words())[0]
    return not bool((got == THEIRS).all())


@pytest.mark.parametrize(
    ("variables", "served"),
    [
        ({}, "indexer mla_decode"),
        ({"DSV4TUNE_DISABLE": "indexer"}, "mla_decode"),
        ({"DSV4TUNE_DISABLE": "mla_decode"}, "indexer"),
        ({"DSV4TUNE_DISABLE": "1"}, ""),
        ({"DSV4TUNE_DISABLE": "0"}, "indexer mla_decode"),
        ({"SGLANG_SM120_MMA_INDEXER": "0"}, "mla_decode"),
        ({"SGLANG_SM120_MMA_INDEXER": "1"}, "indexer mla_decode"),
        ({"SGLANG_OPT_USE_TILELANG_INDEXER": "0", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}, "mla_decode"),
        ({"SGLANG_OPT_USE_TILELANG_INDEXER": "0", "SGLANG_SM120_MMA_INDEXER": "1"}, "indexer mla_decode"),
        ({"SGLANG_SM120_FLASHMLA_BACKEND": "triton"}, "indexer"),
    ],
)
def test_switches(variables: dict[str, str], served: str, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prepared(database)
    assert [kernel for kernel in ("indexer", "mla_decode") if answers(kernel)] == served.split()


def test_insisting_warns_where_it_can_not(
    database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_SM120_MMA_INDEXER", "1")
    plugin.prepare_runner(serving.model_runner(), [ROWS], FakeMachine())
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["dsv4tune: SGLANG_SM120_MMA_INDEXER=1, and no indexer entry can be used"]


@pytest.mark.parametrize(("policy", "taken"), [("measured", False), ("strict", False), ("predicted", True)])
def test_predicted_entries_are_opt_in(
    policy: str, taken: bool, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4TUNE_POLICY", policy)
    prepared(database, provenance="predicted", baseline=None, yardstick="byte floor", score=1.7)
    assert answers("indexer") is taken


# -- registering ------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in of SGLang's hook registry; which hook is registered where."""
    found: dict[str, Any] = {}
    module = ModuleType("sglang.srt.plugins.hook_registry")
    vars(module).update(
        HookRegistry=SimpleNamespace(register=lambda path, hook, kind: found.__setitem__(path, hook)),
        HookType=SimpleNamespace(AROUND="around"),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    return found


def test_only_targets_of_the_architecture_are_registered(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4tune.runtime.targets.Target.missing", lambda self: None)
    monkeypatch.setenv("DSV4TUNE_TARGET", "sm_120")
    plugin.register()
    names = {path.rsplit(".", 1)[1] for path in registry}
    assert "tilelang_fp8_paged_mqa_logits" in names and "flash_mla_with_kvcache_sm120" in names
    assert "flash_mla_with_kvcache" not in names and "init_cuda_graphs" in names
    assert registry["sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"] is plugin.mla_decode


@pytest.mark.parametrize(
    "variables",
    [{"DSV4TUNE_DISABLE": "1"}, *({"DSV4TUNE_TARGET": target} for target in ("sm_80", "x", "sm_\N{SUPERSCRIPT TWO}"))],
)
def test_nothing_is_registered_where_nothing_is_served(
    variables: dict[str, str], registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4tune.runtime.targets.Target.missing", lambda self: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert registry == {}


def test_missing_targets_are_told_once_and_not_registered(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "dsv4tune.runtime.targets.Target.missing",
        lambda self: "tilelang is not installed" if self.name == "tilelang" else None,
    )
    monkeypatch.setenv("DSV4TUNE_TARGET", "sm_120")
    plugin.register()
    assert not any("tilelang" in path for path in registry)
    for _ in range(2):
        plugin.before_capture(lambda runner: None, SimpleNamespace())
    assert sum("tilelang is not installed" in record.message for record in caplog.records) == 1
