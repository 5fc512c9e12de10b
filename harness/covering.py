"""Covering sets: few rows that hold every valid combination of levels of any two, or any three, factors.

The valid rows are held as a union of products: for each way to set the few factors that exclude most, what every other
factor may still be. So whether some levels can go together is known exactly and at once, and nothing dead-ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from harness.space import ANYTHING, CLASHES, FACTORS, RAISING, Box, Clash, everything

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = npt.NDArray[np.int32]

LEVELS: tuple[tuple[str, str], ...] = tuple(
    (name, level) for name, factor in FACTORS.items() for level in factor.levels
)
"""Every level of every factor, in order; its place here is its number."""

_NUMBER: dict[tuple[str, str], int] = {level: number for number, level in enumerate(LEVELS)}
STRENGTHS = (2, 3)
EVERYTHING: tuple[Box, ...] = (ANYTHING,)


def level_number(factor: str, level: str) -> int:
    """Return the number of a factor's level."""
    return _NUMBER[factor, level]


def numbers(name: str) -> slice:
    """Return the numbers of all of a factor's levels."""
    first = level_number(name, FACTORS[name].levels[0])
    return slice(first, first + len(FACTORS[name].levels))


_FACTOR_OF = np.array([list(FACTORS).index(name) for name, _ in LEVELS])


@dataclass(frozen=True, eq=False)
class Space:
    """All valid rows of a union of boxes.

    ``allowed`` [products, levels]: a row is valid just where some product allows each of its levels.
    """

    allowed: Bools

    @cached_property
    def _by_level(self) -> npt.NDArray[np.uint8]:
        """Which products allow a level, a bit each: [levels, products / 8]."""
        return np.packbits(self.allowed.T, axis=1)

    def start(self) -> npt.NDArray[np.uint8]:
        """Return the set of all products, of which choosing a level leaves some; see ``choose``."""
        return np.asarray(np.bitwise_or.reduce(self._by_level, axis=0))

    def choose(self, products: npt.NDArray[np.uint8], level: int) -> npt.NDArray[np.uint8]:
        """Return the products of these that allow a level too."""
        return np.asarray(products & self._by_level[level])

    def open(self, products: npt.NDArray[np.uint8]) -> Bools:
        """Return the levels that some of these products allow: each can be chosen next."""
        return np.asarray((self._by_level & products).any(axis=1))

    def holds(self, rows: Ints) -> Bools:
        """Return which rows [n, factors] of level numbers are valid."""
        return np.array([self.allowed[:, row].all(axis=1).any() for row in rows], dtype=bool)

    def valid(self, strength: int) -> Bools:
        """Return which combinations of levels are part of a valid row: [levels, levels(, levels)], symmetric."""
        allowed = np.unique(self.allowed, axis=0).astype(np.float32)
        other = _FACTOR_OF[:, None] != _FACTOR_OF
        pairs: Bools = (allowed.T @ allowed > 0) & other
        if strength == 2:
            return pairs
        found = np.zeros((len(LEVELS),) * 3, dtype=bool)
        for level in np.flatnonzero(allowed.any(axis=0)):
            beside = np.unique(allowed[allowed[:, level] > 0][:, level:], axis=0)
            found[level, level:, level:] = beside.T @ beside > 0
        found &= other & other[:, :, None] & other[:, None, :]
        for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
            found |= found.transpose(order)
        return found


def space(boxes: Sequence[Box] = EVERYTHING, clashes: Sequence[Clash] = CLASHES) -> Space:
    """Return the valid rows that lie in any of the boxes."""
    parts = [_products(box, clashes) for box in boxes]
    return Space(np.unique(np.concatenate(parts or [np.zeros((0, len(LEVELS)), dtype=bool)]), axis=0))


def _products(box: Box, clashes: Sequence[Clash]) -> Bools:
    """Return the valid rows of a box as products: [products, levels].

    Factors are set until no clash has two left open: ``_hubs``. Levels that every clash treats alike are set together.
    """
    domains = everything(box)
    for clash in clashes:
        if len(clash.factors) == 1:
            (name,) = clash.factors
            domains[name] = tuple(level for level in domains[name] if not clash.excludes(level))
    clashes = [clash for clash in clashes if len(clash.factors) > 1]
    tables = [
        np.array(
            [clash.excludes(*levels) for levels in itertools.product(*(domains[name] for name in clash.factors))],
            dtype=bool,
        ).reshape([len(domains[name]) for name in clash.factors])
        for clash in clashes
    ]
    hubs = _hubs([clash.factors for clash in clashes], domains)
    classes = {name: _alike(name, domains[name], clashes, tables) for name in domains}
    chosen: dict[str, Ints] = {}  # per hub, the class of each product so far, by the place of its first level
    size = 1
    for hub in hubs:
        firsts = np.array([places[0] for places in classes[hub]], dtype=np.int64)
        chosen = {name: np.repeat(values, len(firsts)) for name, values in chosen.items()}
        chosen[hub] = np.tile(firsts, size)
        kept = np.ones(size * len(firsts), dtype=bool)
        for clash, table in zip(clashes, tables, strict=True):
            if hub in clash.factors and set(clash.factors) <= set(chosen):
                kept &= ~table[tuple(chosen[name] for name in clash.factors)]
        chosen = {name: values[kept] for name, values in chosen.items()}
        size = int(kept.sum())
    allowed = np.zeros((size, len(LEVELS)), dtype=bool)
    for name, levels in domains.items():
        for places in classes[name]:
            alike = [level_number(name, levels[place]) for place in places]
            fits = chosen[name] == places[0] if name in hubs else np.ones(size, dtype=bool)
            for clash, table in zip(clashes, tables, strict=True):
                if name in clash.factors and name not in hubs:
                    at = tuple(places[0] if other == name else chosen[other] for other in clash.factors)
                    fits = fits & ~table[at]
            allowed[:, alike] = fits[:, None]
    some = np.logical_and.reduce([allowed[:, numbers(name)].any(axis=1) for name in domains])
    return np.asarray(allowed[some])


