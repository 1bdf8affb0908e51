"""Remembered prefixes without a model: what every block holds is written down in plain Python beside the scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepbind import CacheGroup, GroupKind, SamplingParams, StepError
from stepbind.hosts.local.blocks import BlockManager
from stepbind.hosts.local.pool import BlockPool
from stepbind.hosts.local.prefix import Prefixes
from stepbind.hosts.local.request import Sequence
from stepbind.hosts.local.scheduler import Batch, Scheduler
from stepbind.step import Phase

BLOCK = 4
ATTENTION = CacheGroup("attention", GroupKind.ATTENTION, (1,), BLOCK, 2, 26)
LATENT = CacheGroup("latent", GroupKind.LATENT, (2,), BLOCK, BLOCK, 31)
STATE = CacheGroup("state", GroupKind.STATE, (0,), BLOCK, BLOCK, 14)


def next_token(tokens: list[int]) -> int:
    """What the model would choose: it depends on all tokens, and is often the same for like endings."""
    return sum(tokens) % 2


class Notebook:
    """Serves requests like the engine, with a cache that notes after which tokens each entry was written."""

    def __init__(self, groups: tuple[CacheGroup, ...], rng: random.Random, keep_state_every: int) -> None:
        self.groups, self.rng, self.abort_rate = groups, rng, 0.05
        self.blocks = BlockManager(groups, keep_state_every, reuse_prefixes=True)
        self.scheduler = Scheduler(self.blocks, max_rows=4, token_budget=rng.choice((3, 8, 30)), max_context=60)
        self.written: dict[tuple[int, int, int], tuple[int, ...]] = {}  # (group, block, offset); offset 0 of a state
        self.in_flight = False  # whether a pass runs whose input tokens are not known here

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add(Sequence(number, len(prompt), list(prompt), SamplingParams(max_tokens=max_tokens)))

    def step(self) -> None:
        """One pass; after a decode, sometimes the next ones too, launched before the tokens of the last are known."""
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.running  # an empty engine never lets a request wait for ever
            assert not self.scheduler.waiting
        getting_a_token = [batch.sequences[row] for row in batch.finishing()] if batch else []
        while batch is not None:
            self.run(batch)
            self.scheduler.done(batch)
            self.check()
            if self.in_flight:
                getting_a_token = self.land(getting_a_token)
            may_go_on = batch.phase is Phase.DECODE and self.rng.random() < 0.5
            batch = self.scheduler.go_on(getting_a_token) if may_go_on else None
            self.in_flight = batch is not None
        self.land(getting_a_token)

    def land(self, sequences: list[Sequence]) -> list[Sequence]:
        """The next token of each; the ones that go on."""
        for sequence in sequences:
            sequence.tokens.append(next_token(sequence.tokens))
            if len(sequence.tokens) > sequence.max_len or self.rng.random() < self.abort_rate:
                self.scheduler.remove(sequence)
        self.check()
        return [sequence for sequence in sequences if sequence in self.scheduler.running]

    def run(self, batch: Batch) -> None:
        """Read what a pass reads, then write what it writes, into blocks that are its rows' alone."""
        rows = list(zip(batch.sequences, batch.query_len, strict=True))
        remembered = {(index, block) for node in self.blocks.prefixes for index, block in enumerate(node.blocks)}
        writes: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for sequence, count in rows:
            tokens = list(sequence.tokens)
            if len(tokens) < sequence.computed + count:
                tokens.append(next_token(tokens))
            for index, group in enumerate(self.groups):
                of_row = _state_pass if group.kind is GroupKind.STATE else _paged_pass
                reads, row_writes = of_row(sequence.tables[index], tokens, sequence.computed, count)
                for (block, offset), expected in reads.items():
                    assert self.written[index, block, offset] == expected
                for (block, offset), value in row_writes.items():
                    assert block >= group.first_block
                    assert (index, block) not in remembered
                    assert (index, block, offset) not in writes
                    writes[index, block, offset] = value
        self.written |= writes

    def check(self) -> None:
        """Every block has one owner, and the numbers that admission goes by are true."""
        running = self.scheduler.running
        held = {id(node): node for sequence in running for node in sequence.prefix}
        nodes = held | {id(node): node for node in self.blocks.prefixes}
        for index, pool in enumerate(self.blocks.pools):
            owned = [node.blocks[index] for node in nodes.values() if node.blocks[index] >= 0]
            for sequence in running:
                shared = [node.blocks[index] for node in sequence.prefix]
                own = sequence.tables[index]
                owned += [block for column, block in enumerate(own) if block >= 0 and [block] != shared[column:][:1]]
            assert sorted(owned + pool._free) == list(range(pool.group.first_block, pool.group.num_blocks))
            unused = [node for node in self.blocks.prefixes if node.users == 0 and node.blocks[index] >= 0]
            assert pool.unused == len(unused)
            assert pool._promised == sum(sequence.reserved[index] for sequence in running)
            assert pool.available >= 0
            assert all(sequence.reserved[index] >= 0 for sequence in running)

    @property
    def all_free(self) -> bool:
        return all(pool.available == pool.capacity and pool.unused == 0 for pool in self.blocks.pools)


