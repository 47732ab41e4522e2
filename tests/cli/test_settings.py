"""Settings: units, refusals with the nearest name and the line, and edits that keep a file's comments."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_xla import config as settings
from pie_xla.cli.config import template, with_setting
from pie_xla.config import AUTO, SECTIONS, Environment, ExtraModel, settings_of
from pie_xla.errors import UsageError

ENV = Environment.read({"PIE_XLA_HOME": "/nowhere"})


def parse(text: str) -> settings.Config:
    return settings.parse(text, ENV, "c.toml")


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2 kib", 2048), ("7B", 7), ("1TiB", 1 << 40), ("3kB", 3000)],
)
def test_sizes(text: str, count: int) -> None:
    assert settings.parse_size(text) == count


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30.0), ("250ms", 0.25), ("2min", 120.0), ("1.5h", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert settings.parse_duration(text) == seconds


@pytest.mark.parametrize("value", ["512", 512, "MiB", "-1MiB", "0B", "1 potato", "1e3MB", True, None, ["1MiB"]])
def test_a_size_needs_a_number_and_a_unit(value: object) -> None:
    with pytest.raises(ValueError, match="size"):
        settings.parse_size(value)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_size_survives_being_shown(count: int) -> None:
    assert settings.parse_size(settings.show_size(count)) == count


@given(st.integers(min_value=1, max_value=10**8))
def test_a_duration_survives_being_shown(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert settings.parse_duration(settings.show_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


def test_values_land_in_their_sections_and_the_rest_stays_default() -> None:
    config = parse('[engine]\nkv_memory = "2GiB"\nmax_rows = 4\n\n[limits]\ncpu_time = "5s"\n')
    assert config.engine.kv_memory == 2 << 30
    assert config.engine.max_rows == 4
    assert config.engine.page_size == 16
    assert config.engine.max_context is AUTO
    assert config.limits.cpu_time == 5.0
    assert config.origins == {
        "engine.kv_memory": "c.toml:2",
        "engine.max_rows": "c.toml:3",
        "limits.cpu_time": "c.toml:6",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[engine]\n# note\nkv_memroy = "1GiB"', r"c\.toml:3: unknown setting 'kv_memroy' in \[engine\].*'kv_memory'"),
        ("[engin]\nmax_rows = 1", r"c\.toml:1: unknown section \[engin\].*'engine'"),
        ("max_rows = 3", r"c\.toml:1: 'max_rows' stands outside its section.*\[engine\]"),
        ("[cache]\nmax_rows = 3", r"c\.toml:2: unknown setting 'max_rows' in \[cache\].*under \[engine\]"),
        ("engine = 3", r"c\.toml:1: 'engine' is a section"),
        ("[engine]\nkv_memory = 3", r"c\.toml:2: engine\.kv_memory is 3, but must be a size.*or \"auto\""),
        ("[engine]\npage_size = 0", r"c\.toml:2: engine\.page_size is 0, but must be a whole number from 1 to 1024"),
        ("[engine]\npage_size = true", r"engine\.page_size is True"),
        ('[model]\ndtype = "int4"', r"model\.dtype is 'int4', but must be one of \"float32\", .*\"auto\""),
        ("[server]\nport = 70000", r"server\.port is 70000"),
        ("[engine\n", r"c\.toml is not valid TOML"),
        ("engine.zzz = 1", r"c\.toml: unknown setting 'zzz' in \[engine\].*known: platform, kernels, kv_memory"),
    ],
)
def test_wrong_files_are_refused_where_they_are_wrong(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){expected}"):
        parse(text)


def test_the_template_is_all_defaults_and_names_every_setting() -> None:
    text = template()
    assert parse(text) == settings.Config(ENV)
    bare = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    assert {section: set(body) for section, body in tomllib.loads(bare).items()} == {
        section: set(settings_of(section)) for section in SECTIONS
    } | {"models": {"draft", "expert"}}
    uncommented = parse(bare)
    assert (uncommented.engine, uncommented.limits) == (settings.Config(ENV).engine, settings.Config(ENV).limits)


def test_models_are_named_by_the_user() -> None:
    config = parse('[models]\ndraft = "small"\n\n[models."v1.5"]\nmodel = "large"\nkv_memory = "64MiB"\n')
    assert config.models == {"draft": ExtraModel("small"), "v1.5": ExtraModel("large", 64 << 20)}
    assert config.origins["models.draft"] == "c.toml:2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("draft = 3", r"c.toml:2: models.draft names a model of the store"),
        ('draft = {kv_memory = "1GiB"}', "c.toml:2: models.draft names a model of the store"),
        ('draft = {model = "a", speed = 3}', "c.toml:2: models.draft names a model of the store"),
        ('draft = {model = "a", kv_memory = 7}', "c.toml:2: models.draft is .* a size with its unit"),
        ('draft = ""', "models.draft is '', but must be a text"),
        ('"a b" = "small"', "a model cannot be called 'a b'"),
    ],
)
def test_a_wrong_model_is_refused_with_its_line(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(f"[models]\n{line}\n")


def test_set_does_not_edit_models() -> None:
    with pytest.raises(UsageError, match="names of your own"):
        with_setting("", "models.draft", "small", ENV, "c.toml")


def test_set_changes_one_line_and_keeps_the_rest() -> None:
    before = '# mine\n[engine]\nmax_rows = 8  # enough # for me\n\n[limits]\nmemory = "1GiB"\n'
    after = with_setting(before, "engine.max_rows", "16", ENV, "c.toml")
    assert after == '# mine\n[engine]\nmax_rows = 16  # enough # for me\n\n[limits]\nmemory = "1GiB"\n'
    after = with_setting(after, "engine.kv_memory", "1gib", ENV, "c.toml")
    assert after.splitlines()[1:4] == ["[engine]", 'kv_memory = "1GiB"', "max_rows = 16  # enough # for me"]
    after = with_setting(after, "server.port", "0", ENV, "c.toml")
    assert parse(after).server.port == 0 and after.startswith("# mine\n")


def test_set_puts_a_value_under_its_commented_default() -> None:
    lines = with_setting(template(), "limits.output", "1MiB", ENV, "c.toml").splitlines()
    at = lines.index('output = "1MiB"')
    assert lines[at - 1] == '# output = "8MiB"'


@given(st.sampled_from([f"{s}.{k}" for s in ("engine", "server") for k in settings_of(s)]))
def test_set_twice_is_set_once(dotted: str) -> None:
    value = {"engine.kv_memory": "2GiB", "engine.platform": "cpu", "engine.kernels": "xla"}.get(dotted, "128")
    once = with_setting(template(), dotted, value, ENV, "c.toml")
    assert with_setting(once, dotted, value, ENV, "c.toml") == once
    assert once != template()


@pytest.mark.parametrize(
    ("text", "name", "value", "expected"),
    [
        ("", "engine.max_row", "3", "unknown setting 'engine.max_row'.*'engine.max_rows'"),
        ("", "max_rows", "3", "unknown setting 'max_rows'.*'engine.max_rows'"),
        ("", "engine.max_rows", "many", "engine.max_rows cannot be 'many'.*whole number"),
        ("", "model.dtype", "int8", "model.dtype cannot be 'int8'"),
        ("engine = {max_rows = 3}\n", "engine.max_rows", "4", "cannot be edited in place.*max_rows = 4"),
        ("engine.max_rows = 3\n", "engine.max_rows", "4", "cannot be edited in place"),
    ],
)
def test_set_refuses_what_it_cannot_do(text: str, name: str, value: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){expected}"):
        with_setting(text, name, value, ENV, "c.toml")


def test_texts_with_quotes_and_backslashes_round_trip() -> None:
    value = 'a"b\\c\t# d'
    assert parse(with_setting("", "model.default", value, ENV, "c.toml")).model.default == value


def test_the_environment_decides_the_folders(tmp_path: Path) -> None:
    env = Environment.read({"XDG_CONFIG_HOME": "/c", "XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "relative"})
    assert env.config_file == Path("/c/pie-xla/config.toml")
    assert env.data_dir == Path("/d/pie-xla")
    assert env.cache_dir == Path.home() / ".cache/pie-xla"  # the specification ignores relative folders
    home = Environment.read({"PIE_XLA_HOME": str(tmp_path), "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"})
    config = settings.load(home)
    assert (config.store_dir, config.cache_dir) == (tmp_path, tmp_path / "cache")
    assert home.hf_offline and home.hf_token == "hf_secret"
    assert "hf_secret" not in repr(home) + repr(config)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config file .*x\.toml"):
        settings.load(Environment.read({"PIE_XLA_CONFIG": str(tmp_path / "x.toml")}))
    assert settings.load(Environment.read({"PIE_XLA_HOME": str(tmp_path)})).engine.page_size == 16
