"""The SGLang plugin: hooks that answer from the table, and one that fills it before a model runner captures.

Whatever goes wrong here, the server's own function answers, and one line says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("dsv4tune")

#: What was said: a reason is told once, however many calls meet it.
_said: set[str] = set()
_lock = threading.Lock()
#: What `register` found, told by the first later hook: lines logged while plugins load are lost.
_pending: list[str] = []
#: Runners prepared so far, which number the ranks' comparisons.
_rounds = 0


def register() -> None:
    """The entry point ``sglang.srt.plugins``: registers hooks, touches no GPU and imports no kernel."""
    from dsv4tune.runtime import switches, targets

    decided = switches.read()
    _pending.extend(decided.notes)
    if not decided.kernels:
        return
    arches = [_arch(decided.target)] if decided.target else _arches()
    found, missing = targets.usable([arch for arch in arches if arch], decided.kernels)
    _pending.extend(f"not there, so not served: {line}" for line in missing)
    if not any(target.kernel for target in found) or targets.RUNNER not in found:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {targets.RUNNER: before_capture, targets.LATER: before_later_capture}
    for target in found:
        hook = hooks.get(target) or HOOKS[target.kernel]
        HookRegistry.register(target.path, hook, HookType.AROUND)


def _arch(target: str) -> int:
    digits = target.removeprefix("sm_")
    if not digits.isdecimal():
        _pending.append(f"DSV4TUNE_TARGET={target} is no capability such as sm_120; nothing is served")
        return 0
    return int(digits)


def _arches() -> list[int]:
    """Capabilities of this machine's GPUs by the driver's management library, which makes no CUDA context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    found: list[int] = []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
                found.append(major.value * 10 + minor.value)
    finally:
        nvml.nvmlShutdown()
    return sorted(set(found))


# -- calls ------------------------------------------------------------------------------------------------------

#: Our functions by kernel; empty until a runner is prepared, so that calls before that cost one dictionary access.
_ours: dict[str, Callable[..., Any]] = {}


