"""Canaries first: whose turn it is, whatever the order in which devices come and answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from server_runtime.rollout import Offered, Rollout, choose_devices

NAMES = ("a", "b", "c", "d", "e")
OFFERED = Offered("ab" * 32, "front", 2, 1000, "/front", NAMES, 2, "first")


def test_the_others_come_after_every_canary_is_content() -> None:
    rollout = Rollout(OFFERED)
    assert [rollout.offer(name) for name in ("c", "a", "b")] == [True, True, False]
    assert rollout.offer("c")  # it comes again before it has answered
    assert rollout.waits("b") and rollout.of("b") == "waits"
    rollout.take("c", "ok", "")
    assert rollout.phase == "canary" and not rollout.offer("b")  # the other canary is silent: it may be stopped by it
    rollout.take("a", "ok", "")
    assert rollout.phase == "rest" and all(rollout.offer(name) for name in ("b", "d"))
    rollout.take("b", "rolled-back", "slower")  # that is between it and its own trial
    assert rollout.phase == "rest" and rollout.offer("e")
    for name in ("d", "e"):
        rollout.take(name, "ok", "")
    assert rollout.phase == "complete"
    assert rollout.counts() == {"ok": 4, "rolled-back": 1}
    assert rollout.of("b") == "rolled-back: slower"


@pytest.mark.parametrize(("word", "reason"), [("rolled-back", "parity"), ("refused", "signature")])
def test_one_canary_that_does_not_take_it_stops_the_update(word: str, reason: str) -> None:
    rollout = Rollout(OFFERED)
    assert rollout.offer("a") and rollout.offer("b")
    rollout.take("a", word, reason)
    assert rollout.phase == "stopped" and rollout.of("c") == "left out"
    assert not rollout.offer("c") and not rollout.waits("c")
    rollout.take("b", "ok", "")
    assert rollout.phase == "stopped" and not rollout.offer("d")
    rollout.take("a", "ok", "")  # a verdict is given once
    assert rollout.phase == "stopped"


def test_a_canary_that_could_not_try_makes_room() -> None:
    rollout = Rollout(replace(OFFERED, canary=1))
    assert rollout.offer("a") and not rollout.offer("b")
    rollout.take("a", "not-tried", "device")
    assert rollout.phase == "canary" and rollout.offer("b")
    assert not rollout.offer("a")  # until the operator offers it again
    again = rollout.again()
    assert again.offer("a") and not again.offer("b")


def test_offered_again_asks_all_but_those_that_have_it() -> None:
    rollout = Rollout(OFFERED)
    for name, word in (("a", "ok"), ("b", "rolled-back")):
        assert rollout.offer(name)
        rollout.take(name, word, "" if word == "ok" else "slower")
    again = rollout.again()
    assert again.phase == "canary" and not again.offer("a") and again.offer("b") and not again.offer("c")


def test_without_canaries_and_with_more_than_there_are() -> None:
    assert all(Rollout(replace(OFFERED, canary=0)).offer(name) for name in NAMES)
    many = Rollout(replace(OFFERED, canary=9))
    assert all(many.offer(name) for name in NAMES) and many.phase == "canary"
    for name in NAMES:
        many.take(name, "ok", "")
    assert many.phase == "complete"
    assert not many.offer("a stranger") and many.of("a stranger") is None
    many.take("a stranger", "rolled-back", "slower")
    assert many.phase == "complete"


def test_in_any_order_nobody_gets_what_a_canary_refused() -> None:
    rng = random.Random(0)
    for _ in range(300):
        canary = rng.randint(0, 4)
        rollout, bad = Rollout(replace(OFFERED, canary=canary)), rng.random() < 0.5
        offered: set[str] = set()
        for _ in range(40):
            name = rng.choice(NAMES)
            if rollout.offer(name):
                offered.add(name)
            if name in offered and rng.random() < 0.5:
                rollout.take(name, "rolled-back" if bad else "ok", "parity" if bad else "")
        if bad and canary:
            assert len(offered) <= canary
        elif not bad:
            for name in NAMES * 2:
                if rollout.offer(name):
                    rollout.take(name, "ok", "")
            assert rollout.phase == "complete" and rollout.counts() == {"ok": len(NAMES)}


def test_an_update_is_for_all_for_a_site_or_for_those_named() -> None:
    devices = {"a": "clinic", "b": "farm", "c": "clinic"}
    assert choose_devices(devices, None, None) == (("a", "b", "c"), ())
    assert choose_devices(devices, None, "clinic") == (("a", "c"), ())
    assert choose_devices(devices, ["c", "x"], None) == (("c",), ("x",))
