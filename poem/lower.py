"""Model + kernels -> plain functions over flat dictionaries of arrays. The layer loop lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from poem.context import Context
from poem.family import Config, Model
from poem.registry import family_of
from poem.spec import (
    Batch,
    Facts,
    Heads,
    Leaf,
    Loop,
    Ops,
    Place,
    PoemError,
    State,
    StateGroup,
    StateKind,
    WeightRule,
)
from poem.taps import Taps

Arrays = dict[str, jax.Array]
M = TypeVar("M")


@dataclass(frozen=True)
class Part:
    """A module split once: its graph and the dotted names of its leaves, in the graph's order."""

    graph: nnx.GraphDef[Any]
    tree: jax.tree_util.PyTreeDef
    leaves: Mapping[str, Leaf]

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The module over `arrays`; only while tracing."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))


@dataclass(frozen=True)
class Segment:
    """`repeats` copies of `period` consecutive layers, from layer `start` on."""

    start: int
    period: int
    repeats: int


@dataclass(frozen=True)
class LoweredModel:
    """A model as named pure steps over flat dictionaries.

    Args:
        facts: what users may know.
        stored: parameters as a store keeps them, one per layer; the same for every loop.
        params: parameters as `step` takes them; `pack` makes them from the stored ones.
        groups: what a sequence keeps.
        weight_rules: checkpoint tensors -> stored parameters.
    """

    facts: Facts
    stored: dict[str, Leaf]
    params: dict[str, Leaf]
    groups: tuple[StateGroup, ...]
    weight_rules: tuple[WeightRule, ...]
    ops: Ops
    place: Place | None
    outer: Part
    layers: tuple[Part, ...]
    layer_groups: tuple[StateGroup, ...]
    segments: tuple[Segment, ...]

    @property
    def views(self) -> bool:
        """Whether steps heed `Batch.view`."""
        return self.ops.views

    def pack(self, stored: Mapping[str, jax.Array]) -> Arrays:
        """Stored parameters as `step` takes them: the layers of a scanned segment are stacked."""
        params = {name: stored[name] for name in self.outer.leaves}
        for segment in self.segments:
            for j, name in self._segment_names(segment):
                layers = [
                    stored[_layer_name(segment.start + j + r * segment.period, name)] for r in range(segment.repeats)
                ]
                params[_packed_name(segment, j, name)] = layers[0] if segment.repeats == 1 else jnp.stack(layers)
        return params

    def step(
        self, params: Arrays, state: State, batch: Batch, outputs: tuple[str, ...] = ("logits", "hidden")
    ) -> tuple[State, Arrays]:
        """One pass of every row. Pure; jit it with `outputs` static and `state` donated.

        Args:
            params: as `self.params`.
            state: per group the arrays of `StateGroup.arrays(units)`.
            batch: the launch.
            outputs: the names wanted; what they do not need is not computed.

        Returns:
            The new state, and `logits` f32[R, V], `hidden` f32[R, D] at `batch.readout`.
        """
        state, values, _ = self._step(params, state, batch, outputs, None)
        return state, values

    def tapped_step(
        self, params: Arrays, state: State, batch: Batch, taps: Taps, outputs: tuple[str, ...] = ("logits", "hidden")
    ) -> tuple[State, Arrays, Any]:
        """`step` with `taps` at each attention layer.

        Returns:
            What `step` returns, and what the taps carried out of the last layer.

        Raises:
            PoemError: the kernels cannot show attention, or the model has none.
        """
        if self.facts.attention is None:
            raise PoemError(f"{self.facts.model_type} shows no attention: it has none, or its kernels cannot")
        return self._step(params, state, batch, outputs, taps)

    def _step(
        self, params: Arrays, state: State, batch: Batch, outputs: tuple[str, ...], taps: Taps | None
    ) -> tuple[State, Arrays, Any]:
        if unknown := [name for name in outputs if name not in self.facts.outputs]:
            raise PoemError(
                f"{self.facts.model_type} has no output {unknown[0]!r}", f"it has: {', '.join(self.facts.outputs)}"
            )
        model: Model = self.outer.merge([params[name] for name in self.outer.leaves])
        with jax.named_scope("embed_tokens"):
            x, shared = model.embed(batch)
        context = partial(Context, batch, self.ops, shared=shared, place=self.place, taps=taps)
        carry = None if taps is None else taps.start()
        for segment in self.segments:
            x, state, carry = self._run(segment, params, x, state, carry, context)
        x = x.reshape(-1, x.shape[-1])[batch.readout]
        values: Arrays = {}
        with jax.named_scope("norm"):
            hidden = model.hidden(x)
        if "hidden" in outputs:
            values["hidden"] = hidden.astype(jnp.float32)
        if "logits" in outputs:
            with jax.named_scope("lm_head"):
                values["logits"] = model.logits(hidden)
        return self._placed(state), values, carry

    def _run(
        self, segment: Segment, params: Arrays, x: jax.Array, state: State, carry: Any, context: Any
    ) -> tuple[jax.Array, State, Any]:
        period = range(segment.period)
        weights = [
            [params[_packed_name(segment, j, name)] for name in self.layers[segment.start + j].leaves] for j in period
        ]
        kinds = [self.layer_groups[segment.start + j] for j in period]
        # index of the first layer of the segment within its group, and how far one repeat moves it
        before = [group.name for group in self.layer_groups[: segment.start]]
        names = [group.name for group in kinds]
        base = [before.count(name) + names[:j].count(name) for j, name in enumerate(names)]
        stride = [names.count(name) for name in names]
        # the same among attention layers of all groups
        paged = [group.kind is StateKind.PAGED for group in kinds]
        attention = sum(group.kind is StateKind.PAGED for group in self.layer_groups[: segment.start])

        def body(
            carried: tuple[jax.Array, State, Any], xs: tuple[list[list[jax.Array]], Any]
        ) -> tuple[tuple[jax.Array, State, Any], None]:
            x, state, carry = carried
            arrays, repeat = xs
            for j in period:
                layer = self.layers[segment.start + j].merge(arrays[j])
                now = context(
                    state=state,
                    group=kinds[j],
                    layer=base[j] + repeat * stride[j],
                    carry=carry,
                    number=attention + sum(paged[:j]) + repeat * sum(paged),
                )
                with jax.named_scope(f"layers.{segment.start + j}"):
                    x = layer(x, now)
                state, carry = now.state, now.carry
            return (x, state, carry), None

        if segment.repeats == 1:
            return body((x, state, carry), (weights, 0))[0]
        steps = jnp.arange(segment.repeats, dtype=jnp.int32)
        return jax.lax.scan(body, (x, state, carry), (weights, steps))[0]

    def _segment_names(self, segment: Segment) -> list[tuple[int, str]]:
        return [(j, name) for j in range(segment.period) for name in self.layers[segment.start + j].leaves]

    def _placed(self, state: State) -> State:
        if self.place is None:
            return state
        placed: State = {}
        for group in self.groups:
            units = next(iter(state[group.name].values())).shape[0] // group.layers
            leaves = group.arrays(units)
            placed[group.name] = {
                name: jax.lax.with_sharding_constraint(array, self.place(leaves[name]))  # type: ignore[no-untyped-call, unused-ignore]
                for name, array in state[group.name].items()
            }
        return placed


