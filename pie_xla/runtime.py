"""Models made ready to serve: store entries -> lowered models, weights, engine, sandbox, process manager.

The sandbox and the tokenizer are loaded on threads of their own while JAX is imported and the engine is made.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pie_xla import machine
from pie_xla.config import DEFAULT_MODEL, DEFAULT_SOURCE, Auto, Config, EngineSettings, ExtraModel, show_size
from pie_xla.errors import PieError, UsageError
from pie_xla.launch import Launch, Launched, Listener
from pie_xla.progress import Progress
from pie_xla.timings import Timings

if TYPE_CHECKING:
    from pie_xla.engine.api import EngineOptions, LoadedModel, Recipe
    from pie_xla.engine.engine import Engine
    from pie_xla.engine.served import Served
    from pie_xla.hub.chat import Chat
    from pie_xla.hub.store import ModelEntry
    from pie_xla.hub.tokenizer import Tokenizer
    from pie_xla.kernels.ops import Kernel
    from pie_xla.process.interfaces import ModelFacts
    from pie_xla.process.process import ProcessManager
    from poem.spec import Leaf, Loop

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent


class Runtime:
    """Loaded models; implements `pie_xla.launch.Service`. `close` ends everything that `open_runtime` started."""

    def __init__(self, model_name: str, engine: Engine, manager: ProcessManager, max_processes: int) -> None:
        self.model_name = model_name
        self.engine = engine
        self.manager = manager
        self._max_processes = max_processes

    def launch(self, launch: Launch, listener: Listener) -> Launched:
        if len(self.manager.running) >= self._max_processes:
            raise PieError(
                f"{self._max_processes} inferlets run already, as many as may",
                "wait for one to end, or raise limits.processes",
            )
        return self.manager.launch(launch, listener)

    def warm_programs(self, progress: Progress) -> int:
        """Compile the epilogues of all programs that have run, for every number of passes; how many epilogues.

        Raises:
            PieError: one needs too much memory for some number of passes.
        """
        tables = [served.programs for served in self.engine.models.values()]
        known = [(table, entry) for table in tables for entry in table.entries() if entry.ready]
        with progress.task("epilogues", len(known)) as task:
            for table, entry in known:
                table.build_sizes(entry)
                task.advance()
        return sum(1 for _, entry in known if entry.program.results or entry.program.channels)

    def close(self) -> None:
        self.manager.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ModelLanguage:
    """A stored model's tokenizer and chat template as processes ask for them."""

    def __init__(self, tokenizer: Tokenizer, template: Chat) -> None:
        self.tokenizer, self._template = tokenizer, template

    def encode(self, text: str, specials: bool) -> list[int]:
        return self.tokenizer.encode(text, specials)

    def decode(self, ids: Sequence[int], skip_specials: bool) -> str:
        return self.tokenizer.decode(ids, skip_specials)

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> list[int]:
        return self._template.encode(messages, tools, add_generation_prompt)


@dataclass(frozen=True)
class Wanted:
    """A model to load.

    Attributes:
        name: as programs call it.
        state_bytes: memory of its own for state; None: a share.
    """

    name: str
    entry: ModelEntry
    state_bytes: int | None = None


