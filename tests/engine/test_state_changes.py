"""What a set's author may do with its state: buffer and commit, evict, masks, publish; each equals plain decoding of what it means."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Greedy, Listener, V, engine, load, reference_greedy

from pie_xla.engine.api import FromTicket, Geometry, PassError, PassRequest, Row, Sight
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, Read, TensorType

rng = np.random.default_rng(7)
PROMPT = [int(x) for x in rng.integers(0, V, 22)]
NEXT = [int(x) for x in rng.integers(0, V, 9)]


@dataclasses.dataclass
class Logits(Greedy):
    """The logits of row 0's positions."""

    key: str = "logits"
    positions: int | None = None

    def __post_init__(self) -> None:
        self.key += str(self.positions)
        shape = (V,) if self.positions is None else (self.positions, V)
        self.reads = (Read(0, "logits", shape, DType.F32),)
        self.params, self.channels = (), ()
        self.results = (TensorType(DType.F32, shape),)

    def apply(self, reads, params, cells, key, ordinal):
        return [reads[0]], []


@dataclasses.dataclass
class Count(Greedy):
    """A number on the device, and the greedy token."""

    key: str = "count"

    def __post_init__(self) -> None:
        self.reads = (Read(0, "logits", (V,), DType.F32),)
        self.params = (TensorType(DType.I32, ()),)
        self.channels = ()
        self.results = (TensorType(DType.I32, ()), TensorType(DType.I32, ()))

    def apply(self, reads, params, cells, key, ordinal):
        return [params[0], jnp.argmax(reads[0]).astype(jnp.int32)], []


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
    client = served.client("test", listener)
    yield client, listener
    client.close()
    for name in served.named.names("", "tiny"):
        served.named.withdraw("", "tiny", name)
    served.settle()
    for free, used, total in served.stats()["memory"].values():
        assert used == 0 and free == total
    assert served.stats()["words used"] == 0


def run(client, listener, ws, tokens, geometry=Geometry.FOLD, sight=None, readout=None, program=None):
    program = program or Logits(positions=None if readout is None else len(readout))
    request = PassRequest(
        (Row(ws, tuple(tokens), sight),), geometry, None if readout is None else (tuple(readout),), program=program
    )
    return listener.wait(client.submit(client.new_pipeline(), request))[0]


def after(client, listener, tokens):
    """Logits after exactly these tokens, from a set of their own."""
    ws = client.new_set()
    out = run(client, listener, ws, tokens)
    client.drop_set(ws)
    return out


def same(one, other):
    np.testing.assert_allclose(one, other, atol=2e-4)


# -- buffering ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_commit_keeps_the_first_of_the_buffered_tokens(account, kept):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, PROMPT)
    run(client, listener, ws, NEXT[:5], Geometry.BUFFER)
    assert client.set_length(ws) == 27
    client.commit_set(ws, kept)
    assert client.set_length(ws) == 22 + kept
    same(run(client, listener, ws, [50]), after(client, listener, PROMPT + NEXT[:kept] + [50]))


@pytest.mark.parametrize("kept", [-3, 0, 3, 5, 99])
def test_a_commit_may_be_decided_on_the_device_and_what_follows_does_not_wait(account, kept):
    """Passes are queued behind a length that the host does not know; their tokens land where it says."""
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    number = (np.int32(kept),)
    client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))
    first = client.submit(pipe, PassRequest((Row(ws, tuple(NEXT[:5])),), Geometry.BUFFER, None, Count(), number))
    client.commit_set(ws, FromTicket(first, 0))
    fork = client.fork_set(ws)
    second = client.submit(pipe, PassRequest((Row(ws, (50, 51)),), program=Logits()))
    third = client.submit(
        pipe, PassRequest((Row(ws, tuple(NEXT[5:8])),), Geometry.BUFFER, None, Count(), (np.int32(1),))
    )
    client.commit_set(ws, FromTicket(third, 0))
    fourth = client.submit(pipe, PassRequest((Row(ws, (52,)),), program=Logits()))
    other = client.submit(pipe, PassRequest((Row(fork, (60,)),), program=Logits()))
    real = PROMPT + NEXT[: min(max(kept, 0), 5)]
    same(listener.wait(second)[0], after(client, listener, [*real, 50, 51]))
    same(listener.wait(fourth)[0], after(client, listener, [*real, 50, 51, NEXT[5], 52]))
    same(listener.wait(other)[0], after(client, listener, [*real, 60]))
    assert client.set_length(ws) == len(real) + 4
    assert client.set_length(fork) == len(real) + 1
    same(run(client, listener, ws, [53]), after(client, listener, [*real, 50, 51, NEXT[5], 52, 53]))


@pytest.mark.parametrize("n", [3, 20, 22, 90])
def test_truncate_by_a_value_on_the_device(account, n):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    first = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), Geometry.FOLD, None, Count(), (np.int32(n),)))
    client.truncate_set(ws, FromTicket(first, 0))
    second = client.submit(pipe, PassRequest((Row(ws, (50,)),), program=Logits()))
    same(listener.wait(second)[0], after(client, listener, [*PROMPT[:n], 50]))
    assert client.set_length(ws) == min(n, 22) + 1


