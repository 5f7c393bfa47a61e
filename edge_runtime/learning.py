"""edge-run --learn: the head that answers without a server, learned anew from a labelled folder; nothing is sent.

Only images that this device has not learned from before go through the frontend, told by their pixels; class folders
that are new give the head more classes. The server's classes are left as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from contract.errors import ConfigError
from edge_runtime.answering import without_head
from edge_runtime.client import Traffic
from edge_runtime.config import LocalConfig
from edge_runtime.delivery import Stopped
from edge_runtime.equip import equip
from edge_runtime.report import Report
from edge_runtime.run_report import Talk, make_report
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.worker import Worker

STOPPED = "stopped before it had learned: what it had learned before stays"


def learn(config: LocalConfig, stop: threading.Event, say: Callable[[str], None]) -> Report | None:
    """None when it was stopped before it had learned.

    Raises: ConfigError for a package without a frontend; DataError for images without a class; as `equip`.
    """
    watch = SlowdownWatch()
    try:
        equipment = equip(config, "learn", stop, say)
    except Stopped:
        say(STOPPED)
        return None
    try:
        learner, worker = equipment.learner, equipment.worker
        if learner is None or not isinstance(worker, Worker):
            raise ConfigError(without_head(equipment), "use a package with a frozen frontend, or ask the server")
        new = learner.missing()
        say(f"{len(new)} of {len(equipment.dataset.samples)} images are new here")
        worker.look_at(new)
        with equipment.stages.measure("learn"):
            learner.learn()
        return make_report(equipment, "learned", None, Talk(Traffic()), watch)
    except Stopped:
        say(STOPPED)
        return None
    finally:
        equipment.state.close()
