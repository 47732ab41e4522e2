"""Random calls on two models, with kills, cancels and steps that take their pool along: nobody hangs, and every account balances."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import pytest
import tiny
from tiny import OPTIONS, Greedy, Listener, V, load

from pie_xla.engine.api import FromTicket, Geometry, PassRequest, Row
from pie_xla.engine.engine import Engine
from pie_xla.errors import PieError

NAMES = ("target", "draft")
ROUNDS = 25


@dataclasses.dataclass
class Account:
    """A client with what it holds: sets per model, and tickets of passes of both."""

    client: object
    pipeline: int
    sets: dict[str, list[int]]
    tickets: list[int]


def call(rng: random.Random, account: Account) -> None:
    """One random call; refusals are part of the game."""
    client, name = account.client, rng.choice(NAMES)
    sets, tickets = account.sets[name], account.tickets
    if not sets:
        sets.append(client.new_set(name))
    ws, what = rng.choice(sets), rng.random()
    if what < 0.08:
        sets.append(client.fork_set(ws))
    elif what < 0.14:
        client.truncate_set(ws, rng.randint(0, client.set_length(ws)))
    elif what < 0.24 and tickets:
        client.commit_set(ws, FromTicket(rng.choice(tickets)))
    elif what < 0.28:
        sets.remove(ws)
        client.drop_set(ws)
    elif what < 0.32 and tickets:
        client.release(tickets.pop(rng.randrange(len(tickets))))
    elif what < 0.34:
        client.cancel_pipeline(account.pipeline)
        account.pipeline = client.new_pipeline()
    elif what < 0.37:
        client.publish_set(ws, f"p{rng.randint(0, 3)}")
    elif what < 0.41:
        opened = client.open_set(f"p{rng.randint(0, 3)}", name)
        sets += [] if opened is None else [opened]
    elif what < 0.42:
        client.close()
    else:
        tokens = tuple(rng.randrange(V) for _ in range(rng.choice([1, 1, 1, 3, 14])))
        if tickets and rng.random() < 0.5:
            tokens = FromTicket(rng.choice(tickets))  # of either model
        buffered = client._sets[ws].buffered
        geometry = rng.choice([Geometry.BUFFER, Geometry.READ, Geometry.BUFFER if buffered else Geometry.FOLD])
        request = PassRequest((Row(ws, tokens),), geometry, program=Greedy(), model=name)
        tickets.append(client.submit(account.pipeline, request))


@pytest.mark.parametrize("seed", [1, 2])
def test_accounts_balance_whatever_is_called(seed: int) -> None:
    model = dataclasses.replace(load(), state_bytes=20_000)  # 18 pages of 4 tokens each: memory is short
    options = dataclasses.replace(OPTIONS, memory_seconds=0.05)
    models = [dataclasses.replace(model, name=name) for name in NAMES]
    served = Engine(models, options, store=Path(tiny._STORE.name))
    served.start(warm=((1, 1), (1, 16)))
    rng, faults = random.Random(seed), random.Random(seed)
    draft = served.models["draft"]
    key = draft.programs.step_key(draft.buckets.decode[0])
    real = draft.table.get(key)

    def flaky(params, state, words, block):
        if faults.random() < 0.03:
            for leaf in state["full"].values():
                leaf.delete()
            raise RuntimeError("a fault")
        return real(params, state, words, block)

    draft.table._ready[key] = flaky
    refused = 0
    try:
        for _ in range(ROUNDS):
            accounts = []
            for i in range(6):
                client = served.client(str(i), Listener())
                accounts.append(Account(client, client.new_pipeline(), {name: [] for name in NAMES}, []))
            for _ in range(150):
                account = rng.choice(accounts)
                if account.client.closed:
                    continue
                try:
                    call(rng, account)
                except PieError:
                    refused += 1
                if rng.random() < 0.03:
                    time.sleep(0.002)
            if rng.random() < 0.5:  # else they are killed in the midst of it
                served.settle()
            for account in accounts:
                account.client.close()
            for name in NAMES:
                for published in served.named.names("", name):
                    served.named.withdraw("", name, published)
            served.settle()
            for free, used, total in served.stats()["memory"].values():
                assert used == 0 and free == total
            assert served.stats()["words used"] == 0
        assert served.stats()["rebuilds"] > 0 and served.stats()["tokens"] > 1000 and refused > 0
    finally:
        served.close()
