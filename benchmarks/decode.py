"""Greedy decoding side by side: the bare loop, native inferlets, sandboxed inferlets, transformers, llama.cpp.

    python -m benchmarks.decode --streams 1 16 32 --rounds 3 [--gguf FILE]

One process measures the bare `jax.jit` loop, then the engine with native and with sandboxed inferlets, in turn, round by round, on the
same weights and the same prompts (32 tokens, then 64 decoded: 64 cached positions on average). Peers follow in processes of their own.
Figures are tokens/s of all streams together while all of them decode.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS, DEPTH = 32, 64, 8
HERE = Path(__file__).parent


def prompt_of(stream: int) -> list[int]:
    """The same prompt as benchmarks/inferlets/decode.py."""
    return [1 + (i * 37 + stream * 11) % 1000 for i in range(PROMPT)]


def steady(times: list[list[float]]) -> float:
    """Tokens a second, of all streams, in the window in which all of them decode."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    inside = sum(sum(1 for at in stream if begin < at <= end) for stream in times)
    return inside / (end - begin)


def inferlets(runtime: Any, streams: int, native: bool, tokens: int = TOKENS) -> dict[str, Any]:
    """`streams` processes of the decode inferlet at once."""
    from pie_xla.launch import Failed, Launch, Returned

    source = (HERE / "inferlets" / "decode.py").read_text()
    results: dict[int, Any] = {}
    done = threading.Semaphore(0)

    def hear(stream: int, event: Any) -> None:
        if isinstance(event, Returned | Failed):
            results[stream] = event
            done.release()

    for stream in range(streams):
        given = {"stream": stream, "prompt": PROMPT, "tokens": tokens, "depth": DEPTH}
        runtime.launch(
            Launch(source, str(HERE / "inferlets" / "decode.py"), given, native), lambda event, s=stream: hear(s, event)
        )
    for _ in range(streams):
        done.acquire()
    for event in results.values():
        if isinstance(event, Failed):
            raise SystemExit(event.message)
    return {
        "rate": steady([r.value["times"] for r in results.values()]),
        "tokens": {s: r.value["tokens"] for s, r in results.items()},
    }


def bare(step: Any, params: Any, state: Any, first: Any, steps: int) -> tuple[float, Any]:
    """Tokens a second of the bare loop."""
    tokens, starts = (x + 0 for x in first)  # the step consumes what it is given
    rows = tokens.shape[0]
    begin = time.perf_counter()
    for _ in range(steps):
        state, tokens, starts = step(params, state, tokens, starts)
    tokens.block_until_ready()
    return rows * steps / (time.perf_counter() - begin), state