def _hubs(clashes: Iterable[tuple[str, ...]], domains: dict[str, tuple[str, ...]]) -> list[str]:
    """Return factors such that no clash has two others: those of most clashes first."""
    hubs: list[str] = []
    left = [set(factors) for factors in clashes]
    while left := [factors for factors in left if len(factors - set(hubs)) > 1]:
        open_ = {name: sum(name in factors for factors in left) for name in domains if name not in hubs}
        hubs.append(max(open_, key=lambda name: open_[name]))
    return hubs


def _alike(name: str, levels: Sequence[str], clashes: Sequence[Clash], tables: Sequence[Bools]) -> list[list[int]]:
    """Return the places of a factor's levels, those together that every clash treats alike."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for place in range(len(levels)):
        treated = tuple(
            table.take(place, axis=clash.factors.index(name)).tobytes()
            for clash, table in zip(clashes, tables, strict=True)
            if name in clash.factors
        )
        groups.setdefault(treated, []).append(place)
    return list(groups.values())


# ------------------------------------------------------------------ the covering set


def covering_set(strength: int, boxes: Sequence[Box] = EVERYTHING, seed: int = 0) -> list[dict[str, str]]:
    """Return rows of the boxes that hold every valid combination of levels of ``strength`` factors, the fullest first.

    The same arguments give the same rows. What can be had without levels that are known to raise comes first, without.
    """
    within = space(boxes)
    wanted = within.valid(strength)
    rows = list(cover(space(boxes, (*CLASHES, *RAISING)), wanted, seed))
    rows += cover(within, wanted & ~held(rows, strength), seed)
    return [named(row) for row in rows]


def held(rows: Sequence[Sequence[int] | Ints], strength: int) -> Bools:
    """Return which combinations of levels some of the rows hold, given by level numbers: as ``Space.valid``."""
    return Space(one_hot(rows)).valid(strength)


def one_hot(rows: Sequence[Sequence[int] | Ints]) -> Bools:
    """Return rows of level numbers, each as a row with a place for every level."""
    found = np.zeros((len(rows), len(LEVELS)), dtype=bool)
    for index, levels in enumerate(rows):
        found[index, list(levels)] = True
    return found


def named(row: Ints) -> dict[str, str]:
    """Return a row of level numbers by the names of its factors and levels."""
    return dict(LEVELS[level] for level in sorted(row))


def cover(within: Space, wanted: Bools, seed: int = 0, tries: int = 1) -> Generator[Ints, bool | None, None]:
    """Yield valid rows, as level numbers, until they hold every wanted combination: [levels, levels(, levels)].

    ``wanted`` is symmetric, and what of it no valid row holds is left out. Send False after a row that came to nothing:
    its combinations then stay open until they were in so many rows, those tried less often first.
    """
    draw = np.random.default_rng(seed)
    left = (wanted & within.valid(wanted.ndim)).astype(np.int32) << (tries - 1)
    beside = left.sum(axis=2) if left.ndim == 3 else left  # how much two levels share of what is open
    while beside.any():
        row = _grow(within, left, beside, draw.random(len(LEVELS)))
        settled = (yield row) is not False
        held, pairs = np.ix_(*[row] * left.ndim), np.ix_(row, row)
        then = np.zeros_like(left[held]) if settled else left[held] >> 1
        if left.ndim == 3:
            beside[pairs] -= (left[held] - then).sum(axis=2, dtype=np.int32)
        left[held] = then


def _grow(within: Space, left: Counts, beside: Counts, tie: npt.NDArray[np.float64]) -> Ints:
    """Return a valid row that holds an open combination and, as far as a greedy choice finds them, many more.

    The next level is the one that completes most open combinations with those chosen; while none completes any, the
    one that shares most with them.
    """
    products, free = within.start(), np.ones(len(LEVELS), dtype=bool)
    completes = shares = np.zeros(len(LEVELS), dtype=np.int64)
    row: list[int] = []
    while len(row) < len(FACTORS):
        possible = free & within.open(products)
        score = next((score for score in (completes, shares) if score[possible].any()), None)
        score = score if score is not None else beside.sum(axis=0) if not row else completes
        level = int(np.where(possible, score + tie, -1.0).argmax())
        completes = completes + (left[level] if left.ndim == 2 else left[level, row].sum(axis=0))
        shares = shares + beside[level]
        row.append(level)
        products = within.choose(products, level)
        free[numbers(LEVELS[level][0])] = False
    return np.array(row)
