"""Batches in order: gaps, replays, and engines that restart."""

from moonpool.interop.kv_events.events import EventBatch
from moonpool.interop.kv_events.feed import (
    MAX_HELD,
    ApplyBatch,
    AskReplay,
    BatchArrived,
    BatchReplayed,
    EventFeed,
    FeedAction,
    ForgetBlocks,
    Interrupted,
    ReplayEnded,
)


def batch(time: float) -> EventBatch:
    return EventBatch(time, ())


def apply(*times: float) -> list[FeedAction]:
    return [ApplyBatch(batch(time)) for time in times]


def arrive(feed: EventFeed, number: int, time: float) -> list[FeedAction]:
    return feed.handle(BatchArrived(number, batch(time)))


def replay(feed: EventFeed, number: int, *batches: tuple[int, float]) -> list[FeedAction]:
    """Answers a replay whole."""
    found = [order for at, time in batches for order in feed.handle(BatchReplayed(number, at, batch(time)))]
    return [*found, *feed.handle(ReplayEnded(number, complete=True))]


def following(*times: float) -> EventFeed:
    """A feed that has applied batches with these times, numbered from 0."""
    feed = EventFeed()
    assert feed.start() == [AskReplay(1, 0)]
    assert replay(feed, 1, *enumerate(times)) == apply(*times)
    assert feed.settled
    return feed


def test_what_an_engine_has_kept_comes_first() -> None:
    feed = EventFeed()
    feed.start()
    assert arrive(feed, 2, 2.0) == []  # waits for the replay
    assert replay(feed, 1, (0, 0.0), (1, 1.0), (2, 2.0)) == apply(0.0, 1.0, 2.0)
    assert arrive(feed, 3, 3.0) == apply(3.0)
    assert (feed.gaps, feed.lost) == (0, 0)


def test_a_gap_is_filled_by_a_replay_from_the_last_batch() -> None:
    feed = following(0.0, 1.0)
    assert arrive(feed, 4, 4.0) == [AskReplay(2, 1)]
    assert not feed.settled
    assert arrive(feed, 5, 5.0) == []
    assert replay(feed, 2, (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)) == apply(2.0, 3.0, 4.0, 5.0)
    assert (feed.gaps, feed.lost) == (1, 0)


def test_what_was_lost_for_good_is_learnt_anew() -> None:
    feed = following(0.0, 1.0)
    arrive(feed, 9, 9.0)
    assert replay(feed, 2, (7, 7.0), (8, 8.0), (9, 9.0)) == [ForgetBlocks(restarted=False), *apply(7.0, 8.0, 9.0)]
    assert feed.lost == 1


def test_an_engine_without_replay_is_followed_from_the_next_batch_on() -> None:
    feed = EventFeed()
    feed.start()
    arrive(feed, 6, 6.0)
    assert feed.handle(ReplayEnded(1, complete=False)) == [ForgetBlocks(restarted=False), *apply(6.0)]
    assert arrive(feed, 7, 7.0) == apply(7.0)


def test_numbers_that_begin_again_are_another_engines() -> None:
    feed = following(0.0, 1.0, 2.0)
    assert arrive(feed, 0, 9.0) == [ForgetBlocks(restarted=True), AskReplay(2, 0)]
    assert replay(feed, 2, (0, 9.0)) == apply(9.0)


def test_an_old_batch_that_comes_again_is_no_restart() -> None:
    feed = following(0.0, 1.0, 2.0)
    assert arrive(feed, 1, 1.0) == []
    assert arrive(feed, 3, 3.0) == apply(3.0)


def test_another_engine_with_more_batches_is_seen_by_its_times() -> None:
    feed = following(0.0, 1.0, 2.0)
    assert feed.handle(Interrupted()) == [AskReplay(2, 2)]
    orders = feed.handle(BatchReplayed(2, 2, batch(8.0)))
    assert orders == [ForgetBlocks(restarted=True), AskReplay(3, 0)]
    assert feed.handle(BatchReplayed(2, 3, batch(9.0))) == []  # the rest of the replay that is no longer wanted
    assert replay(feed, 3, (0, 6.0), (1, 7.0), (2, 8.0), (3, 9.0)) == apply(6.0, 7.0, 8.0, 9.0)


def test_another_engine_with_fewer_batches_does_not_know_the_last_one() -> None:
    feed = following(0.0, 1.0, 2.0)
    feed.handle(Interrupted())
    assert feed.handle(ReplayEnded(2, complete=True)) == [ForgetBlocks(restarted=True), AskReplay(3, 0)]
    assert replay(feed, 3, (0, 7.0)) == apply(7.0)


def test_the_first_batches_of_a_new_engine_are_missed_like_others() -> None:
    feed = EventFeed()
    feed.start()
    feed.handle(ReplayEnded(1, complete=True))  # it has published nothing
    assert arrive(feed, 2, 2.0) == [AskReplay(2, 0)]
    assert replay(feed, 2, (0, 0.0), (1, 1.0), (2, 2.0)) == apply(0.0, 1.0, 2.0)


def test_a_connection_that_was_lost_for_a_moment_changes_nothing() -> None:
    feed = following(0.0, 1.0)
    feed.handle(Interrupted())
    assert replay(feed, 2, (1, 1.0)) == []
    assert arrive(feed, 2, 2.0) == apply(2.0)


def test_after_a_batch_that_cannot_be_read_all_is_learnt_anew() -> None:
    feed = following(0.0)
    assert feed.handle(BatchArrived(1, None)) == [ForgetBlocks(restarted=False)]
    assert arrive(feed, 2, 2.0) == apply(2.0)
    assert feed.lost == 1


def test_batches_that_wait_are_bounded() -> None:
    feed = following(0.0)
    arrive(feed, 2, 2.0)
    for number in range(3, MAX_HELD + 100):
        arrive(feed, number, float(number))
    assert replay(feed, 2, (0, 0.0), (1, 1.0), (2, 2.0))[:2] == apply(1.0, 2.0)
    assert not feed.settled  # the oldest of those that waited are asked for again
