"""The store is complete or absent; damage is refused by name; weights come back bit for bit, on one device or many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_checkpoint import CONFIG, tensors, write_directory, write_gguf

from pie_xla.errors import PieError, UsageError
from pie_xla.hub import ModelEntry, Store, import_model
from pie_xla.hub.arrays import chunk_shape
from pie_xla.hub.load import load_params, machine_available_bytes, required_bytes
from pie_xla.hub.weights import Shapes
from poem.lower import lower
from poem.spec import Leaf


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def tiny(tmp_path: Path, store: Store) -> ModelEntry:
    return import_model(str(write_directory(tmp_path / "tiny")), store)


def stored(entry: ModelEntry, dtype: str = "float32") -> dict[str, Leaf]:
    return lower(entry.config, ops=Shapes(), dtype=dtype).stored


def test_parameters_are_the_checkpoints(tiny: ModelEntry) -> None:
    params = load_params(tiny, stored(tiny))
    source = tensors()
    assert len(params) == len(source)
    np.testing.assert_array_equal(params["embed_tokens.weight"], source["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["layers.1.mlp.up_proj.kernel"], source["model.layers.1.mlp.up_proj.weight"])
    query = params["layers.1.self_attn.q_proj.kernel"]
    np.testing.assert_array_equal(
        np.asarray(query).reshape(-1), source["model.layers.1.self_attn.q_proj.weight"].reshape(-1)
    )


def test_a_gguf_file_gives_the_same_parameters(tmp_path: Path, tiny: ModelEntry) -> None:
    entry = import_model(str(write_gguf(tmp_path / "Tiny-Q8_0.gguf")), Store(tmp_path / "second"))
    assert entry.name == "tiny"  # a quantization is no part of a name
    ours, theirs = load_params(entry, stored(entry)), load_params(tiny, stored(tiny))
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


def test_orbax_reads_the_weights(tiny: ModelEntry) -> None:
    script = f"""
import warnings
import orbax.checkpoint as ocp, numpy as np, json, jax
path = {str(tiny.weights_path)!r}
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tree = ocp.PyTreeCheckpointer().restore(path)
    target = {{name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) for name, value in tree.items()}}
    placed = ocp.StandardCheckpointer().restore(path, target)
assert all(value.sharding == sharding and (value == tree[name]).all() for name, value in placed.items())
print(json.dumps({{name: [list(value.shape), float(np.float64(value).sum())] for name, value in tree.items()}}))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(out.stdout.splitlines()[-1])
    params = load_params(tiny, stored(tiny))
    assert set(found) == set(params)
    for path, value in params.items():
        assert found[path][0] == list(value.shape)
        assert found[path][1] == pytest.approx(float(np.float64(value).sum()), rel=1e-12)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_and_shards(tmp_path: Path, store: Store, dtype: str, shards: int) -> None:
    entry = import_model(str(write_directory(tmp_path / "x", dtype=dtype, shards=shards)), store)
    assert entry.manifest.dtype == dtype
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    expected = tensors()["model.layers.0.mlp.down_proj.weight"].astype(kind)
    kept = load_params(entry, stored(entry, dtype))["layers.0.mlp.down_proj.kernel"]
    assert kept.dtype == kind
    np.testing.assert_array_equal(kept, expected)
    wide = load_params(entry, stored(entry, "float32"))["layers.0.mlp.down_proj.kernel"]
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, expected.astype(np.float32))


def test_import_casts_when_asked(tmp_path: Path, store: Store) -> None:
    entry = import_model(str(write_directory(tmp_path / "x")), store, dtype="bfloat16")
    assert entry.manifest.dtype == "bfloat16"
    assert entry.manifest.total_bytes == 2 * entry.manifest.param_count
    value = load_params(entry, stored(entry, "bfloat16"))["norm.weight"]
    np.testing.assert_array_equal(value, tensors()["model.norm.weight"].astype(ml_dtypes.bfloat16))


