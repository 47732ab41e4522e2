"""The component's entry: exports `run` of the world `pie:inferlet`. What is imported here is in the snapshot."""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import random

import inferlet
import wit_world
from componentize_py_types import Err
from pie_component import author, census, checked, holes, loop, preload, stdio, warmup

preload.preload()
for _, _name, _ in pkgutil.walk_packages(inferlet.__path__, "inferlet."):
    importlib.import_module(_name)  # every module of the SDK, or the build fails
loop.install()
checked.install()


class WitWorld(wit_world.WitWorld):
    def run(self, request: str) -> str:
        stdio.install()
        random.seed()  # the snapshot's generator is the same in every instance
        try:
            return author.run(json.loads(request))
        except author.Failed as failed:
            raise Err(failed.args[0]) from None
        finally:
            stdio.flush()


warmup.run()
gc.collect()
census.take()
gc.freeze()
holes.fill()
