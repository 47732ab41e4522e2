"""The timers that end a guest's slice."""

from __future__ import annotations

import time

import pytest
from wasmtime import Store
from wasmtime.component import Component, Linker

from pie_xla.process.wasm.engine_config import new_engine
from pie_xla.process.wasm.slices import NativeTimer, ThreadTimer

SPIN = """(component
  (core module $m (func (export "spin") (loop $again (br $again))))
  (core instance $i (instantiate $m))
  (func (export "spin") (canon lift (core func $i "spin"))))"""


@pytest.mark.parametrize("kind", [NativeTimer, ThreadTimer])
@pytest.mark.parametrize("late", [0.0, 0.03], ids=["at once", "late"])
def test_a_spinning_function_is_interrupted(kind, late):
    engine = new_engine()
    timer = kind(engine)
    store = Store(engine)
    store.set_epoch_deadline(1000)
    function = Linker(engine).instantiate(store, Component(engine, SPIN)).get_func(store, "spin")
    timer.begin(0.005)
    time.sleep(late)  # the thread lost the processor before it set the deadline
    store.set_epoch_deadline(timer.ticks)
    started = time.monotonic()
    with pytest.raises(Exception, match="interrupt"):
        function(store)
    assert time.monotonic() - started < 1.0
    timer.end()
    timer.close()


@pytest.mark.parametrize("kind", [NativeTimer, ThreadTimer])
def test_no_processor_time_when_no_guest_runs(kind):
    timer = kind(new_engine())
    timer.begin(0.005)
    timer.end()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02
    timer.close()
