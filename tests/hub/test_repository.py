"""Hub repositories, against a loopback server: gated, offline, resumed, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, GATED, GATED_TOKEN, FakeHub
from tiny_checkpoint import write_directory

from pie_xla.errors import PieError, UsageError
from pie_xla.hub import Remotes, Store, import_model

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    directory = write_directory(tmp_path / "repo", shards=2)
    (directory / "README.md").write_text("# no licence here\n")
    (directory / "pytorch_model.bin").write_bytes(b"a program")
    with FakeHub({"Org/Tiny-1B": directory, GATED: directory}) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_repository(hub: FakeHub, store: Store) -> None:
    entry = import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url))
    assert (entry.name, entry.manifest.source, entry.manifest.origin) == ("tiny-1b", "Org/Tiny-1B", COMMIT)
    assert entry.manifest.license.id == "mit"
    seen = len(hub.requests)
    assert import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url)).manifest == entry.manifest
    assert len(hub.requests) == seen  # what is there needs no network
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET"}
    assert SHARD in fetched
    assert "pytorch_model.bin" not in fetched
    assert all(
        "/resolve/" not in path or COMMIT in path for _, path, _ in hub.requests
    )  # one commit, even if main moves


def test_offline_uses_what_is_there(hub: FakeHub, store: Store) -> None:
    with pytest.raises(PieError, match="Org/Tiny-1B is not in the download cache, and offline mode is on"):
        import_model("Org/Tiny-1B", store, offline=True, remotes=Remotes(hub=hub.url))
    import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url))
    store.remove("tiny-1b")
    seen = len(hub.requests)
    entry = import_model("Org/Tiny-1B", store, offline=True, remotes=Remotes(hub=hub.url))
    assert entry.manifest.origin == COMMIT
    assert len(hub.requests) == seen
    next(store.downloads.rglob(SHARD)).unlink()
    with pytest.raises(PieError, match=f"{SHARD} of Org/Tiny-1B is not in the download cache"):
        import_model("Org/Tiny-1B", store, name="again", offline=True)


def test_a_gated_repository_says_what_to_do(hub: FakeHub, store: Store) -> None:
    for token in (None, "hf_bad"):
        with pytest.raises(PieError, match="Org/Gated is gated") as caught:
            import_model(GATED, store, token=token, remotes=Remotes(hub=hub.url))
        assert "accept its terms at https://huggingface.co/Org/Gated, then set HF_TOKEN" in str(caught.value)
    assert store.names() == []
    assert import_model(GATED, store, token=GATED_TOKEN, remotes=Remotes(hub=hub.url)).name == "gated"


def test_unknown_repository_and_revision(hub: FakeHub, store: Store) -> None:
    with pytest.raises(UsageError, match="no repository Org/Nothing"):
        import_model("Org/Nothing", store, remotes=Remotes(hub=hub.url))
    with pytest.raises(UsageError, match="Org/Tiny-1B has no revision 'v9'"):
        import_model("Org/Tiny-1B@v9", store, remotes=Remotes(hub=hub.url))


def test_a_partial_file_is_continued_where_it_stopped(hub: FakeHub, store: Store, tmp_path: Path) -> None:
    whole = (tmp_path / "repo" / SHARD).read_bytes()
    directory = store.downloads / "hub" / "Org--Tiny-1B" / COMMIT
    directory.mkdir(parents=True)
    (directory / f"{SHARD}.part").write_bytes(whole[:1234])
    (directory / "config.json").write_bytes((tmp_path / "repo" / "config.json").read_bytes())
    entry = import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url))
    ranges = {path.rpartition("/")[2]: where for method, path, where in hub.requests if method == "GET"}
    assert ranges[SHARD] == "bytes=1234-"
    assert "config.json" not in ranges  # whole already
    assert (directory / SHARD).read_bytes() == whole
    assert entry.name == "tiny-1b"


def test_a_broken_connection_is_survived(hub: FakeHub, store: Store, tmp_path: Path) -> None:
    hub.cut[SHARD] = 2000
    import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url))
    ranges = [where for method, path, where in hub.requests if path.endswith(SHARD) and method == "GET"]
    assert len(ranges) == 2  # the client keeps whole blocks of 10 MB, so this short file is asked for again
    fetched = store.downloads / "hub" / "Org--Tiny-1B" / COMMIT / SHARD
    assert fetched.read_bytes() == (tmp_path / "repo" / SHARD).read_bytes()


def test_damage_on_the_way_is_found_and_the_file_dropped(hub: FakeHub, store: Store) -> None:
    hub.lie.add(SHARD)
    with pytest.raises(PieError, match=f"{SHARD} of Org/Tiny-1B arrived damaged: sha256 is"):
        import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url))
    assert list(store.downloads.rglob(f"{SHARD}*")) == []
    hub.lie.clear()
    assert import_model("Org/Tiny-1B", store, remotes=Remotes(hub=hub.url)).name == "tiny-1b"


def test_repositories_without_a_checkpoint(hub: FakeHub, store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "gguf-only"
    directory.mkdir()
    (directory / "m-Q4_0.gguf").write_bytes(b"GGUF")
    hub.repositories["Org/Ggufs"] = directory
    with pytest.raises(PieError, match=r"holds no \*\.safetensors file") as caught:
        import_model("Org/Ggufs", store, remotes=Remotes(hub=hub.url))
    assert "m-Q4_0.gguf" in str(caught.value)
    adapter = write_directory(tmp_path / "adapter")
    (adapter / "tokenizer.json").unlink()
    hub.repositories["Org/Adapter"] = adapter
    with pytest.raises(PieError, match=r"Org/Adapter holds no tokenizer\.json"):
        import_model("Org/Adapter", store, remotes=Remotes(hub=hub.url))


def test_no_server(store: Store) -> None:
    with pytest.raises(PieError, match="downloading Org/Tiny-1B failed"):
        import_model("Org/Tiny-1B", store, remotes=Remotes(hub="http://127.0.0.1:1"))
    assert store.names() == []
