"""What a client has in hand, without a network or a model."""

from __future__ import annotations

from offbeat.live.hand import Hand, Work
from offbeat.live.wire import Drop, Void
from offbeat.records import Begun


def at_work(holds: bool, version: int = 3) -> tuple[Hand, Begun]:
    hand = Hand(holds, overlaps=False)
    hand.inbox = Work(version, 0, bytearray(), 0.0)
    begun, _ = hand.begin(client=5, number=hand.number, steps=2, epoch=1)
    return hand, begun


def test_an_update_is_in_hand_until_it_is_answered() -> None:
    hand, begun = at_work(holds=False)
    assert hand.held() == [[0, 3, 2, 0, False]]
    finished, replaced = hand.finish((begun, b"update"))
    assert (finished, replaced) == ((begun, b"update"), None)
    hand.sent((begun, b"update"))
    hand.inbox = Work(4, 0, bytearray(), 0.0)
    assert not hand.ready()  # one after the other
    assert hand.held() == [[0, 3, 2, 0, True]]
    assert hand.accepted(0)
    assert not hand.accepted(0)
    assert hand.ready()
    assert (hand.held(), hand.delivered) == ([], 3)


def test_a_send_buffer_waits_until_it_is_asked_for() -> None:
    hand, first = at_work(holds=True)
    assert hand.finish((first, b"first")) == (None, None)
    hand.inbox = Work(4, 0, bytearray(), 0.0)
    second, _ = hand.begin(5, hand.number, 2, 1)
    assert hand.fetch() is None  # not while another one is made, which would overwrite it
    assert hand.finish((second, b"second")) == ((second, b"second"), first)
    hand.sent((second, b"second"))
    assert hand.fetch() is None  # the answer is on its way


def test_what_does_not_count_is_given_up() -> None:
    hand, _ = at_work(holds=False)
    assert not hand.void(Void(0, 9, -1, 0, 0))  # of another version
    assert hand.void(Void(0, 3, -1, 0, 0))
    assert (hand.current, hand.number, hand.seen) == (None, 0, -1)
    hand, begun = at_work(holds=True)
    hand.finish((begun, b"update"))
    hand.drop(Drop(-1, 4, 0))
    assert (hand.held(), hand.number) == ([], 4)


def test_the_next_job_begins_behind_the_finished_ones() -> None:
    hand, first = at_work(holds=True)
    assert hand.void(Void(0, 3, -1, 0, 0))  # lost while it was computed: its rows are read again
    hand.inbox = Work(3, 0, bytearray(), 0.0)
    first, _ = hand.begin(5, hand.number, 2, 1)
    assert first == Begun(5, 0, 3, 2, 0)
    hand.finish((first, b"first"))
    hand.inbox = Work(4, 7, bytearray(), 0.0)
    second, _ = hand.begin(5, hand.number, 2, 1)
    assert second == Begun(5, 1, 4, 7, 2)
    hand.finish((second, b"second"))  # overwrites the first, whose rows were read
    assert (hand.number, hand.steps_before) == (2, 9)
    hand.sent((second, b"second"))
    assert not hand.void(Void(0, 3, 0, 1, 2))  # a job of before: what is in hand stays
    hand.inbox = Work(5, 0, bytearray(), 0.0)
    third, _ = hand.begin(5, hand.number, 2, 1)
    assert hand.void(Void(2, 5, 1, 2, 9))  # the second is in hand, and counts
    assert (third.steps_before, hand.number, hand.steps_before) == (9, 2, 9)
    hand.drop(Drop(0, 3, 2))  # the server has the first as finished, and the second as lost
    assert (hand.number, hand.steps_before) == (3, 2)