def test_speculative_rounds_without_the_host(account, model):
    """Verify a draft of 4 on the device, commit what was right, go on from the device's token: greedy decoding, whatever the draft."""
    client, listener = account
    wanted = reference_greedy(model.lowered, model.params, PROMPT, 12)
    ws, pipe = client.new_set(), client.new_pipeline()

    @dataclasses.dataclass
    class Verify(Greedy):
        key: str = "verify"

        def __post_init__(self) -> None:
            self.reads = (Read(0, "logits", (4, V), DType.F32),)
            self.params, self.channels = (TensorType(DType.I32, (4,)),), ()
            self.results = (TensorType(DType.I32, ()), TensorType(DType.I32, ()))

        def apply(self, reads, params, cells, key, ordinal):
            best = jnp.argmax(reads[0], axis=-1).astype(jnp.int32)  # what follows each of the 4 tokens
            right = jnp.cumprod((best[:3] == params[0][1:]).astype(jnp.int32))
            kept = 1 + jnp.sum(right)
            return [kept, best[kept - 1]], []

    start = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))
    got = [int(listener.wait(start)[0])]
    while len(got) < 12:
        draft = [got[-1], *wanted[len(got) : len(got) + 2], 0][:4]  # the last one is wrong
        draft += [0] * (4 - len(draft))
        request = PassRequest(
            (Row(ws, tuple(draft)),), Geometry.BUFFER, (tuple(range(4)),), Verify(), (np.array(draft, np.int32),)
        )
        ticket = client.submit(pipe, request)
        client.commit_set(ws, FromTicket(ticket, 0))
        kept, token = (int(x) for x in listener.wait(ticket))
        got += [*draft[1:kept], token]
    assert got[:12] == wanted


def test_final_tokens_after_buffered_ones_are_refused(account):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, NEXT, Geometry.BUFFER)
    with pytest.raises(PieError, match="9 buffered"):
        run(client, listener, ws, [1])
    with pytest.raises(PieError, match=r"commit\(10\): 9 tokens"):
        client.commit_set(ws, 10)
    with pytest.raises(PieError, match="publish: 9 tokens"):
        client.publish_set(ws, "x")


def test_a_length_on_the_device_is_not_guessed(account):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    ticket = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), Geometry.BUFFER, None, Count(), (np.int32(3),)))
    client.commit_set(ws, FromTicket(ticket, 0))
    try:
        client.truncate_set(ws, 10)
    except PieError as error:
        assert "between 0 and 22" in str(error)
    else:  # it had landed already
        assert client.set_length(ws) <= 10
    listener.wait(ticket)


def test_a_failed_pass_takes_its_commit_along_and_leaves_the_set_as_before(account):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    run(client, listener, ws, PROMPT)
    bad = client.new_channel(TensorType(DType.I32, ()), 1)
    client.put_channel(bad, np.array([V + 5], np.int32).view(np.uint32))
    from pie_xla.engine.api import FromChannel

    first = client.submit(
        pipe, PassRequest((Row(ws, FromChannel(bad)),), Geometry.BUFFER, None, Count(), (np.int32(1),))
    )
    client.commit_set(ws, FromTicket(first, 0))
    second = client.submit(pipe, PassRequest((Row(ws, (50,)),), program=Logits()))
    for ticket in (first, second):
        with pytest.raises(PassError, match="token id outside"):
            listener.wait(ticket)
    assert client.set_length(ws) == 22
    same(run(client, listener, ws, [51]), after(client, listener, [*PROMPT, 51]))
    client.drop_channel(bad)


# -- eviction and masks --------------------------------------------------------------------------------------------


def test_evicted_cells_are_not_seen_their_pages_go_back_and_positions_stay(account, served):
    """evict == a mask over the same cells == only the spans that are left."""
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, PROMPT)
    seen = np.ones((1, 23), bool)
    seen[0, 2:11] = seen[0, 17] = False
    masked = run(client, listener, client.fork_set(ws), [50], sight=Sight(mask=seen))
    spans = run(client, listener, client.fork_set(ws), [50], sight=Sight(spans=((0, 2), (11, 17), (18, 22))))
    same(masked, spans)
    served.settle()
    before = served.stats()["memory"]["full"][1]
    other = client.new_set()
    run(client, listener, other, [1, *PROMPT])  # no page in common
    served.settle()
    held = served.stats()["memory"]["full"][1] - before
    client.evict_set(other, [(0, 12)])
    served.settle()
    assert held - (served.stats()["memory"]["full"][1] - before) in (3, 0)  # cached pages count as free already
    client.evict_set(ws, [(2, 11), (17, 18)])
    assert client.set_length(ws) == 22
    same(run(client, listener, ws, [50]), masked)
    assert np.abs(masked - after(client, listener, [*PROMPT, 50])).max() > 0.01  # it matters
    # and the set goes on: what is appended, truncated and appended again sits at the right positions
    client.truncate_set(ws, 22)
    same(run(client, listener, ws, [50]), masked)


