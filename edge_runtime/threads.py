"""Threads for the worker's part: named, and unable to keep the program from ending.

What they compute, and how they are told to stop, is left to `equip` and `delivery`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

NAME = "edge-worker"

Result = TypeVar("Result")


def start_worker(function: Callable[[], None]) -> None:
    """Run `function` beside everything else; the end of the program does not wait for it."""
    threading.Thread(target=function, name=NAME, daemon=True).start()


def workers_left() -> bool:
    """Is a worker still at it, such as one deep in native code that did not notice a stop?"""
    return any(thread.name == NAME for thread in threading.enumerate())


def in_worker(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """The result of `function`, run in a worker, for the running event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not future.done():  # a cancelled wait has no use for the result
            act()

    def work() -> None:
        try:
            result = function()
        except Exception as error:
            raised = error
            loop.call_soon_threadsafe(settle, lambda: future.set_exception(raised))
        else:
            loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

    start_worker(work)
    return future
