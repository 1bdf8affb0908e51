"""The fill kernels, in Triton's interpreter, equal the plain reference on random steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.step import Step
from tests.fill_checks import check_fill, on_device, poisoned_arena
from tests.random_steps import steps


@settings(max_examples=60)
@given(steps(), st.booleans())
def test_the_fill_kernels_equal_the_reference(step: Step, device_lengths: bool) -> None:
    check_fill(on_device(step, "cpu", device_lengths=device_lengths), poisoned_arena(step))
