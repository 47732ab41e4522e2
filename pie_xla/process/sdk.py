"""Gives native inferlets the guest package: ours, never another package that happens to be named `inferlet`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from pie_xla.errors import PieError

NAME = "inferlet"


def sdk_folder() -> Path:
    """The folder that holds the `inferlet` package: in an installed wheel, else in the checkout.

    Raises:
        PieError: neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "_sdk", package.parent / "inferlets" / "sdk" / "python")
    for place in places:
        if (place / NAME / "__init__.py").is_file():
            return place
    raise PieError(
        "the inferlet SDK is not installed with pie-xla", f"reinstall pie-xla; looked in {places[0]} and {places[1]}"
    )


def load_sdk() -> ModuleType:
    """Import our `inferlet` under its name, without putting its folder on `sys.path`.

    Raises:
        PieError: another package of that name is already imported in this interpreter.
    """
    folder = sdk_folder() / NAME
    known = sys.modules.get(NAME)
    if known is not None:
        where = Path(getattr(known, "__file__", None) or "?").resolve().parent
        if where == folder:
            return known
        raise PieError(
            f"another package named {NAME} is already imported, from {where}",
            f"uninstall it or do not import it; ours is in {folder}",
        )
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module