def ours(streams: list[int], rounds: int, model: str | None) -> dict[str, Any]:
    from benchmarks.bare_loop import decode_loop
    from pie_xla.cli.console import PlainProgress
    from pie_xla.config import load
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    report: dict[str, Any] = {}
    with open_runtime(load(), model, serve=True, progress=PlainProgress(), timings=Timings()) as runtime:
        engine = runtime.engine
        for n in streams:
            step, state, first = decode_loop(engine.default.model.lowered, n, PROMPT, TOKENS)
            params = dict(engine.default.model.params)
            for _ in range(3):  # its first call compiles, and its second does again, for state that a step has made
                _, state = bare(step, params, state, first, 2)
            cells: dict[str, list[float]] = {"bare": [], "native": [], "sandboxed": []}
            for native in (True, False):  # programs, and sizes of theirs that are new, compile here
                for _ in range(3):
                    inferlets(runtime, n, native, tokens=8)
            before = engine.stats()
            for _ in range(rounds):
                rate, state = bare(step, params, state, first, TOKENS)
                cells["bare"].append(rate)
                native, sandboxed = inferlets(runtime, n, True), inferlets(runtime, n, False)
                assert native["tokens"] == sandboxed["tokens"], "native and sandboxed tokens differ"
                cells["native"].append(native["rate"])
                cells["sandboxed"].append(sandboxed["rate"])
            after = engine.stats()
            report[str(n)] = {name: {"median": statistics.median(v), "all": v} for name, v in cells.items()}
            report[str(n)]["compiles after warm-up"] = sum(after["compiled"].values()) - sum(
                before["compiled"].values()
            )
            for name in ("native", "sandboxed"):
                ratios = [a / b for a, b in zip(cells[name], cells["bare"], strict=True)]
                report[str(n)][f"{name} / bare"] = statistics.median(ratios)
            report[str(n)]["sandboxed / native"] = statistics.median(
                [a / b for a, b in zip(cells["sandboxed"], cells["native"], strict=True)]
            )
            del step, state, first
        report["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report["weights MiB"] = sum(a.nbytes for a in engine.default.model.params.values()) / 2**20
        report["state MiB"] = engine.default.plan.bytes / 2**20
    return report


def transformers(streams: list[int], rounds: int, gguf: str) -> dict[str, Any]:
    """Hugging Face transformers, float32 (it dequantizes the same file), eager PyTorch on all cores: its own cache, argmax by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(gguf)
    net = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    report = {}
    for n in streams:
        rates = []
        for _ in range(rounds):
            with torch.inference_mode():
                ids = torch.tensor([prompt_of(s) for s in range(n)])
                out = net(ids, use_cache=True)
                begin = time.perf_counter()
                for _ in range(TOKENS - 1):
                    token = out.logits[:, -1].argmax(-1, keepdim=True)
                    out = net(token, past_key_values=out.past_key_values, use_cache=True)
                out.logits.sum().item()
                rates.append(n * (TOKENS - 1) / (time.perf_counter() - begin))
        report[str(n)] = {"median": statistics.median(rates), "all": rates}
    return report


def llama_cpp(streams: list[int], rounds: int, gguf: str) -> dict[str, Any]:
    """llama.cpp through its C API: one batch of one token per sequence, greedy, two threads, flash attention off (faster here)."""
    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    weights = ll.llama_model_load_from_file(gguf.encode(), ll.llama_model_default_params())
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(weights))
    report = {}
    for n in streams:
        settings = ll.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = n * 128, 2048, 512, n
        settings.n_threads = settings.n_threads_batch = 2
        settings.flash_attn_type = 0  # disabled
        context = ll.llama_init_from_model(weights, settings)
        batch = ll.llama_batch_init(2048, 0, 1)

        def add(token: int, position: int, sequence: int, wanted: bool, batch: Any = batch) -> None:
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
            batch.n_tokens = i + 1

        rates = []
        for _ in range(rounds):
            ll.llama_memory_clear(ll.llama_get_memory(context), True)
            batch.n_tokens = 0
            last = []
            for s in range(n):
                for i, token in enumerate(prompt_of(s)):
                    if i == PROMPT - 1:
                        last.append(batch.n_tokens)
                    add(token, i, s, i == PROMPT - 1)
            assert ll.llama_decode(context, batch) == 0
            best = [int(np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (vocab,)).argmax()) for i in last]
            begin = time.perf_counter()
            for step in range(TOKENS - 1):
                batch.n_tokens = 0
                for s in range(n):
                    add(best[s], PROMPT + step, s, True)
                assert ll.llama_decode(context, batch) == 0
                best = [
                    int(np.ctypeslib.as_array(ll.llama_get_logits_ith(context, s), (vocab,)).argmax()) for s in range(n)
                ]
            rates.append(n * (TOKENS - 1) / (time.perf_counter() - begin))
        report[str(n)] = {"median": statistics.median(rates), "all": rates}
        ll.llama_batch_free(batch)
        ll.llama_free(context)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="a model of the store")
    parser.add_argument(
        "--gguf", metavar="FILE", help="the model's GGUF file: also transformers and llama.cpp (llama-cpp-python)"
    )
    parser.add_argument("--only", choices=["ours", "transformers", "llama.cpp"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decode.json")
    args = parser.parse_args()
    if args.only is not None:
        match args.only:
            case "ours":
                found = ours(args.streams, args.rounds, args.model)
            case "transformers":
                found = transformers(args.streams, args.rounds, args.gguf)
            case _:
                found = llama_cpp(args.streams, args.rounds, args.gguf)
        print(json.dumps(found))
        return
    report = {}
    wanted = [("ours", True), ("transformers", args.gguf), ("llama.cpp", args.gguf)]
    for name, given in wanted:
        if given:
            command = [sys.executable, "-m", "benchmarks.decode", *sys.argv[1:], "--only", name]
            print(f"{name} ...", file=sys.stderr)
            said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            report[name] = json.loads(said.splitlines()[-1])
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report, args.streams))


def table(report: dict[str, Any], streams: list[int]) -> str:
    """The report as Markdown."""
    lines = [
        "| streams | bare loop | native | sandboxed | native / bare | sandboxed / native | transformers f32 | llama.cpp |"
    ]
    lines.append("| --- |" + " --- |" * 7)
    for n in map(str, streams):
        cell = report["ours"][n]
        peers = [f"{report[p][n]['median']:.0f}" if p in report else "-" for p in ("transformers", "llama.cpp")]
        rates = [f"{cell[k]['median']:.0f}" for k in ("bare", "native", "sandboxed")]
        ratios = [f"{cell[k]:.2f}" for k in ("native / bare", "sandboxed / native")]
        lines.append(f"| {n} | " + " | ".join([*rates, *ratios, *peers]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