def open_runtime(
    config: Config,
    model: str | None = None,
    *,
    others: Mapping[str, str] | None = None,
    native: bool = False,
    serve: bool = False,
    progress: Progress,
    timings: Timings,
) -> Runtime:
    """Load models of the store and everything that runs inferlets on them.

    Args:
        model: the default one's name; `model.default` of the settings by default.
        others: more models of the store by the name that programs call them by, beside those that the settings name.
        native: no sandbox is loaded; only native inferlets run.
        serve: every step is compiled before this returns, so that none compiles while strangers wait.
        progress: hears what is being done.
        timings: gets a span for each part.

    Raises:
        UsageError: no such model. PieError: a damaged store, too little memory, a part that cannot be made.
    """
    machine.share_arenas()  # before there are threads
    importlib.import_module("numpy")  # its import fails when two threads begin it at once (seen)
    models = wanted_models(config, model, others or {})
    made: Future[Engine] = Future()  # the sandbox is there before the engine

    def quiet() -> None:
        """No guest can submit any more: the engine need not wait for one."""
        if made.done():
            made.result().nobody_is_coming()

    with ExitStack() as undo:  # what a failure of a later part, or Ctrl-C, takes back
        sandbox = None
        if not native:
            sandbox = _beside(lambda: _load_sandbox(config, progress, quiet), "sandbox", timings)
            undo.callback(_close_when_made, sandbox)
        languages = [
            _beside(partial(_load_language, one.entry), f"tokenizer{_of(one, models)}", timings) for one in models
        ]
        with timings.span("import of JAX"):
            devices = import_jax(config.engine.platform)
            check_weights_fit(models, devices[0].platform)
            check_state_fits(config.engine, total_bytes(models), devices[0].platform)
            leaves = [stored_leaves(one.entry) for one in models]
        stored = [
            _beside(partial(_load_stored, one.entry, own, progress), f"weights{_of(one, models)}", timings)
            for one, own in zip(models, leaves, strict=True)
        ]
        with timings.span("import of the engine"):
            for module in ("pie_xla.engine.engine", "pie_xla.eta.program", "pie_xla.process.process"):
                importlib.import_module(module)
        from pie_xla.engine.api import LoadedModel
        from pie_xla.engine.lowering import remembered
        from pie_xla.engine.memory import return_free_memory

        with timings.span("kernels"):
            kernel, library = kernel_for(devices[0], config, progress)
        options = replace(
            engine_options(config.engine, total_bytes(models), devices[0].platform),
            store_bytes=config.cache.executables,
        )
        loaded = []
        for one, own, arrays in zip(models, leaves, stored, strict=True):
            with timings.span(f"lowering{_of(one, models)}"):
                recipe = recipe_of(config, one.entry, kernel, library)
                key = step_key(recipe)
                lowered = remembered(recipe, key, config.cache_dir / "executables")
            check_stored(one.entry, own, lowered.stored)
            weights: Future[Any] = _beside(
                partial(_pack, lowered, arrays), f"weights packed{_of(one, models)}", timings
            )
            loaded.append(LoadedModel(one.name, lowered, weights, key, recipe, one.state_bytes))
        engine = _load_engine(config, loaded, options, serve, progress, timings)
        undo.callback(engine.close)
        made.set_result(engine)
        spoken = [language.result() for language in languages]
        manager = _manager(config, engine, spoken, None if sandbox is None else sandbox.result())
        undo.pop_all()
    return_free_memory()
    timings.mark("ready")
    return Runtime(models[0].name, engine, manager, config.limits.processes)


def find_model(config: Config, name: str | None) -> ModelEntry:
    """The store's entry, or a refusal that says how to get the default one."""
    from pie_xla.hub.store import Store

    wanted = name or config.model.default
    store = Store(config.store_dir)
    if wanted == DEFAULT_MODEL and wanted not in store.names():
        raise UsageError(f"the model {wanted} is not imported yet", f"pie-xla model import {DEFAULT_SOURCE}")
    return store.open(wanted)


def wanted_models(config: Config, model: str | None, others: Mapping[str, str]) -> list[Wanted]:
    """The default model first, then those of the settings and of `others`, which wins.

    Raises:
        UsageError: one that is not in the store, or a name that is the default model's own.
    """
    default = find_model(config, model)
    found = [Wanted(default.name, default)]
    settled = dict(config.models) | {name: ExtraModel(store) for name, store in others.items()}
    for name, extra in settled.items():
        entry = find_model(config, extra.model)
        if name == found[0].name:
            hint = f"give {extra.model} another name, as in --with draft={extra.model}"
            raise UsageError(f"'{name}' is the default model's name", hint)
        found.append(Wanted(name, entry, None if isinstance(extra.kv_memory, Auto) else extra.kv_memory))
    return found


