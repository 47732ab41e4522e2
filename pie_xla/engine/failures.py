"""How failing is undone: passes with all that depends on them, what a client leaves behind, pools and words that a failed step took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pie_xla.engine.agenda import Agenda
from pie_xla.engine.api import Geometry, PassError
from pie_xla.engine.records import DropSet, Fork, Pass, PassRow, Shorten, Status, WorkingSet
from pie_xla.engine.words import WordFile

if TYPE_CHECKING:
    from pie_xla.engine.device_words import DeviceWords
    from pie_xla.engine.served import Served

Deliver = Callable[[int, int, Any], None]  # client, ticket, values or PassError


class Failures:
    """See the module.

    Args:
        models: all models of the engine.
        device: the device words.
        deliver: hands a result to its client.
        lose_state: marks every set of a model that had content as lost, with the cause.
        lose_words: marks every channel and output that had content as lost.
    """

    def __init__(
        self,
        models: tuple[Served, ...],
        agenda: Agenda,
        words: WordFile,
        device: DeviceWords,
        counters: Counter[str],
        deliver: Deliver,
        lose_state: Callable[[Served, str], None],
        lose_words: Callable[[str], None],
    ) -> None:
        self._models = models
        self._agenda = agenda
        self._words = words
        self._device = device
        self._counters = counters
        self._deliver = deliver
        self._lose_state = lose_state
        self._lose_words = lose_words

    # -- passes --------------------------------------------------------------------------------------------------

    def fail(self, item: Pass, cause: str) -> None:
        """Fail a pass and everything that depends on it; sets go back to before, in reverse order of launch."""
        failed = {item.order: item}
        broken: list[WorkingSet] = []
        found = -1
        while len(failed) != found:  # until nothing new follows
            found = len(failed)
            for order, other in self._agenda.running.items():
                if other.depends & failed.keys():
                    failed[order] = other
            since: dict[int, int] = {}  # set -> the first of its failed passes
            for order in sorted(failed, reverse=True):
                since |= {id(row.set): order for row in failed[order].rows if row.set is not None}
            for effect in self._agenda.waiting():
                match effect:
                    case Pass():
                        behind = any(since.get(id(row.set), effect.order) < effect.order for row in effect.rows)
                        if behind or effect.depends & failed.keys():
                            failed[effect.order] = effect
                    case Shorten(target) if effect.after and since.get(id(target), effect.order) < effect.order:
                        effect.dead = True  # of what it would have kept some, nothing is left
                        effect.pending.settle(0)
                        effect.let_go(self._words)
                    case Fork(parent, child) if since.get(id(parent), effect.order) < effect.order:
                        broken.append(child)
        for order in sorted(failed, reverse=True):
            self._undo(failed[order])
        for one in failed.values():
            own = {id(row.set) for row in one.rows}
            for heir in one.heirs:
                heir.sources.discard(one.order)
                if id(heir) not in own:
                    broken.append(heir)  # a fork that holds the failed tokens cannot be put back
        for target in broken:
            target.broken = cause
        for order in sorted(failed):
            one = failed[order]
            one.error = PassError(cause, one.line)
            self._deliver(one.client, one.ticket, one.error)

    def _undo(self, item: Pass) -> None:
        item.status = Status.FAILED
        item.dead = True
        self._agenda.running.pop(item.order, None)
        self._agenda.forget(item)
        item.pipeline.passes.pop(item.ticket, None)
        for row in item.rows:
            if row.set is None:
                continue
            if not item.read_only:
                row.set.undo(row.before, row.total if item.request.geometry is Geometry.BUFFER else 0)
            if row.start is not None:
                self.undo_row(row)
        for channel, producer in reversed(item.taken):
            channel.untake(producer)
        if item.wrote:
            for channel, use in zip(item.channels, item.entry.program.channels, strict=True):
                if use.put:
                    channel.poison = channel.poison or "a pass that was to put into this channel failed"
        for source in item.producers:
            if source is not None:
                source.unpin(self._words)
        for value in item.params:
            if isinstance(value, Future):
                value.cancel()
        for learner in item.learners:
            learner.pending.settle(0)
            self._words.release(learner.length.word, 1)
        item.learners.clear()
        item.free_results(self._words)

    def undo_row(self, row: PassRow) -> None:
        """The row's set as it was before the pass. Its cells beyond are dead, its newer slots go back."""
        target = row.set
        if target is None or row.start is None:
            return
        ledger = target.model.ledger
        if target.dropped:
            ledger.give_slot(row.replaced or 0)
        else:
            state = target.state
            emptied = state.length < row.start  # truncated to nothing since
            if row.anchored:
                ledger.release_anchor(state, restore=False)
            if row.replaced is not None:
                ledger.give_slot(state.slot)
                state.slot = row.replaced
            if emptied and ledger.slots:
                ledger.truncate(state, 0)
            elif not emptied:
                ledger.rewind(state, row.start, row.unknown)
        row.replaced = None

    def cancel(self, items: list[Pass], cause: str) -> None:
        """Drop passes that no step has taken, and discard those in flight."""
        for item in sorted(items, key=lambda p: p.order):
            if item.status in (Status.QUEUED, Status.RUNNING):
                self.fail(item, cause)

    def bury(self, client: int) -> None:
        """Effects of a client that has ended do not happen any more."""
        for effect in self._agenda.waiting():
            if effect.client_id == client:
                effect.dead = True
                effect.let_go(self._words)
                match effect:
                    case DropSet(target):
                        target.drop()
                    case Fork(_, child) if child.client != client:  # it was to be published
                        child.broken = "the process that published it ended before"

    # -- executables -----------------------------------------------------------------------------------------------

    def launch_failed(self, model: Served, items: list[Pass], error: Exception) -> None:
        """An executable could not be queued: its passes fail with the reason. If it took donated arrays along, those are rebuilt and
        whoever had content in them fails too."""
        cause = refusal(error)
        self._fail_all(items, cause)
        self.check_lost(cause, model)

    def landing_failed(self, items: list[Pass], error: Exception) -> None:
        """The device failed in the middle of something: every array may be an error now, and whether it is, only waiting for it says."""
        cause = refusal(error)
        self._fail_all(items, cause)
        if not self._device.sound():
            self.words_lost(cause)
        for model in self._models:
            if not model.launcher.sound():
                self.state_lost(model, cause)

    def _fail_all(self, items: list[Pass], cause: str) -> None:
        for item in items:
            if item.status in (Status.QUEUED, Status.RUNNING):
                self.fail(item, cause)

    def check_lost(self, cause: str, model: Served | None = None) -> None:
        """Rebuild what a failed executable has consumed."""
        if self._device.lost:
            self.words_lost(cause)
        if model is not None and model.launcher.lost:
            self.state_lost(model, cause)

    def state_lost(self, model: Served, cause: str) -> None:
        """Fresh pools for a model; its passes in flight and every set of it with content fail with the cause."""
        self._counters["rebuilds"] += 1
        self._fail_all([item for item in self._agenda.running.values() if item.model is model], cause)
        model.launcher.rebuild()
        model.prefixes.clear()
        self._lose_state(model, cause)

    def words_lost(self, cause: str) -> None:
        """Fresh words; what is in flight and every output and channel with content fail with the cause."""
        self._counters["rebuilds"] += 1
        self._fail_all(list(self._agenda.running.values()), cause)
        self._device.rebuild()
        self._lose_words(cause)


def refusal(error: Exception) -> str:
    """What a device error becomes for those who hear of it."""
    return f"the device could not run this step: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
