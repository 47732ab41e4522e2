"""Several models in one engine: each decodes as alone, values pass between them on the device, and what one loses is not the other's."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import CONFIG, OPTIONS, Greedy, Listener, V, load, reference_greedy

from pie_xla.engine.api import FromChannel, FromTicket, Geometry, PassError, PassRequest, Row
from pie_xla.engine.engine import Engine
from pie_xla.engine.memory import plan_states
from pie_xla.errors import PieError
from pie_xla.eta.types import ChannelUse, DType, Read, TensorType

PROMPT = [int(x) for x in np.random.default_rng(5).integers(0, V, 14)]
SMALL = 61  # the other model's vocabulary
FOUR = TensorType(DType.I32, (4,))
ONE = TensorType(DType.I32, ())


def noisy(model, name, scale):
    """The model with every weight a little off: a draft that is often right."""
    rng = np.random.default_rng(3)
    weights: Future = Future()
    weights.set_result(
        {k: w + scale * np.std(w) * rng.standard_normal(w.shape).astype(w.dtype) for k, w in model.params.items()}
    )
    return dataclasses.replace(model, name=name, weights=weights)


@pytest.fixture(scope="module")
def models():
    target = load()
    other = load({**CONFIG, "vocab_size": SMALL, "num_hidden_layers": 1, "hidden_size": 16})
    return {
        "target": dataclasses.replace(target, name="target"),
        "draft": noisy(target, "draft", 0.02),
        "other": dataclasses.replace(other, name="other", key="other"),
    }


def make(models, *names, store=Path(tiny._STORE.name)):
    """Pools of the same size in every engine, so that executables are compiled once."""
    made = Engine([dataclasses.replace(models[name], state_bytes=1 << 18) for name in names], OPTIONS, store=store)
    made.start(warm=((1, 1), (1, 16)))
    return made


@pytest.fixture(scope="module")
def served(models):
    made = make(models, "target", "draft", "other")
    yield made
    made.close()


@pytest.fixture
def account(served):
    listener = Listener()
    client = served.client("test", listener)
    yield client, listener
    client.close()
    balanced(served)


def balanced(served):
    served.settle()
    memory = served.stats()["memory"]
    assert len(memory) == len(served.models)
    for free, used, total in memory.values():
        assert used == 0 and free == total
    assert served.stats()["words used"] == 0


def decode(client, model, prompt, n, program):
    ws, pipe = client.new_set(model), client.new_pipeline()
    tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(prompt)),), program=program, model=model))]
    for _ in range(n - 1):
        row = Row(ws, FromTicket(tickets[-1]))
        tickets.append(client.submit(pipe, PassRequest((row,), program=program, model=model)))
    return ws, tickets


def tokens_of(listener, tickets):
    return [int(listener.wait(ticket)[0]) for ticket in tickets]


def test_each_decodes_as_if_it_were_alone(served, models, account):
    client, listener = account
    short = [t % SMALL for t in PROMPT]
    prompts = {"target": PROMPT, "draft": PROMPT, "other": short}
    programs = {"target": Greedy(), "draft": Greedy(), "other": Greedy(vocab=SMALL, key="small")}
    runs = {name: decode(client, name, prompts[name], 20, programs[name])[1] for name in prompts}
    for name, tickets in runs.items():
        model = models[name]
        assert tokens_of(listener, tickets) == reference_greedy(model.lowered, model.params, prompts[name], 20)
    default = decode(client, None, PROMPT, 3, Greedy())[1]
    assert tokens_of(listener, default) == tokens_of(listener, runs["target"][:3])


@dataclasses.dataclass
class Propose(Greedy):
    """A draft's greedy token, also at place param[0] of the four in channel 0."""

    key: str = "propose"

    def __post_init__(self) -> None:
        self.reads = (Read(0, "logits", (V,), DType.F32),)
        self.params, self.results = (ONE,), (ONE,)
        self.channels = (ChannelUse(FOUR, take=True, read=False, put=True),)

    def apply(self, reads, params, cells, key, ordinal):
        token = jnp.argmax(reads[0]).astype(jnp.int32)
        return [token], [jnp.where(jnp.arange(4) == params[0], token, cells[0])]