def total_bytes(models: Sequence[Wanted]) -> int:
    """Of all weights."""
    return sum(one.entry.manifest.total_bytes for one in models)


def _of(one: Wanted, models: Sequence[Wanted]) -> str:
    return "" if one is models[0] else f" of {one.name}"


def check_weights_fit(models: Sequence[Wanted], platform: str) -> None:
    """Refuse models whose weights, each of which may fit alone, do not fit together; before any is read.

    Raises:
        PieError: they do not.
    """
    from pie_xla.engine.memory import free_bytes

    if len(models) < 2:
        return  # loading says it for one
    free = machine.memory()[1] if platform == "cpu" else free_bytes()
    if total_bytes(models) > free:
        sizes = ", ".join(f"{one.name}: {one.entry.manifest.total_bytes / 2**20:,.0f} MiB" for one in models)
        raise PieError(
            f"the weights of {len(models)} models ({sizes}) take {total_bytes(models) / 2**20:,.0f} MiB together, "
            f"{free / 2**20:,.0f} MiB are free",
            "name fewer or smaller models with --with and in [models], or import them as bfloat16",
        )


def check_state_fits(settings: EngineSettings, weight_bytes: int, platform: str) -> None:
    """Refuse a `kv_memory` that is more than the weights, not loaded yet, will leave free.

    Raises:
        PieError: it is.
    """
    from pie_xla.engine.memory import free_bytes

    if isinstance(settings.kv_memory, Auto):
        return
    free = (machine.memory()[1] if platform == "cpu" else free_bytes()) - weight_bytes
    if settings.kv_memory > free:
        raise PieError(
            f"engine.kv_memory is {show_size(settings.kv_memory)}, but the weights leave only "
            f"{max(0, free) / 2**20:,.0f} MiB free",
            "lower engine.kv_memory, or set it to auto",
        )


def engine_options(settings: EngineSettings, weight_bytes: int, platform: str) -> EngineOptions:
    """The engine's sizes from the settings, for a platform of JAX ("cpu", "gpu", "tpu").

    The automatic state size is a power of two on CPU: executables depend on it, and free memory is never the same
    twice. An accelerator has memory of its own, which the engine measures.
    """
    from pie_xla.engine.api import EngineOptions
    from pie_xla.engine.memory import MOST, SHARE

    state = None if isinstance(settings.kv_memory, Auto) else settings.kv_memory
    if state is None and platform == "cpu":
        share = min(MOST, int(SHARE * max(0, machine.memory()[1] - weight_bytes)))
        state = 1 << (share.bit_length() - 1) if share else 0
    # Each size is an executable of its own, 25 MB of memory; a step of four rows costs hardly more than one of two.
    rows = tuple(n for n in (1, 4, 8, *(2**i for i in range(4, 13))) if n < settings.max_rows)
    chunks = tuple(n for n in (16, 128, 512, 2048, 8192, 32768) if n < settings.max_tokens)
    groups = tuple((n, 16) for n in (16,) if n <= settings.max_rows and n * 16 <= settings.max_tokens)
    return EngineOptions(
        state_bytes=state,
        max_context=None if isinstance(settings.max_context, Auto) else settings.max_context,
        decode_rows=(*rows, settings.max_rows),
        prefill=(*((1, n) for n in (*chunks, settings.max_tokens)), *groups),
    )


def import_jax(platform: str) -> Any:
    """JAX, set to the platform that is wanted or the best that is there; its devices.

    Raises:
        PieError: the platform is not there.
    """
    import jax

    match platform:
        case "auto":
            # libtpu on a machine without a TPU looks for one on the network, and complains at length.
            if not jax.config.jax_platforms and not _has_tpu() and not _has_gpu_plugin():  # type: ignore[attr-defined]
                jax.config.update("jax_platforms", "cpu")
        case "gpu":
            jax.config.update("jax_platforms", "cuda")
        case _:
            jax.config.update("jax_platforms", platform)
    try:
        return jax.devices()
    except RuntimeError as error:
        hint = "set engine.platform to auto or cpu"
        raise PieError(f"JAX cannot use the platform '{platform}': {error}", hint) from None