def indexer(original: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """In the place of any of SGLang's paged MQA logits functions."""
    ours = _ours.get("indexer")
    if ours is None:
        return original(*args, **words)
    try:
        return ours(*args, **words)
    except Exception as error:
        _fall_back("indexer", error)
    return original(*args, **words)


def mla_decode(original: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """In the place of both of SGLang's sparse MLA functions; other uses of the shared one are not ours."""
    ours = _ours.get("mla_decode")
    if ours is None or args or words.get("indices") is None:
        return original(*args, **words)
    try:
        return ours(**words)
    except Exception as error:
        _fall_back("mla_decode", error)
    return original(*args, **words)


HOOKS = {"indexer": indexer, "mla_decode": mla_decode}


def _fall_back(kernel: str, error: Exception) -> None:
    from dsv4tune.codegen.compile import first_line
    from dsv4tune.runtime.kernels import NotReadyError, UnservedCallError

    if isinstance(error, NotReadyError):
        once(f"{kernel} not ready", logging.INFO, f"{error}: the server's own kernel answers such calls")
        return
    text = str(error) if isinstance(error, UnservedCallError) else f"{kernel}: {first_line(error)}"
    # The same fault of calls that differ in their numbers is one fault.
    once(re.sub(r"\d+", "#", text), logging.WARNING, f"{text}: the server's own kernel answers such calls")


def once(reason: str, level: int, text: str) -> None:
    """A line for a reason that was not told before."""
    with _lock:
        if reason in _said:
            return
        _said.add(reason)
    logger.log(level, "dsv4tune: %s", text)


# -- before capture ---------------------------------------------------------------------------------------------


def before_capture(original: Callable[..., Any], runner: Any, *args: Any, **words: Any) -> Any:
    """Around ``ModelRunner.init_cuda_graphs``: pools and attention backends are there, nothing is captured yet."""
    _prepared_for(runner)
    return original(runner, *args, **words)


def before_later_capture(original: Callable[..., Any], runner: Any, *args: Any, **words: Any) -> Any:
    """Around ``ModelRunner.ensure_decode_cuda_graphs``, by which a prefill server turns to decoding."""
    sizes = args[0] if args else words.get("capture_bs")
    if not getattr(runner, "decode_cuda_graph_captured", False):
        _prepared_for(runner, sizes)
    return original(runner, *args, **words)


def _prepared_for(runner: Any, capture_bs: Any = None) -> None:
    try:
        while _pending:
            logger.warning("dsv4tune: %s", _pending.pop(0))
        prepare_runner(runner, capture_bs)
    except Exception as error:
        once(f"start {type(error).__name__}", logging.WARNING, f"nothing is served: {type(error).__name__}: {error}")


def prepare_runner(runner: Any, capture_bs: Any = None, machine: Any = None) -> None:
    """Choose, make ready, let the ranks agree, and publish what this model runner will call."""
    from dsv4tune.runtime import dispatch, kernels, ranks, startup, switches
    from dsv4tune.runtime import runner as reading

    global _rounds
    started = time.perf_counter()
    decided = switches.read()
    if not reading.is_dsv4(runner):
        logger.info("dsv4tune: this model is not DeepSeek-V4: nothing to do")
        return
    _rounds += 1
    prepared, failure = startup.Prepared(), ""
    try:
        prepared = _ready_for(runner, decided, capture_bs, machine)
    except Exception as error:
        # Told to the other ranks below, so that none waits for this one.
        failure = f"nothing is served: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        logger.warning("dsv4tune: %s", failure)
    found = prepared.found
    digest = "failed" if failure else dispatch.digest(found)
    group = reading.ranks_of(runner)
    if group is not None:
        name = f"{group.ranks[0]}-{group.ranks[-1]}/{_rounds}"
        reason = ranks.agree(group.store, name, group.rank, group.ranks, digest, decided.rank_s)
        if reason and not failure:
            logger.warning("dsv4tune: ranks don't agree, the server's own kernels stay on all of them: %s", reason)
        if reason:
            return
    for key in kernels.TABLE.extend(found):
        logger.warning("dsv4tune: two models mean different heads by %s: the server's own kernel answers it", key)
    ours: dict[str, Callable[..., Any]] = {
        "indexer": kernels.paged_mqa_logits,
        "mla_decode": kernels.sparse_mla_decode,
    }
    _ours.update({kernel: ours[kernel] for kernel, *_ in found})
    for kernel in decided.insist:
        if not any(key[0] == kernel for key in found) and not failure:
            logger.warning("dsv4tune: SGLANG_SM120_MMA_INDEXER=1, and no %s entry can be used", kernel)
    logger.info(
        "dsv4tune: table %s, %d of %d shapes ready in %.1f s",
        *(digest, sum(c.variant is not None for c in prepared.choices), len(prepared.choices)),
        time.perf_counter() - started,
    )


def _ready_for(runner: Any, decided: Any, capture_bs: Any, machine: Any) -> Any:
    from dsv4tune.runtime import runner as reading
    from dsv4tune.runtime import startup, targets

    silicon = (machine or startup).silicon_here()
    if silicon is None:
        raise ValueError("no NVIDIA GPU here")
    served = _served(silicon.arch, decided)
    server, notes = reading.server_of(runner, capture_bs)
    for note in notes:
        logger.warning("dsv4tune: %s", note)
    wanted = server.wanted(silicon, served)
    if not wanted:
        return startup.Prepared()
    rules = startup.rules_here(decided.policy, silicon, targets.baselines(silicon.arch))

    def tell(line: str) -> None:
        logger.warning("dsv4tune: %s", line)

    chosen = startup.choose(wanted, rules, decided.database, tell)
    prepared = startup.make_ready(chosen, rules, machine or startup.Gpu(decided.jobs))
    for level, line in startup.lines(prepared.choices):
        logger.log(level, "dsv4tune: %s", line)
    return prepared


def _served(arch: int, decided: Any) -> list[str]:
    """The kernels to replace: not those for which the user picked another backend, unless they insist on ours."""
    from dsv4tune.runtime import targets

    default, running = targets.baselines(arch), targets.active(arch, os.environ)
    found = []
    for kernel in decided.kernels:
        if kernel not in default:
            logger.warning("dsv4tune: no server kernel is known for sm_%d: %s is left alone", arch, kernel)
        elif running[kernel] != default[kernel] and kernel not in decided.insist:
            set_ = [f"{name}={os.environ[name]}" for name in targets.VARIABLES[kernel] if name in os.environ]
            logger.warning("dsv4tune: %s is left to %s, as %s says", kernel, running[kernel], ", ".join(set_))
        else:
            found.append(kernel)
    return found
