"""`generate` on the fake engine: its tokens are those of greedy decoding by hand, whatever runs ahead of the reader."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, greedy, logits_of

from pie_xla.errors import PieError
from pie_xla.process.sdk import load_sdk

load_sdk()
from inferlet._stops import StopStrings  # noqa: E402

Run = Callable[..., Any]
HEAD = "from inferlet import generate, generate_many, sample, model, Reason, UsageError\nfrom inferlet.eta import *\n"
PROMPT = [5, 6, 7]


def main(body: str) -> str:
    return f"{HEAD}\nasync def main(input):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
def test_tokens_are_those_of_the_loop_by_hand(run: Run, depth: int) -> None:
    body = f"""
        made = generate([5, 6, 7], max_tokens=9, model_stops=False, run_ahead={depth})
        items = [item async for item in made]
        return [made.tokens, [item.token for item in items], made.reason.value, items[-1].reason.value,
                [item.reason for item in items[:-1]], made.text, "".join(item.text for item in items)]
    """
    tokens, items, reason, last, others, text, pieces = run(main(body))
    assert tokens == items == greedy(PROMPT, 9)
    assert reason == last == "length" and set(others) == {None}
    assert text == pieces == bytes(t - 3 for t in tokens if 3 <= t < 259).decode("utf-8", "replace")


def test_it_stops_at_a_token_and_the_set_holds_all_but_the_last(run: Run, engine: FakeEngine) -> None:
    expected = greedy(PROMPT, 6)
    body = f"""
        ws = WorkingSet()
        made = generate([5, 6, 7], stop=[{expected[4]}], model_stops=False, working_set=ws)
        await made.all_tokens()
        again = generate([made.stop], working_set=ws, max_tokens=1, model_stops=False)
        return [made.tokens, made.reason.value, made.stop, len(ws) - 1, await again.all_tokens()]
    """
    assert run(main(body)) == [expected[:4], "stop_token", expected[4], 7, [expected[5]]]


def test_the_models_own_stop_tokens_end_it(run: Run) -> None:
    body = """
        made = generate([5, 6, 7], sampler=sample.logit_bias({2: 1e9}) | sample.greedy())
        items = [item async for item in made]
        return [made.tokens, len(items), items[0].token, made.stop, made.reason.value]
    """
    assert run(main(body)) == [[], 1, 2, 2, "stop_token"]


def test_logprobs_are_the_models(run: Run) -> None:
    body = """
        made = generate([5, 6, 7], max_tokens=2, logprobs=3, sampler=sample.temperature(0.01), model_stops=False)
        items = [item async for item in made]
        own = [item async for item in generate([5, 6, 7], max_tokens=1, logprobs=0)]
        return [[[i.token, i.logprob, i.top] for i in items], own[0].logprob, own[0].top]
    """
    items, own, none = run(main(body))
    context = list(PROMPT)
    for token, logprob, top in items:
        logits = logits_of(context).astype(np.float64)
        logs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logs, kind="stable")[:3]
        assert [t for t, _ in top] == best.tolist() and token == best[0]
        np.testing.assert_allclose([logprob, *(p for _, p in top)], [logs[token], *logs[best]], rtol=1e-5)
        context.append(token)
    assert own == items[0][1] and none == []


def test_a_stop_string_across_tokens(run: Run) -> None:
    letters = [ord(c) + 3 for c in "hello <end> never"]
    # The k-th token is forced by biases of the k-th generation step: a grammar would do the same.
    body = f"""
        class Say(sample.Step):
            looks_back = True
            def change(self, logits, past):
                at = reduce_sum(cast(past >= 0, "i32"))
                wanted = gather(param({letters}), at)
                return where(cast(iota(intrinsics.vocab()), "i32") == wanted, 1e9, logits)
        made = generate([5], sampler=sample.chain(Say(), sample.greedy()), stop=["<end>", "zzz"])
        pieces = [item.text async for item in made]
        return [made.text, "".join(pieces), pieces, made.stop, made.reason.value, len(made.tokens)]
    """
    text, joined, pieces, stop, reason, count = run(main(body))
    assert text == joined == "hello " and pieces[:6] == list("hello ") and set(pieces[6:]) == {""}
    assert (stop, reason, count) == ("<end>", "stop_string", 11)


def test_many_share_the_prompt(run: Run, engine: FakeEngine) -> None:
    body = """
        made = generate_many([5, 6, 7, 8], 3, sampler=sample.temperature(1.0), max_tokens=4, seed=3, model_stops=False)
        texts = [await one.all_tokens() for one in made]
        alone = await generate([5, 6, 7, 8], sampler=sample.temperature(1.0), max_tokens=4, seed=4, model_stops=False).all_tokens()
        return [texts, alone]
    """
    texts, alone = run(main(body))
    assert len({tuple(text) for text in texts}) == 3 and texts[1] == alone
    prompts = [
        request.rows[0].tokens for request in engine.clients[0].submits if isinstance(request.rows[0].tokens, tuple)
    ]
    assert prompts.count((5, 6, 7)) == 1 and prompts.count((8,)) == 3


@pytest.mark.parametrize("n", [1, 2])
def test_many_leave_the_set_that_they_go_on_from(run: Run, n: int) -> None:
    body = f"""
        ws = WorkingSet()
        await generate([5, 6], working_set=ws, max_tokens=1, model_stops=False).all_tokens()
        made = generate_many([7, 8], {n}, working_set=ws, max_tokens=3, model_stops=False)
        return [[await one.all_tokens() for one in made], len(ws)]
    """
    texts, length = run(main(body))
    assert texts == [greedy([5, 6, 7, 8], 3)] * n and length == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("[]", "a prompt is"),
        ("[5], max_tokens=0", "max_tokens 0"),
        ("[5], logprobs=21", "at most 20"),
        ("[5], stop=['']", "stop names ''"),
        ("[5] * 64", "leaves no room"),
        ("[5], sampler=len", "sampler is one of"),
        ("[5], run_ahead=0", "run_ahead 0"),
    ],
)
def test_wrong_arguments_are_named(run: Run, arguments: str, words: str) -> None:
    with pytest.raises(PieError) as failure:
        run(main(f"generate({arguments})"))
    assert words in str(failure.value)


def test_stop_strings_hold_back_no_more_than_they_must() -> None:
    stops = StopStrings(["abab", "c"])
    assert [stops.push(piece) for piece in ("x", "aba", "abz", "ab", "ac")] == ["x", "", "abaabz", "", "aba"]
    assert stops.found == "c" and stops.push("more") == "" and stops.finish() == ""
    open_ = StopStrings(["abc"])
    assert open_.push("xxab") == "xx" and open_.finish() == "ab"