def lower(
    config: Mapping[str, Any],
    *,
    ops: Ops,
    place: Place | None = None,
    dtype: str = "float32",
    page_size: int = 16,
    loop: Loop = Loop.UNROLLED,
) -> LoweredModel:
    """A checkpoint's config.json, lowered. Allocates nothing.

    Args:
        config: config.json as a dictionary.
        ops: the backend's kernels.
        place: sharding of each leaf on a mesh, or None on one device.
        dtype: of parameters, activations and pages; sums and logits are float32.
        page_size: cells per page.
        loop: how layers are run.

    Raises:
        PoemError: unknown architecture, or a variant of it that is not supported.
    """
    family = family_of(config)
    settings: Config = family.Config.from_json(config)
    model: Any = nnx.eval_shape(lambda: family.Model(settings, dtype))
    layers = tuple(split(layer) for layer in model.layers)
    model.layers = nnx.List([])
    outer = split(model)
    groups = family.state_groups(settings, ops, page_size, dtype)
    by_name = {group.name: group for group in groups}
    stored = dict(outer.leaves)
    for i, layer in enumerate(layers):
        stored |= {_layer_name(i, name): leaf for name, leaf in layer.leaves.items()}
    segments = (
        tuple(find_segments(settings.layer_groups))
        if loop is Loop.SCAN
        else tuple(Segment(i, 1, 1) for i in range(len(layers)))
    )
    params = dict(outer.leaves)
    for segment in segments:
        for j in range(segment.period):
            for name, leaf in layers[segment.start + j].leaves.items():
                params[_packed_name(segment, j, name)] = _stacked(leaf, segment.repeats)
    V, D = settings.vocab_size, settings.hidden_size
    attending = sum(by_name[name].kind is StateKind.PAGED for name in settings.layer_groups)
    facts = Facts(
        model_type=config["model_type"],
        vocab_size=V,
        hidden_size=D,
        layers=len(layers),
        max_context=settings.max_position_embeddings,
        page_size=page_size,
        outputs={"logits": ((V,), "float32"), "hidden": ((D,), "float32")},
        param_count=sum(leaf.size for leaf in stored.values()),
        attention=Heads(attending, settings.num_attention_heads, settings.head_dim) if attending and ops.taps else None,
    )
    return LoweredModel(
        facts=facts,
        stored=stored,
        params=params,
        groups=groups,
        weight_rules=family.weight_map(settings),
        ops=ops,
        place=place,
        outer=outer,
        layers=layers,
        layer_groups=tuple(by_name[name] for name in settings.layer_groups),
        segments=segments,
    )


def split(module: Any) -> Part:
    """A module's graph, and its leaves by dotted path."""
    graph, state = nnx.split(module)
    leaves: dict[str, Leaf] = {}
    for path, variable in nnx.to_flat_state(state):
        leaves[".".join(str(key) for key in path)] = Leaf(tuple(variable.shape), variable.dtype.name, variable.axes)
    return Part(graph, jax.tree.structure(state), leaves)


def find_segments(groups: Sequence[str]) -> list[Segment]:
    """Runs of layers that repeat: w w f w w f w -> [Segment(0, 3, 2), Segment(6, 1, 1)].

    At each layer the run that covers most layers is taken, of the shortest period.
    """
    segments: list[Segment] = []
    start = 0
    while start < len(groups):
        best = Segment(start, 1, 1)
        for period in range(1, (len(groups) - start) // 2 + 1):
            pattern = groups[start : start + period]
            repeats = 1
            while tuple(groups[start + repeats * period : start + (repeats + 1) * period]) == tuple(pattern):
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = Segment(start, period, repeats)
        segments.append(best)
        start += best.period * best.repeats
    return segments


def _stacked(leaf: Leaf, repeats: int) -> Leaf:
    return leaf if repeats == 1 else Leaf((repeats, *leaf.shape), leaf.dtype, ("layers", *leaf.axes))


def _layer_name(i: int, name: str) -> str:
    return f"layers.{i}.{name}"


def _packed_name(segment: Segment, j: int, name: str) -> str:
    first = segment.start + j
    if segment.repeats == 1:
        return _layer_name(first, name)
    return f"layers.{first}+{segment.period}x{segment.repeats}.{name}"
