"""The library above passes on a real engine: identity controls, statistics, and memory that really goes back."""

from __future__ import annotations

import math
import textwrap

import numpy as np
import pytest
from tiny_model import PAGE, Tiny

HEAD = """
from inferlet import (Reason, UsageError, beam, evict, generate, generate_many, grammar, prefix, reasoning, sample, session,
                      speculate, tools, watermark)
from inferlet.eta import *
PROMPT = [5, 80, 6, 70, 7]
"""


def main(body: str) -> str:
    return f"{HEAD}\nasync def main(input):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"


GREEDY = "greedy = await generate(PROMPT, max_tokens=24, model_stops=False).all_tokens()\n"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("drafter", "is_mixed"),
    [
        ("speculate.NGram()", False),
        ("speculate.Junk(3)", False),
        ("speculate.Jacobi()", False),
        ("speculate.Known(greedy[:7] + [9] + greedy[8:])", True),
        ("speculate.DraftModel('tiny')", False),
    ],
)
def test_speculation_says_what_greedy_decoding_says(tiny: Tiny, drafter: str, is_mixed: bool, width: int) -> None:
    body = f"""
        spoken = speculate.speculate(PROMPT, {drafter}, width={width}, max_tokens=24, model_stops=False)
        return [greedy, await spoken.all_tokens(), spoken.passes, spoken.proposed, spoken.accepted]
    """
    greedy, spoken, passes, proposed, accepted = tiny(main(GREEDY + textwrap.dedent(body)))
    assert spoken == greedy and len(greedy) == 24
    if is_mixed:
        assert 0 < accepted < proposed and passes < 24
    if "Junk" in drafter:
        assert passes >= 23 and accepted <= 1
    if "DraftModel" in drafter:
        assert accepted == proposed and passes == 1 + math.ceil(23 / (width + 1))


@pytest.mark.slow
def test_speculation_with_a_sampler_follows_the_samplers_law(tiny: Tiny) -> None:
    body = """
        sampler = sample.top_k(3, temperature=2.0)
        runs = [speculate.speculate(PROMPT, speculate.Known([input["guess"]] * 9), width=2, max_tokens=2, sampler=sampler,
                                    seed=seed, model_stops=False) for seed in range(120)]
        plain = generate_many(PROMPT, 120, sampler=sampler, max_tokens=2, seed=1000, model_stops=False)
        return [[await one.all_tokens() for one in runs], [await one.all_tokens() for one in plain], sum(one.accepted for one in runs)]
    """
    first = tiny(main("return await generate(PROMPT, max_tokens=2, model_stops=False).all_tokens()"))
    spoken, plain, accepted = tiny(main(body), guess=first[1])
    assert 0 < accepted < 120
    pairs = sorted({tuple(pair) for pair in spoken + plain})
    one, other = (np.array([[tuple(p) for p in run].count(pair) for pair in pairs]) for run in (spoken, plain))
    chi = float(np.sum((one - other) ** 2 / (one + other)))
    freedom = len(pairs) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_speculation_under_a_grammar_parses_and_forced_tokens_cost_no_pass(tiny: Tiny) -> None:
    body = """
        g = await grammar.json_schema({"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"],
                                       "additionalProperties": False})
        plain = await generate(PROMPT, grammar=g.matcher(), max_tokens=40).all_tokens()
        m = g.matcher()
        spoken = speculate.speculate(PROMPT, speculate.Forced(m), grammar=m, max_tokens=40)
        return [plain, await spoken.all_tokens(), spoken.passes, spoken.accepted]
    """
    plain, spoken, passes, accepted = tiny(main(body))
    assert spoken == plain and accepted > 0 and passes < len(plain)