def test_pages_of_an_evicted_span_are_really_free(account, served):
    client, listener = account
    ws = client.new_set()
    tokens = [int(x) for x in np.random.default_rng(99).integers(0, V, 40)]
    run(client, listener, ws, tokens)
    served.settle()
    free = served.stats()["memory"]["full"][0]
    held = len(client._set(ws).state.pages["full"])
    client.evict_set(ws, [(4, 40)])
    served.settle()
    assert held == 10 and len(client._set(ws).state.pages["full"]) == 1
    assert served.stats()["memory"]["full"][0] == free + 9
    same(
        run(client, listener, ws, [50]),
        run(client, listener, client.fork_set(ws), [50], sight=Sight(spans=((0, 4),))) * 0
        + run_alone(client, listener, tokens),
    )


def run_alone(client, listener, tokens):
    ws = client.new_set()
    run(client, listener, ws, tokens)
    return run(client, listener, ws, [50], sight=Sight(spans=((0, 4),)))


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_window_with_sinks_is_the_mask_that_it_says(account, sinks):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, PROMPT)
    at = np.arange(22 + 9)
    seen = (at[None] > 22 + np.arange(9)[:, None] - 6) | (at[None] < sinks)
    one = run(client, listener, client.fork_set(ws), NEXT, sight=Sight(window=6, sinks=sinks), readout=range(9))
    other = run(client, listener, client.fork_set(ws), NEXT, sight=Sight(mask=seen), readout=range(9))
    same(one, other)
    whole = run(client, listener, client.fork_set(ws), NEXT, readout=range(9))
    assert np.abs(one - whole).max() > 0.01


def test_each_path_of_a_tree_reads_as_if_it_were_alone(account):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, PROMPT)
    tree = (-1, 0, 0, 1, 2, -1)
    tokens = [3, 8, 9, 20, 21, 30]
    out = run(client, listener, client.fork_set(ws), tokens, Geometry.READ, Sight(tree=tree), range(6))
    for leaf in range(6):
        path, at = [], leaf
        while at >= 0:
            path, at = [tokens[at], *path], tree[at]
        np.testing.assert_allclose(out[leaf], after(client, listener, PROMPT + path), atol=2e-4, err_msg=f"leaf {leaf}")


def test_masks_batch_with_strangers(account, served):
    """A masked lane and a plain one, submitted together, each equal what they are alone."""
    client, listener = account
    sets = [client.new_set() for _ in range(4)]
    for ws in sets:
        run(client, listener, ws, PROMPT)
    sights = [Sight(tree=(-1,), spans=None), None, Sight(window=4), Sight(spans=((0, 5),))]
    alone = [run(client, listener, client.fork_set(ws), [50], sight=s) for ws, s in zip(sets, sights, strict=True)]
    pipe = client.new_pipeline()
    for _ in range(3):
        forks = [client.fork_set(ws) for ws in sets]
        tickets = [
            client.submit(pipe, PassRequest((Row(ws, (50,), s),), program=Logits()))
            for ws, s in zip(forks, sights, strict=True)
        ]
        for ticket, expected in zip(tickets, alone, strict=True):
            same(listener.wait(ticket)[0], expected)


def test_positions_of_ones_own(account):
    """The same tokens at positions further on: rope sees it, and the reference is a set whose gap was evicted."""
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, PROMPT[:8])
    moved = run(client, listener, client.fork_set(ws), [50], sight=Sight(places=(4,)))
    run(client, listener, ws, PROMPT[8:12])
    client.evict_set(ws, [(8, 12)])
    same(moved, run(client, listener, ws, [50]))


@pytest.mark.parametrize(
    ("sight", "says"),
    [
        (Sight(window=0), "window of 0"),
        (Sight(sinks=-1), "-1 sinks"),
        (Sight(tree=(0,)), "follows 0"),
        (Sight(tree=(-1, 0)), "tree of 2"),
        (Sight(mask=np.ones((1, 5), bool)), r"bool\[1, 4\]"),
        (Sight(mask=np.ones((1, 4), np.int32)), r"bool\[1, 4\]"),
        (Sight(places=(1, 2)), "2 positions for 1"),
        (Sight(places=(-4,)), "below 0"),
        (Sight(places=(2,), window=4), "do not go with a window"),
        (Sight(spans=((0, 9),)), "span 0..9"),
    ],
)
def test_a_sight_that_makes_no_sense_is_refused(account, sight, says):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, [1, 2, 3])
    with pytest.raises(PieError, match=says):
        run(client, listener, ws, [4], sight=sight)
    assert client.set_length(ws) == 3


def test_evict_beyond_the_set_is_refused(account):
    client, listener = account
    ws = client.new_set()
    run(client, listener, ws, [1, 2, 3])
    with pytest.raises(PieError, match="positions 0 to 3"):
        client.evict_set(ws, [(0, 4)])