@dataclasses.dataclass
class Verify(Greedy):
    """How many of the four tokens in channel 0 the model would have said, and what it says next; the latter is the next first."""

    key: str = "verify"

    def __post_init__(self) -> None:
        self.reads = (Read(0, "logits", (4, V), DType.F32),)
        self.params, self.results = (), (ONE, ONE, FOUR)
        self.channels = (
            ChannelUse(FOUR, take=False, read=True, put=False),
            ChannelUse(FOUR, take=False, read=False, put=True),
        )

    def apply(self, reads, params, cells, key, ordinal):
        best = jnp.argmax(reads[0], axis=-1).astype(jnp.int32)
        kept = 1 + jnp.sum(jnp.cumprod((best[:3] == cells[0][1:]).astype(jnp.int32)))
        return [kept, best[kept - 1], cells[0]], [jnp.full((4,), best[kept - 1], jnp.int32)]


def test_a_draft_proposes_and_a_target_verifies_without_the_host(models, account, served):
    """All rounds are submitted before anything is awaited: tokens, lengths and what is kept never leave the device."""
    client, listener = account
    pipe = client.new_pipeline()
    target, first = decode(client, "target", PROMPT, 1, Greedy())
    draft, _ = decode(client, "draft", PROMPT, 1, Greedy())
    proposal = client.new_channel(FOUR)
    start = tokens_of(listener, first)[0]
    client.put_channel(proposal, np.full(4, start, np.int32))
    verified, last = [], None
    for _ in range(6):
        tokens = (start,) if last is None else FromTicket(last, 1)
        for i in range(1, 5):  # the fourth pass only reads the last proposed token, in case all are right
            row, place = Row(draft, tokens), (np.array(i, np.int32),)
            step = PassRequest((row,), Geometry.BUFFER, None, Propose(), place, (proposal,), model="draft")
            tokens = FromTicket(client.submit(pipe, step))
        row, both = Row(target, FromChannel(proposal)), (proposal, proposal)
        check = PassRequest((row,), Geometry.BUFFER, (tuple(range(4)),), Verify(), (), both, model="target")
        last = client.submit(pipe, check)
        client.commit_set(target, FromTicket(last, 0))
        client.commit_set(draft, FromTicket(last, 0))
        verified.append(last)
    said, kepts = [start], []
    for ticket in verified:
        kept, token, proposed = listener.wait(ticket)
        said += [int(t) for t in proposed[1 : int(kept)]] + [int(token)]
        kepts.append(int(kept))
    expected = reference_greedy(models["target"].lowered, models["target"].params, PROMPT, len(said))
    assert said == expected
    assert max(kepts) > 1  # the draft was of use
    assert client.set_length(target) == client.set_length(draft) == len(PROMPT) + len(said) - 1
    assert served.stats()["models"]["draft"]["step seconds"] > 0


