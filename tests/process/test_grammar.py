"""Grammars: what comes out always parses, masks are of the moment they were asked for, hostile grammars are refused by name."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_engine import FACTS, Bytes, FakeEngine, V, logits_of

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Event, Launch
from pie_xla.process.grammar import GrammarError, GrammarLimits, Kind, Matcher, Vocabulary, Workers
from pie_xla.process.grammar_calls import GrammarCalls
from pie_xla.process.process import ProcessManager

STOP = 2
WORDS = (b'{"', b'": ', b', "', b"true", b"name", b'"}')  # tokens of several bytes, ids 259 and on


def byte_letters() -> dict[int, str]:
    """Byte -> the letter that byte-level tokenizers write for it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters.update({byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in plain)})
    return letters


def tokenizer_json() -> str:
    """`fake_engine.Bytes` as a tokenizer.json: token = byte + 3; 0, 1 and 2 are specials."""
    letters = byte_letters()
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letters[byte]: byte + 3 for byte in range(256)}
    merges: list[list[str]] = []
    for word in WORDS:
        written = [letters[byte] for byte in word]
        whole = written[0]
        for letter in written[1:]:
            if [whole, letter] not in merges:
                merges.append([whole, letter])
            whole += letter
            vocab.setdefault(whole, len(vocab))
    assert len(vocab) <= V
    special = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for text, i in list(vocab.items())[:3]
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": merges}  # fmt: skip
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
                       "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
                       "model": model})  # fmt: skip


SPELLED = tokenizer_json()
BYTES: dict[int, bytes] = {}
for _text, _id in json.loads(SPELLED)["model"]["vocab"].items():
    _back = {letter: byte for byte, letter in byte_letters().items()}
    BYTES[_id] = b"" if _id < 3 else bytes(_back[letter] for letter in _text)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(lambda: SPELLED, V, (STOP,))


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def write(matcher: Matcher, rng: np.random.Generator, most: int = 3000) -> bytes:
    """Random tokens under the mask until a stop token; ends are preferred once the text is long."""
    text = b""
    for n in range(most):
        mask = matcher.mask().result(5)
        choices = allowed(mask)
        token = int(rng.choice(choices))
        if n > 60:  # close strings and lists, and end numbers
            closing = [c for c in choices if BYTES.get(int(c), b" ")[:1] in (b'"', b"]", b"}", b"") or c == STOP]
            token = int(rng.choice(closing)) if closing else token
        assert matcher.accept([token]) == 1
        if token == STOP:
            return text
        text += BYTES[token]
    raise AssertionError(f"no end after {most} tokens: {text!r:.200}")


