"""Host memory of copies to a GPU is never written while a copy may still read it, and is kept when none does."""

from __future__ import annotations

import torch

from stepbind.plan import staging
from stepbind.plan.staging import SLOTS_OF_A_PAGE, Slot, Staging


class Event:
    """A CUDA event that happens when a test says so."""

    def __init__(self) -> None:
        self.recorded = 0
        self.happened = False

    def record(self) -> None:
        self.recorded += 1
        self.happened = False

    def query(self) -> bool:
        return self.happened


def pages_of(of: Staging) -> list[Slot]:
    return [of.take() for _ in range(SLOTS_OF_A_PAGE)]


def with_events(of: Staging) -> Staging:
    """The staging of a GPU as far as events go, on this machine's memory."""
    make = of._new_page
    of._new_page = lambda: staging._Page(make().slots, Event())  # type: ignore[method-assign, arg-type]
    of._pages = [of._new_page()]
    return of


def test_a_slot_has_room_for_a_descriptor_and_lengths_behind_it() -> None:
    slot = Staging(5, 3, pinned=False).take()
    slot.words[:] = 7
    slot.lengths[:] = [1, 2, 3, 4]
    assert slot.buffer[:3].tolist() == [7, 7, 7]
    assert slot.buffer[3:].view(torch.int32).tolist() == [1, 2, 3, 4]


def test_a_page_is_taken_again_only_after_its_copies() -> None:
    of = with_events(Staging(4, 2, pinned=False))
    first, second = pages_of(of), pages_of(of)  # no copy is done yet: a page of its own
    assert {id(slot) for slot in first}.isdisjoint(id(slot) for slot in second)
    event = of._pages[0].copied
    assert isinstance(event, Event)
    assert event.recorded == 1
    event.happened = True
    third = pages_of(of)
    assert [id(slot) for slot in third] == [id(slot) for slot in first]
    fourth = pages_of(of)  # neither page's event has happened
    assert len({id(slot) for slot in (*second, *third, *fourth)}) == 3 * SLOTS_OF_A_PAGE


def test_on_the_cpu_one_page_is_enough() -> None:
    of = Staging(4, 2, pinned=False)
    first = pages_of(of)
    assert [id(slot) for slot in pages_of(of)] == [id(slot) for slot in first]
