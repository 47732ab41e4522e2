"""Compiles: none where others wait, executables bounded in memory and on disk."""

from __future__ import annotations

import dataclasses
import gc
import os
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import OPTIONS, Greedy, Listener, engine, load, reference_greedy

from pie_xla.engine.api import PassRequest, Row
from pie_xla.engine.device_words import DeviceWords
from pie_xla.engine.engine import Engine
from pie_xla.engine.executables import ExecutableStore, Key
from pie_xla.engine.programs import NICE
from pie_xla.eta.types import DType, TensorType

PROMPT = [5, 17, 80, 3, 3, 41]


@pytest.fixture(scope="module")
def model():
    return load()


def one_pass(client, listener, program):
    ws, pipe = client.new_set(), client.new_pipeline()
    ticket = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=program))
    value = int(listener.wait(ticket)[0])
    client.release(ticket)
    client.drop_set(ws)
    client.close_pipeline(pipe)
    return value


def program_keys(served: Engine) -> list[Key]:
    held = served.default.table.keys()
    return [key for key in held if key.kind == "program"]


def test_many_programs_leave_a_bounded_number_of_executables(model):
    served = engine(model, dataclasses.replace(OPTIONS, max_programs=3))
    try:
        listener = Listener()
        client = served.client("", listener)
        expected = reference_greedy(model.lowered, model.params, PROMPT, 1)[0]
        for i in range(8):
            assert one_pass(client, listener, Greedy(key=f"bounded{i}")) == expected
        served.settle()
        gc.collect()
        stats = served.stats()
        assert len(program_keys(served)) == 3 and stats["programs"] == 3 and stats["evicted programs"] == 5
        # One that comes back is loaded, not compiled.
        compiled, loaded = stats["compiled"]["program"], stats["loaded"].get("program", 0)
        assert one_pass(client, listener, Greedy(key="bounded0")) == expected
        stats = served.stats()
        assert stats["compiled"]["program"] == compiled and stats["loaded"]["program"] == loaded + 1
        # The row selection that all of them share has stayed.
        assert stats["misses"] == {}
    finally:
        served.close()


def test_a_program_with_passes_is_not_evicted(model):
    served = engine(model, dataclasses.replace(OPTIONS, max_programs=1))
    try:
        listener = Listener()
        client = served.client("", listener)
        go = threading.Event()
        served.post(lambda door: go.wait(30))
        ws, pipe = client.new_set(), client.new_pipeline()
        mine = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy(key="waiting")))
        for i in range(3):
            served.default.programs.entry(Greedy(key=f"other{i}"))
        gc.collect()
        assert any(entry.program.key.startswith("waiting") for entry in served.default.programs.entries())
        go.set()
        assert int(listener.wait(mine)[0]) == reference_greedy(model.lowered, model.params, PROMPT, 1)[0]
    finally:
        served.close()


def test_evicted_programs_nobody_waits_for_are_not_compiled(model):
    """10,000 distinct programs of a hostile client cost neither memory nor compiles once it is gone."""
    served = engine(model, dataclasses.replace(OPTIONS, max_programs=2))
    try:
        programs = served.default.programs
        stop = threading.Event()
        for _ in range(2):
            programs._pool.submit(stop.wait, 30)  # the compile threads are busy
        for i in range(10_000):
            programs.entry(Greedy(key=f"hostile{i}-"))
        gc.collect()
        assert len(programs.entries()) == 2 and programs.evicted == 9_998
        before = served.stats()["compiled"].get("program", 0)
        stop.set()
        end = time.monotonic() + 30
        while not all(entry.ready for entry in programs.entries()) and time.monotonic() < end:
            time.sleep(0.01)
        assert served.stats()["compiled"]["program"] == before + 2
    finally:
        served.close()


def test_the_disk_keeps_what_was_used_last(tmp_path: Path):
    store = ExecutableStore(tmp_path, "key", [], limit=2_500)
    for i, name in enumerate("abcd"):
        path = tmp_path / f"{name}.xla"
        path.write_bytes(b"x" * 1000)
        os.utime(path, (i, i))
    os.utime(tmp_path / "a.xla", (100, 100))  # used again
    (tmp_path / "remembered.json").write_bytes(b"x" * 9000)  # not an executable
    assert store.prune() == 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xla", "d.xla", "remembered.json"]
    assert ExecutableStore(tmp_path, "key", []).prune() == 0
    # What was just written stays, however small the limit is.
    assert ExecutableStore(tmp_path, "key", [], limit=1).prune(tmp_path / "d.xla") == 1000
    assert (tmp_path / "d.xla").exists()


def test_a_compile_counts_as_use_of_what_is_loaded(model, tmp_path: Path):
    first = Engine(model, OPTIONS, store=tmp_path)
    first.start(warm=((1, 1),))
    first.close()
    [path] = tmp_path.glob("step-*.xla")
    os.utime(path, (1, 1))
    second = Engine(model, OPTIONS, store=tmp_path)
    second.start(warm=((1, 1),))
    second.close()
    assert path.stat().st_mtime > 1e9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities per thread")
def test_compile_threads_step_back(model):
    served = engine(model)
    try:
        heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        served.default.programs._pool.submit(
            lambda: heard.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert heard.get(timeout=10) == max(mine, NICE) and mine < NICE
    finally:
        served.close()


@pytest.mark.parametrize("count", [1, 2, 8, 9, 511, 513, 1100])
def test_words_of_any_size_move_without_a_compile(model, count):
    served = engine(model, dataclasses.replace(OPTIONS, word_count=1111))
    try:
        device: DeviceWords = served.default.words
        rng = np.random.default_rng(count)
        everything = rng.integers(0, 1 << 31, 1111).astype(np.int32)
        device.poke(everything, 0)
        for at in (0, 3, 1111 - count):
            if at + count > 1111:
                continue
            values = rng.integers(0, 1 << 31, count).astype(np.int32)
            everything[at : at + count] = values
            device.poke(values, at)
            np.testing.assert_array_equal(device.peek(at, count).result(), values.view(np.uint32))
        np.testing.assert_array_equal(np.asarray(device.array), everything.view(np.uint32))
        assert served.stats()["misses"] == {}
    finally:
        served.close()


def test_channels_of_odd_sizes_miss_nothing(model):
    served = engine(model)
    try:
        listener = Listener()
        client = served.client("", listener)
        channel = client.new_channel(TensorType(DType.I32, (37,)), 2)
        client.put_channel(channel, np.arange(37, dtype=np.int32))
        got = listener.wait(client.take_channel(channel))[0]
        np.testing.assert_array_equal(got, np.arange(37))
        assert served.stats()["misses"] == {}
    finally:
        served.close()
