"""The same working set over other state: a recurrent hybrid (qwen3_5) and sliding windows (gemma3) fork, batch and run ahead alike."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import OPTIONS, Greedy, Listener, engine, load, reference_greedy

from pie_xla.engine.api import FromTicket, Geometry, PassError, PassRequest, Row
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, TensorType

HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
WINDOWED = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
TEXT = [int(x) for x in np.random.default_rng(3).integers(0, 97, 50)]


@pytest.fixture(scope="module", params=["hybrid", "windowed"])
def kind(request):
    model = load(HYBRID if request.param == "hybrid" else WINDOWED)
    served = engine(model, OPTIONS, name=request.param)
    yield request.param, served, model
    served.close()


def test_chunked_prompt_then_run_ahead(kind):
    _, served, model = kind
    listener = Listener()
    client = served.client("", listener)
    ws, pipe = client.new_set(), client.new_pipeline()
    tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(TEXT)),), program=Greedy()))]
    for _ in range(11):
        tickets.append(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=Greedy())))
    got = [int(listener.wait(t)[0]) for t in tickets]
    assert got == reference_greedy(model.lowered, model.params, TEXT, 12)
    client.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())


def test_forks_go_their_own_ways(kind):
    _, served, model = kind
    listener = Listener()
    client = served.client("", listener)
    ws, pipe = client.new_set(), client.new_pipeline()
    client.submit(pipe, PassRequest((Row(ws, tuple(TEXT[:23])),)))
    forks = [client.fork_set(ws) for _ in range(3)]
    tickets = [
        client.submit(pipe, PassRequest((Row(fork, (10 + i, 20 + i)),), program=Greedy()))
        for i, fork in enumerate(forks)
    ]
    probe = client.submit(pipe, PassRequest((Row(ws, (7,)),), geometry=Geometry.READ, program=Greedy()))
    after = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    for i, ticket in enumerate(tickets):
        expected = reference_greedy(model.lowered, model.params, [*TEXT[:23], 10 + i, 20 + i], 1)
        assert [int(listener.wait(ticket)[0])] == expected
    assert [int(listener.wait(probe)[0])] == reference_greedy(model.lowered, model.params, [*TEXT[:23], 7], 1)
    assert [int(listener.wait(after)[0])] == reference_greedy(model.lowered, model.params, [*TEXT[:23], 9], 1)
    client.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())


def test_strangers_in_one_batch(kind):
    _, served, model = kind
    accounts = []
    for i in range(5):
        listener = Listener()
        client = served.client("", listener)
        prompt = TEXT[i : i + 4 + 3 * i]
        ws, pipe = client.new_set(), client.new_pipeline()
        tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(prompt)),), program=Greedy()))]
        for _ in range(5):
            tickets.append(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=Greedy())))
        accounts.append((client, listener, prompt, tickets))
    for client, listener, prompt, tickets in accounts:
        got = [int(listener.wait(t)[0]) for t in tickets]
        assert got == reference_greedy(model.lowered, model.params, prompt, 6)
        client.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())


def test_a_fault_leaves_the_state_as_it_was(kind):
    _, served, model = kind
    listener = Listener()
    client = served.client("", listener)
    ws, pipe = client.new_set(), client.new_pipeline()
    listener.wait(client.submit(pipe, PassRequest((Row(ws, tuple(TEXT[:10])),))))
    channel = client.new_channel(TensorType(DType.I32, ()))
    client.put_channel(channel, np.array([5000], np.uint32))
    from pie_xla.engine.api import FromChannel

    bad = client.submit(pipe, PassRequest((Row(ws, FromChannel(channel)),), program=Greedy()))
    with pytest.raises(PassError, match="token id outside"):
        listener.wait(bad)
    again = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    assert [int(listener.wait(again)[0])] == reference_greedy(model.lowered, model.params, [*TEXT[:10], 9], 1)
    client.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())


def test_what_cannot_be_undone_is_refused_by_name(kind):
    name, served, model = kind
    listener = Listener()
    client = served.client("", listener)
    ws, pipe = client.new_set(), client.new_pipeline()
    listener.wait(client.submit(pipe, PassRequest((Row(ws, tuple(TEXT)),))))
    reason = "recurrent state cannot be undone" if name == "hybrid" else "sliding window of group 'window' has let go"
    with pytest.raises(PieError, match=reason):
        client.truncate_set(ws, 20)
    assert client.set_length(ws) == len(TEXT)
    client.truncate_set(ws, len(TEXT))
    client.truncate_set(ws, 0)  # a fresh start is always possible
    again = client.submit(pipe, PassRequest((Row(ws, tuple(TEXT[:5])),), program=Greedy()))
    assert [int(listener.wait(again)[0])] == reference_greedy(model.lowered, model.params, TEXT[:5], 1)
    client.close()
    served.settle()
    assert all(used == 0 for _, used, _ in served.stats()["memory"].values())