def kernel_for(device: Any, config: Config, progress: Progress) -> tuple[Kernel, str]:
    """The attention kernels of a device's platform, ready to be called, and the file that holds them ("" where JAX does).

    Raises:
        PieError: the settings ask for kernels that this machine cannot have.
    """
    from pie_xla.kernels.ops import Kernel

    wanted = config.engine.kernels
    if device.platform != "cpu":
        if wanted == "cpu":
            raise PieError(
                f"engine.kernels is cpu, but the device is a {device.platform}", "set engine.kernels to auto"
            )
        return (Kernel.TPU if device.platform == "tpu" and wanted == "auto" else Kernel.XLA), ""
    if wanted == "xla":
        return Kernel.XLA, ""
    try:
        from pie_xla.kernels.build import library
        from pie_xla.kernels.cpu import load

        path = library(config.cache_dir, progress)
        load(path)
    except (PieError, OSError) as error:
        if wanted == "cpu":
            raise
        progress.note(f"attention in plain XLA, which is slower: {error}")
        return Kernel.XLA, ""
    return Kernel.CPU, str(path)


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel*")) or Path("/dev/vfio").is_dir()


def _has_gpu_plugin() -> bool:
    return any(
        "cuda" in point.name or "rocm" in point.name for point in importlib.metadata.entry_points(group="jax_plugins")
    )


def _loop_for(kernel: Kernel) -> Loop:
    from pie_xla.kernels.ops import Kernel
    from poem.spec import Loop

    return Loop.SCAN if kernel is Kernel.TPU else Loop.UNROLLED


def recipe_of(config: Config, entry: ModelEntry, kernel: Kernel, library: str = "") -> Recipe:
    """All that decides how the model is lowered."""
    from pie_xla.engine.api import Recipe

    loop = _loop_for(kernel).value
    return Recipe(entry.config, kernel.value, entry.manifest.dtype, config.engine.page_size, loop, library)


def _load_engine(
    config: Config,
    models: list[LoadedModel],
    options: EngineOptions,
    serve: bool,
    progress: Progress,
    timings: Timings,
) -> Engine:
    from pie_xla.engine.engine import Engine

    with timings.span("executables"):
        engine = Engine(models, options, store=config.cache_dir / "executables", progress=progress)
        try:
            for name, served in engine.models.items():
                progress.note(f"{name}: {served.plan}")
            # A prompt, and then one stream of tokens; other sizes compile aside while these serve.
            engine.start(engine.warm_all()) if serve else engine.start(((1, 16),), soon=((1, 1),))
        except BaseException:
            engine.close()
            raise
    return engine


def stored_leaves(entry: ModelEntry) -> dict[str, Leaf]:
    """A store's parameters as it lists them: their reading begins before the model is lowered."""
    from poem.spec import Leaf

    return {p.path: Leaf(tuple(p.shape), p.dtype, (None,) * len(p.shape)) for p in entry.manifest.params}


def check_stored(entry: ModelEntry, stored: dict[str, Leaf], wanted: dict[str, Leaf]) -> None:
    """Refuse a store whose parameters are not those that this version's model takes."""
    listed = {path: (leaf.shape, leaf.dtype) for path, leaf in stored.items()}
    needed = {path: (leaf.shape, leaf.dtype) for path, leaf in wanted.items()}
    if listed != needed:
        path = sorted(path for path, _ in listed.items() ^ needed.items())[0]
        raise PieError(
            f"the stored model {entry.name!r} was imported by another version: its {path} is {listed.get(path, 'missing')}, "
            f"this version's model takes {needed.get(path, 'no such parameter')}",
            f"import it again: pie-xla model remove {entry.name}, then pie-xla model import {entry.manifest.source}",
        )


def _load_stored(entry: ModelEntry, leaves: dict[str, Leaf], progress: Progress) -> dict[str, Any]:
    from pie_xla.hub.load import load_params

    return load_params(entry, leaves, progress=progress)


