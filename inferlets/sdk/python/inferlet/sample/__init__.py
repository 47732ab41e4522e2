"""Samplers: `out = fwd.epilogue(sample.top_p(0.9, temperature=0.7))`, or `generate(prompt, sampler=...)`.

Each function gives a `Sampler`; `a | b` does first what a says, then what b says: `sample.penalties(frequency=0.5) | sample.min_p(0.05)`.
Numbers are inputs of the traced program, so changing one never compiles anything. Filters keep ties together.
A sampler is an epilogue that draws a token (i32 scalar) from a row's logits. Those that remember something from token to token
(`penalties`, `dry`, `no_repeat`, `mirostat`) serve one sequence each: `sampler.begin(prompt, max_tokens)`. `generate` begins them by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inferlet import model
from inferlet._errors import UsageError
from inferlet.sample._filters import Epsilon, Eta, TailFree, TopA, TopNSigma, Typical, Usual, Xtc
from inferlet.sample._heat import DynamicTemperature, EntropyTemperature, Mirostat, Temperature
from inferlet.sample._penalties import Bias, Dry, NoRepeat, Penalties, tokens_of
from inferlet.sample._sampler import Argmax, Categorical, Draw, Sampler, Step, number, whole

INF = float("inf")

__all__ = [
    "Argmax",
    "Categorical",
    "Draw",
    "Sampler",
    "Step",
    "chain",
    "dry",
    "dynamic_temperature",
    "entropy_temperature",
    "epsilon",
    "eta",
    "greedy",
    "logit_bias",
    "min_p",
    "mirostat",
    "no_repeat",
    "number",
    "penalties",
    "sampler",
    "tail_free",
    "temperature",
    "tokens_of",
    "top_a",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical",
    "whole",
    "xtc",
]


def chain(*samplers: Sampler | Step) -> Sampler:
    """One after another; a `Step` of one's own may stand among them. `chain()` alone draws from softmax(logits)."""
    made = Sampler()
    for one in samplers:
        made = made | (Sampler((one,)) if isinstance(one, Step) else one)
    return made


def greedy(row: int = 0) -> Sampler:
    """The likeliest token; the lowest id on ties."""
    return Sampler(draw=Argmax(), row=row)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    row: int = 0,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
) -> Sampler:
    """What requests usually ask for, in the usual order: bias, penalties, temperature, top-k, top-p, min-p, then the draw.

    Temperature 0 is greedy. All temperatures and filters are one program; bias and penalties are others.
    """
    heat = number("temperature", temperature, 0, INF)
    k = 0 if top_k is None else whole("top_k", top_k, 1)
    p = 1.0 if top_p is None else number("top_p", top_p, 0, 1, above=True)
    floor = 0.0 if min_p is None else number("min_p", min_p, 0, 1, above=True)
    made = Sampler(row=row)
    if bias:
        made = made | logit_bias(bias)
    if (repetition, presence, frequency) != (1.0, 0.0, 0.0):
        made = made | penalties(repetition, presence, frequency)
    if heat == 0:
        return made | greedy(row)
    return made | (Sampler((Usual(heat, k, p, floor),), row=row) if k or p < 1 or floor else _heated(heat, row))


def temperature(value: float, row: int = 0) -> Sampler:
    """A draw from softmax(logits / value); value 0 is greedy."""
    return sampler(temperature=value, row=row)


def top_k(k: int, temperature: float = 1.0, row: int = 0) -> Sampler:
    """A draw among the k likeliest tokens."""
    return sampler(temperature=temperature, top_k=k, row=row)


def top_p(p: float, temperature: float = 1.0, row: int = 0) -> Sampler:
    """A draw among the likeliest tokens that together have probability p (Holtzman et al. 2019, arXiv:1904.09751)."""
    return sampler(temperature=temperature, top_p=p, row=row)


