"""The events of Nexmark: their proportions, that any can be made alone, and that what they name
exists or soon will.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.nexmark.events import (
    ACTIVE_PEOPLE,
    AUCTIONS_IN_FLIGHT,
    HOT_GROUP,
    LEAD,
    Auction,
    Bid,
    Nexmark,
    Person,
)

COUNT = 5_000


def test_fifty_events_are_one_person_three_auctions_and_bids() -> None:
    nexmark = Nexmark()
    assert Counter(type(nexmark(index)) for index in range(COUNT)) == {
        Person: COUNT // 50,
        Auction: COUNT // 50 * 3,
        Bid: COUNT // 50 * 46,
    }


def test_an_event_follows_from_seed_and_index_alone() -> None:
    assert [Nexmark()(index) for index in (4321, 50, 1, 7)] == list(
        map(Nexmark(), (4321, 50, 1, 7))
    )
    assert Nexmark(seed=8)(4321) != Nexmark(seed=7)(4321)


def test_ids_go_up_by_one() -> None:
    events = list(map(Nexmark(), range(COUNT)))
    for kind in (Person, Auction):
        ids = [event.id for event in events if isinstance(event, kind)]
        assert ids == list(range(1000, 1000 + len(ids)))


def test_named_people_and_auctions_exist_or_are_about_to() -> None:
    people = auctions = 0
    for event in map(Nexmark(), range(COUNT)):
        match event:
            case Person():
                people += 1
            case Auction():
                auctions += 1
                assert max(people - ACTIVE_PEOPLE, 0) <= event.seller - 1000 < people + LEAD
                assert event.date_time < event.expires
            case Bid():
                assert 0 <= event.bidder - 1000 < people + LEAD
                assert (
                    auctions - 1 - max(AUCTIONS_IN_FLIGHT, HOT_GROUP)
                    <= event.auction - 1000
                    < auctions + LEAD
                )


def test_half_of_the_bids_are_for_a_hot_auction_and_three_quarters_of_a_hot_bidder() -> None:
    bids = [event for event in map(Nexmark(), range(COUNT)) if isinstance(event, Bid)]
    assert 0.45 < sum((bid.auction - 1000) % HOT_GROUP == 0 for bid in bids) / len(bids) < 0.55
    assert 0.70 < sum((bid.bidder - 1001) % HOT_GROUP == 0 for bid in bids) / len(bids) < 0.82


def test_times_are_out_of_order_by_less_than_the_delay_and_each_time_is_there() -> None:
    nexmark = Nexmark(rate=1000, group=30)
    times = [nexmark(index).date_time - nexmark.start_ms for index in range(300)]
    assert sorted(times) == list(range(300))
    assert times != sorted(times)
    newest = 0
    for time in times:
        assert time > newest - nexmark.delay_ms
        newest = max(newest, time)