def _pack(lowered: Any, stored: Future[dict[str, Any]]) -> Any:
    return lowered.pack(stored.result())


def step_key(recipe: Any) -> str:
    """A digest of all that decides a step's machine code: the model's recipe, and the source of what lowers it."""
    digest = hashlib.sha256(json.dumps(vars(recipe), sort_keys=True, default=str).encode())
    for folder in (_PACKAGE.parent / "poem", _PACKAGE / "engine", _PACKAGE / "eta", _PACKAGE / "kernels"):
        for path in sorted(found for found in folder.rglob("*") if found.suffix in (".py", ".cc", ".inc", ".h")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _load_sandbox(config: Config, progress: Progress, on_quiescent: Callable[[], None]) -> Any:
    from pie_xla.process.wasm.sandbox import Sandbox

    return Sandbox(config.cache_dir, progress, on_quiescent=on_quiescent)


def _load_language(entry: ModelEntry) -> ModelLanguage:
    from pie_xla.hub.chat import Chat
    from pie_xla.hub.tokenizer import Tokenizer

    tokenizer = Tokenizer(entry)
    return ModelLanguage(tokenizer, Chat(entry, tokenizer))


def _manager(config: Config, engine: Engine, languages: list[ModelLanguage], sandbox: Any) -> ProcessManager:
    from pie_xla.eta.program import EtaProgram
    from pie_xla.process.grammar import Vocabulary, Workers
    from pie_xla.process.grammar_calls import GrammarCalls
    from pie_xla.process.interfaces import HostModel
    from pie_xla.process.limits import HostLimits
    from pie_xla.process.process import ProcessManager
    from pie_xla.process.wasm.limits import Limits

    limits = config.limits
    models = [
        HostModel(_facts(served, language), language)
        for served, language in zip(engine.models.values(), languages, strict=True)
    ]
    workers = Workers()
    vocabularies = {
        model.facts.name: Vocabulary(language.tokenizer.backend_json, model.facts.vocab_size, model.facts.stop_tokens)
        for model, language in zip(models, languages, strict=True)
    }
    return ProcessManager(
        engine,
        models[0].facts,
        models[0].language,
        lambda text: EtaProgram.from_json(text),
        sandbox,
        HostLimits(output_bytes=limits.output),
        Limits(memory_bytes=limits.memory, cpu_seconds=limits.cpu_time, output_bytes=limits.output),
        rooms=(lambda host: GrammarCalls(host, vocabularies, workers),),
        others=models[1:],
        processes=limits.processes,
    )


def _facts(served: Served, language: ModelLanguage) -> ModelFacts:
    from pie_xla.process.interfaces import ModelFacts

    facts = served.facts
    return ModelFacts(
        name=served.name,
        vocab_size=facts.vocab_size,
        max_context=served.max_context,
        page_size=facts.page_size,
        outputs={name: (shape, eta_dtype(dtype)) for name, (shape, dtype) in facts.outputs.items()},
        stop_tokens=language.tokenizer.stop_tokens,
        prefix=language.tokenizer.prefix,
        attention=None if facts.attention is None else astuple(facts.attention),
    )


def eta_dtype(name: str) -> str:
    """A model output's dtype as epilogues spell it: float32 -> f32."""
    from pie_xla.eta.types import DType

    for dtype in DType:
        if dtype.numpy.name == name:
            return dtype.value
    raise PieError(f"a model output of type {name} cannot be read by epilogues", "they read f32, i32, u32 and bool")


def _close_when_made(future: Future[Any]) -> None:
    """Close what a thread is still making, without waiting for it."""
    future.add_done_callback(lambda made: None if made.exception() else made.result().close())


def _beside(work: Callable[[], T], name: str, timings: Timings) -> Future[T]:
    """Run `work` on a thread of its own. Not a pool: its threads would be joined at exit, Ctrl-C or not."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with timings.span(name):
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"pie-load-{name}", daemon=True).start()
    return future
