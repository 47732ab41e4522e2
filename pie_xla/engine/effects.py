"""Effects that need no launch, in the order of their calls: forks, lengths, evictions, and what the host puts into channels and takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pie_xla.engine.agenda import Agenda
from pie_xla.engine.api import PassError
from pie_xla.engine.device_words import DeviceWords, HostWords
from pie_xla.engine.failures import Deliver, Failures, refusal
from pie_xla.engine.packing import value_of
from pie_xla.engine.records import (
    Channel,
    DropSet,
    Effect,
    Evict,
    Fork,
    HostPut,
    HostTake,
    Learner,
    Pass,
    Shorten,
    Status,
)
from pie_xla.engine.state import DeviceLength
from pie_xla.engine.words import WordFile


@dataclass
class Peek:
    """A channel cell on its way to the host."""

    client: int
    ticket: int
    channel: Channel
    words: HostWords


class Effects:
    """See the module.

    Args:
        words, device: which device words are whose, and the words themselves.
        deliver: hands a result to its client.

    Attributes:
        peeks: channel cells that somebody should wait for.
    """

    def __init__(
        self, agenda: Agenda, words: WordFile, device: DeviceWords, failures: Failures, deliver: Deliver
    ) -> None:
        self._agenda = agenda
        self._words = words
        self._device = device
        self._failures = failures
        self._deliver = deliver
        self.peeks: list[Peek] = []

    def settle(self) -> None:
        """Run every effect that needs no launch and is first in its lanes, until nothing changes."""
        moved = True
        while moved:
            moved = False
            for effect in self._agenda.heads():
                moved = (not effect.dead and self._happen(effect)) or moved

    def _happen(self, effect: Effect) -> bool:
        """Let an effect that is first happen; True when it has left its lanes, so that those behind it may move."""
        if isinstance(effect, Pass):  # a pass leaves when it is launched, or when it cannot run any more
            cause = _doomed(effect)
            if cause is not None:
                self._failures.fail(effect, cause)
            return cause is not None
        if not self._act(effect):
            return False
        effect.leave()
        return True

    def _act(self, effect: Effect) -> bool:
        match effect:
            case Fork(parent, child):
                if parent.broken is not None:
                    child.broken = parent.broken
                elif not child.dropped:
                    child.state = parent.model.ledger.fork(parent.state)
                    child.sources = set(parent.sources)
                    for order in parent.sources:
                        self._agenda.running[order].heirs.append(child)
                return True
            case Shorten(target):
                done = target.broken is not None or target.dropped or self._shorten(effect)
                if done:
                    effect.let_go(self._words)
                return done
            case Evict(target, spans):
                if target.broken is not None or target.dropped:
                    return True
                if target.state.unknown is not None:  # until the host knows which cells there are
                    return False
                target.model.ledger.evict(target.state, spans)
                return True
            case DropSet(target):
                target.drop()
                return True
            case HostPut():
                return self._host_put(effect)
            case HostTake():
                return self._host_take(effect)
            case _:
                raise TypeError(f"unknown effect {effect!r}")

    def _shorten(self, effect: Shorten) -> bool:
        """Cut a set; False while the pass that says how much has not been launched."""
        state, source, ledger = effect.set.state, effect.source, effect.set.model.ledger
        n: int | None = effect.n
        if source is not None:
            if source.status is Status.QUEUED:
                return False
            if source.status is Status.FAILED:
                self._shorten_by_failed(effect, source)
                return True
            n = source.counts[effect.index] if source.status is Status.DONE else None
        if n is None:
            assert source is not None
            return self._shorten_on_device(effect, source)
        if effect.after:
            less = effect.most - min(max(n, 0), effect.most)
            ledger.drop_last(state, less)
            effect.pending.settle(less)
        elif source is not None and state.unknown is not None:
            return False  # the host will soon know which is shorter
        else:
            if effect.commit and n < state.length:
                ledger.release_anchor(state, restore=True)
            less = max(0, state.length - max(n, 0))
            ledger.truncate(state, max(n, 0))
            effect.pending.settle(less)
        if effect.commit:
            ledger.release_anchor(state, restore=False)
        return True

    def _shorten_by_failed(self, effect: Shorten, source: Pass) -> None:
        """The pass that was to say how many has failed. Its own sets are as before it; others have no length."""
        effect.pending.settle(0)
        if all(row.set is not effect.set for row in source.rows):
            effect.set.broken = source.error.cause if source.error else "the pass that decides its length failed"

    def _shorten_on_device(self, effect: Shorten, source: Pass) -> bool:
        """The length becomes a value on the device, until the pass that says it lands. False: no word is free for it now."""
        target = effect.set
        state, base = target.state, target.state.unknown
        word = self._words.allocate(1)
        if word is None:
            return False
        cells = state.cells - effect.most if effect.after else state.cells
        least = state.least - effect.most if effect.after else 0
        since = cells if base is None else cells - base.most
        at = source.offsets[effect.index]
        change = (word, since, -1 if base is None else base.word, 0, at, effect.most, int(effect.after), state.moved)
        self._device.settle_length(change)
        length = DeviceLength(word, least, state.cells)
        target.model.ledger.shorten(state, length)
        source.learners.append(
            Learner(
                length,
                target.model.ledger,
                effect.pending,
                effect.index,
                base,
                since,
                effect.after,
                effect.most,
                state.moved,
            )
        )
        target.sources.add(source.order)
        source.heirs.append(target)
        return True

    def _host_put(self, effect: HostPut) -> bool:
        channel = effect.channel
        if channel.poison is not None or channel.dropped:
            return True
        if effect.replace and channel.count:
            if channel.last_taker in self._agenda.running:  # it may still give its cell back
                return False
            at, channel.producers[0] = channel.cell(0), -1
        elif channel.count >= channel.capacity:
            return False
        else:
            at = channel.put(-1)
        try:
            self._device.poke(effect.words, at)
        except Exception as error:
            channel.poison = refusal(error)
            self._failures.check_lost(channel.poison)
        return True

    def _host_take(self, effect: HostTake) -> bool:
        channel = effect.channel
        if channel.poison is not None:
            self._deliver(channel.client, effect.ticket, PassError(channel.poison))
            return True
        if (
            not channel.count or channel.last_taker in self._agenda.running
        ):  # a pass in flight may still give its cell back
            return False
        try:
            words = self._device.peek(channel.cell(0), channel.type.size)
        except Exception as error:
            self._deliver(channel.client, effect.ticket, PassError(refusal(error)))
            self._failures.check_lost(refusal(error))
            return True
        if effect.consume:
            channel.take()
        self.peeks.append(Peek(channel.client, effect.ticket, channel, words))
        return True

    def learn(self, learner: Learner, value: int | None) -> None:
        """A result that decides a length has landed."""
        assert value is not None
        base = learner.base
        if base is not None and base.exact is None:  # its own pass lands later
            base.waiting.append(lambda: self.learn(learner, value))
            return
        learner.learn(value)
        learner.pending.settle(learner.length.most - (learner.length.exact or 0))
        learner.ledger.resolve(learner.length)
        self._words.release(learner.length.word, 1)
        waiting, learner.length.waiting = learner.length.waiting, []
        for call in waiting:
            call()

    def land_peek(self, peek: Peek, words: np.ndarray) -> None:
        if peek.channel.poison is not None:
            self._deliver(peek.client, peek.ticket, PassError(peek.channel.poison))
        else:
            self._deliver(peek.client, peek.ticket, (value_of(words, peek.channel.type),))

    def peek_failed(self, peek: Peek, error: Exception | None) -> None:
        cause = refusal(error) if error is not None else "the device gave no value"
        self._deliver(peek.client, peek.ticket, PassError(cause))


def _doomed(item: Pass) -> str | None:
    """The cause for which a pass cannot run any more, or None."""
    if item.entry.refused is not None:
        return item.entry.refused
    for row in item.rows:
        if row.set is not None and row.set.broken is not None:
            return row.set.broken
    for channel in (*item.channels, *item.embedded):
        if channel.poison is not None:
            return channel.poison
    for producer in item.producers:
        if producer is not None and producer.lost is not None:
            return producer.lost
        if producer is not None and producer.status is Status.FAILED:
            return producer.error.cause if producer.error else "the pass whose output it embeds failed"
    return None
