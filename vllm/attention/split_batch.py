"""Cuts a step between two of its rows, for layers that serve rows of different kinds differently.

Called by attention blocks with lengths that the host knows; nothing waits for the device.
"""

from __future__ import annotations

from vllm.batch import ForwardBatch, GroupBatch


def split_batch(batch: ForwardBatch, num_rows: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Return the first `num_rows` rows and the others as batches of their own.

    Rows whose logits are needed stay with the whole step: both parts have none.

    Args:
        batch: with its lengths on the host.
        num_rows: at least 1, less than the batch has.
    """
    total = len(batch.new_lens_cpu)
    assert 0 < num_rows < total, f"{num_rows} rows of {total}"
    return _take_rows(batch, 0, num_rows), _take_rows(batch, num_rows, total)


def _take_rows(batch: ForwardBatch, start: int, stop: int) -> ForwardBatch:
    first = sum(batch.new_lens_cpu[:start])
    new_lens = batch.new_lens_cpu[start:stop]
    computed_lens = batch.computed_lens_cpu[start:stop]
    tokens = slice(first, first + sum(new_lens))
    groups = tuple(
        GroupBatch(
            block_offsets=group.block_offsets[start:stop],
            slots=group.slots[tokens],  # a group of states has none, and stays empty
            block_tokens=group.block_tokens,
        )
        for group in batch.groups
    )
    return ForwardBatch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        cu_query_lens=batch.cu_query_lens[start : stop + 1] - first,
        seq_lens=batch.seq_lens[start:stop],
        logits_rows=batch.logits_rows[:0],
        groups=groups,
        max_query_len=max(new_lens),
        max_seq_len=max(n + c for n, c in zip(new_lens, computed_lens, strict=True)),
        num_decode_rows=max(0, min(stop, batch.num_decode_rows) - start),
        new_lens_cpu=new_lens,
        computed_lens_cpu=computed_lens,
    )
