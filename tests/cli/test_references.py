"""The references' prompts through the whole of it: greedy ids and first logits equal transformers' (float32)."""

from __future__ import annotations

import fcntl
import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pie_xla.config import Config
from pie_xla.launch import Event, Failed, Launch, Returned
from pie_xla.progress import Silent
from pie_xla.timings import Timings

pytestmark = pytest.mark.model

REFERENCE = Path(__file__).parents[1] / "hub" / "reference_logits.json"
MODELS: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))["models"]
MODES = pytest.mark.parametrize("native", [False, True], ids=["sandboxed", "native"])
PROGRAM = """
from inferlet import chat, model
from inferlet.eta import (ForwardPass, Pipeline, StateGeometry, WorkingSet, exp, intrinsics, log, reduce_argmax,
                          reduce_max, reduce_sum, sub, add, top_k)


def first():
    logits = intrinsics.output(0, "logits")
    most = reduce_max(logits)
    values, ids = top_k(logits, 5)
    return reduce_argmax(logits), values, ids, add(most, log(reduce_sum(exp(sub(logits, most)))))


def later():
    return reduce_argmax(intrinsics.output(0, "logits"))


async def main(input):
    prompt = input["prompt"]
    if input["chat"]:
        tokens = chat.render([{"role": "user", "content": prompt}])
    else:
        tokens = chat.prefix() + model.encode(prompt)
    given = list(tokens)
    ws, pipe, ids, top = WorkingSet(), Pipeline(), [], None
    for _ in range(32):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(later if ids else first)
        pipe.submit(fwd)
        if ids:
            token = await out
        else:
            token, values, winners, total = [await one for one in out]
            top = {"values": values, "ids": winners, "total": total}
        ids.append(token)
        tokens = [token]
    return {"given": given, "ids": ids, "top": top}
"""


def check(result: dict[str, Any], case: dict[str, Any]) -> None:
    assert result["given"] == case["input_ids"]
    assert len(case["greedy_ids"]) == 32 and result["ids"] == case["greedy_ids"]
    assert result["top"]["ids"] == [index for index, _ in case["first_logits_top5"]]
    assert result["top"]["values"] == pytest.approx([value for _, value in case["first_logits_top5"]], abs=2e-3)
    assert result["top"]["total"] == pytest.approx(case["first_logits_logsumexp"], abs=2e-3)


@MODES
@pytest.mark.parametrize("case", MODELS["smollm2-135m-instruct"], ids=["raw", "chat"])
def test_smollm2(run_inferlet: Callable[..., Any], case: dict[str, Any], native: bool) -> None:
    outcome = run_inferlet(PROGRAM, {"prompt": case["prompt"], "chat": case["chat"]}, native)
    assert outcome.failure is None
    check(outcome.result, case)


@pytest.mark.slow
def test_gemma3(real_config: Config) -> None:
    from pie_xla.hub import GEMMA_SOURCE, Store, import_model
    from pie_xla.runtime import open_runtime

    with (real_config.environment.data_dir / "import.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entry = import_model(GEMMA_SOURCE, Store(real_config.store_dir))
    [case] = MODELS[entry.name]
    with open_runtime(real_config, entry.name, progress=Silent(), timings=Timings()) as runtime:
        for native in (False, True):
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            given = {"prompt": case["prompt"], "chat": case["chat"]}
            runtime.launch(Launch(PROGRAM, "main.py", given, native), events.put)
            while not isinstance(event := events.get(timeout=300), Returned | Failed):
                pass
            assert isinstance(event, Returned), event
            check(event.value, case)