def test_one_beam_is_greedy_and_more_are_likelier(tiny: Tiny) -> None:
    body = """
        one = await beam.search(PROMPT, 1, 12, model_stops=False)
        four = await beam.search(PROMPT, 4, 12, model_stops=False)
        return [greedy[:12], one[0].tokens, one[0].logprob, [[list(h.tokens), h.logprob, h.score] for h in four]]
    """
    greedy, one, logprob, four = tiny(main(GREEDY + textwrap.dedent(body)))
    assert list(one) == greedy
    assert len(four) == 4 and len({tuple(tokens) for tokens, _, _ in four}) == 4
    assert four[0][1] >= logprob and [score for *_, score in four] == sorted((s for *_, s in four), reverse=True)


def test_beams_are_scored_by_the_model(tiny: Tiny) -> None:
    body = """
        best = (await beam.search(PROMPT, 3, 5, model_stops=False))[0]
        total, text = 0.0, list(PROMPT)
        for token in best.tokens:
            item = await anext(generate(text, max_tokens=1, logprobs=20, model_stops=False))
            total += dict(item.top)[token]
            text.append(token)
        return [best.logprob, total]
    """
    logprob, total = tiny(main(body))
    assert logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("policy", ["evict.Policy()", "evict.Window(500)", "evict.Sinks(4, 400)"])
def test_a_policy_that_forgets_nothing_changes_nothing(tiny: Tiny, policy: str) -> None:
    body = f"return [greedy, await generate(PROMPT, max_tokens=24, model_stops=False, kv={policy}).all_tokens()]"
    greedy, same = tiny(main(GREEDY + body))
    assert greedy == same


@pytest.mark.parametrize(("policy", "sight"), [("Window(12)", "window(12)"), ("Sinks(4, 8)", "window(8, sinks=4)")])
def test_what_is_evicted_was_not_seen_and_its_memory_goes_back(tiny: Tiny, policy: str, sight: str) -> None:
    body = f"""
        ws, masked = WorkingSet(), WorkingSet()
        made = await generate(PROMPT, max_tokens=60, model_stops=False, kv=evict.{policy}, working_set=ws).all_tokens()
        pipe, fwd = Pipeline(), ForwardPass().embed(PROMPT).state([masked], StateGeometry.folding().{sight})
        out, want = fwd.epilogue(sample.greedy()), []
        for _ in range(60):
            want.append(await pipe.submit(fwd))
            fwd.embed(out)
        await generate([9], max_tokens=1, working_set=ws).all_tokens()
        return [made, want]
    """
    made, want = tiny(main(body))
    assert made == want and len(set(made)) > 1
    pages = """
        ws = WorkingSet()
        made = generate(PROMPT, max_tokens=200, model_stops=False, working_set=ws{}, run_ahead=1)
        count = 0
        async for _ in made:
            count += 1
            if count == 190:
                session.send("look")
        return count
    """
    used: list[int] = []

    tiny.on_sent = lambda text: used.append(tiny.engine.stats()["memory"]["full"][1])
    for kv in ("", f", kv=evict.{policy}"):
        assert tiny(main(pages.format(kv))) == 200
    assert used[0] > 190 // PAGE and used[1] <= 8, used


MARKS: dict[str, str] = {
    "greenlist": "watermark.Greenlist(key=77, delta=4.0)",
    "gumbel": "watermark.Gumbel(key=77)",
    "tournament": "watermark.Tournament(key=77)",
}


