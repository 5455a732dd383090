"""The events of Nexmark: people who sell and bid, their auctions, and the bids. Each follows from
the seed and its index alone.

Of fifty events one is a person, three are auctions and the rest are bids. So any index can be made
without those before it, a source that is restarted goes on where it was, and DuckDB is given the
very same events. The proportions, the hot sellers, auctions, bidders and channels, and the ids that
run ahead of what there is yet are those of the published generator; the random numbers are our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Auction", "Bid", "Chance", "Event", "Nexmark", "Person"]

PEOPLE, AUCTIONS, BIDS = 1, 3, 46
EPOCH = PEOPLE + AUCTIONS + BIDS

FIRST_ID = 1000
FIRST_CATEGORY = 10
CATEGORIES = 5

HOT_SELLERS, HOT_AUCTIONS, HOT_BIDDERS, HOT_CHANNELS = 4, 2, 4, 2
"""One event in `HOT_SELLERS`, `HOT_AUCTIONS`, ... is not for a hot seller, auction, ...."""
HOT_GROUP = 100
"""Ids come in groups of this size. The first person or auction of a group is hot as a seller or
auction, the second person as a bidder, so that no hot seller is a hot bidder.
"""
LEAD = 10
"""Ids that far ahead are used before their person or auction exists."""
ACTIVE_PEOPLE = 1000
AUCTIONS_IN_FLIGHT = 100

CHANNELS = 10_000
HOT_CHANNEL_NAMES = ("Google", "Facebook", "Baidu", "Apple")
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
FIRST_NAMES = (
    "Peter",
    "Paul",
    "Luke",
    "John",
    "Saul",
    "Vicky",
    "Kate",
    "Julie",
    "Sarah",
    "Deiter",
    "Walter",
)
LAST_NAMES = (
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
)

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
TEXT_LENGTH = 4096
MASK = (1 << 64) - 1


class Person(NamedTuple):
    """A person who may sell and bid."""

    id: int
    name: str
    email: str
    credit_card: str
    city: str
    state: str
    date_time: int  # ms
    extra: str


class Auction(NamedTuple):
    """Something for sale until `expires`."""

    id: int
    item: str
    description: str
    initial_bid: int
    reserve: int
    date_time: int  # ms
    expires: int  # ms
    seller: int
    category: int
    extra: str


class Bid(NamedTuple):
    """An offer, in cents."""

    auction: int
    bidder: int
    price: int
    channel: str
    url: str
    date_time: int  # ms
    extra: str


Event = Person | Auction | Bid


class Chance:
    """Random numbers that follow from a seed and an index (splitmix64: Steele, Lea and Flood,
    2014). Cheap to create again.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, index: int) -> None:
        self._state = (seed * 0xD1342543DE82EF95 + index * 0xDA942042E4DD58B5) & MASK

    def below(self, n: int) -> int:
        """0 to n - 1."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) * n) >> 64


@dataclass(frozen=True)
class Nexmark:
    """Makes event `index` when called with it: `af.io.datagen(Nexmark(), count=n)`.

    `rate` events make a second of event time. Within groups of `group` events times are out of
    order, by less than `delay_ms`.
    """

    seed: int = 7
    rate: float = 10_000.0
    group: int = 1
    start_ms: int = 1_436_918_400_000  # 2015-07-15T00:00:00Z

    @property
    def delay_ms(self) -> int:
        """How much older an event may be than one before it."""
        return int(self.group * 1000 / self.rate) + 1

    def time_ms(self, index: int) -> int:
        """Event time of the event `index`."""
        base = index // self.group * self.group
        return self.start_ms + int((base + index * 953 % self.group) * 1000 / self.rate)

    def __call__(self, index: int) -> Event:
        chance = Chance(self.seed, index)
        offset = index % EPOCH
        if offset < PEOPLE:
            return self._person(index, chance)
        if offset < PEOPLE + AUCTIONS:
            return self._auction(index, chance)
        return self._bid(index, chance)

    def _person(self, index: int, chance: Chance) -> Person:
        name = (
            f"{FIRST_NAMES[chance.below(len(FIRST_NAMES))]} "
            f"{LAST_NAMES[chance.below(len(LAST_NAMES))]}"
        )
        email = f"{self._text(chance, 7)}@{self._text(chance, 5)}.com"
        card = " ".join(f"{chance.below(10_000):04}" for _ in range(4))
        city, state = CITIES[chance.below(len(CITIES))], STATES[chance.below(len(STATES))]
        return Person(
            FIRST_ID + _last_person(index),
            name,
            email,
            card,
            city,
            state,
            self.time_ms(index),
            self._extra(chance, 130),
        )

    def _auction(self, index: int, chance: Chance) -> Auction:
        at = self.time_ms(index)
        last = _last_person(index)
        seller = (
            last // HOT_GROUP * HOT_GROUP
            if chance.below(HOT_SELLERS)
            else _some_person(last, chance)
        )
        category = FIRST_CATEGORY + chance.below(CATEGORIES)
        initial = _price(chance)
        reserve = initial + _price(chance)
        # Duration after which the hundredth auction from now begins halfway, on average.
        ahead_ms = int(AUCTIONS_IN_FLIGHT * EPOCH // AUCTIONS * 1000 / self.rate)
        expires = at + 1 + chance.below(max(2 * ahead_ms, 1))
        item, description = self._text(chance, 20), self._text(chance, 100)
        id = FIRST_ID + _last_auction(index)
        return Auction(
            id,
            item,
            description,
            initial,
            reserve,
            at,
            expires,
            FIRST_ID + seller,
            category,
            self._extra(chance, 330),
        )

    def _bid(self, index: int, chance: Chance) -> Bid:
        last = _last_auction(index)
        if chance.below(HOT_AUCTIONS):
            auction = last // HOT_GROUP * HOT_GROUP
        else:
            first = max(last - AUCTIONS_IN_FLIGHT, 0)
            auction = first + chance.below(last - first + 1 + LEAD)
        last = _last_person(index)
        bidder = (
            last // HOT_GROUP * HOT_GROUP + 1
            if chance.below(HOT_BIDDERS)
            else _some_person(last, chance)
        )
        price = _price(chance)
        channel, url = (
            self._hot_channels[chance.below(4)]
            if chance.below(HOT_CHANNELS)
            else self._channel(chance.below(CHANNELS))
        )
        return Bid(
            FIRST_ID + auction,
            FIRST_ID + bidder,
            price,
            channel,
            url,
            self.time_ms(index),
            self._extra(chance, 68),
        )

    @cached_property
    def _letters(self) -> str:
        """Text of which a string is a piece: drawing each letter by itself would be most of the
        generator's time.
        """
        chance = Chance(self.seed, -1)
        return "".join(LETTERS[chance.below(len(LETTERS))] for _ in range(TEXT_LENGTH))

    @cached_property
    def _hot_channels(self) -> list[tuple[str, str]]:
        return [
            (name, self._url(Chance(self.seed, -2 - number)))
            for number, name in enumerate(HOT_CHANNEL_NAMES)
        ]

    def _channel(self, number: int) -> tuple[str, str]:
        """Nine in ten name themselves in their address."""
        chance = Chance(self.seed, -10 - number)
        url = self._url(chance)
        return (
            f"channel-{number}",
            f"{url}&channel_id={number * 214_013 % 2_147_483_648}" if chance.below(10) else url,
        )

    def _url(self, chance: Chance) -> str:
        first, second, third = (self._text(chance, 5).replace("_", "x") for _ in range(3))
        return f"https://www.nexmark.com/{first}/{second}/{third}/item.htm?query=1"

    def _text(self, chance: Chance, length: int) -> str:
        begin = chance.below(TEXT_LENGTH - length)
        return self._letters[begin : begin + length]

    def _extra(self, chance: Chance, length: int) -> str:
        """About `length` letters, a fifth more or less."""
        return self._text(chance, length * 4 // 5 + chance.below(length * 2 // 5))


def _last_person(index: int) -> int:
    """Number of the newest person when event `index` comes, itself included. From 0."""
    return index // EPOCH * PEOPLE + min(index % EPOCH, PEOPLE - 1)


def _last_auction(index: int) -> int:
    """Number of the newest auction when event `index` comes, itself included.

    From 0; -1 before the first.
    """
    epoch, offset = divmod(index, EPOCH)
    return epoch * AUCTIONS + min(offset - PEOPLE, AUCTIONS - 1)


def _some_person(last: int, chance: Chance) -> int:
    people = last + 1
    active = min(people, ACTIVE_PEOPLE)
    return people - active + chance.below(active + LEAD)


def _price(chance: Chance) -> int:
    """Cents, from 100 to 100 million, as many of each power of ten."""
    return round(math.pow(10.0, chance.below(1 << 53) / (1 << 53) * 6.0) * 100.0)
