"""Drives the sites' strategies: Ask -> send -> gather -> replies back in; answers inference; says what each waits for.

It decides and does no I/O: frames go out through a `Post`, what lasts through `Records`, and the clock is handed in.

Rules:
* one generator per site, advanced one yield at a time, so that sites and inference requests share the torch process;
* a site goes on when every asked device has answered. A device that is away, or idle for longer than
  `idle_progress_s`, pauses its site with a reason; it is asked again, under the same ask id, when it comes back. Where
  the question has a quorum, the site goes on without such devices once so many others have answered;
* a device that was told to sleep is not missed before the time at which it was to wake up;
* a checkpoint is kept at a Record, at most every `checkpoint_s`; gradients of an upload's rows and quorums since then
  are in the journal. A strategy that trains with the devices is told at each Progress when one is due, so that it can
  let them settle first: what they answer between two checkpoints is too much to keep, and is made again instead;
* a device that has lost its part of the model says which checkpoints of it are left: the site goes back to the last one
  that both sides hold, and replays from there; where a question has the quorum 0, it is passed over instead;
* a site whose training fails stays failed, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contract.asks import ASK_KINDS
from contract.errors import TrainingError
from contract.messages import (
    Activations,
    Bye,
    Checkpoints,
    Choice,
    Gradient,
    Message,
    PatchFeatures,
    Prototypes,
    Scores,
    Settled,
    Update,
)
from contract.messages import Ask as AskMessage

from . import pipe
from .pipe import PipeFrame
from .site_run import Journal, Pending, Request, SiteRun, positions_of
from .store import Upload
from .strategies import Ask, HandsOver, Metric, Progress, Record, Reply, Site, State

COLLECTED, DONE, FAILED = "collected", "done", "failed"  # why a device is let go
JOURNALLED = frozenset(("score_batch", "head_step"))  # answers that a restarted server does not ask for again


class Post(Protocol):
    """Where frames for the socket process go."""

    def send(self, frame: PipeFrame) -> None: ...


class Records(Protocol):
    """What lasts: what devices sent, and what the run directory keeps."""

    def upload(self, site: str, device: str, ask: str) -> Upload | None:
        """A device's whole answer, or None while a part is missing."""
        ...

    def codes(self, site: str, request: Request) -> np.ndarray | None:
        """Wire codes (B,T,d) of an inference request, or None when it is gone."""
        ...

    def journal(self, site: str, device: str, reply: Gradient) -> None:
        """Keep a reply for a restart."""
        ...

    def journal_quorum(self, site: str, ask: str, devices: tuple[str, ...]) -> None:
        """Keep for a restart which devices a question went on with."""
        ...

    def rewind(self, site: str, fits: Callable[[State], bool]) -> State | None:
        """The newest checkpoint that fits, None for the beginning; newer ones and the journal are dropped."""
        ...

    def keep(self, site: str, record: Mapping[str, Metric], state: State | None, ended: bool) -> None:
        """Write a metrics line, and a checkpoint where there is a state."""
        ...


@dataclass(frozen=True)
class Conducting:
    """What holds for all sites of a run; waits in seconds."""

    run: str
    label_mode: str
    trains_with_devices: bool = False  # a device is needed to the end, whatever the label mode
    idle_progress_s: float = 120.0
    absent_s: float = 15.0  # how long a question with a quorum waits for a device that is not connected
    checkpoint_s: float = 10.0  # a server that is killed loses no more work than this