@pytest.mark.parametrize("name", list(MARKS))
def test_detectors_tell_marked_text_from_unmarked(tiny: Tiny, name: str) -> None:
    body = f"""
        mark, plain = {MARKS[name]}, sample.temperature(3.0)
        marked = generate_many(PROMPT, 4, sampler=plain | mark.sampler(), max_tokens=60, seed=2, model_stops=False)
        unmarked = generate_many(PROMPT, 8, sampler=plain, max_tokens=60, seed=2, model_stops=False)
        wrong = {MARKS[name].replace("77", "78")}
        texts = [PROMPT + await one.all_tokens() for one in marked]
        others = [PROMPT + await one.all_tokens() for one in unmarked]
        return [[mark.detect(t).z for t in texts], [mark.detect(t).z for t in others], [wrong.detect(t).z for t in texts],
                mark.detect(texts[0]).p_value, [mark.detect(t).counted for t in texts], texts]
    """
    marked, unmarked, wrong, p, counted, texts = tiny(main(body))
    assert min(marked) > 4 and p < 1e-4 and min(counted) > 30
    assert max(map(abs, unmarked)) < 3.5 and max(map(abs, wrong)) < 3.5
    assert abs(np.mean(unmarked)) < 1.2
    if name == "gumbel":
        assert len(set(map(tuple, texts))) == 1  # the draw is the key's, not the seed's


def test_prefixes_are_computed_once(tiny: Tiny) -> None:
    body = """
        first = prefix.load("lib", PROMPT)
        again = prefix.load("lib", PROMPT)
        one = await generate([9], working_set=first, max_tokens=4, model_stops=False).all_tokens()
        other = await generate([9], working_set=again, max_tokens=4, model_stops=False).all_tokens()
        plain = await generate([*PROMPT, 9], max_tokens=4, model_stops=False).all_tokens()
        return [one, other, plain, WorkingSet.withdraw("lib")]
    """
    one, other, plain, was_there = tiny(main(body))
    assert one == other == plain and was_there


def test_agents_call_tools_that_their_grammar_names(tiny: Tiny) -> None:
    body = """
        from inferlet.agent import Agent
        seen = []
        def add(a: int, b: int) -> int:
            "Adds."
            seen.append((a, b))
            if len(seen) == 1:
                raise ValueError("not now")
            return a + b
        bias = sample.logit_bias({3 + ord("n"): 90.0, 3 + ord(","): 60.0, 3 + ord("}"): 60.0}) | sample.greedy()
        agent = Agent([add], max_steps=2, max_tokens=90, longest=3, sampler=bias)
        result = await agent.run("x")
        return [len(result.steps), [s.result for s in result.steps], [[s.call.arguments["a"], s.call.arguments["b"]] for s in result.steps],
                [list(pair) for pair in seen], result.answer]
    """
    count, results, calls, seen, answer = tiny(main(body))
    assert count == 2 and calls == seen
    assert results == ["error: not now", str(sum(seen[1]))]
    assert answer is None or len(answer) <= 3


def test_tools_are_described_parsed_and_checked(tiny: Tiny) -> None:
    body = """
        from typing import Literal
        def weather(city: str, days: int = 1, unit: Literal["C", "F"] | None = None) -> str:
            "The weather."
            return f"{city}{days}"
        box = tools.Toolbox([weather])
        text = 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call> <tool_call>{"name": 1}</tool_call>'
        calls = tools.parse(text)
        said = []
        for call in [tools.Call("nothing"), tools.Call("weather", {"town": "x"})]:
            try:
                await box.run(call)
            except UsageError as error:
                said.append(str(error))
        return [box.describe()[0]["function"], [[c.name, c.arguments] for c in calls], await box.run(calls[0]), said,
                len(tools.parse("no call")), tools.parse('{"name": "a", "parameters": {}}')[0].name]
    """
    described, calls, result, said, none, bare = tiny(main(body))
    assert described["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]}},
        "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    assert calls == [["weather", {"city": "Rome", "days": 2}]] and result == "Rome2"
    assert "no tool 'nothing'" in said[0] and "'city'" in said[1] and (none, bare) == (0, "a")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_thoughts_are_told_apart_wherever_the_pieces_end(size: int) -> None:
    from inferlet.reasoning import Splitter

    text, splitter = "a<think>b < c</think>d<thin>e<think>f", Splitter()
    pieces = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
    assert "".join(p.thought for p in pieces) == "b < cf" and "".join(p.answer for p in pieces) == "ad<thin>e"