Entries = dict[tuple[int, int], tuple[int, ...]]  # by block and offset: all tokens that the entry depends on


def _paged_pass(table: list[int], tokens: list[int], prior: int, count: int) -> tuple[Entries, Entries]:
    entries = {(table[t // BLOCK], t % BLOCK): tuple(tokens[: t + 1]) for t in range(prior + count)}
    places = [(table[t // BLOCK], t % BLOCK) for t in range(prior + count)]
    return {place: entries[place] for place in places[:prior]}, {place: entries[place] for place in places[prior:]}


def _state_pass(table: list[int], tokens: list[int], prior: int, count: int) -> tuple[Entries, Entries]:
    reads: Entries = {(table[(prior - 1) // BLOCK], 0): tuple(tokens[:prior])} if prior else {}
    end = prior + count
    inside = [t for t in range(prior + 1, end) if t % BLOCK == 0 and table[t // BLOCK - 1] >= 0]
    return reads, {(table[(t - 1) // BLOCK], 0): tuple(tokens[:t]) for t in (*inside, end)}


GROUPS = [(ATTENTION,), (LATENT,), (STATE, ATTENTION), (STATE, LATENT, ATTENTION)]


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.name for group in groups))
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_hit_reads_what_a_recomputation_would_have_written(
    groups: tuple[CacheGroup, ...], seed: int, keep_state_every: int
) -> None:
    """Requests come with common beginnings, are cut into chunks, grow, end and are aborted at random, in pools that
    hold a few of them: every entry that a pass reads was written after exactly the tokens that it stands for."""
    rng = random.Random(seed)
    stems = [[rng.randrange(2) for _ in range(24)] for _ in range(2)]
    served = Notebook(groups, rng, keep_state_every)
    for number in range(30):
        if rng.random() < 0.7:
            prompt = rng.choice(stems)[: rng.randint(0, 24)] + [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            served.submit(number, prompt, rng.randint(1, 12))
        for _ in range(rng.randint(0, 6)):
            served.step()
        live = [*served.scheduler.running, *served.scheduler.waiting]
        if live and rng.random() < 0.1:
            served.scheduler.remove(rng.choice(live))
            served.check()
        if rng.random() < 0.03:
            served.scheduler.forget_prefixes()
            assert not list(served.blocks.prefixes)
            served.check()
    while served.scheduler.running or served.scheduler.waiting:
        served.step()
    assert all(pool.available == pool.capacity for pool in served.blocks.pools)
    served.scheduler.forget_prefixes()
    assert served.all_free


def serve(served: Notebook, prompt: list[int], max_tokens: int = 2) -> Sequence:
    served.submit(0, prompt, max_tokens)
    sequence = served.scheduler.waiting[-1]
    while served.scheduler.running or served.scheduler.waiting:
        served.step()
    return sequence


def notebook(*groups: CacheGroup, keep_state_every: int = 1) -> Notebook:
    served = Notebook(groups, random.Random(0), keep_state_every)
    served.scheduler.token_budget, served.abort_rate = 100, 0
    return served


def test_the_least_recently_used_prefix_is_given_up_first() -> None:
    served = notebook(CacheGroup("attention", GroupKind.ATTENTION, (0,), BLOCK, BLOCK, 1 + 10))
    first, second, third = [0] * 17, [1] * 17, [2] * 17  # four full blocks each: two of them and one more fit
    serve(served, first, 1)
    serve(served, second, 1)
    assert serve(served, first, 1).reused == 16  # now the second is the one whose last use is the longest ago
    assert serve(served, third, 1).reused == 0
    assert serve(served, first, 1).reused == 16
    assert serve(served, second, 1).reused < 16


def test_a_prefix_is_given_up_from_its_end() -> None:
    served = notebook(CacheGroup("attention", GroupKind.ATTENTION, (0,), BLOCK, BLOCK, 1 + 7))
    serve(served, [0] * 21, 1)  # five full blocks remembered, two free
    serve(served, [1] * 16, 1)  # takes four
    assert serve(served, [0] * 21, 1).reused == 12


def test_a_state_group_resumes_where_a_state_was_kept() -> None:
    served = notebook(STATE, ATTENTION, keep_state_every=3)
    serve(served, [0] * 30)
    assert serve(served, [0] * 30).reused == 24
    assert serve(served, [0] * 24 + [1]).reused == 24
    assert serve(served, [0] * 24).reused == 12  # one token is always left to compute
    assert serve(served, [0] * 11).reused == 0


def test_a_resumed_sequence_is_promised_what_it_can_come_to_own_and_no_more() -> None:
    blocks = BlockManager((STATE, ATTENTION), 3, reuse_prefixes=True)
    assert blocks.blocks_needed(12 * BLOCK) == [4 + 2, 12]
    assert blocks.blocks_needed(12 * BLOCK, resumed=6) == [2 + 2, 6]
    assert blocks.blocks_needed(8 * BLOCK, resumed=6) == [2, 2]


def test_requests_of_one_batch_share_what_the_first_of_them_computes() -> None:
    """Their turns come one after another; the last token is always computed."""
    served = notebook(ATTENTION)
    served.scheduler.token_budget = 17
    for number in range(4):
        served.submit(number, [0] * 17, 3)
    sequences = list(served.scheduler.waiting)
    while served.scheduler.running or served.scheduler.waiting:
        served.step()
    assert [sequence.reused for sequence in sequences] == [0, 16, 16, 16]
    assert [sequence.chunks for sequence in sequences] == [[17], [1], [1], [1]]


def test_generated_tokens_are_reused_too() -> None:
    served = notebook(ATTENTION)
    first = serve(served, [0, 1, 0], 14)
    assert len(first.tokens) == 17  # the last one never entered the cache
    assert serve(served, [*first.tokens, 1, 1]).reused == 16


def test_sharing_admits_more_requests_than_the_pool_could_hold_apart() -> None:
    served = notebook(CacheGroup("attention", GroupKind.ATTENTION, (0,), BLOCK, BLOCK, 1 + 8))
    serve(served, [0] * 21, 1)
    for number in range(3):  # five shared blocks, and one more each
        served.submit(number, [0] * 20 + [number], 3)
    served.step()
    assert [sequence.reused for sequence in served.scheduler.running] == [20, 20, 20]


class SameHash(int):
    """Token ids that only comparison can tell apart."""

    __eq__ = int.__eq__

    def __hash__(self) -> int:
        return 0


def test_an_equal_hash_is_no_hit() -> None:
    pools = (BlockPool(ATTENTION),)
    prefixes = Prefixes(pools)
    pools[0].reserve(1)
    one, other = tuple(map(SameHash, range(BLOCK))), tuple(map(SameHash, range(1, BLOCK + 1)))
    assert hash(one) == hash(other)
    node = prefixes.enter(None, one, (pools[0].take(),))
    assert prefixes.find([*one, 0]) == [node]
    assert prefixes.find([*other, 0]) == []


def test_options_that_do_not_fit_are_named() -> None:
    with pytest.raises(StepError, match="keep_state_every: got 0, expected at least 1 with reuse_prefixes"):
        BlockManager((STATE, ATTENTION), 0, reuse_prefixes=True)
    other = CacheGroup("other", GroupKind.ATTENTION, (3,), 2 * BLOCK, BLOCK, 9)
    with pytest.raises(StepError, match=r"block_size: got \[4, 8\], expected one for all groups"):
        BlockManager((ATTENTION, other), 0, reuse_prefixes=True)