def test_a_vector_of_one_model_is_an_input_of_another_s_epilogue(models, account):
    """Contrastive decoding (Li et al. 2023): the amateur's logits reach the expert's epilogue through a channel."""
    client, listener = account

    @dataclasses.dataclass
    class Put(Greedy):
        key: str = "put"

        def __post_init__(self) -> None:
            self.reads, self.params, self.results = (Read(0, "logits", (V,), DType.F32),), (), ()
            self.channels = (ChannelUse(TensorType(DType.F32, (V,)), take=False, read=False, put=True),)

        def apply(self, reads, params, cells, key, ordinal):
            return [], [reads[0]]

    @dataclasses.dataclass
    class Contrast(Greedy):
        key: str = "contrast"

        def __post_init__(self) -> None:
            self.reads, self.params = (Read(0, "logits", (V,), DType.F32),), ()
            self.results = (TensorType(DType.F32, (V,)),)
            self.channels = (ChannelUse(TensorType(DType.F32, (V,)), take=True, read=False, put=False),)

        def apply(self, reads, params, cells, key, ordinal):
            return [reads[0] - 0.5 * cells[0]], []

    logits = client.new_channel(TensorType(DType.F32, (V,)))
    pipe = client.new_pipeline()
    amateur, expert = client.new_set("draft"), client.new_set("target")
    ticket = client.submit(  # before what it takes has been put
        pipe, PassRequest((Row(expert, tuple(PROMPT)),), program=Contrast(), channels=(logits,), model="target")
    )
    client.submit(pipe, PassRequest((Row(amateur, tuple(PROMPT)),), program=Put(), channels=(logits,), model="draft"))
    difference = listener.wait(ticket)[0]
    own = {}
    for name in ("target", "draft"):
        ws, channel = client.new_set(name), client.new_channel(TensorType(DType.F32, (V,)))
        client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Put(), channels=(channel,), model=name))
        own[name] = listener.wait(client.take_channel(channel))[0]
    np.testing.assert_allclose(difference, own["target"] - 0.5 * own["draft"], rtol=1e-4, atol=1e-4)
    assert np.abs(own["target"] - own["draft"]).max() > 0.05


def test_models_share_the_device_fairly_and_killing_gives_both_pools_back(served, models):
    listeners = [Listener() for _ in range(4)]
    clients = [served.client(str(i), listener) for i, listener in enumerate(listeners)]
    runs = [decode(client, ("target", "draft")[i % 2], PROMPT, 60, Greedy())[1] for i, client in enumerate(clients)]
    for listener, tickets in zip(listeners, runs, strict=True):
        listener.wait(tickets[5])
    clients[0].close()  # in mid-flight
    clients[1].close()
    for i in (2, 3):
        model = models[("target", "draft")[i % 2]]
        assert tokens_of(listeners[i], runs[i]) == reference_greedy(model.lowered, model.params, PROMPT, 60)
        clients[i].close()
    balanced(served)


def test_a_set_and_a_pass_are_of_one_model_and_unknown_ones_are_refused(account):
    client, _ = account
    pipe = client.new_pipeline()
    target, draft, other = client.new_set(), client.new_set("draft"), client.new_set("other")
    with pytest.raises(PieError, match=r"no model 'drat' here; there is target, draft, other"):
        client.new_set("drat")
    with pytest.raises(PieError, match="no model 'drat'"):
        client.submit(pipe, PassRequest((Row(target, (1,)),), model="drat"))
    with pytest.raises(PieError, match="set of row 1 holds state of the model draft, the pass runs target"):
        client.submit(pipe, PassRequest((Row(target, (1,)), Row(draft, (1,)))))
    with pytest.raises(PieError, match="set of row 0 holds state of the model target, the pass runs draft"):
        client.submit(pipe, PassRequest((Row(target, (1,)),), model="draft"))
    with pytest.raises(PieError, match=f"token id {SMALL}; the vocabulary has ids 0 to {SMALL - 1}"):
        client.submit(pipe, PassRequest((Row(other, (SMALL,)),), model="other"))
    with pytest.raises(PieError, match=rf"reads logits of row 0 as \[{V}\]; it is \[{SMALL}\]"):
        client.submit(pipe, PassRequest((Row(other, (1,)),), program=Greedy(), model="other"))


def test_a_token_of_the_larger_vocabulary_is_a_fault_in_the_smaller_one(served, account):
    client, listener = account

    @dataclasses.dataclass
    class High(Greedy):
        key: str = "high"

        def apply(self, reads, params, cells, key, ordinal):
            return [jnp.int32(V - 1)], []

    ws, pipe, other = client.new_set(), client.new_pipeline(), client.new_set("other")
    high = client.submit(pipe, PassRequest((Row(ws, (1,)),), program=High()))
    program = Greedy(vocab=SMALL, key="small")
    bad = client.submit(pipe, PassRequest((Row(other, FromTicket(high)),), program=program, model="other"))
    with pytest.raises(PassError, match="outside the vocabulary of the model other"):
        listener.wait(bad)
    assert client.set_length(other) == 0


