"""Zoo line 16: token -> request index beyond the table's rows during warm-up (vllm 55636, 55637).

Checked by taking out, one at a time: `out[tokens:] = padding` in plan/fill_torch.py (first two tests), and
`(row >= 0)[:, None] &` in `slots_of` of ops/latent_attention.py (third test).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from stepbind.ops.latent_attention import slots_of
from stepbind.plan import PagedPlan, build_plan, make_arena
from stepbind.plan.arena import Arena
from stepbind.step import Phase, Step, make_step
from stepbind.tiny import tiny_model
from tests.latent_runner import LatentRunner, random_ids
from tests.random_steps import steps


def dirty(arena: Arena) -> Arena:
    """As after a pass that used all of it."""
    for values in (arena.shared, *arena.groups):
        for value in vars(values).values():
            if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
                value.fill_(77)
    return arena


@given(steps())
def test_every_token_has_a_row_of_the_table_or_none(step: Step) -> None:
    arena = dirty(
        make_arena(
            step.groups,
            max_rows=step.padded_rows,
            max_tokens=step.padded_tokens + 3,
            max_context=max(step.max_context, 1),
        )
    )
    row = build_plan(step, arena, strict=False).shared.row_of_token
    assert len(row) == step.padded_tokens
    assert (row[: step.num_tokens] >= 0).all()
    assert (row < step.num_rows).all()
    assert (row[step.num_tokens :] == -1).all()


@pytest.mark.parametrize("top_k", [1, 16])
def test_a_warm_up_pass_of_more_tokens_than_rows_touches_nothing(top_k: int) -> None:
    runner = LatentRunner(tiny_model("glm_moe_dsa", index_topk=top_k), random_ids([40, 40]))
    dirty(runner.arena)
    step = make_step(
        runner.groups, Phase.PREFILL, [0, 0], [0, 0], {"latent": runner.table * 0}, padded_rows=2, padded_tokens=64
    )
    logits = runner.forward(step, torch.zeros(64, dtype=torch.long))
    assert logits.isfinite().all()
    for layer in range(3):
        pages = runner.pages(layer)
        assert pages.latent.isnan().all()
        assert pages.index_key is None or pages.index_key.isnan().all()


def test_a_padding_token_looks_nothing_up() -> None:
    runner = LatentRunner(tiny_model("deepseek_v32"), random_ids([40, 40]))
    plan = build_plan(runner.step([3, 2], padding=2)[0], runner.arena)
    group_plan = plan.groups[0]
    assert isinstance(group_plan, PagedPlan)
    slots = slots_of(torch.zeros(7, 2, dtype=torch.int32), group_plan, plan.shared)
    first = runner.table[:, 0].tolist()
    assert slots[:, 0].tolist() == [first[0] * 16] * 3 + [first[1] * 16] * 2 + [-1] * 2