OBJECT = {"type": "object", "additionalProperties": False}
SIMPLE: list[Any] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "number"},
    {"type": "number", "minimum": 0.5, "maximum": 2},
    {"type": "string"},
    {"type": "string", "maxLength": 7},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f0-9]{4}$"},
    {"type": "string", "enum": ["red", "green", "blue", "greenish"]},
    {"enum": [1, "two", None, [3], {"four": 5}]},
    {"const": {"fixed": [1, 2]}},
    {"type": ["string", "null"]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
]
WHOLE: list[Any] = [
    *SIMPLE,
    *({"type": "array", "items": one, "minItems": 1, "maxItems": 3} for one in SIMPLE),
    *({**OBJECT, "properties": {"name": one, "other": SIMPLE[0]}, "required": ["name"]} for one in SIMPLE),
    {"anyOf": [SIMPLE[0], SIMPLE[3]]},
    {"type": "array", "prefixItems": [SIMPLE[0], SIMPLE[3]], "items": False},
    {**OBJECT, "properties": {"a": {**OBJECT, "properties": {"b": SIMPLE[3]}, "required": ["b"]}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"$defs": {"n": {**OBJECT, "properties": {"v": SIMPLE[3], "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
                     "required": ["v", "next"]}}, "$ref": "#/$defs/n"},
    True,
]  # fmt: skip


@pytest.mark.parametrize("n", range(len(WHOLE)))
def test_whatever_is_drawn_is_json_of_the_schema(vocabulary: Vocabulary, workers: Workers, n: int) -> None:
    schema = WHOLE[n]
    start = vocabulary.compile(Kind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(3):
        text = write(Matcher(vocabulary, start.deep_copy(), workers), np.random.default_rng([n, seed]))
        jsonschema.validate(json.loads(text.decode()), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{2,8}@[a-z]+\.(com|org)", r"\d{3}-\d{4}", "(ab|a)*c?", "é+|日本", r"-?(0|[1-9][0-9]*)"]
)
def test_whatever_is_drawn_matches_the_regex(vocabulary: Vocabulary, workers: Workers, pattern: str) -> None:
    start = vocabulary.compile(Kind.REGEX, pattern)
    for seed in range(5):
        matcher, rng = Matcher(vocabulary, start.deep_copy(), workers), np.random.default_rng(seed)
        text = b""
        while True:
            choices = allowed(matcher.mask().result(5))
            token = STOP if len(text) > 20 and STOP in choices else int(rng.choice(choices))
            assert matcher.accept([token]) == 1 and len(text) < 300
            if token == STOP:
                break
            text += BYTES[token]
        assert re.fullmatch(pattern, text.decode())


def test_a_mask_allows_exactly_what_can_be_accepted(vocabulary: Vocabulary, workers: Workers) -> None:
    start = vocabulary.compile(Kind.JSON_SCHEMA, json.dumps(WHOLE[-4]))
    matcher, rng = Matcher(vocabulary, start.deep_copy(), workers), np.random.default_rng(5)
    for _ in range(12):
        mask = set(allowed(matcher.mask().result(5)).tolist())
        tried = {token for token in range(V) if token in BYTES and matcher.fork().accept([token])}
        if not matcher.forced():  # where there is no choice, the mask names one spelling
            assert mask == tried
        assert mask <= tried
        matcher.accept([int(rng.choice(sorted(mask)))])
        if matcher.state()[0]:
            break


def test_lark_rollback_and_forks(vocabulary: Vocabulary, workers: Workers) -> None:
    start = vocabulary.compile(Kind.LARK, 'start: "<" item ("," item)* ">"\nitem: /[0-9]+/ | "x"')
    matcher = Matcher(vocabulary, start, workers)
    spell = Bytes().encode
    assert matcher.accept(spell("<12,y", False)) == 4
    other = matcher.fork()
    assert matcher.accept(spell("x>", False)) == 2 and matcher.state() == (True, True, 6)
    assert matcher.accept([STOP]) == 1 and matcher.accept([STOP]) == 1  # a stop token after the end changes nothing
    assert other.state() == (False, False, 4)
    matcher.rollback(3)
    assert matcher.state() == (False, False, 5)
    assert set(allowed(matcher.mask().result(5))) == {byte + 3 for byte in b",>"}
    matcher.rollback(5)
    assert list(allowed(matcher.mask().result(5))) == spell("<", False)
    with pytest.raises(GrammarError, match=r"rollback\(1\): the matcher has accepted 0 tokens"):
        matcher.rollback(1)


def test_a_mask_is_of_the_moment_it_was_asked_for(vocabulary: Vocabulary, workers: Workers) -> None:
    matcher = Matcher(vocabulary, vocabulary.compile(Kind.REGEX, "abc"), workers)
    first = matcher.mask()
    assert matcher.accept([ord("a") + 3]) == 1
    follow, second = matcher.follow(), matcher.mask()
    assert list(allowed(first.result(5))) == [ord("a") + 3]
    with pytest.raises(GrammarError, match="follows a pass that has not run yet"):
        matcher.accept([ord("b") + 3])
    assert not second.done()
    matcher.landed(follow, ord("b") + 3)
    assert list(allowed(second.result(5))) == [ord("c") + 3]
    wrong, third = matcher.follow(), matcher.mask()
    matcher.landed(wrong, ord("x") + 3)
    with pytest.raises(GrammarError, match="token 123, after 2 others, is not what the grammar allows"):
        third.result(5)
    lost, fourth = matcher.follow(), matcher.mask()
    matcher.landed(lost, None, "out of luck")
    with pytest.raises(GrammarError, match="never came: out of luck"):
        fourth.result(5)
    assert matcher.accept([ord("c") + 3]) == 1  # what never came changed nothing


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        (Kind.JSON_SCHEMA, "{", "cannot be read"),
        (Kind.JSON_SCHEMA, '{"type": "strin"}', "cannot be compiled"),
        (Kind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (Kind.REGEX, "(a", "cannot be compiled"),
        (Kind.LARK, "start: nothing", "cannot be compiled"),
        (Kind.REGEX, "a" * 300_000, "more than 262144 bytes"),
    ],
)
def test_bad_grammars_are_refused_by_name(vocabulary: Vocabulary, kind: Kind, source: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        vocabulary.compile(kind, source)


@pytest.mark.parametrize(
    ("multiples", "states"), [([200003], "200,003"), ([9973, 9967], "99,400,891"), ([0.00001, 99991], "99,991")]
)
def test_multiples_that_need_too_large_an_automaton_are_refused(
    vocabulary: Vocabulary, multiples: list[float], states: str
) -> None:
    schema = {"type": "object", "properties": {str(n): {"allOf": [{"multipleOf": n}]} for n in multiples}}
    with pytest.raises(GrammarError, match=f"need {states} states"):
        vocabulary.compile(Kind.JSON_SCHEMA, json.dumps(schema))
    vocabulary.compile(Kind.JSON_SCHEMA, json.dumps({"type": "number", "multipleOf": 0.01}))


@pytest.mark.parametrize("limits", [GrammarLimits(symbols=100), GrammarLimits(compile_fuel=100)])
def test_a_grammar_beyond_its_limits_is_refused(limits: GrammarLimits) -> None:
    small = Vocabulary(lambda: SPELLED, V, (STOP,), limits)
    rules = "\n".join(f'a{n}: "x" a{n + 1} | /[a-z]{{{n}}}q/' for n in range(200))
    with pytest.raises(GrammarError, match="cannot be compiled"):
        small.compile(Kind.LARK, f'start: a0\n{rules}\na200: "y"')
    assert Vocabulary(lambda: SPELLED, V, (STOP,)).compile(Kind.LARK, f'start: a0\n{rules}\na200: "y"')


def test_a_grammar_that_explodes_while_it_is_followed_fails_alone(workers: Workers) -> None:
    small = Vocabulary(lambda: SPELLED, V, (STOP,), GrammarLimits(states=40, mask_fuel=2000))
    matcher = Matcher(small, small.compile(Kind.REGEX, "(a|b)*a(a|b){12}"), workers)
    with pytest.raises(GrammarError, match=r"cannot be (followed any further|compiled)"):
        for token in Bytes().encode("abbaabababbaaabbabbabababaabba" * 3, False):
            matcher.mask().result(5)
            matcher.accept([token])


# -- whole processes


@pytest.fixture
def manager(engine: FakeEngine, vocabulary: Vocabulary, workers: Workers) -> Iterator[ProcessManager]:
    room = partial(GrammarCalls, vocabularies={"fake": vocabulary}, workers=workers)
    facts = replace(FACTS, max_context=4096)
    manager = ProcessManager(engine, facts, Bytes(), lambda text: EtaProgram.from_json(text), rooms=(room,))
    yield manager
    manager.close()


def run(manager: ProcessManager, source: str, value: Any = None) -> Any:
    events: list[Event] = []
    launch = Launch(textwrap.dedent(source), "main.py", value or {}, native=True)
    return manager.launch(launch, events.append).done.result(60)


DECODE = """
from inferlet import grammar
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    g = await grammar.json_schema(input["schema"])
    m, ws, pipe, fwd = g.matcher(), WorkingSet(), Pipeline(), ForwardPass()
    tokens, new, passes = [], [9, 8], 0
    fwd.embed(new).state([ws], StateGeometry.folding())
    fwd.epilogue(lambda: reduce_argmax(grammar.apply(intrinsics.output(0, "logits"), m)))
    while not m.is_done:
        forced = m.forced() if input["forced"] else []
        if forced:
            assert m.accept(forced) == len(forced)
            tokens += forced
            new = new + forced
            continue
        token = await pipe.submit(fwd.embed(new))
        passes += 1
        assert m.accept(token) == 1
        tokens.append(token)
        new = [token]
    return [tokens, passes]
"""
AHEAD = """
from inferlet import grammar
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    g = await grammar.json_schema(input["schema"])
    m, ws, pipe, fwd = g.matcher(), WorkingSet(), Pipeline(), ForwardPass()
    fwd.embed([9, 8]).state([ws], StateGeometry.folding())
    out = fwd.epilogue(lambda: reduce_argmax(grammar.apply(intrinsics.output(0, "logits"), m)))
    outs = []
    for _ in range(input["count"]):
        outs.append(pipe.submit(fwd))
        m.follow(outs[-1])
        fwd.embed(out)
    return [await one for one in outs]
"""
KEYS = {
    **OBJECT,
    "properties": {"the_name_of_the_thing": {"enum": ["alpha", "beta"]}, "its_weight_in_kilograms": SIMPLE[3]},
    "required": ["the_name_of_the_thing", "its_weight_in_kilograms"],
}


def test_forced_tokens_are_what_greedy_would_have_said_in_fewer_passes(manager: ProcessManager) -> None:
    slow, passes = run(manager, DECODE, {"schema": KEYS, "forced": False})
    fast, fewer = run(manager, DECODE, {"schema": KEYS, "forced": True})
    text = b"".join(BYTES[token] for token in slow).decode()
    jsonschema.validate(json.loads(text), KEYS)
    assert b"".join(BYTES[token] for token in fast).decode() == text
    assert fast == slow and passes >= len(slow) and fewer <= len(slow) // 3


def test_following_runs_ahead_to_the_same_tokens(
    manager: ProcessManager, vocabulary: Vocabulary, workers: Workers
) -> None:
    tokens, _ = run(manager, DECODE, {"schema": KEYS, "forced": False})
    ahead = run(manager, AHEAD, {"schema": KEYS, "count": len(tokens) + 3})
    assert ahead[: len(tokens)] == tokens and ahead[len(tokens) :] == [STOP] * 3
    matcher, so_far = Matcher(vocabulary, vocabulary.compile(Kind.JSON_SCHEMA, json.dumps(KEYS)), workers), [9, 8]
    for token in tokens:  # masked greedy, by hand
        choices = allowed(matcher.mask().result(5))
        assert token == choices[np.argmax(logits_of(so_far)[choices])]
        matcher.accept([token])
        so_far.append(token)


def test_what_makes_no_sense_is_refused(manager: ProcessManager) -> None:
    with pytest.raises(PieError, match="grammar cannot be compiled"):
        run(manager, "from inferlet import grammar\nasync def main(input):\n    await grammar.regex('(a')\n")
    source = "from inferlet._host import runtime\nasync def main(input):\n    runtime().transport.call({0})\n"
    with pytest.raises(PieError, match="matcher 7 is not one of this process"):
        run(manager, source.format("'matcher.forced', {'matcher': 7}"))
    with pytest.raises(PieError, match="grammar 3 is not one of this process"):
        run(manager, source.format("'grammar.matcher', {'grammar': 3}"))
