"""The engine's promises: faults stay home, memory is accounted, fused and strict change nothing that matters."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import CONFIG, OPTIONS, Greedy, Listener, V, engine, load, reference_greedy

from pie_xla.engine.api import FromTicket, PassError, PassRequest, Recipe, Row
from pie_xla.engine.engine import Engine
from pie_xla.engine.executables import Key
from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.eta.types import DType, Read, TensorType

PROMPT = [5, 17, 80, 3, 3, 41]
GREEDY_BODY = {
    "channels": [], "eta": 1, "ops": [["output", [], {"i": 0}], ["reduce_argmax", [0], {}]], "out": [1], "params": [],
    "reads": [[0, "logits", "f32", [V]]], "rows": 1, "single": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load()


def chain(client, prompt, n, program):
    """A run-ahead decode: n tickets, all submitted at once."""
    ws, pipe = client.new_set(), client.new_pipeline()
    tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(prompt)),), program=program))]
    for _ in range(n - 1):
        tickets.append(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=program)))
    return ws, pipe, tickets


def test_two_programs_in_one_batch_are_one_step(model):
    served = engine(model)
    try:
        listeners = [Listener(), Listener()]
        clients = [served.client("", listener) for listener in listeners]
        programs = [Greedy(), Greedy(key="other")]
        for program in programs:  # both known before they meet
            served.default.programs.build(served.default.programs.entry(program), 1)
        served.default.programs.build_step(served.default.buckets.decode[1])
        ends = [chain(c, PROMPT, 6, p)[2] for c, p in zip(clients, programs, strict=True)]
        expected = reference_greedy(model.lowered, model.params, PROMPT, 6)
        for tickets, listener in zip(ends, listeners, strict=True):
            assert [int(listener.wait(t)[0]) for t in tickets] == expected
        assert served.stats()["misses"] == {}
    finally:
        served.close()


def test_a_program_that_costs_too_much_is_refused_with_the_number(model):
    served = engine(model)
    try:
        client = served.client("a", Listener())
        ws, pipe = client.new_set(), client.new_pipeline()
        heavy = Greedy(key="heavy", cost=10**12)
        with pytest.raises(PieError, match="1,000,000,000,000 element operations"):
            client.submit(pipe, PassRequest((Row(ws, (1,)),), program=heavy))
        assert client.set_length(ws) == 0
    finally:
        served.close()


class Broken(Greedy):
    def apply(self, reads, params, cells, key, ordinal):
        raise ValueError("no such thing")


def test_a_program_that_does_not_compile_fails_alone(model):
    served = engine(model)
    try:
        listener, hears = Listener(), Listener()
        good, bad = served.client("good", listener), served.client("bad", hears)
        ws, pipe = bad.new_set(), bad.new_pipeline()
        wrong = bad.submit(pipe, PassRequest((Row(ws, (1,)),), program=Broken(key="broken")))
        _, _, tickets = chain(good, PROMPT, 4, Greedy())
        with pytest.raises(PassError, match="does not compile: no such thing"):
            hears.wait(wrong)
        assert [int(listener.wait(t)[0]) for t in tickets] == reference_greedy(model.lowered, model.params, PROMPT, 4)
    finally:
        served.close()


def test_a_client_closed_in_flight_gives_everything_back(model):
    served = engine(model)
    try:
        listener = Listener()
        for _ in range(5):
            listener = Listener()
            victim, neighbour = served.client("victim", Listener()), served.client("neighbour", listener)
            chain(victim, PROMPT, 40, Greedy())
            _, _, tickets = chain(neighbour, PROMPT, 5, Greedy())
            listener.wait(tickets[1])
            victim.close()
            assert [int(listener.wait(t)[0]) for t in tickets] == reference_greedy(
                model.lowered, model.params, PROMPT, 5
            )
            neighbour.close()
        served.settle()
        for free, used, total in served.stats()["memory"].values():
            assert (free, used) == (total, 0)
        assert served.stats()["words used"] == 0 and served.stats()["clients"] == 0
    finally:
        served.close()


def test_cancel_drops_the_rest_and_the_set_lives_on(model):
    served = engine(model)
    try:
        listener = Listener()
        client = served.client("a", listener)
        ws, pipe, tickets = chain(client, PROMPT, 60, Greedy())
        first = [int(listener.wait(t)[0]) for t in tickets[:3]]
        client.cancel_pipeline(pipe)
        outcomes = []
        for ticket in tickets[3:]:
            try:
                outcomes.append(int(listener.wait(ticket)[0]))
            except PassError as error:
                assert "cancelled" in str(error)
                break
        else:
            pytest.fail("sixty passes ended before the cancel")
        length = client.set_length(ws)
        text = [*PROMPT, *first, *outcomes]
        assert length == len(text) - 1  # the last token that was returned has not been fed
        again = client.submit(client.new_pipeline(), PassRequest((Row(ws, (text[length],)),), program=Greedy()))
        assert [int(listener.wait(again)[0])] == reference_greedy(model.lowered, model.params, text[: length + 1], 1)
        client.close()
    finally:
        served.close()


def test_a_failed_launch_that_takes_the_state_fails_its_passes_and_the_engine_goes_on(model):
    served = engine(model)
    try:
        listener, hears = Listener(), Listener()
        client, other = served.client("a", listener), served.client("b", hears)
        ws, pipe, tickets = chain(client, PROMPT, 2, Greedy())
        for ticket in tickets:
            listener.wait(ticket)
        key = served.default.programs.step_key(served.default.buckets.decode[0])
        real = served.default.table.get(key)

        def explode(params, state, words, block):
            for leaf in state["full"].values():
                leaf.delete()  # as a failing executable does with what was donated to it
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 10 bytes")

        served.default.table._ready[key] = explode
        bad = client.submit(pipe, PassRequest((Row(ws, (1,)),), program=Greedy(), line="main.py:3"))
        with pytest.raises(PassError, match=r"could not run this step: RESOURCE_EXHAUSTED.*main.py:3"):
            listener.wait(bad)
        served.default.table._ready[key] = real
        with pytest.raises(PassError, match="RESOURCE_EXHAUSTED"):  # its content is gone, and it says so
            listener.wait(client.submit(pipe, PassRequest((Row(ws, (1,)),), program=Greedy())))
        _, _, fresh = chain(other, PROMPT, 4, Greedy())
        assert [int(hears.wait(t)[0]) for t in fresh] == reference_greedy(model.lowered, model.params, PROMPT, 4)
        assert served.stats()["rebuilds"] == 1
        client.close()
        other.close()
        served.settle()
        assert all(used == 0 for _, used, _ in served.stats()["memory"].values())
    finally:
        served.close()


def test_out_of_memory_waits_for_those_who_will_finish_and_refuses_when_nobody_will(model):
    per_page = model.lowered.groups[0].bytes_per_unit
    served = engine(
        model, dataclasses.replace(OPTIONS, state_bytes=13 * per_page, memory_seconds=0.5)
    )  # 12 pages of 4 tokens
    try:
        listener, hears = Listener(), Listener()
        a, b = served.client("a", listener), served.client("b", hears)
        hold = a.new_set()
        pipe = a.new_pipeline()
        listener.wait(a.submit(pipe, PassRequest((Row(hold, tuple([1] * 32)),))))  # 8 of 12 pages, idle
        ws = b.new_set()
        with pytest.raises(PieError, match="all state memory holds 48"):
            b.submit(b.new_pipeline(), PassRequest((Row(ws, tuple([1] * 49)),)))
        refused = b.submit(b.new_pipeline(), PassRequest((Row(ws, tuple([2] * 30)),)))
        with pytest.raises(PassError, match=r"no memory.*full: \d+ of 12 free"):
            hears.wait(refused)
        waits = b.submit(b.new_pipeline(), PassRequest((Row(b.new_set(), tuple([1] * 30)),)))
        a.close()  # and what it held serves the one that waits
        hears.wait(waits)
        again = b.submit(b.new_pipeline(), PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))
        assert [int(hears.wait(again)[0])] == reference_greedy(model.lowered, model.params, PROMPT, 1)
        b.close()
    finally:
        served.close()


def test_strict_is_bit_equal_alone_and_in_company(model):
    """Every logit of the last step, alone and beside seven strangers, in one fixed shape."""
    served = engine(model, dataclasses.replace(OPTIONS, strict=True))

    class Logits(Greedy):
        def __post_init__(self):
            super().__post_init__()
            self.results = (TensorType(DType.F32, (V,)),)
            self.reads = (Read(0, "logits", (V,), DType.F32),)

        def apply(self, reads, params, cells, key, ordinal):
            return [reads[0]], []

    def run(strangers: int):
        listener = Listener()
        clients = [served.client("", listener), *(served.client("", Listener()) for _ in range(strangers))]
        for i, c in enumerate(clients[1:]):
            chain(c, PROMPT[: 1 + i % 5], 8, Greedy())
        ws, pipe = clients[0].new_set(), clients[0].new_pipeline()
        out = []
        for token in PROMPT:
            out.append(
                listener.wait(clients[0].submit(pipe, PassRequest((Row(ws, (token,)),), program=Logits(key="logits"))))[
                    0
                ]
            )
        for c in clients:
            c.close()
        served.settle()
        return np.stack(out)

    try:
        np.testing.assert_array_equal(run(0), run(7))
    finally:
        served.close()


@pytest.mark.slow
def test_a_hot_program_is_fused_by_another_process_and_its_tokens_stay(model, tmp_path: Path):
    recipe = Recipe(CONFIG, "xla", "float32", 4, "unrolled")
    hot = dataclasses.replace(OPTIONS, fuse_after=3)
    served = Engine(dataclasses.replace(model, recipe=recipe), hot, store=tmp_path / "store")
    served.start(warm=((1, 1), (1, 16)))
    try:
        program = EtaProgram.from_json(json.dumps({"body": GREEDY_BODY}))
        listener = Listener()
        client = served.client("a", listener)
        expected = reference_greedy(model.lowered, model.params, PROMPT, 12)
        _, _, tickets = chain(client, PROMPT, 12, program)
        assert [int(listener.wait(t)[0]) for t in tickets] == expected
        entry = served.default.programs.entry(program)
        end = time.monotonic() + 120
        while not entry.fused and time.monotonic() < end:
            assert not served.default.fusion.failures
            time.sleep(0.1)
        before = served.stats()["fused launches"]
        _, _, tickets = chain(client, PROMPT, 12, program)
        assert [int(listener.wait(t)[0]) for t in tickets] == expected
        assert served.stats()["fused launches"] - before >= 11
        assert Key("fused", program.key, "1x1") in set(served.default.table.keys())
        client.close()
    finally:
        served.close()


def test_executables_come_back_from_disk(model, tmp_path: Path):
    first = Engine(model, OPTIONS, store=tmp_path)
    first.start(warm=((1, 1),))
    first.close()
    assert first.stats()["compiled"]["step"] == 1
    second = Engine(model, OPTIONS, store=tmp_path)
    second.start(warm=((1, 1),))
    assert "step" not in second.stats()["compiled"] and second.stats()["loaded"]["step"] == 1
    second.close()
    for path in tmp_path.glob("step-*"):
        path.write_bytes(b"garbage")
    third = Engine(model, OPTIONS, store=tmp_path)
    third.start(warm=((1, 1),))
    assert third.stats()["compiled"]["step"] == 1
    third.close()
    tmp_path.chmod(0o777)
    with pytest.raises(PieError, match="can be written by others"):
        Engine(model, OPTIONS, store=tmp_path)


class Gate:
    """A launch's faults, which cannot be read before the launch after it has been dispatched."""

    def __init__(self, faults, following: threading.Event, waited: list[bool]) -> None:
        self._faults, self._following, self._waited = faults, following, waited

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._waited.append(self._following.wait(20))
        return np.asarray(self._faults)


def test_the_next_step_is_dispatched_before_this_one_is_read(model, monkeypatch: pytest.MonkeyPatch):
    """Reading step n waits until step n + 1 is on its way: only a host that is not in the loop gets through."""
    served = engine(model)
    steps = 8
    events = [threading.Event() for _ in range(steps + 1)]
    events[steps].set()  # nothing follows the last one
    waited: list[bool] = []
    launches = itertools.count()
    launch = served.default.launcher.launch

    def gated(*args, **kwargs):
        flight = launch(*args, **kwargs)
        n = next(launches)
        events[n].set()
        flight.faults = Gate(flight.faults, events[n + 1], waited)
        return flight

    try:
        client = served.client("", listener := Listener())
        warm = chain(client, PROMPT, 3, Greedy())[2]
        listener.wait(warm[-1])
        served.settle()
        monkeypatch.setattr(served.default.launcher, "launch", gated)
        tickets = chain(client, PROMPT, steps, Greedy())[2]
        got = [int(listener.wait(ticket)[0]) for ticket in tickets]
        assert got == reference_greedy(model.lowered, model.params, PROMPT, steps)
        assert waited == [True] * steps
    finally:
        for event in events:
            event.set()
        served.close()
