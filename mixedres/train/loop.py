"""The loop of a run: steps, evaluations and checkpoints, until the end or a request to stop."""

from __future__ import annotations

import dataclasses
import pathlib
import signal

import jax

from mixedres import checkpoints, data, models
from mixedres._internal.cli.compilation import CompilationCounter
from mixedres._internal.cli.signals import StopSignal
from mixedres._internal.errors import Stopped, TrainingError
from mixedres._internal.formats import stamped
from mixedres._internal.processes import SingleProcess
from mixedres._internal.types import Batch, CompiledStep, Metrics, Record
from mixedres.checkpoints import Claim
from mixedres.train import evaluation, step
from mixedres.train.debug import nonfinite, replicas
from mixedres.train.debug.monitor import Sampler
from mixedres.train.debug.profiler import Profiler
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.log import InFlight, RunLog

# A running average has 95 % of its weight on the newest 3 / (1 - momentum) steps.
_STEPS_OF_STATISTICS = 3
# A test loss this many times the training loss, or this large, is worth a note.
_MUCH_LARGER = 3.0


@dataclasses.dataclass
class Loop:
    """A run between its first and its last step."""

    experiment: Experiment
    directory: pathlib.Path
    group: SingleProcess
    claim: Claim | None  # of the directory; None in a process that does not write
    saved: checkpoints.Checkpoints
    log: RunLog
    sampler: Sampler  # examines the numerics now and then
    profiler: Profiler  # traces the steps that ``config.profile`` names
    stop_signal: StopSignal
    train_step: CompiledStep
    eval_step: CompiledStep
    state: step.TrainState  # after the newest step
    host: checkpoints.HostState  # evaluations and sums, which the next checkpoint holds
    collects: bool = False  # keep the results of the single images of the last evaluation
    on_evaluation: evaluation.OnEvaluation | None = None  # see `mixedres.train.fit`
    on_step: evaluation.OnStep | None = None
    baseline: float | None = None  # fraction of the test images that have the most frequent class
    results: data.ImageResults | None = None  # of the newest evaluation, if it was known to be the last
    compilations: list[str] = dataclasses.field(default_factory=list)  # after the first step; should be empty
    _stopping: bool = False
    _told: int | None = None  # the step whose evaluation `on_evaluation` has seen
    _is_ended: bool = False  # by `on_evaluation`
    _noted: bool = False  # that running statistics are young

    def run(self, batches: data.Prefetch[data.Batch, Batch]) -> Record:
        """Runs to the end, over `batches`, which begin with the next step, and returns the last evaluation.

        Raises Stopped after a signal, with all saved; NonFiniteError, with the state before the step; and TrainingError
        if the last checkpoint cannot be saved, or the devices have different states.
        """
        log, first_step, total_steps = self.log, int(self.state.step), self.experiment.total_steps
        self._stopping = self.group.stop_agreed(self._is_asked_to_stop(), first_step)
        # An evaluation that a signal cut off comes first: it belongs to the state that was restored.
        ended = first_step > 0 and self._pause(first_step)
        in_flight = InFlight()
        # No implicit transfer and no compilation: both would make every step slow without an error.
        traced = self.profiler.over(lambda: self.state)
        with traced, jax.transfer_guard("disallow"), CompilationCounter() as compiled:
            for done in range(first_step + 1, total_steps + 1) if not ended else ():
                with self.profiler.step(done):
                    log.clock.start()
                    batch = self._take(batches, in_flight, done)
                    self.group.progress(done)
                    self.sampler.look(done, self.state, batch)
                    self.state, metrics = self.train_step(self.state, batch)
                    finished = in_flight.push(done, metrics, batch)
                log.waited = batches.waited
                self._record(finished)
                self._warn(self.saved.poll())
                for name in compiled.take():
                    self.compilations.append(name)
                    log.print(f"warning: {name} was compiled before step {done}; a step should compile nothing")
                self._stopping = self.group.stop_agreed(self._is_asked_to_stop(), done)
                must_pause = self._is_evaluation(done) or self._is_checkpoint(done) or self._stopping
                self.profiler.after(done, pausing=must_pause)
                if must_pause:
                    self._record(in_flight.drain())
                    log.clock.stop()  # evaluations and checkpoints do not count in the rate
                    if self._pause(done):
                        break
        assert self.host.evaluated is not None
        self._finish(self.host.evaluated["step"])
        return dict(self.host.evaluated)

    def _take(self, batches: data.Prefetch[data.Batch, Batch], in_flight: InFlight, done: int) -> Batch:
        """Returns the batch of step `done`; raises Stopped after the step before if a signal comes during the wait."""
        try:
            return batches.take(in_flight.busy)
        except data.GaveUp:
            self._record(in_flight.drain())
            self.log.clock.stop()
            self._stopping = True
            if done > 1:
                self._pause(done - 1)
            raise self._stopped(done - 1) from None

    def stops_alone(self) -> bool:
        """Returns whether a single process was asked to stop; several processes agree after the next step."""
        return self.group.count == 1 and self._is_asked_to_stop()

    def _is_asked_to_stop(self) -> bool:
        return self.stop_signal.requested is not None

    def _stopped(self, done: int) -> Stopped:
        return Stopped(self.stop_signal.requested or signal.SIGTERM, done, self.saved.latest_step())

    def _check_place(self, done: int) -> None:
        """Raises TrainingError if the directory of the run was removed or moved; called before and after a save."""
        if self.claim is not None and self.claim.is_lost():
            raise TrainingError(
                f"the checkpoint of step {done} could not be written: {self.directory} was removed or moved during the "
                "run; put it back and start the same command again to go on from its newest checkpoint"
            )

    def _finish(self, last: int) -> None:
        """Waits for the disk; raises TrainingError if the checkpoint of the `last` step is not on it."""
        with self.group.pause():
            problems = self.saved.finish()
            if self.saved.latest_step() != last and self.group.count == 1:
                self._save(last)  # once more: the error may have passed
                problems += self.saved.finish()
        self._check_place(last)
        newest = self.saved.latest_step()
        if newest == last:
            self._warn(problems)
            return
        problem = problems[-1] if problems else f"the checkpoint of step {last} could not be written"
        stands = "nothing is saved" if newest is None else f"the checkpoint of step {newest} stands"
        raise TrainingError(f"{problem}; {stands}. Make room and start the same command again to go on from there")

    def _is_evaluation(self, done: int) -> bool:
        experiment = self.experiment
        return done in (experiment.total_steps, self.host.pending_eval) or _is_due(done, experiment.eval_every)

    def _is_checkpoint(self, done: int) -> bool:
        return _is_due(done, self.experiment.checkpoint_every)  # the last step is saved because it is evaluated

    def _pause(self, done: int) -> bool:
        """Evaluates and saves what is due after `done` steps; returns whether the run ends here."""
        group, better = self.group, False
        if self._is_evaluation(done) and not self._is_evaluated(done):
            better = self._evaluate(done)
        self._tell(done)
        ended = self._is_evaluated(done) and (done == self.experiment.total_steps or bool(self.stopped_by()))
        self._stopping |= self.stops_alone()  # perhaps since the evaluation
        if better or ended or self._is_checkpoint(done) or self._stopping:
            self._save(done)
        if self._stopping and not ended:
            with group.pause():
                self._warn(self.saved.finish())
            raise self._stopped(done)
        return ended

    def _tell(self, done: int) -> None:
        """Calls `on_evaluation` with the evaluation of step `done`, also with one that a checkpoint has."""
        tell, evaluated = self.on_evaluation, self.host.evaluated
        if tell is None or evaluated is None or not self._is_evaluated(done) or self._told == done:
            return
        self._told, epoch = done, done / self.experiment.steps_per_epoch
        with jax.transfer_guard("allow"):
            self._is_ended = bool(tell({"epoch": epoch, **evaluated}))

    def _evaluate(self, done: int) -> bool:
        """Evaluates, logs, and returns whether the result is the best so far; a signal leaves it for the next start."""
        # The run ends with this evaluation, unless it is the best, or if `on_evaluation` asks for it.
        may_end = done == self.experiment.total_steps or self._is_out_of_patience(done) or self.on_evaluation
        collector = data.ResultCollector() if self.collects and may_end else None
        by_name = evaluation.sum_over_images(
            self.experiment,
            {"": self.eval_step},
            self.state,
            should_stop=self.stops_alone,
            group=self.group,
            collector=collector,
        )
        if not by_name:
            return False
        self.results = None if collector is None else collector.results()
        result = evaluation.means(by_name[""])
        if (frequent := by_name[""].get("most_frequent")) is not None:
            self.baseline = int(frequent) / result["examples"]
        self.log.eval(done, done / self.experiment.steps_per_epoch, result)
        self._note_young_statistics(done, result["loss"])
        top1, top5, loss, examples = (result[name] for name in ("top1", "top5", "loss", "examples"))
        self.host.evaluated = {"step": done, "top1": top1, "top5": top5, "loss": loss, "examples": examples}
        better = self.host.best is None or result["top1"] > self.host.best["top1"]
        if better:
            self.host.best = {"step": done, "top1": result["top1"]}
        return better

    def _note_young_statistics(self, done: int, test_loss: float) -> None:
        """Prints a note if a large test loss may come from running statistics that have seen too few steps."""
        experiment, train_loss = self.experiment, self.log.epoch_loss
        momentum, frozen = experiment.config.batch_norm.momentum, experiment.config.batch_norm.frozen
        enough = _STEPS_OF_STATISTICS / (1 - momentum)
        is_young = isinstance(experiment.model, models.ResNet) and not frozen and done < enough
        if is_young and not self._noted and train_loss is not None and test_loss > _MUCH_LARGER * max(train_loss, 1.0):
            self._noted = True
            self.log.print(
                f"note: the test loss is far above the training loss; the running averages of batch norm have seen "
                f"{done} of the {enough:,.0f} steps, 3 / (1 - momentum), that momentum {momentum:g} takes: train "
                "longer, or lower --config.batch_norm.momentum"
            )

    def _is_out_of_patience(self, step: int) -> bool:
        patience = self.experiment.patience
        return self.host.best is not None and bool(0 < patience <= step - self.host.best["step"])

    def _is_evaluated(self, done: int) -> bool:
        return self.host.evaluated is not None and self.host.evaluated["step"] == done

    def stopped_by(self) -> str | None:
        """Returns what ends the run early after the newest evaluation: 'on_evaluation', or a key of the config."""
        experiment = self.experiment
        if self.host.evaluated is None or self.host.evaluated["step"] == experiment.total_steps:
            return None
        if self._is_ended:
            return "on_evaluation"
        if (wanted := experiment.config.stop_at_top1) is not None and self.host.evaluated["top1"] >= wanted:
            return "stop_at_top1"
        return "patience" if self._is_out_of_patience(self.host.evaluated["step"]) else None

    def _save(self, done: int) -> None:
        experiment, group, log = self.experiment, self.group, self.log
        self._check_place(done)
        replicas.check_copies(self.state, group, done, self.saved.latest_step())
        if not log.sync() and group.count == 1:  # other processes would wait
            log.print(f"warning: no checkpoint of step {done}, because its metrics cannot be written either")
            return
        host = self.host
        host.pending_eval = done if self._is_evaluation(done) and not self._is_evaluated(done) else None
        host.log = log.state()
        record = {"config": experiment.resolved, "data": experiment.data, "devices": len(experiment.devices)}
        record = checkpoints.with_host_state(stamped(record), host)
        with jax.transfer_guard("allow"), group.pause():
            self.saved.save(done, self.state, record, best=host.best["step"] if host.best else None)

    def _warn(self, problems: list[str]) -> None:
        for problem in problems:
            newest = self.saved.latest_step()
            stands = "there is none yet" if newest is None else f"the newest is of step {newest}"
            self.log.print(f"warning: {problem}; {stands}")

    def _record(self, finished: list[tuple[int, Metrics, Batch]]) -> None:
        """Logs the metrics of finished steps; raises NonFiniteError at a step that was not taken."""
        for done, values, batch in finished:
            self.log.train(done, values)
            self.sampler.finished(done, values, self.log)
            if self.on_step is not None:
                with jax.transfer_guard("allow"):
                    self.on_step({"step": done, **values})
            if values["halted"]:
                self.profiler.end()
                self.log.print(f"step {done} is not finite; examining it takes about as long as compiling twice")
                with jax.transfer_guard("allow"):
                    raise nonfinite.explain_halt(self.experiment, self.directory, self.state, batch)


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
