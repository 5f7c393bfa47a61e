"""Frames between the two processes come through whole, in pieces of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import LocalProtocolError, RemoteProtocolError
from contract.messages import Ask, Gradient
from server_runtime import pipe
from server_runtime.pipe import PipeFrame, PipeLimits, Unpacker, carried, carry, pack

FRAMES = [
    PipeFrame(pipe.READY),
    PipeFrame(pipe.STATUS, "clinic", text="training, epoch 3 of 9 — ü", values={"busy": True, "step": 3, "x": None}),
    PipeFrame(pipe.MESSAGE, "clinic", "pi", message=bytes(range(256)) * 20),
]


@given(st.lists(st.integers(0, 6000), max_size=8))
def test_frames_come_through_in_any_pieces(cuts: list[int]) -> None:
    data = b"".join(map(pack, FRAMES))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    unpacker = Unpacker()
    found = [frame for a, b in zip(edges, edges[1:], strict=False) for frame in unpacker.feed(data[a:b])]
    assert found == FRAMES


def test_messages_are_carried_as_codec_bytes() -> None:
    tensors = {"features": np.ones((2, 3), np.float32), "sample_ids": np.zeros((2, 16), np.uint8)}
    ask = Ask("a", "head_step", {"step": 1, "after": 0, "base": 0}, 5.0, tensors)
    again = carried(carry("clinic", "pi", ask))
    assert isinstance(again, Ask)
    assert np.array_equal(again.tensors["features"], ask.tensors["features"])


def test_arrays_of_wider_items_come_through_uncopied() -> None:
    values = np.arange(60_000, dtype=np.float32)
    tensors = {"features": values.reshape(200, 300), "sample_ids": np.zeros((200, 16), np.uint8)}
    frame = carry("clinic", "pi", Ask("a", "head_step", {"step": 1, "after": 0, "base": 0}, 5.0, tensors))
    pieces = pipe.parts(frame)
    assert any(
        isinstance(piece, memoryview) and np.shares_memory(np.frombuffer(piece, np.uint8), values) for piece in pieces
    )
    assert all(memoryview(piece).itemsize == 1 and memoryview(piece).ndim == 1 for piece in pieces)  # to be sliced
    (come,) = Unpacker().feed(b"".join(pieces))
    again = carried(come)
    assert isinstance(again, Ask) and np.array_equal(again.tensors["features"], tensors["features"])


def test_a_message_larger_than_a_wire_frame_is_carried() -> None:
    large = Gradient("a", 0.5, 1, 4, np.ones((4, 200_000), np.float32))
    again = carried(carry("clinic", "pi", large))
    assert isinstance(again, Gradient)
    assert again.gradient.shape == (4, 200_000)


def test_a_length_over_the_limit_is_refused_before_it_is_buffered() -> None:
    limits = PipeLimits(header_bytes=100, message_bytes=100)
    with pytest.raises(LocalProtocolError, match="limit"):
        list(Unpacker(limits).feed(pack(FRAMES[2])[:8]))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        carried(PipeFrame(pipe.MESSAGE, "clinic", "pi", message=b"\x80\x04N."))
