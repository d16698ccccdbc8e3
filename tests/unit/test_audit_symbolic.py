"""Identities that the audit applies before hashing: those that hold, and neighbours of theirs that do not."""

from __future__ import annotations

import numpy as np

from te_overrides.audit.symbolic import Node, element_hashes, lane_mix, make

LANES = 64


def value(name: str) -> Node:
    """An unknown float32 in each of 64 lanes."""
    hashes = element_hashes(name, LANES)[:, None, :]
    return Node("loaded", (), 32, hashes, np.zeros((1, LANES), np.bool_), frozenset())


def constant(bits: int) -> np.ndarray:
    return np.full((1, LANES), bits, np.uint32)


def same(first: Node, second: Node) -> np.ndarray:
    """Lanes whose expressions are equal."""
    return (np.broadcast_to(first.h, (2, 1, LANES)) == second.h).all(0)[0]


def test_adding_minus_zero_changes_nothing_and_adding_zero_does() -> None:
    x = value("x")
    assert same(make("add.f32", 32, (x, constant(0x80000000))), x).all()
    assert same(make("add.f32", 32, (constant(0x80000000), x)), x).all()
    assert not same(make("add.f32", 32, (x, constant(0))), x).any()
    inside = (np.arange(LANES) < 40)[None]
    padded = lane_mix(inside, value("y"), constant(0x80000000))
    assert (same(make("add.f32", 32, (x, padded)), x) == ~inside[0]).all()


def test_a_choice_between_two_equal_numbers_is_either_of_them() -> None:
    p, q, other = value("p"), value("q"), value("r")
    equal = make("eq.u32", 1, (p, q))
    assert same(make("select", 32, (equal, q, p)), p).all()
    assert same(make("select", 32, (equal, p, q)), q).all()
    mixed = make("select", 32, (equal, other, p))
    assert not (same(mixed, p) | same(mixed, other)).any()


def test_the_register_that_holds_the_neighbour_s_value_is_found() -> None:
    """What Triton emits for a sum over two lanes on gfx950: swap, compare with one's own, take the other."""
    own = value("own")
    odd = (np.arange(LANES) % 2 == 1)[None]
    neighbour = Node("moved", (), 32, own.h[:, :, np.arange(LANES) ^ 1], own.bad, frozenset())
    first, second = lane_mix(odd, neighbour, own), lane_mix(odd, own, neighbour)
    found = make("select", 32, (make("eq.u32", 1, (first, own)), second, first))
    assert same(found, neighbour).all()