def test_shards_go_straight_to_their_devices(tiny: ModelEntry) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))

    def place(leaf: Leaf) -> NamedSharding:
        spec = PartitionSpec(*("model" if axis == "vocab" or axis == "ffn" else None for axis in leaf.axes))
        return NamedSharding(mesh, spec)

    leaves = stored(tiny)
    params = load_params(tiny, leaves, place=place)
    whole = load_params(tiny, leaves)
    for path, value in params.items():
        assert value.sharding.is_equivalent_to(place(leaves[path]), value.ndim)
        np.testing.assert_array_equal(value, whole[path], err_msg=path)
    embedding = params["embed_tokens.weight"]
    assert [shard.data.shape for shard in embedding.addressable_shards] == [(12, 32)] * 4
    assert required_bytes({"e": leaves["embed_tokens.weight"]}, {"e": embedding.sharding}) == 2 * 48 * 32 * 4
    norm = params["norm.weight"]  # replicated: four times
    assert required_bytes({"n": leaves["norm.weight"]}, {"n": norm.sharding}) == 5 * 32 * 4


def test_a_chosen_device(tiny: ModelEntry) -> None:
    device = jax.devices()[2]
    params = load_params(tiny, stored(tiny), device=device)
    assert {next(iter(value.devices())) for value in params.values()} == {device}


def test_large_arrays_have_several_chunks() -> None:
    assert chunk_shape((49152, 576), 4) == (12288, 576)
    assert chunk_shape((576,), 4) == (576,)
    assert chunk_shape((3, 64 << 20), 4) == (1, 64 << 20)
    assert chunk_shape((), 4) == ()


def test_not_enough_memory_is_computed_before_loading(tiny: ModelEntry) -> None:
    leaves = stored(tiny)
    need = sum(leaf.nbytes for leaf in leaves.values()) + max(leaf.nbytes for leaf in leaves.values())
    with pytest.raises(PieError, match=r"not enough memory for tiny: its weights need .* kB, .* kB are available"):
        load_params(tiny, leaves, available=need - 1)
    assert len(load_params(tiny, leaves, available=need)) == len(leaves)


def test_available_memory_of_linux(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemFree:         1 kB\nMemAvailable:   42 kB\n")
    assert machine_available_bytes(meminfo) == 42 * 1024
    assert machine_available_bytes(tmp_path / "none") is None


def test_params_of_another_version_are_named(tiny: ModelEntry) -> None:
    leaves = stored(tiny)
    with pytest.raises(PieError, match=r"has no parameter lm_head\.weight"):
        load_params(tiny, leaves | {"lm_head.weight": leaves["embed_tokens.weight"]})
    with pytest.raises(PieError, match=r"norm\.weight .* has shape \[32\], the model wants \[33\]"):
        load_params(tiny, leaves | {"norm.weight": Leaf((33,), "float32", ("embed",))})


def test_the_manifest_says_what_is_there(tiny: ModelEntry) -> None:
    manifest = tiny.manifest
    assert manifest.license.id == "apache-2.0"
    assert (tiny.path / "license" / "LICENSE").read_text() == "Apache License"
    assert manifest.param_count == sum(array.size for array in tensors().values())
    assert manifest.total_bytes == 4 * manifest.param_count
    files = {str(path.relative_to(tiny.path)) for path in tiny.path.rglob("*") if path.is_file()}
    assert {record.path for record in manifest.files} == files - {"manifest.json"}
    assert tiny.config == CONFIG
    assert tiny.generation.stop_tokens == (2,)
    assert tiny.generation.bos == 1


def test_list_info_remove(tmp_path: Path, store: Store, tiny: ModelEntry) -> None:
    import_model(str(write_directory(tmp_path / "other")), store, name="Other.1")
    assert [entry.name for entry in store.list_models()] == ["Other.1", "tiny"]
    assert store.open("tiny").manifest == tiny.manifest
    store.remove("tiny")
    assert [entry.name for entry in store.list_models()] == ["Other.1"]
    assert [path.name for path in (store.root / "partial").iterdir() if not path.name.startswith(".")] == []
    with pytest.raises(UsageError, match="no model 'tiny'"):
        store.open("tiny")


@pytest.mark.parametrize("name", ["tyny", "tiny2", "Tiny"])
def test_unknown_names_get_the_nearest(store: Store, tiny: ModelEntry, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        store.open(name)
    assert "the nearest is 'tiny'" in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "x" * 200])