def test_names_are_published_per_model(served, account):
    client, _ = account
    for name in ("target", "draft"):
        ws = client.new_set(name)
        client.submit(client.new_pipeline(), PassRequest((Row(ws, tuple(PROMPT[: 5 + len(name)])),), model=name))
        client.publish_set(ws, "prompt")
    lengths = [client.set_length(client.open_set("prompt", name)) for name in ("target", "draft", None)]
    assert lengths == [11, 10, 11] and client.open_set("prompt", "other") is None
    assert client.withdraw_set("prompt", "draft") and client.open_set("prompt", "draft") is None
    assert client.withdraw_set("prompt")


def test_a_step_that_takes_its_pool_along_leaves_the_other_models_alone(models):
    served = make(models, "target", "draft")
    try:
        listener = Listener()
        client = served.client("a", listener)
        sets = {name: decode(client, name, PROMPT, 3, Greedy()) for name in ("target", "draft")}
        ends = {name: tokens_of(listener, tickets) for name, (_, tickets) in sets.items()}
        channel = client.new_channel(ONE)
        client.put_channel(channel, np.array([7], np.int32))
        draft = served.models["draft"]
        key = draft.programs.step_key(draft.buckets.decode[0])
        real = draft.table.get(key)

        def explode(params, state, words, block):
            for leaf in state["full"].values():
                leaf.delete()  # as a failing executable does with what was donated to it
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        draft.table._ready[key] = explode
        pipe = client.new_pipeline()
        bad = client.submit(pipe, PassRequest((Row(sets["draft"][0], (1,)),), program=Greedy(), model="draft"))
        with pytest.raises(PassError, match="RESOURCE_EXHAUSTED"):
            listener.wait(bad)
        draft.table._ready[key] = real
        with pytest.raises(PassError, match="RESOURCE_EXHAUSTED"):  # its content is gone, and it says so
            listener.wait(client.submit(pipe, PassRequest((Row(sets["draft"][0], (1,)),), model="draft")))
        # the target's state is there, and so is what it had said (an output) and the channel
        ws, tickets = sets["target"]
        following = client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=Greedy()))
        expected = reference_greedy(models["target"].lowered, models["target"].params, PROMPT, 4)
        assert [*ends["target"], int(listener.wait(following)[0])] == expected
        assert int(listener.wait(client.take_channel(channel))[0]) == 7
        fresh = decode(client, "draft", PROMPT, 3, Greedy())[1]
        assert tokens_of(listener, fresh) == ends["draft"]
        assert served.stats()["rebuilds"] == 1
        client.close()
        balanced(served)
    finally:
        served.close()


def test_an_epilogue_that_fails_on_the_device_costs_the_words_and_no_pool(models):
    served = make(models, "target", "draft", store=None)

    @dataclasses.dataclass
    class Fails(Greedy):
        key: str = "fails"

        def apply(self, reads, params, cells, key, ordinal):
            def fail(x):
                raise RuntimeError("a fault in the middle")

            return [
                jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.int32), reads[0][0], vmap_method="sequential")
            ], []

    try:
        listener = Listener()
        client = served.client("a", listener)
        sets = {name: decode(client, name, PROMPT, 3, Greedy()) for name in ("target", "draft")}
        ends = {name: tokens_of(listener, tickets) for name, (_, tickets) in sets.items()}
        # A step that takes long: its program is queued behind it, and what that leaves behind the program.
        draft = served.models["draft"]
        key = draft.programs.step_key(draft.buckets.decode[0])
        real = draft.table.get(key)
        slow = jax.jit(
            lambda x: x + 0 * jax.lax.fori_loop(0, 400, lambda i, y: jnp.tanh(y @ y), jnp.ones((400, 400)))[0, 0]
        )

        def late(params, state, words, block):
            state, outputs, faults = real(params, state, words, block)
            return state, {name: slow(output) for name, output in outputs.items()}, faults

        draft.table._ready[key] = late
        pipe = client.new_pipeline()
        doomed = client.new_set("draft")
        bad = client.submit(pipe, PassRequest((Row(doomed, (1,)),), program=Fails(), model="draft"))
        with pytest.raises(PassError, match="could not run this step"):
            listener.wait(bad)
        draft.table._ready[key] = real
        served.settle()
        for name, (ws, tickets) in sets.items():
            with pytest.raises(PassError, match="could not run this step"):  # what it had said was in the words
                listener.wait(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), model=name)))
            row = Row(ws, (ends[name][-1],))  # its state was not
            following = client.submit(pipe, PassRequest((row,), program=Greedy(), model=name))
            model = models[name]
            expected = reference_greedy(model.lowered, model.params, PROMPT, 4)
            assert [*ends[name], int(listener.wait(following)[0])] == expected
        assert served.stats()["rebuilds"] == 1
        client.close()
        balanced(served)
    finally:
        served.close()


