"""What was written from the table is current."""

from __future__ import annotations

import json

import pytest

from pie_xla.eta import rules
from pie_xla.eta.emit import ROOT, files
from pie_xla.eta.table import TABLE


@pytest.mark.parametrize("name", files())
def test_written_file_is_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == files()[name], "run: python -m pie_xla.eta.emit"


def test_guest_rules_infer_as_the_hosts() -> None:
    from inferlet.eta import _rules, _table

    assert _rules.MAX_COST == rules.MAX_COST and set(_table.TABLE) == set(TABLE)
    kinds = (("f32", (4, 100)),)
    for name in ("top_k", "softmax", "reduce_argmax"):
        host, guest = TABLE[name].rule, _table.TABLE[name]
        attrs = {"k": 7} if name == "top_k" else {}
        assert host.infer(kinds, host.check_attrs(attrs)) == guest.infer(kinds, guest.check_attrs(attrs))


def test_json_table_names_every_op() -> None:
    table = json.loads(files()["tests/eta/golden/table.json"])
    assert [op["name"] for op in table["ops"]] == list(TABLE)
    assert all(op["doc"].endswith(".") and op["signature"] and op["cost"] for op in table["ops"])