class Conductor:
    """All sites of a run."""

    def __init__(
        self, sites: Iterable[SiteRun], rules: Conducting, post: Post, records: Records, clock: Callable[[], float]
    ) -> None:
        self._sites = {site.name: site for site in sites}
        self._rules = rules
        self._post = post
        self._records = records
        self._clock = clock
        self._present: dict[str, str] = {}  # device -> purpose of its session
        self._asleep: dict[str, float] = {}  # device -> when it was to wake up
        self.stopped = False

    # -- what comes in

    def start(self) -> None:
        """Take up every site that has had a device before: its uploads may be complete, its devices gone for good."""
        for site in self._sites.values():
            if site.classes is not None:
                self._begin(site)
            self._tell(site)

    def feed(self, frame: PipeFrame) -> None:
        """Take in one frame of the socket process."""
        if frame.kind == pipe.STOP:
            self.stopped = True
            return
        site = self._sites[frame.site]
        if frame.kind == pipe.JOINED:
            self._join(site, frame.device, str(frame.values["purpose"]), int(frame.values["class_count"] or 0))
        elif frame.kind == pipe.LEFT:
            self._present.pop(frame.device, None)
            self._note_progress(site, frame.device)
        elif frame.kind == pipe.STORED:
            self._take_features(site, frame)
        elif frame.kind == pipe.PROGRESS:
            self._note_progress(site, frame.device)
        elif frame.kind == pipe.MESSAGE:
            message = pipe.carried(frame)
            if isinstance(message, Activations) and message.split == "infer":
                site.requests[Request(frame.device, message.ask, message.batch)] = message
            elif isinstance(message, Gradient | Settled | Choice | Activations | Update | PatchFeatures | Prototypes):
                self._take_reply(site, frame.device, message)
            elif isinstance(message, Checkpoints):
                self._take_checkpoints(site, frame.device, message)

    def _join(self, site: SiteRun, device: str, purpose: str, classes: int) -> None:
        self._present[device] = purpose
        if purpose == "infer":  # it sends again whatever it has no scores for
            site.requests = {request: held for request, held in site.requests.items() if request.device != device}
        if site.conduct is None and not site.over:
            site.classes = classes
            self._begin(site)  # asks everyone who is present
        elif site.pending and device in site.pending.missing:
            site.pending.progress_s[device] = self._clock()
            self._ask(site, site.pending, device)
        elif site.failure is not None:  # a device that came to predict would wait for ever
            self._say_bye(site, device, FAILED)
        elif purpose == "adapt" and site.over:
            if not self._hand_over(site, device):
                self._say_bye(site, device, DONE)
        elif purpose == "adapt" and self._needs_features_only:
            self._say_bye(site, device, COLLECTED)

    def _hand_over(self, site: SiteRun, device: str) -> bool:
        """Give a device what was trained without it; False where the strategy has nothing for it."""
        question = site.strategy.last_part(device) if site.ended and isinstance(site.strategy, HandsOver) else None
        if question is None:
            return False
        name = f"{self._rules.run}.{question.name}"
        site.late[device] = name
        parameters = _parameters(site, question, device)
        tensors = dict(question.tensors[device])
        self._send(site, device, AskMessage(name, question.kind, parameters, self._rules.idle_progress_s, tensors))
        return True

    @property
    def _needs_features_only(self) -> bool:
        return self._rules.label_mode == "permuted-label" and not self._rules.trains_with_devices

    def _begin(self, site: SiteRun) -> None:
        state, site.ended = site.resumed or (None, False)
        site.resumed = None
        site.load(_facts(site), state)
        if site.ended:
            self._post.send(PipeFrame(pipe.ENDED, site.name, values=dict(site.last_record)))
        else:
            site.conduct = site.strategy.run(_facts(site))
            self._advance(site)

    def _take_features(self, site: SiteRun, frame: PipeFrame) -> None:
        ask, batch = str(frame.values["ask"]), int(frame.values["batch"] or 0)
        self._note_progress(site, frame.device)
        if frame.values["split"] == "infer":
            site.requests[Request(frame.device, ask, batch)] = None
        elif site.pending and ask == site.pending.id and frame.values["complete"]:
            self._gather_upload(site, site.pending, frame.device)

    def _gather_upload(self, site: SiteRun, pending: Pending, device: str) -> None:
        upload = self._records.upload(site.name, device, pending.id)
        if upload is None or device not in pending.missing:
            return
        if self._needs_features_only and self._present.get(device) == "adapt":
            self._say_bye(site, device, COLLECTED)  # it may be switched off: no more will be asked of it
        self._gather(site, pending, device, upload)

    def _take_reply(
        self,
        site: SiteRun,
        device: str,
        reply: Gradient | Settled | Choice | Activations | Update | PatchFeatures | Prototypes,
    ) -> None:
        """Whatever answers another question than the one that is open came too late and is dropped."""
        if site.late.get(device) == reply.ask:
            del site.late[device]
            self._say_bye(site, device, DONE)
            return
        pending = site.pending
        if pending and reply.ask == pending.id and device in pending.missing:
            if isinstance(reply, Gradient) and pending.ask.kind in JOURNALLED:
                self._records.journal(site.name, device, reply)
            self._gather(site, pending, device, reply)

    def _take_checkpoints(self, site: SiteRun, device: str, held: Checkpoints) -> None:
        """A device cannot take the step: go back to the newest checkpoint whose place it still holds."""
        pending = site.pending
        if pending is None or held.ask != pending.id or device not in pending.missing:
            return
        if "after" not in ASK_KINDS[pending.ask.kind].parameters:  # nothing that could be lost is asked for
            return
        if pending.ask.quorum == 0:  # the site goes on without it: it begins again wherever it stands
            pending.lost.add(device)
            return
        # What it did since it settled is in its memory only. But where it settled it could go on from: going back would
        # not help, nor ever end.
        parameters = _parameters(site, pending.ask, device)
        begins = pending.ask.kind != "batch_loss" and not parameters.get("batch")  # a loss is of a batch in memory
        if begins and site.positions.get(device, 0) in held.steps:
            cause = f"{device} refuses the step after {site.positions.get(device, 0)}, which it holds"
            self._fail(site, TrainingError(cause, "update the device's software"))
            return
        assert site.conduct is not None
        site.conduct.close()
        state = self._records.rewind(site.name, lambda state: positions_of(state).get(device, 0) in held.steps)
        site.pending, site.journal = None, Journal()
        site.load(_facts(site), state)
        self._post.send(
            PipeFrame(
                pipe.WARNING,
                text=f"site {site.name}: {device} has lost its newest part of the model: training goes back to the "
                f"last step that both sides hold ({positions_of(state).get(device, 0)}) and replays from there",
            )
        )
        site.conduct = site.strategy.run(_facts(site))
        self._advance(site)

    def _gather(self, site: SiteRun, pending: Pending, device: str, reply: Reply) -> None:
        pending.replies[device] = reply
        if pending.ask.kind == "sleep":
            self._asleep[device] = self._clock() + float(_parameters(site, pending.ask, device)["wake_s"])
        if not pending.missing:
            self._close(site, pending)

    def _close(self, site: SiteRun, pending: Pending) -> None:
        """Hand in the answers that are there."""
        if pending.ask.step is not None:
            site.positions.update(dict.fromkeys(pending.replies, pending.ask.step))
        # In the order of asking, so that nothing depends on who was first.
        site.ready = {device: pending.replies[device] for device in pending.expected if device in pending.replies}
        site.pending = None

    def _close_at_quorum(self, site: SiteRun) -> None:
        """Go on without devices that are away or stuck, where the question allows it."""
        pending = site.pending
        if pending is None or pending.ask.quorum is None or len(pending.replies) < pending.ask.quorum:
            return
        if all(self._is_given_up(pending, device) for device in pending.missing):
            answered = tuple(device for device in pending.expected if device in pending.replies)
            self._records.journal_quorum(site.name, pending.id, answered)
            self._close(site, pending)

    def _is_given_up(self, pending: Pending, device: str) -> bool:
        """Whether a device is not waited for where a quorum is enough: it may be on its way back for a moment."""
        if device in pending.lost:
            return True
        away = self._present.get(device) != "adapt"
        limit_s = self._rules.absent_s if away else self._rules.idle_progress_s
        since_s = max(pending.progress_s[device], self._asleep.get(device, 0.0) if away else 0.0)
        return self._clock() - since_s > limit_s

    def _note_progress(self, site: SiteRun, device: str) -> None:
        if site.pending and device in site.pending.progress_s:
            site.pending.progress_s[device] = self._clock()

    # -- what is done next

    @property
    def runnable(self) -> bool:
        """Whether `work` has something to do without a new frame."""
        return any(site.ready is not None or (site.requests and site.over) for site in self._sites.values())

    def work(self) -> None:
        """Advance every site that can go on by one yield, and answer one inference request of each."""
        for site in self._sites.values():
            self._close_at_quorum(site)
            if site.ready is not None:
                self._advance(site)
            if site.requests and site.over:
                request = next(iter(site.requests))
                self._answer(site, request, site.requests.pop(request))
            self._tell(site)

    def _advance(self, site: SiteRun) -> None:
        assert site.conduct is not None
        replies, site.ready = site.ready, None
        try:
            step = next(site.conduct) if replies is None else site.conduct.send(replies)
        except StopIteration:
            self._end(site)
        except TrainingError as error:
            self._fail(site, error)
        else:
            self._follow(site, step)

    def _follow(self, site: SiteRun, step: Ask | Record | Progress) -> None:
        if isinstance(step, Ask):
            name = f"{self._rules.run}.{step.name}"
            expected = site.journal.quorums.get(name, tuple(step.tensors))
            site.pending = pending = Pending(name, step, expected, progress_s=dict.fromkeys(expected, self._clock()))
            for device in expected:
                self._ask(site, pending, device)
            return
        due = self._clock() - site.kept_s >= self._rules.checkpoint_s
        if isinstance(step, Record):
            site.last_record = dict(step.values) or site.last_record
            self._records.keep(site.name, step.values, site.checkpoint() if due else None, ended=False)
            if due:
                site.kept_s, site.base = self._clock(), dict(site.positions)
            site.ready = {}
        else:
            site.status, site.ready = step.text, due

    def _ask(self, site: SiteRun, pending: Pending, device: str) -> None:
        """Ask one device, unless its answer is here already: in the store or in the journal."""
        if pending.ask.kind == "collect_features":
            self._gather_upload(site, pending, device)
        elif (pending.id, device) in site.journal.replies:
            self._gather(site, pending, device, site.journal.replies[pending.id, device])
        if device in pending.missing and self._present.get(device) == "adapt":
            message = AskMessage(
                ask=pending.id,
                kind=pending.ask.kind,
                parameters=_parameters(site, pending.ask, device),
                idle_progress_s=self._rules.idle_progress_s,
                tensors=dict(pending.ask.tensors[device]),
            )
            self._send(site, device, message)

    def _answer(self, site: SiteRun, request: Request, activations: Activations | None) -> None:
        # Who is away gets nothing: it sends the batch again when it is back.
        if request.device not in self._present or not site.ended:
            return
        if activations is not None:
            try:
                values = site.strategy.predict_part(request.device, activations.values)
            except TrainingError as error:  # this device's fault, and no one else's
                self._post.send(PipeFrame(pipe.WARNING, text=f"site {site.name}: {error.cause}"))
                self._say_bye(site, request.device, FAILED)
                return
        else:
            codes = self._records.codes(site.name, request)
            if codes is None:
                return
            values = site.strategy.predict(codes)
        self._send(site, request.device, Scores(ask=request.ask, batch=request.batch, values=values))

    def _end(self, site: SiteRun) -> None:
        site.ended, site.status = True, "trained"
        self._records.keep(site.name, {"ended": True}, site.checkpoint(), ended=True)
        self._let_go(site, DONE)  # before the end is told, which may be the server's
        self._post.send(PipeFrame(pipe.ENDED, site.name, values=dict(site.last_record)))

    def _fail(self, site: SiteRun, error: TrainingError) -> None:
        site.failure, site.status = error, f"training failed: {error.cause}"
        self._let_go(site, FAILED)
        self._post.send(PipeFrame(pipe.FAILED, site.name, values={"cause": error.cause, "cure": error.cure}))

    # -- what is said

    def _let_go(self, site: SiteRun, reason: str) -> None:
        for device in site.devices:
            if self._present.get(device) == "adapt" or (reason == FAILED and device in self._present):
                self._say_bye(site, device, reason)

    def _say_bye(self, site: SiteRun, device: str, reason: str) -> None:
        self._send(site, device, Bye(reason=reason, may_return=reason != FAILED))

    def _send(self, site: SiteRun, device: str, message: Message) -> None:
        self._post.send(pipe.carry(site.name, device, message))

    def _tell(self, site: SiteRun) -> None:
        """Tell the socket process what the site is doing, when that has changed."""
        text = self._waiting_for(site)
        if text != site.told:
            site.told = text
            self._post.send(PipeFrame(pipe.STATUS, site.name, text=text, values={"busy": site.ready is not None}))

    def _waiting_for(self, site: SiteRun) -> str:
        """What a site is doing or waiting for, in words."""
        pending = site.pending
        if pending is None or site.over:
            return site.status
        reasons = []
        for device in pending.missing:
            if self._present.get(device) == "infer":
                reasons.append(f"{device} came to predict and is needed to train: run edge-run without --infer first")
            elif self._present.get(device) != "adapt" and self._asleep.get(device, 0.0) > self._clock():
                reasons.append(f"{device} sleeps")
            elif self._present.get(device) != "adapt":
                reasons.append(f"{device} is not connected")
            elif self._clock() - pending.progress_s[device] > self._rules.idle_progress_s:
                reasons.append(f"{device} has made no progress for {self._rules.idle_progress_s:.0f} s")
        if reasons:
            return f"paused: {', '.join(reasons)} ({site.reply_count})"
        if pending.ask.kind == "collect_features":
            return f"collecting features, {site.reply_count}"
        return site.status  # gradients come and go too fast to be told


def _facts(site: SiteRun) -> Site:
    return Site(site.name, site.devices, site.classes or 0)


def _parameters(site: SiteRun, ask: Ask, device: str) -> dict[str, float | int | str]:
    """What a question says to one device."""
    return {**ask.parameters, **ask.own.get(device, {}), **_numbers(site, ask, device)}


def _numbers(site: SiteRun, ask: Ask, device: str) -> dict[str, int]:
    """To which step a question takes the device, from which, and to which both sides could go back: those of the three
    that this kind of question has."""
    numbers = {"step": ask.step, "after": site.positions.get(device, 0), "base": site.base.get(device, 0)}
    known = ASK_KINDS[ask.kind].parameters
    return {name: number for name, number in numbers.items() if name in known and number is not None}