def min_p(p: float, temperature: float = 1.0, row: int = 0) -> Sampler:
    """A draw among tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    return sampler(temperature=temperature, min_p=p, row=row)


def top_a(a: float) -> Sampler:
    """Tokens with a probability of at least a times the square of the highest one (KoboldAI)."""
    return Sampler((TopA(number("top_a", a, 0, 1)),))


def typical(mass: float) -> Sampler:
    """The tokens whose information is closest to the expected one and that have probability `mass` together.

    Meister et al. 2022, "Locally Typical Sampling", arXiv:2202.00666.
    """
    return Sampler((Typical(number("typical mass", mass, 0, 1, above=True)),))


def tail_free(z: float) -> Sampler:
    """Tokens before the tail, which begins where the second differences of the sorted probabilities have share z (Phénix & Egan 2019)."""
    return Sampler((TailFree(number("tail_free z", z, 0, 1)),))


def epsilon(epsilon: float) -> Sampler:
    """Tokens with a probability of at least epsilon (Hewitt et al. 2022, "Truncation Sampling", arXiv:2210.15191)."""
    return Sampler((Epsilon(number("epsilon", epsilon, 0, 1)),))


def eta(epsilon: float) -> Sampler:
    """Tokens with at least min(epsilon, sqrt(epsilon) * exp(-entropy)) (Hewitt et al. 2022, arXiv:2210.15191)."""
    return Sampler((Eta(number("eta epsilon", epsilon, 0, 1)),))


def top_n_sigma(n: float) -> Sampler:
    """Tokens whose logit is within n standard deviations of the highest (Tang et al. 2024, arXiv:2411.07641)."""
    return Sampler((TopNSigma(number("top_n_sigma n", n, 0, INF)),))


def xtc(threshold: float = 0.1, probability: float = 0.5) -> Sampler:
    """Exclude top choices: at this probability, of the tokens above the threshold only the least likely stays (p-e-w 2024)."""
    return Sampler(
        (Xtc(number("xtc threshold", threshold, 0, 1, above=True), number("xtc probability", probability, 0, 1)),)
    )


def entropy_temperature(highest: float = 1.0, theta: float = 0.1, base: float = 0.8) -> Sampler:
    """Temperature highest * base ** (theta / entropy): colder where the model is sure (Zhang et al. 2024, EDT, arXiv:2403.14541)."""
    step = EntropyTemperature(
        number("entropy_temperature highest", highest, 0, INF, above=True),
        number("entropy_temperature theta", theta, 0, INF),
        number("entropy_temperature base", base, 0, 1, above=True),
    )
    return Sampler((step,))


def dynamic_temperature(low: float = 0.5, high: float = 1.5, exponent: float = 1.0) -> Sampler:
    """Temperature low + (high - low) * (entropy / highest possible entropy) ** exponent (llama.cpp's dynatemp)."""
    step = DynamicTemperature(
        number("dynamic_temperature low", low, 0, INF),
        number("dynamic_temperature high", high, low, INF),
        number("dynamic_temperature exponent", exponent, 0, INF, above=True),
    )
    return Sampler((step,))


def mirostat(tau: float = 5.0, rate: float = 0.1) -> Sampler:
    """Mirostat 2: a bound of surprise that holds the text's at tau bits a token (Basu et al. 2021, arXiv:2007.14966)."""
    return Sampler((Mirostat(number("mirostat tau", tau, 0, INF), number("mirostat rate", rate, 0, INF)),))


def penalties(repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> Sampler:
    """Against saying the same again.

    Args:
        repetition: logits of tokens seen anywhere, the prompt included, are divided by it where positive and multiplied by it where
            negative (Keskar et al. 2019, CTRL, arXiv:1909.05858). 1 is off.
        presence, frequency: taken off the logits of drawn tokens, once or as often as each was drawn (OpenAI's). 0 is off.
    """
    step = Penalties(
        number("repetition", repetition, 0, INF, above=True),
        number("presence", presence, -INF, INF),
        number("frequency", frequency, -INF, INF),
    )
    return Sampler((step,))


def dry(multiplier: float = 0.8, base: float = 1.75, allowed: int = 2, breakers: Iterable[int | str] = ()) -> Sampler:
    """Don't repeat yourself: a token that would make a repetition of n tokens longer loses multiplier * base ** (n - allowed) (p-e-w 2024).

    Args:
        allowed: repetitions shorter than this cost nothing.
        breakers: tokens (or texts, each of one token) that no repetition reaches across, such as line ends.
    """
    step = Dry(
        number("dry multiplier", multiplier, 0, INF),
        number("dry base", base, 1, INF),
        whole("dry allowed", allowed, 1),
        tuple(_token(breaker) for breaker in breakers),
    )
    return Sampler((step,))


def no_repeat(n: int) -> Sampler:
    """No run of n tokens comes twice, the prompt included (Paulus et al. 2017, arXiv:1705.04304)."""
    return Sampler((NoRepeat(whole("no_repeat n", n, 1)),))


def logit_bias(bias: Mapping[int, float]) -> Sampler:
    """Adds to the logits of single tokens; -inf forbids one."""
    if not bias:
        raise UsageError("logit_bias names no token")
    for token, value in bias.items():
        if type(token) is not int or not 0 <= token < model.vocab_size():
            raise UsageError(f"logit_bias names {token!r:.60}, not a token id (0 to {model.vocab_size() - 1})")
        if value != -INF:
            number(f"logit_bias of token {token}", value, -INF, INF)
    size = 16  # so that few programs serve all sizes; what fills up adds nothing
    while size < len(bias):
        size *= 2
    fill = size - len(bias)
    return Sampler((Bias((*bias, *[-1] * fill), (*map(float, bias.values()), *[0.0] * fill)),))


def _heated(heat: float, row: int) -> Sampler:
    return Sampler(() if heat == 1.0 else (Temperature(heat),), row=row)


def _token(breaker: int | str) -> int:
    if isinstance(breaker, str):
        found = model.encode(breaker)
        if len(found) != 1:
            raise UsageError(f"dry: the breaker {breaker!r} is {len(found)} tokens, not one")
        return found[0]
    return whole("dry breaker", breaker, 0)