@dataclasses.dataclass
class Count(Greedy):
    """Its parameter, as a number on the device; or a fault."""

    key: str = "count"

    def __post_init__(self) -> None:
        self.reads, self.channels = (Read(0, "logits", (V,), DType.F32),), ()
        self.params, self.results = (ONE,), (ONE,)

    def apply(self, reads, params, cells, key, ordinal):
        return [params[0]], []


@pytest.mark.parametrize("fails", [False, True])
def test_a_length_that_another_model_decides(models, account, served, fails):
    """The target says how much of the draft's set stays. When it fails, the draft's set has no length, and says why."""
    client, listener = account
    pipe = client.new_pipeline()
    target, draft = client.new_set("target"), client.new_set("draft")
    first = client.submit(pipe, PassRequest((Row(draft, tuple(PROMPT[:6])),), model="draft"))
    listener.wait(first)
    buffered = PassRequest((Row(draft, tuple(PROMPT[6:12])),), Geometry.BUFFER, model="draft")
    client.submit(pipe, buffered)
    tokens = (1,)
    if fails:  # a token that the device gives and that is none
        bad = client.submit(
            pipe, PassRequest((Row(client.new_set(), (1,)),), program=Count(), params=(np.array(-1, np.int32),))
        )
        tokens = FromTicket(bad)
    number = client.submit(pipe, PassRequest((Row(target, tokens),), program=Count(), params=(np.array(2, np.int32),)))
    client.commit_set(draft, FromTicket(number))
    following = client.submit(pipe, PassRequest((Row(draft, (PROMPT[8],)),), program=Greedy(), model="draft"))
    if fails:
        with pytest.raises(PassError, match="outside the vocabulary of the model target"):
            listener.wait(number)
        with pytest.raises(PassError, match="outside the vocabulary of the model target"):
            listener.wait(following)
    else:
        model = models["draft"]
        expected = reference_greedy(model.lowered, model.params, PROMPT[:9], 1)
        assert [int(listener.wait(following)[0])] == expected
        assert client.set_length(draft) == 9
    assert client.set_length(target) == (0 if fails else 1)


def test_memory_is_shared_so_that_the_same_sequences_fit(models):
    target, other = models["target"], models["other"]
    plans = plan_states([target, other], OPTIONS)
    assert sum(plan.bytes for plan in plans) <= OPTIONS.state_bytes
    assert plans[0].tokens == pytest.approx(plans[1].tokens, rel=0.02) and plans[0].bytes > 2 * plans[1].bytes
    asked = plan_states([target, dataclasses.replace(other, state_bytes=1 << 16)], OPTIONS)
    assert asked[1].bytes <= 1 << 16 and asked[0].bytes + (1 << 16) <= OPTIONS.state_bytes
    assert asked[0].bytes > OPTIONS.state_bytes - (1 << 16) - 4096
    with pytest.raises(PieError, match="less than"):
        plan_states([target, dataclasses.replace(other, state_bytes=OPTIONS.state_bytes)], OPTIONS)
    with pytest.raises(PieError, match="different names"):
        Engine([target, target], OPTIONS)