def test_names_that_are_no_names(tmp_path: Path, store: Store, name: str) -> None:
    directory = write_directory(tmp_path / "x")
    if name == "":
        assert import_model(str(directory), store, name=None).name == "x"
        return
    with pytest.raises(UsageError, match="cannot be a model's name"):
        import_model(str(directory), store, name=name)
    with pytest.raises(UsageError, match="no model"):
        store.remove(name)


def corrupt(entry: ModelEntry, what: str) -> None:
    chunk = next(entry.weights_path.glob("norm.weight/c/*"))
    manifest = entry.path / "manifest.json"
    match what:
        case "missing chunk":
            chunk.unlink()
        case "short chunk":
            chunk.write_bytes(chunk.read_bytes()[:-1])
        case "missing tokenizer":
            (entry.path / "tokenizer.json").unlink()
        case "no manifest":
            manifest.unlink()
        case "cut manifest":
            manifest.write_text(manifest.read_text()[:-20])
        case "changed manifest":
            manifest.write_text(manifest.read_text().replace("apache-2.0", "mit"))
        case "newer format":
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing chunk", r"norm\.weight/c/0 is missing"),
        ("short chunk", r"norm\.weight/c/0 has 127 bytes instead of 128"),
        ("missing tokenizer", r"tokenizer\.json is missing"),
        ("no manifest", r"manifest\.json is missing"),
        ("cut manifest", r"manifest\.json cannot be read"),
        ("changed manifest", r"manifest\.json was changed"),
        ("newer format", "has store format 2, and this version reads format 1"),
    ],
)
def test_a_damaged_store_is_refused_by_name_and_can_be_replaced(
    tmp_path: Path, store: Store, tiny: ModelEntry, what: str, message: str
) -> None:
    corrupt(tiny, what)
    with pytest.raises(PieError, match=message):
        store.open("tiny")
    assert store.list_models() == []
    assert import_model(str(tmp_path / "tiny"), store).manifest == tiny.manifest
    corrupt(tiny, what)
    store.remove("tiny")
    assert store.names() == []


def test_verify_finds_a_flipped_bit(store: Store, tiny: ModelEntry) -> None:
    assert store.verify("tiny").name == "tiny"
    chunk = next(tiny.weights_path.glob("norm.weight/c/*"))
    data = bytearray(chunk.read_bytes())
    data[17] ^= 1
    chunk.write_bytes(data)
    store.open("tiny")  # sizes are right
    with pytest.raises(PieError, match=r"the digest of .*norm\.weight/c/0 is wrong"):
        store.verify("tiny")


def test_parameter_digests_are_of_the_array(tiny: ModelEntry) -> None:
    import hashlib

    params = load_params(tiny, stored(tiny))
    for record in tiny.manifest.params:
        assert record.sha256 == hashlib.sha256(np.asarray(params[record.path]).tobytes()).hexdigest()


def test_importing_the_hub_is_light() -> None:
    script = "import sys, pie_xla.hub, pie_xla.hub.tokenizer, pie_xla.hub.chat, pie_xla.hub.load; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    heavy: set[Any] = {
        "transformers",
        "torch",
        "jax",
        "orbax",
        "tensorstore",
        "huggingface_hub",
        "gguf",
        "jinja2",
        "tokenizers",
    }
    assert not loaded & heavy
