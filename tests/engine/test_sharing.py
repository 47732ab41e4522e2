"""Prefixes that sets share: by their tokens, and by a name. What is shared is computed once and reads as if it were one's own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_state_changes import Logits, after, run, same
from tiny import OPTIONS, Greedy, Listener, V, engine, load

from pie_xla.engine.api import Geometry, PassError, PassRequest, Row
from pie_xla.errors import PieError

rng = np.random.default_rng(3)
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 10,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
}


def prompt(n: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, V, n)]


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def served(model):
    made = engine(model)
    yield made
    made.close()


@pytest.fixture
def account(served):
    listener = Listener()
    client = served.client("test", listener, tenant="a")
    yield client, listener
    client.close()
    for tenant in ("a", "b"):
        for name in served.named.names(tenant, "tiny"):
            served.named.withdraw(tenant, "tiny", name)
    served.settle()
    for free, used, total in served.stats()["memory"].values():
        assert used == 0 and free == total
    assert served.stats()["words used"] == 0


def computed(served) -> int:
    return served.stats()["tokens"]


def test_a_known_prefix_is_not_computed_again(account, served):
    client, listener = account
    tokens = prompt(40, 11)
    first = after(client, listener, tokens)
    before, hits = computed(served), served.stats()["prefix tokens"]
    again = after(client, listener, tokens)
    np.testing.assert_allclose(first, again, atol=2e-5)
    assert served.stats()["prefix tokens"] - hits == 36  # 9 pages of 4; the last token is always computed
    assert computed(served) - before == 4
    other = after(client, listener, tokens[:20] + prompt(9, 12))
    assert served.stats()["prefix tokens"] - hits == 56
    alone = served.client("b", hear := Listener(), tenant="b")  # what another tenant has asked is nobody's business
    before = computed(served)
    same(after(alone, hear, tokens[:20] + prompt(9, 12)), other)
    assert computed(served) - before == 29
    alone.close()


def test_a_prefix_grows_on_over_passes_and_after_truncation(account, served):
    client, listener = account
    tokens = prompt(30, 13)
    ws = client.new_set()
    run(client, listener, ws, tokens[:16])
    run(client, listener, ws, [1, 2, 3])
    client.truncate_set(ws, 16)
    run(client, listener, ws, tokens[16:])
    hits = served.stats()["prefix tokens"]
    same(after(client, listener, [*tokens, 5]), run(client, listener, ws, [5]))
    assert served.stats()["prefix tokens"] - hits == 28
    fork = client.new_set()
    run(client, listener, fork, tokens[:16])  # ends with a full page: what follows may be shared, too
    hits = served.stats()["prefix tokens"]
    run(client, listener, fork, [*tokens[16:], 5])
    assert served.stats()["prefix tokens"] - hits == 12


def test_processes_that_come_at_once_compute_their_common_prefix_once(account, served):
    client, listener = account
    tokens, pipe = prompt(60, 14), client.new_pipeline()
    before = computed(served)
    sets = [client.new_set() for _ in range(6)]
    tickets = [
        client.submit(pipe, PassRequest((Row(ws, (*tokens, i)),), program=Greedy())) for i, ws in enumerate(sets)
    ]
    got = [int(listener.wait(ticket)[0]) for ticket in tickets]
    assert computed(served) - before == 61 + 5 * 1
    for i in (0, 5):
        assert got[i] == int(np.argmax(after(client, listener, [*tokens, i])))


def test_whoever_waits_goes_on_when_the_one_who_computes_is_cancelled(account, served):
    client, listener = account
    tokens = prompt(60, 15)
    first, second = client.new_pipeline(), client.new_pipeline()
    a = client.submit(first, PassRequest((Row(client.new_set(), tuple(tokens)),), program=Greedy()))
    b = client.submit(second, PassRequest((Row(client.new_set(), tuple(tokens)),), program=Greedy()))
    client.cancel_pipeline(first)
    assert int(listener.wait(b)[0]) == int(np.argmax(after(client, listener, tokens)))
    try:
        listener.wait(a)
    except PassError as error:
        assert "cancelled" in str(error)


def test_cached_pages_serve_whoever_needs_memory(model):
    per_page = model.lowered.groups[0].bytes_per_unit
    served = engine(model, dataclasses.replace(OPTIONS, state_bytes=13 * per_page))  # 12 pages of 4 tokens
    try:
        client, listener = served.client("c", Listener()), None
        listener = client.on_event
        for seed in range(5):
            after(client, listener, prompt(30, 100 + seed))
            served.settle()
            free, used, total = served.stats()["memory"]["full"]
            assert (free, used, total) == (12, 0, 12)
        assert 0 < served.stats()["cached"]["full"] <= 12
        hits = served.stats()["prefix tokens"]
        after(client, listener, prompt(30, 104))  # the latest is still there
        assert served.stats()["prefix tokens"] - hits == 28
        client.close()
    finally:
        served.close()


def test_windows_share_prefixes_too():
    model = load(GEMMA)
    served = engine(model, name="gemma-sharing")
    try:
        client = served.client("c", listener := Listener())
        tokens = prompt(50, 16)
        first = after(client, listener, tokens)
        hits = served.stats()["prefix tokens"]
        np.testing.assert_allclose(after(client, listener, tokens), first, atol=2e-5)
        assert served.stats()["prefix tokens"] - hits == 48
        ws = client.new_set()
        run(client, listener, ws, tokens[:30])
        client.evict_set(ws, [(4, 12)])
        one = run(client, listener, ws, tokens[30:], readout=[19])
        two = client.new_set()
        run(client, listener, two, tokens[:30])
        from pie_xla.engine.api import Sight

        other = run(client, listener, two, tokens[30:], sight=Sight(spans=((0, 4), (12, 30))), readout=[19])
        np.testing.assert_allclose(one, other, atol=2e-4)
        client.close()
        served.settle()
        for free, used, total in served.stats()["memory"].values():
            assert used == 0 and free == total
    finally:
        served.close()


def test_a_published_set_is_opened_by_name_within_its_tenant(account, served):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, prompt(21, 17))
    client.publish_set(ws, "system")
    run(client, listener, ws, [1])
    other = served.client("other", hear := Listener(), tenant="a")
    opened = other.open_set("system")
    assert opened is not None and other.set_length(opened) == 21
    same(run(other, hear, opened, [50]), after(client, listener, [*prompt(21, 17), 50]))
    stranger = served.client("stranger", Listener(), tenant="b")
    assert stranger.open_set("system") is None
    assert other.open_set("nothing") is None
    client.publish_set(ws, "system")  # replaces
    again = other.open_set("system")
    assert again is not None and other.set_length(again) == 22
    assert other.withdraw_set("system") and not other.withdraw_set("system")
    assert other.open_set("system") is None
    other.close()
    stranger.close()


def test_a_published_set_outlives_its_process(served):
    client = served.client("first", listener := Listener(), tenant="a")
    ws = client.new_set()
    run(client, listener, ws, prompt(9, 18))
    client.publish_set(ws, "kept")
    served.settle()
    client.close()
    other = served.client("second", hear := Listener(), tenant="a")
    opened = other.open_set("kept")
    assert opened is not None
    same(run(other, hear, opened, [50]), after(other, hear, [*prompt(9, 18), 50]))
    other.withdraw_set("kept")
    other.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())


def test_named_prefixes_are_bounded_and_go_when_memory_is_needed(model):
    per_page = model.lowered.groups[0].bytes_per_unit
    options = dataclasses.replace(OPTIONS, state_bytes=13 * per_page, published=2, memory_seconds=0.2)
    served = engine(model, options)
    try:
        client = served.client("c", listener := Listener())
        for i in range(3):
            ws = client.new_set()
            run(client, listener, ws, prompt(5, 200 + i))
            client.publish_set(ws, f"p{i}")
            client.drop_set(ws)
        assert served.named.names("", "tiny") == ["p1", "p2"]
        run(client, listener, client.new_set(), prompt(45, 300))
        assert served.named.names("", "tiny") == []
        client.close()
        served.settle()
        assert served.stats()["memory"]["full"][1] == 0
    finally:
        served.close()


def test_publishing_what_has_failed_opens_nothing(account, served):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    client.submit(pipe, PassRequest((Row(ws, tuple(prompt(9, 19))),), program=Logits()))
    client.publish_set(ws, "never")
    client.cancel_pipeline(pipe)
    served.settle()
    opened = client.open_set("never")
    if opened is not None:  # the pass was done before it could be cancelled
        same(run(client, listener, opened, [50]), after(client, listener, [*prompt(9, 19), 50]))


def test_reading_leaves_nothing_behind_after_a_shared_prefix(account, served):
    client, listener = account
    tokens = prompt(24, 20)
    expected = after(client, listener, tokens)
    ws = client.new_set()
    same(run(client, listener, ws, tokens, Geometry.READ), expected)
    assert client.set_length(ws) == 0
    same(run(client, listener, ws, tokens), expected)
    with pytest.raises(PieError, match="no working set 999"):
        client.publish_set(999, "x")
