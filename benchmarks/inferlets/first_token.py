"""Sends the first token it gets and ends: what `pie-xla run` takes until something can be read."""

from inferlet import model, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> None:
    fwd = ForwardPass()
    fwd.embed(model.encode("The capital of France is"))
    fwd.state([WorkingSet()], StateGeometry.folding())
    fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    session.send(model.decode([await Pipeline().submit(fwd)]))
